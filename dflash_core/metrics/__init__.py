"""Where measurements go: JSONL (the truth), the console, Weights & Biases. The training loop knows only `MetricsSink`.

`wandb_sink` is imported by the one who wants it, because `import wandb` takes a second.
"""

from dflash_core.metrics.console import ConsoleSink
from dflash_core.metrics.sinks import STREAMS, FanOut, JsonlSink, MemorySink, MetricsSink, OptionalSink, RunLog

__all__ = ["STREAMS", "ConsoleSink", "FanOut", "JsonlSink", "MemorySink", "MetricsSink", "OptionalSink", "RunLog"]
