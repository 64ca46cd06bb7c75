"""What a report plots of a run over time besides its curves, small enough to keep for any number of runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_core.analysis.reader import numbers
from dflash_core.analysis.runs import Run
from dflash_core.analysis.series import FloatArray

IntArray = np.ndarray[Any, np.dtype[np.int64]]

MAX_STRETCHES = 40


@dataclass(frozen=True)
class History:
    """Moments and mixes of a run.

    Args:
        epoch_starts: first step of each epoch but the first.
        resumes: first step of each attempt but the first.
        steps: the run cut into stretches of equal length: the middle step of each, [stretches].
        bucket_counts: trained batches, [stretches, buckets].
        target_counts: trained batches by the target that served them, [stretches, targets of all cells].
        target_names: of its columns.
    """

    epoch_starts: IntArray
    resumes: IntArray
    steps: FloatArray
    bucket_counts: IntArray
    target_counts: IntArray
    target_names: tuple[str, ...]


def history_of(run: Run) -> History:
    step = numbers(run.steps, "step").astype(np.int64)
    stretch, middles = _stretches(numbers(run.batches, "step"))
    target, names = _targets(run)
    return History(
        epoch_starts=_rises(step, numbers(run.steps, "epoch", missing=0)),
        resumes=_rises(step, numbers(run.steps, "attempt", missing=0)),
        steps=middles,
        bucket_counts=_counted(stretch, run.buckets(), len(middles), run.num_buckets),
        target_counts=_counted(stretch, target, len(middles), len(names)),
        target_names=names,
    )


def _rises(step: IntArray, value: FloatArray) -> IntArray:
    return np.asarray(step[1:][np.diff(value) > 0])


def _stretches(step: FloatArray) -> tuple[IntArray, FloatArray]:
    """The stretch of each batch, and the middle step of each stretch."""
    first, last = int(step.min()), int(step.max())
    width = -(-(last - first + 1) // MAX_STRETCHES)
    count = (last - first) // width + 1
    starts = first + width * np.arange(count)
    ends = np.minimum(starts + width - 1, last)
    return ((step - first) // width).astype(np.int64), (starts + ends) / 2


def _targets(run: Run) -> tuple[IntArray, tuple[str, ...]]:
    """The target of each batch as a number over all cells, and their names; no names where a batch lacks its target."""
    cell, target = numbers(run.batches, "cell", missing=0), numbers(run.batches, "target")
    if not np.isfinite(target).all():
        return np.zeros(0, dtype=np.int64), ()
    # By the columns, each of which has few values: to sort pairs takes much longer.
    (cells, in_cells), (targets, in_targets) = (np.unique(values, return_inverse=True) for values in (cell, target))
    pair = in_cells * len(targets) + in_targets
    there = np.flatnonzero(np.bincount(pair, minlength=len(cells) * len(targets)))
    found = [(int(cells[one // len(targets)]), int(targets[one % len(targets)])) for one in there.tolist()]
    names = tuple(f"cell {c}, target {t}" if len(cells) > 1 else f"target {t}" for c, t in found)
    return np.searchsorted(there, pair), names


def _counted(stretch: IntArray, column: IntArray, num_stretches: int, num_columns: int) -> IntArray:
    if not num_columns:
        return np.zeros((num_stretches, 0), dtype=np.int64)
    flat = np.bincount(stretch * num_columns + column, minlength=num_stretches * num_columns)
    return np.asarray(flat.reshape(num_stretches, num_columns))
