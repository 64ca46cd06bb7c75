"""What a report shows, from the analysed runs: which findings, plots, tables and words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from dflash_core.analysis.compare import ALL_PAIRS_UP_TO
from dflash_core.analysis.history import History
from dflash_core.analysis.one_run import RunAnalysis
from dflash_core.analysis.plots import Plot, order, pipeline, quality, training
from dflash_core.analysis.report import PlotGroup, Report
from dflash_core.analysis.summary import (
    MAX_COMPARISON_TABLES,
    bucket_table,
    comparison_tables,
    figure_lines,
    head_lines,
    run_table,
    shortened,
    state_lines,
)
from dflash_core.analysis.told_findings import finding_lines, told_findings
from dflash_core.analysis.told_groups import group_lines, group_tables
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
        histories: by run id; plots that need the history of a run that is not here leave it out.
    """

    runs: Sequence[RunAnalysis]
    comparisons: Sequence[Mapping[str, Any]]
    tables: Mapping[str, pa.Table]
    config: AnalyzeConfig
    differences: Sequence[str]
    histogram: pd.DataFrame | None
    bins: pd.DataFrame | None
    histories: Mapping[str, History] = field(default_factory=dict)


def build_report(content: Content) -> Report:
    """Everything that `report.html` and `report.md` show."""
    runs, tables = content.runs, content.tables
    facts, rows = [run.facts for run in runs], [run.row for run in runs]
    names = shortened([run.name for run in runs])
    groups = (tables["groups"].to_pylist(), tables["group_comparisons"].to_pylist())
    head = [*head_lines(facts, rows, content.differences), *group_lines(*groups), *finding_lines(runs)]
    dataset = Path(rows[0]["dataset"]).name if rows[0]["dataset"] else "unknown"  # where it lies is in runs.parquet
    return Report(
        title=f"Runs compared: {names}" if len(runs) > 1 else f"Run: {names}",
        subtitle=f"dataset {dataset} · target {rows[0]['target'] or 'unknown'} · made {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        states=state_lines(facts, rows),
        head=head,
        figures=figure_lines(rows, content.comparisons),
        findings=told_findings(runs),
        differences=content.differences,
        runs=run_table(rows),
        groups=group_tables(*groups),
        comparisons=comparison_tables(rows, content.comparisons),
        buckets=bucket_table(rows, tables["bucket_stats"].to_pylist(), _ranges(content.histogram)),
        plots=_plots(content),
        notes=_notes(content),
    )


def _plots(content: Content) -> list[PlotGroup]:
    """All plots that have something to show, in groups; a group without any is left out."""
    runs, histories, config = content.runs, content.histories, content.config
    frame = {
        name: content.tables[name].to_pandas() for name in ("run_lengths", "loss_parts", "run_positions", "waits", "progress")
    }
    ranges = _ranges(content.histogram)
    lengths = [] if content.histogram is None or content.bins is None else [order.length_plot(content.bins, content.histogram)]
    groups: dict[str, list[Plot | None]] = {
        "Loss and gradient": [
            training.loss_plot(runs, histories, config),
            training.grad_norm_plot(runs, histories, config),
            pipeline.loss_parts_plot(runs, frame["loss_parts"]),
            *order.position_plots(runs, frame["run_positions"]),
            *quality.progress_plots(runs, frame["progress"]),
        ],
        "Batches and their order": [
            *order.run_length_plots(runs, frame["run_lengths"]),
            *lengths,
            *order.share_plots(runs, histories, ranges),
        ],
        "Acceptance": [
            training.acceptance_over_training_plot(runs, histories, config),
            *quality.acceptance_plots(runs),
        ],
        "Time and queues": [
            pipeline.wait_plot(runs, frame["waits"]),
            *pipeline.queue_plots(runs),
            *pipeline.dispatch_plots(runs, histories),
        ],
    }
    shown = [PlotGroup(title, _arranged([plot for plot in plots if plot is not None])) for title, plots in groups.items()]
    return [group for group in shown if group.plots]


def _arranged(plots: list[Plot]) -> list[Plot]:
    """Wide plots first, then pairs; of an odd number the first is wide too, so that no half of a line stays empty."""
    wide, narrow = [plot for plot in plots if plot.wide], [plot for plot in plots if not plot.wide]
    if len(narrow) % 2:
        narrow[0] = replace(narrow[0], wide=True)
    return wide + narrow


def _notes(content: Content) -> list[str]:
    notes = []
    if content.histogram is None or content.bins is None:
        notes.append("The dataset folder has no length histogram, so that plot is left out.")
    num_runs = len(content.runs)
    known = [(run.name, content.histories[run.run_id]) for run in content.runs if run.run_id in content.histories]
    several = [(name, history) for name, history in known if len(history.target_names) > 1]
    equal = [name for name, history in several if not pipeline.unequal(pipeline.batches_ahead(history))]
    if equal:
        notes.append(f"All targets were given equally many batches at all times in {shortened(equal)}.")
    if num_runs > pipeline.MAX_QUEUE_PLOTS:
        notes.append(f"Queue depths are shown for {pipeline.MAX_QUEUE_PLOTS} of {num_runs} runs.")
    if num_runs - 1 > MAX_COMPARISON_TABLES:
        notes.append(comparisons_note(num_runs))
    return notes


def comparisons_note(num_runs: int) -> str:
    """Where to find the comparisons that the page has no room for."""
    which = "of all pairs" if num_runs <= ALL_PAIRS_UP_TO else "of all runs with the first"
    return f"Shown are the first {MAX_COMPARISON_TABLES} comparisons; comparisons.parquet holds those {which}."


def _ranges(histogram: pd.DataFrame | None) -> dict[int, str]:
    """The lengths of each bucket as text, where the dataset tells them."""
    if histogram is None or "bucket" not in histogram:
        return {}
    edges = zip(*(histogram[name].astype(int).tolist() for name in ("bucket", "lower", "upper")), strict=True)
    return {bucket: f"{lower + 1:,}–{upper:,}" for bucket, lower, upper in edges}
