"""What the detectors about queues read from a run: columns that may be missing, the steps that count, and shares of time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.random import Generator

from dflash_core.analysis.intervals import MIN_STEPS_FOR_INTERVAL
from dflash_core.analysis.reader import matrix, numbers
from dflash_core.analysis.runs import Run
from dflash_core.analysis.series import BoolArray, FloatArray, resampled_means

# Steps are added up to at most this many pieces before they are drawn again, so that an interval costs the same for any run.
MOST_PIECES = 400
RESAMPLES = 400
# The pipeline fills in the first steps: targets wait for the first batches and the drafter for the first states.
FILLING_FRACTION = 0.1


def column(table: pa.Table, name: str, missing: float = np.nan) -> FloatArray:
    """A column as float64; all `missing` where the table has none of that name, or one that holds no numbers."""
    if name not in table.column_names:
        return np.full(len(table), missing)
    try:
        return numbers(table, name, missing)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return np.full(len(table), missing)


def lists(table: pa.Table, name: str) -> FloatArray:
    """A column of lists as float64 [rows, longest list], NaN where there is nothing; [rows, 0] where there is no such column."""
    if name not in table.column_names or not pa.types.is_list(table.schema.field(name).type):
        return np.empty((len(table), 0))
    try:
        return matrix(table, name)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return np.empty((len(table), 0))


@dataclass(frozen=True)
class Share:
    """A part of the time, 0 to 1, with its 95 % interval, or a wider one (`share_of`)."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.0%} ({self.low:.0%} to {self.high:.0%})"


def share_of(part: FloatArray, whole: FloatArray, rng: Generator) -> Share | None:
    """Sum of `part` over sum of `whole`, with the interval of a block bootstrap over the steps.

    A ratio r of sums varies as the mean of (part - r whole) / mean(whole) does, to first order, so that this series is drawn
    again. Steps worth too few independent ones (`intervals.mean_error`) have the range of the steps' own shares instead, which is
    wider than any interval of their mean: where each step waited long, no statistics are needed to say so.

    None for fewer than `MIN_STEPS_FOR_INTERVAL` steps, and where nothing passed.
    """
    known = np.isfinite(part) & np.isfinite(whole)
    part, whole = part[known], whole[known]
    if len(part) < MIN_STEPS_FOR_INTERVAL or whole.sum() <= 0:
        return None
    starts = np.arange(0, len(part), ceil(len(part) / MOST_PIECES))
    part, whole = np.add.reduceat(part, starts), np.add.reduceat(whole, starts)
    if len(part) < MIN_STEPS_FOR_INTERVAL:
        return None
    value = float(part.sum() / whole.sum())
    drawn = resampled_means((part - value * whole) / whole.mean(), rng, RESAMPLES)
    if drawn is None:
        each = (part / whole)[whole > 0]
        return Share(value, float(each.min()), float(each.max()))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Share(value, value + float(low), value + float(high))


def counted_steps(run: Run) -> BoolArray:
    """The steps in which the pipeline ran full, of those in `run.steps`.

    Left out are the first tenth and the first step of every attempt, where it fills, and the last steps, for which all
    batches were dispatched already: targets have nothing to do there, and nobody is to blame.
    """
    step, attempt = column(run.steps, "step"), column(run.steps, "attempt", 0.0)
    counted = np.arange(len(step)) >= len(step) * FILLING_FRACTION
    counted[np.flatnonzero(np.diff(attempt, prepend=-1))] = False
    dispatched = column(run.stats, "num_batches")
    at = column(run.stats, "step")
    cell = column(run.stats, "cell", 0.0)
    known = (column(run.stats, "attempt", 0.0) == attempt[-1]) & np.isfinite(dispatched)
    for one in np.unique(cell[known]):
        rows = known & (cell == one)
        before_the_end = rows & (dispatched < dispatched[rows].max())
        if before_the_end.any():
            counted &= step <= at[before_the_end].max()
    return counted


@dataclass(frozen=True)
class Stretch:
    """What the counters of one cell grew by between two snapshots, in seconds of `seconds`; NaN where not recorded.

    `target_idle`: mean over the targets; `least_idle` and `most_idle`: of the targets that idle least and most. `put_wait`: sum
    over the targets, for one thread at a time dispatches. `loader_idle`: mean over the loading threads.
    """

    cell: int
    seconds: float
    target_idle: float
    least_idle: float
    most_idle: float
    put_wait: float
    budget_wait: float
    loader_idle: float
    ready_wait: float
    held_up: float

    def share(self, name: str) -> float:
        """A counter as a share of the time; NaN where it is not known."""
        return float(getattr(self, name)) / self.seconds


