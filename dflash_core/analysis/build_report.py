"""What a report shows, from the analysed runs: which plots, which tables, which words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pandas as pd
import pyarrow as pa

from dflash_core.analysis import plots
from dflash_core.analysis.one_run import RunAnalysis
from dflash_core.analysis.report import Report
from dflash_core.analysis.summary import (
    MAX_COMPARISON_TABLES,
    bucket_table,
    comparison_tables,
    run_table,
    shortened,
    summary_lines,
)
from dflash_core.config import AnalyzeConfig


@dataclass(frozen=True)
class Content:
    """What a report is made from.

    Args:
        runs: the first is the one that others are compared with.
        comparisons: rows of `comparisons`.
        tables: all tables of the report by name (`analysis.tables`).
        differences: what makes the runs incomparable, a line each.
        histogram: `length_histogram` of the dataset, where there is one.
        bins: its `length_bins`.
    """

    runs: Sequence[RunAnalysis]
    comparisons: Sequence[Mapping[str, Any]]
    tables: Mapping[str, pa.Table]
    config: AnalyzeConfig
    differences: Sequence[str]
    histogram: pd.DataFrame | None
    bins: pd.DataFrame | None


def build_report(content: Content) -> Report:
    """Everything that `report.html` and `report.md` show."""
    runs, tables, config, histogram, bins = content.runs, content.tables, content.config, content.histogram, content.bins
    notes, shown = [], []
    rows = [run.row for run in runs]
    if histogram is not None and bins is not None:
        shown.append(plots.length_plot(bins, histogram))
    else:
        notes.append("The dataset folder has no length histogram, so that plot is left out.")
    shown.append(plots.run_length_plot(runs, rows, tables["run_lengths"].to_pandas()))
    shown += [plots.loss_plot(runs, config.smoothing_steps), plots.grad_norm_plot(runs, config.smoothing_steps)]
    queues = plots.queue_plots(runs)
    if len(runs) > len(queues):
        notes.append(f"Queue depths are shown for {len(queues)} of {len(runs)} runs.")
    if len(runs) - 1 > MAX_COMPARISON_TABLES:
        notes.append(f"Shown are the first {MAX_COMPARISON_TABLES} comparisons; comparisons.parquet holds those of all pairs.")
    ranges = {}
    if histogram is not None and "bucket" in histogram:
        edges = zip(*(histogram[name].astype(int).tolist() for name in ("bucket", "lower", "upper")), strict=True)
        ranges = {bucket: f"{lower + 1:,}–{upper:,}" for bucket, lower, upper in edges}
    names = shortened([run.name for run in runs])
    return Report(
        title=f"Runs compared: {names}" if len(runs) > 1 else f"Run: {names}",
        subtitle=f"dataset {rows[0]['dataset'] or 'unknown'} · target {rows[0]['target'] or 'unknown'} · "
        f"made {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        summary=summary_lines([run.facts for run in runs], rows, content.comparisons, content.differences),
        differences=content.differences,
        runs=run_table(rows),
        comparisons=comparison_tables(rows, content.comparisons),
        buckets=bucket_table(rows, tables["bucket_stats"].to_pylist(), ranges),
        plots=[*shown, *queues, *plots.acceptance_plots(runs)],
        notes=notes,
    )
