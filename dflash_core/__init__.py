"""Training of DFlash drafters: data, bucketing, the asynchronous pipeline, evaluation and analysis."""

__version__ = "0.1.0"
