"""What a report says about itself: how to read a finding, a table or a plot, where that is needed and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dflash_core.analysis.compare import ALL_PAIRS_UP_TO
from dflash_core.analysis.history import History
from dflash_core.analysis.one_run import RunAnalysis
from dflash_core.analysis.plots import pipeline
from dflash_core.analysis.summary import MAX_COMPARISON_TABLES, Table, shortened

ONE_RUN_EACH = (
    "One run each: differences between these runs may be chance, as another seed of the same configuration would differ, too. "
    "Train several seeds of each to know."
)
SINGLE_RUNS = (
    "Each column is one run. Intervals cover the noise between the steps of these runs (circular block bootstrap), not the "
    "choice of the seed. Throughput, waits, acceptance and bucket runs are one number per run and have no interval (one run "
    "each): their differences may be chance."
)
SINGLE_EFFECT = "Effect: the difference in standard deviations of the step noise (sd), or the ratio of the two values (×)."
GROUPS = (
    "A group: runs whose configurations differ in nothing but seeds. Each run is one value, so these intervals cover what "
    "another seed would change (Student's t). Effect: the difference in standard deviations between runs of a group (sd)."
)
BOLD = (
    "Bold: the 95 % interval of the difference excludes zero; where nothing differs, one row in twenty would be bold by chance."
)
# How to read a kind of finding: what its words mean and what its figures cover.
READING: dict[str, str] = {
    "batch_order": (
        "Batch order: the figures are of the worst epoch alone, and the range of a random order is of that epoch, too (95 of 100 "
        "orders; in the section In figures it is of all epochs of a run, 90 of 100). A step leans to one bucket when it holds "
        "more than one batch above the bucket's quota (the step's batches times the bucket's share of the run), or several "
        "batches and none of another bucket. The strength follows what the steps feel and not the length of the run: each "
        "finding says by what."
    ),
    "loss_composition": (
        "Loss composition: shares are of the variance around the trend, behind the first tenth of the steps. The plot of what "
        "the loss scatter is made of, and the tables, count the trend in, so the bucket mix has a smaller share there."
    ),
}


def reading_notes(runs: Sequence[RunAnalysis]) -> list[str]:
    """How to read the kinds of findings that there are."""
    found = {finding.kind for run in runs for finding in run.findings}
    return [note for kind, note in READING.items() if kind in found]


def warnings(num_runs: int, groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """What must be known before any difference is read. `groups`: rows of `groups`."""
    return [ONE_RUN_EACH] if num_runs > 1 and all(row["num_runs"] < 2 for row in groups) else []


def comparison_notes(tables: Sequence[Table], num_runs: int) -> list[str]:
    """Above the comparisons of single runs."""
    if not tables:
        return []
    notes = [f"{SINGLE_RUNS} {SINGLE_EFFECT}", *_bold(tables)]
    return [*notes, comparisons_note(num_runs)] if num_runs - 1 > MAX_COMPARISON_TABLES else notes


def group_notes(tables: Sequence[Table]) -> list[str]:
    """Above the tables of groups."""
    return [GROUPS, *_bold(tables)] if tables else []


def _bold(tables: Sequence[Table]) -> list[str]:
    return [BOLD] if any(table.bold for table in tables) else []


def comparisons_note(num_runs: int) -> str:
    """Where to find the comparisons that the page has no room for."""
    which = "of all pairs" if num_runs <= ALL_PAIRS_UP_TO else "of all runs with the first"
    return f"Shown are the first {MAX_COMPARISON_TABLES} comparisons; comparisons.parquet holds those {which}."


def dispatch_notes(known: Sequence[tuple[str, History]]) -> Iterator[str]:
    """How equally the targets were served in the runs, by name, that have no plot of it. Taken at up to 40 places of a run."""
    by_gap: dict[tuple[int, int], list[str]] = {}
    for name, history in known:
        if len(history.target_names) > 1 and not pipeline.unequal(pipeline.batches_ahead(history)):
            total = history.target_counts.cumsum(axis=0)
            gaps = total.max(axis=1) - total.min(axis=1)
            by_gap.setdefault((int(gaps.max()), int(gaps[-1])), []).append(name)
    for (most, last), names in by_gap.items():
        if not most:
            yield f"All targets were given equally many batches in {shortened(names)}."
        else:
            end = "" if last == most else f" ({last} at the end)"
            batches = "batch" if most == 1 else "batches"
            yield f"Targets were given equally many batches, at most {most} {batches} apart{end}, in {shortened(names)}."


def no_lengths(dataset: str | None) -> str:
    """Why the lengths of buckets are not shown."""
    if not dataset:
        return "The lengths of the buckets are not known: the run does not name its dataset."
    return (
        f"Lengths are not known here: the dataset folder that the run names, {dataset}, is not there or has no "
        "length_histogram.parquet. The report shows them, and a plot of the lengths, where it is."
    )