def stretches(run: Run, counted: BoolArray) -> list[Stretch]:
    """For each cell of the newest attempt, the growth of its counters over the counted steps.

    Counters run from the start of the attempt, so that the difference of two snapshots is what happened between them.
    """
    steps = column(run.steps, "step")[counted]
    if not len(steps) or not len(run.stats):
        return []
    stats = run.stats
    attempt, at, cell = column(stats, "attempt", 0.0), column(stats, "step"), column(stats, "cell", 0.0)
    within = (attempt == attempt.max()) & (at >= steps[0]) & (at <= steps[-1])
    workers = run.setting("prefetch.num_workers") or np.nan
    with np.errstate(all="ignore"):
        put = lists(stats, "queue_put_wait_s")
        sums = {
            "seconds": column(stats, "observed_s"),
            "target_idle": _mean(lists(stats, "queue_get_wait_s")),
            "put_wait": _mean(put) * put.shape[1],
            "budget_wait": column(stats, "budget_wait_s"),
            "loader_idle": column(stats, "loader_idle_s") / workers,
            "ready_wait": column(stats, "ready_get_wait_s"),
            "held_up": column(stats, "ready_held_up_s"),
        }
    idle = lists(stats, "queue_get_wait_s")
    found = []
    for one in np.unique(cell[within]).tolist():
        rows = np.flatnonzero(within & (cell == one))
        grown = {name: float(values[rows[-1]] - values[rows[0]]) for name, values in sums.items()}
        of_targets = idle[rows[-1]] - idle[rows[0]]
        known = of_targets[np.isfinite(of_targets)]
        if grown["seconds"] > 0:
            least, most = (known.min(), known.max()) if len(known) else (np.nan, np.nan)
            found.append(Stretch(cell=int(one), least_idle=float(least), most_idle=float(most), **grown))
    return found


def cell_waits(run: Run, counted: BoolArray, cell: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Seconds between the snapshots of a cell's newest attempt in the counted steps, and of these the seconds for which its
    drafter and, on average, its targets waited."""
    steps, stats = column(run.steps, "step")[counted], run.stats
    attempt, at = column(stats, "attempt", 0.0), column(stats, "step")
    rows = (attempt == attempt.max(initial=0)) & (at >= steps[0]) & (at <= steps[-1]) & (column(stats, "cell", 0.0) == cell)
    series = (column(stats, "observed_s"), column(stats, "ready_get_wait_s"), _mean(lists(stats, "queue_get_wait_s")))
    seconds, drafter, targets = (np.diff(values[rows]) for values in series)
    return seconds, drafter, targets


def _mean(values: FloatArray) -> FloatArray:
    known = np.isfinite(values)
    return np.asarray(np.where(known, values, 0.0).sum(axis=1) / np.where(known.any(axis=1), known.sum(axis=1), np.nan))


def devices_shared(run: Run) -> bool | None:
    """Whether target and drafter compute on the same device, or on the same processor cores; None where nothing says so.

    Where they share one, waiting says who was given the device, not that the other is too slow: the wait of one stage is the
    work of another, and no topology changes it. On the CPU every target and drafter has `threads_per_device` threads, and
    there must be as many cores.
    """
    topology, devices = run.setting("topology"), run.provenance.get("devices")
    if not isinstance(topology, Mapping) or not isinstance(devices, list) or not devices:
        return None
    if topology.get("colocated"):
        return True
    if any(not str(name).startswith("cpu") for name in devices):
        return False
    cores = run.provenance.get("num_cpus")
    threads = topology.get("cells", 1) * (topology.get("targets_per_cell", 1) + 1) * topology.get("threads_per_device", 1)
    return not isinstance(cores, int) or threads > cores or _cores_are_contended(run)


def _cores_are_contended(run: Run) -> bool:
    """Whether a target's pass took much longer than its thread was given a core: then others had it."""
    wall, busy = column(run.batches, "target_forward_s"), column(run.batches, "target_busy_s")
    known = np.isfinite(wall) & np.isfinite(busy)
    return bool(wall[known].sum() > CONTENDED * busy[known].sum()) if known.any() else True


# Wall time over processor time of a target's pass from which on other threads had its core.
CONTENDED = 1.3


def plain(value: Any) -> Any:
    """`value` as a JSON value: numpy numbers as Python's, NaN as None, floats with four digits behind the point."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return round(value, 4) if np.isfinite(value) else None
    return value
