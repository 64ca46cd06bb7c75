"""The table `waits`: where the time of each stage of the pipeline went."""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash_core.analysis.findings.pipeline_rows import column, lists
from dflash_core.analysis.runs import Run
from dflash_core.analysis.series import FloatArray

# Stages of the drafter, with the column of `steps` that holds their seconds. They and `drafter.other` add up to the step time.
DRAFTER = {
    "drafter.wait": "target_wait_s",
    "drafter.forward": "forward_s",
    "drafter.backward": "backward_s",
    "drafter.reduce": "reduce_s",
    "drafter.optimizer": "optimizer_s",
}
# Stages timed batch by batch. Time in a queue is nobody's time: it has no share.
BY_BATCH = {"loader.load": "load_s", "target.queued": "queued_s", "target.forward": "target_forward_s"}


def waits(run: Run) -> list[dict[str, Any]]:
    """Rows of `waits`, by cell and stage; a stage that was not recorded has no row.

    Columns: `run_id`; `cell`; `stage`; `seconds`, summed over the threads of the stage; `share_of_time`, 0 to 1: of the time that
    all threads of the stage had, null where it is no thread's time or their number is not known; `per_batch_s`: seconds per
    batch of the cell.

    Stages: `loader.load`, `loader.idle` (no batch to load: the feed waits for bytes or for the plan), `feed.budget_wait` (the
    byte budget was full), `target.queued` (loaded batches in the queues), `target.forward`, `target.idle` (no batch in the
    queue), `ready.held_up` (the drafter waited while later batches were there: part of `drafter.wait`), and, where the drafter's
    time went, `drafter.wait` (for target states), `.forward`, `.backward`, `.reduce` (joining the cells, waiting for others
    included), `.optimizer`, `.other`. The drafter's are those of the first cell, whose steps are recorded; of other cells
    `drafter.wait` is taken from the snapshots. On a GPU, forward and backward are the launching thread's time.
    """
    cell = column(run.batches, "cell").astype(np.float64)
    known = bool(np.isfinite(cell).all())
    cells = np.unique(cell).astype(int).tolist() if known else [None]
    rows: list[dict[str, Any]] = []
    for one in cells:
        own = np.ones(len(cell), dtype=bool) if one is None else cell == one
        seconds = _of_batches(run, own) | _of_snapshots(run, one)
        if one in (None, 0):
            seconds |= _of_steps(run)
        num_batches = int(own.sum())
        rows += [
            {
                "run_id": run.run_id,
                "cell": one,
                "stage": stage,
                "seconds": spent,
                "share_of_time": None if of is None or of <= 0 else spent / of,
                "per_batch_s": spent / num_batches,
            }
            for stage, (spent, of) in seconds.items()
        ]
    return rows


# Seconds of each stage, and the seconds that its threads had.
Seconds = dict[str, tuple[float, float | None]]


def _of_steps(run: Run) -> Seconds:
    total = _sum(column(run.steps, "step_s"))
    found = {stage: _sum(column(run.steps, name)) for stage, name in DRAFTER.items()}
    parts: Seconds = {stage: (spent, total) for stage, spent in found.items() if spent is not None}
    if total is None or not parts:
        return parts
    return parts | {"drafter.other": (max(0.0, total - sum(spent for spent, _ in parts.values())), total)}


def _of_batches(run: Run, own: np.ndarray[Any, np.dtype[np.bool_]]) -> Seconds:
    total = _sum(column(run.steps, "step_s"))
    threads = {"loader.load": run.setting("prefetch.num_workers"), "target.forward": run.setting("topology.targets_per_cell")}
    found: Seconds = {}
    for stage, name in BY_BATCH.items():
        spent = _sum(column(run.batches, name)[own])
        many = threads.get(stage)
        if spent is not None:
            found[stage] = (spent, total * many if total is not None and isinstance(many, int) else None)
    return found


def _of_snapshots(run: Run, cell: int | None) -> Seconds:
    """The newest counters of every attempt, added up: they start at 0 with each."""
    stats = run.stats
    own = np.ones(len(stats), dtype=bool) if cell is None else column(stats, "cell", 0.0) == cell
    attempt = column(stats, "attempt", 0.0)
    last = [int(np.flatnonzero(own & (attempt == one))[-1]) for one in np.unique(attempt[own])]
    workers = run.setting("prefetch.num_workers")
    observed, idle = column(stats, "observed_s"), lists(stats, "queue_get_wait_s")
    total = _sum(observed[last])
    num_targets = idle.shape[1]
    series = {
        "feed.budget_wait": (column(stats, "budget_wait_s"), 1),
        "loader.idle": (column(stats, "loader_idle_s"), workers if isinstance(workers, int) else None),
        "target.idle": (np.nansum(idle, axis=1) if num_targets else np.full(len(stats), np.nan), num_targets),
        "ready.held_up": (column(stats, "ready_held_up_s"), 1),
        "drafter.wait": (column(stats, "ready_get_wait_s"), 1),
    }
    found: Seconds = {}
    for stage, (values, threads) in series.items():
        spent = _sum(values[last])
        if spent is not None:
            found[stage] = (spent, None if total is None or threads is None else total * threads)
    return found


def _sum(values: FloatArray) -> float | None:
    return float(np.nansum(values)) if np.isfinite(values).any() else None
