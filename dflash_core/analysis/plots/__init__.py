"""The report's plots as plotly figures, thinned so that a page stays small for any number of runs."""

from dflash_core.analysis.plots.figure import Plot, log_ticks, thin

__all__ = ["Plot", "log_ticks", "thin"]
