"""What a report shows, from the analysed runs: which findings, plots, tables and words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from dflash_core.analysis.history import History
from dflash_core.analysis.notes import comparison_notes, dispatch_notes, group_notes, no_lengths, warnings
from dflash_core.analysis.one_run import RunAnalysis
from dflash_core.analysis.plots import Plot, order, pipeline, quality, training
from dflash_core.analysis.report import PlotGroup, Report
from dflash_core.analysis.summary import (
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
from dflash_core.analysis.told_suspects import suspect_lines
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


TIME_AND_QUEUES = "Time and queues"


def build_report(content: Content) -> Report:
    """Everything that `report.html` and `report.md` show."""
    runs, tables = content.runs, content.tables
    facts, rows = [run.facts for run in runs], [run.row for run in runs]
    names = shortened([run.name for run in runs])
    groups = (tables["groups"].to_pylist(), tables["group_comparisons"].to_pylist())
    head = [*head_lines(facts, rows, content.differences), *group_lines(*groups), *finding_lines(runs), *suspect_lines(runs)]
    side_by_side, comparisons = group_tables(*groups), comparison_tables(rows, content.comparisons)
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
        groups=side_by_side,
        comparisons=comparisons,
        buckets=bucket_table(rows, tables["bucket_stats"].to_pylist(), _all_ranges(content), no_lengths(rows[0]["dataset"])),
        plots=_plots(content),
        warnings=warnings(len(runs), groups[0]),
        group_notes=group_notes(side_by_side),
        comparison_notes=comparison_notes(comparisons, len(runs)),
    )


def _plots(content: Content) -> list[PlotGroup]:
    """All plots that have something to show, in groups; a group without any is left out."""
    runs, histories, config = content.runs, content.histories, content.config
    frame = {
        name: content.tables[name].to_pandas() for name in ("run_lengths", "loss_parts", "run_positions", "waits", "progress")
    }
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
            *order.share_plots(runs, histories, _all_ranges(content)),
        ],
        "Acceptance": [
            training.acceptance_over_training_plot(runs, histories, config),
            *quality.acceptance_plots(runs),
        ],
        TIME_AND_QUEUES: [
            pipeline.wait_plot(runs, frame["waits"]),
            *pipeline.queue_plots(runs),
            *pipeline.dispatch_plots(runs, histories),
        ],
    }
    notes = {TIME_AND_QUEUES: _queue_notes(content)}
    shown = [
        PlotGroup(title, _arranged([plot for plot in plots if plot is not None]), notes.get(title, ()))
        for title, plots in groups.items()
    ]
    return [group for group in shown if group.plots]


def _arranged(plots: list[Plot]) -> list[Plot]:
    """Wide plots first, then pairs; of an odd number the first is wide too, so that no half of a line stays empty."""
    wide, narrow = [plot for plot in plots if plot.wide], [plot for plot in plots if not plot.wide]
    if len(narrow) % 2:
        narrow[0] = replace(narrow[0], wide=True)
    return wide + narrow


def _queue_notes(content: Content) -> list[str]:
    known = [(run.name, content.histories[run.run_id]) for run in content.runs if run.run_id in content.histories]
    notes, num_runs = list(dispatch_notes(known)), len(content.runs)
    if num_runs > pipeline.MAX_QUEUE_PLOTS:
        notes.append(f"Queue depths are shown for {pipeline.MAX_QUEUE_PLOTS} of {num_runs} runs.")
    return notes


def _all_ranges(content: Content) -> dict[str, dict[int, str]]:
    """The lengths of each bucket by run: of the run's own plan where it names them, else the dataset's."""
    of_dataset = _ranges(content.histogram)
    return {run.run_id: _own_ranges(run) or of_dataset for run in content.runs}


def _own_ranges(run: RunAnalysis) -> dict[int, str]:
    """Where the boundaries were given as lengths and not as a method that finds them."""
    upper = run.facts.setting("bucketing.boundaries")
    if not isinstance(upper, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in upper):
        return {}
    return {bucket: _range(low, high) for bucket, (low, high) in enumerate(pairwise([0, *upper]))}


def _range(lower: int, upper: int) -> str:
    return f"{lower + 1:,}–{upper:,}"


def _ranges(histogram: pd.DataFrame | None) -> dict[int, str]:
    """The lengths of each bucket as text, where the dataset tells them."""
    if histogram is None or "bucket" not in histogram:
        return {}
    edges = zip(*(histogram[name].astype(int).tolist() for name in ("bucket", "lower", "upper")), strict=True)
    return {bucket: _range(lower, upper) for bucket, lower, upper in edges}
