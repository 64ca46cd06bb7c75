"""What checkpoints cost: by how much the steps that overlap one are longer than the run's other steps of the same size.

A step overlaps a checkpoint from the snapshot, which is taken before the step, until the writer is done. What a step would have
taken without is a line over its padded tokens, fitted to the steps that overlap none. All figures are shares of that: 0.02
is two percent longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.random import Generator

from dflash_core.analysis.reader import numbers
from dflash_core.analysis.runs import Run
from dflash_core.analysis.series import NUM_RESAMPLES, BoolArray, FloatArray

IntArray = np.ndarray[Any, np.dtype[np.int64]]

MIN_OTHER_STEPS = 10
FIT_ROUNDS = 50
FIT_TOLERANCE = 1e-9
EVENT_FIELDS = ("attempt", "step", "kind", "time", "snapshot_s", "wait_s", "write_s", "num_bytes")
SUMMARY_COLUMNS = (
    "num_checkpoints", "checkpoint_steps", "checkpoint_slowdown", "checkpoint_slowdown_low", "checkpoint_slowdown_high",
    "checkpoint_slowdown_max", "other_slowdown_max",
)  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """One finished checkpoint, from its two events. Times in seconds since 1970."""

    attempt: int
    step: int
    begin: float
    end: float
    snapshot_s: float
    wait_s: float
    write_s: float
    num_bytes: int


def checkpoints_of(run: Run) -> list[Checkpoint]:
    """The checkpoints that were finished, in the order of their steps; rows that lack a number or a time are left out."""
    begun: dict[tuple[int, int], Mapping[str, Any]] = {}
    found = []
    events = run.events.select([name for name in EVENT_FIELDS if name in run.events.column_names])
    for event in events.filter(pc.is_in(events["kind"], pa.array(["checkpoint_begin", "checkpoint_end"]))).to_pylist():
        key = (event.get("attempt") or 0, event.get("step"))
        if event.get("kind") == "checkpoint_begin":
            begun[key] = event
        elif event.get("kind") == "checkpoint_end" and key in begun:
            one = _joined(key, begun.pop(key), event)
            found += [one] if one is not None else []
    return sorted(found, key=lambda one: (one.step, one.attempt))


def _joined(key: tuple[int, int], begin: Mapping[str, Any], end: Mapping[str, Any]) -> Checkpoint | None:
    """A checkpoint from its two events, or None where one of them is not as it was written."""
    started, ended = begin.get("time"), end.get("time")
    values = [begin.get("snapshot_s"), begin.get("wait_s"), end.get("write_s"), end.get("num_bytes")]
    if not (isinstance(started, datetime) and isinstance(ended, datetime)):
        return None
    if not all(isinstance(value, int | float) for value in values):
        return None
    snapshot_s, wait_s, write_s, num_bytes = (float(value) for value in values if value is not None)
    began = started.timestamp() - snapshot_s - wait_s
    return Checkpoint(*key, began, ended.timestamp(), snapshot_s, wait_s, write_s, int(num_bytes))


@dataclass(frozen=True)
class StepTimes:
    """Of each checkpoint the rows of the steps that overlap it; of each step the share by which the time it took, with the
    snapshot before it, is more than what its size lets expect (NaN where nothing can be said), and whether it overlaps one."""

    during: list[IntArray]
    slowdown: FloatArray
    overlaps: BoolArray


def _during(end: FloatArray, attempt: FloatArray, seconds: FloatArray, checkpoints: list[Checkpoint]) -> list[IntArray]:
    """For each checkpoint the rows of the steps that overlap it.

    Steps are nearly in the order of time. So those that end behind the begin of a checkpoint are looked for only from the first
    row on behind which some step does, and only up to the last row before which some step begins before the checkpoint's end.
    """
    latest_end = np.maximum.accumulate(np.where(np.isnan(end), -np.inf, end))
    begin = end - seconds
    earliest_begin = np.minimum.accumulate(np.where(np.isnan(begin), np.inf, begin)[::-1])[::-1]
    firsts = np.searchsorted(latest_end, [one.begin for one in checkpoints], side="right").tolist()
    lasts = np.searchsorted(earliest_begin, [one.end for one in checkpoints], side="left").tolist()
    found = []
    for one, first, last in zip(checkpoints, firsts, lasts, strict=True):
        near = slice(first, last)
        is_during = (end[near] > one.begin) & (begin[near] < one.end) & (attempt[near] == one.attempt)
        found.append(first + np.flatnonzero(is_during))
    return found


def step_times(run: Run, checkpoints: list[Checkpoint]) -> StepTimes:
    """Compare each step of a run with a line over the padded tokens of those that overlap no checkpoint."""
    steps = run.steps
    end = np.asarray(steps["time"].cast(pa.int64()).to_numpy(), dtype=np.float64) / 1e6
    attempt, step, seconds = numbers(steps, "attempt", missing=0), numbers(steps, "step"), numbers(steps, "step_s").copy()
    overlaps = np.zeros(len(end), dtype=bool)
    near = np.flatnonzero(np.isin(step, [one.step for one in checkpoints])).tolist()  # few of many
    row_of = {(step[row], attempt[row]): row for row in near}
    for one in checkpoints:  # the snapshot before a step is not in the step's own time
        row = row_of.get((one.step, one.attempt))
        if row is not None:
            seconds[row] += one.snapshot_s + one.wait_s
    during = _during(end, attempt, seconds, checkpoints)
    for rows in during:
        overlaps[rows] = True
    tokens = numbers(steps, "num_padded_tokens")
    # The first step of a process waits for the pipeline to fill.
    known = np.isfinite(tokens) & np.isfinite(seconds) & np.append(False, attempt[1:] == attempt[:-1])
    slowdown = np.full(len(end), np.nan)
    others = known & ~overlaps
    if others.sum() >= MIN_OTHER_STEPS:
        expected = _line(tokens, tokens[others], seconds[others])
        if (expected[known] > 0).all():
            slowdown[known] = seconds[known] / expected[known] - 1
    return StepTimes(during, slowdown, overlaps)


def _line(at: FloatArray, x: FloatArray, y: FloatArray) -> FloatArray:
    """Values at `at` of the line with the least absolute deviations from the points (iteratively reweighted least squares).

    Deviations and not squares, because single steps of a run are several times as long as the others.
    """
    centre, scale = float(np.median(x)), float(np.ptp(x))
    if scale == 0:
        return np.full(len(at), float(np.median(y)))
    places = (x - centre) / scale
    smallest = 1e-6 * max(float(np.median(np.abs(y))), 1e-12)
    weights, before = np.ones(len(x)), np.full(2, np.inf)
    for _ in range(FIT_ROUNDS):
        # Weighted least squares around the weighted means, which is what keeps it accurate.
        total = weights.sum()
        middle, level = float(weights @ places) / total, float(weights @ y) / total
        away = places - middle
        spread = float(weights @ away**2)
        slope = float((weights * away) @ (y - level)) / spread if spread > 0 else 0.0
        found = np.array((level - slope * middle, slope))
        if np.abs(found - before).max() <= FIT_TOLERANCE * np.abs(found).max():
            break
        before = found
        weights = 1 / np.maximum(np.abs(y - found[0] - slope * places), smallest)
    return np.asarray(found[0] + found[1] * (at - centre) / scale)


def checkpoint_tables(run: Run, rng: Generator) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The run's rows of `checkpoints` and the columns of `runs` about them."""
    found = checkpoints_of(run)
    times = step_times(run, found)
    return _rows(run, found, times), _summary(found, times, rng)


def checkpoint_rows(run: Run) -> list[dict[str, Any]]:
    """The run's rows of `checkpoints`, one per finished checkpoint.

    `num_steps` are the steps that overlap it, `slowdown` the median of theirs; null where none does.
    """
    found = checkpoints_of(run)
    return _rows(run, found, step_times(run, found))


def _rows(run: Run, found: list[Checkpoint], times: StepTimes) -> list[dict[str, Any]]:
    rows = []
    for one, during in zip(found, times.during, strict=True):
        slowdown = times.slowdown[during]
        slowdown = slowdown[np.isfinite(slowdown)]
        rows.append(
            {
                "run_id": run.run_id,
                "attempt": one.attempt,
                "step": one.step,
                "snapshot_s": one.snapshot_s,
                "wait_s": one.wait_s,
                "write_s": one.write_s,
                "num_bytes": one.num_bytes,
                "num_steps": len(slowdown),
                "slowdown": float(np.median(slowdown)) if len(slowdown) else None,
            }
        )
    return rows


def checkpoint_summary(run: Run, rng: Generator) -> dict[str, Any]:
    """The columns of `runs` about checkpoints.

    `checkpoint_slowdown` is the median over the `checkpoint_steps` steps that overlap one, minus that of the others, with
    its 95 % bootstrap interval; the two `_max` are the largest of either kind of step: the noise beside the finding.
    """
    found = checkpoints_of(run)
    return _summary(found, step_times(run, found), rng)


def _summary(found: list[Checkpoint], times: StepTimes, rng: Generator) -> dict[str, Any]:
    columns: dict[str, Any] = dict.fromkeys(SUMMARY_COLUMNS)
    columns["num_checkpoints"] = len(found)
    usable = np.isfinite(times.slowdown)
    these, others = times.slowdown[usable & times.overlaps], times.slowdown[usable & ~times.overlaps]
    columns["checkpoint_steps"] = len(these)
    if not len(these) or not len(others):
        return columns
    drawn = _medians(these, rng) - _medians(others, rng)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return columns | {
        "checkpoint_slowdown": float(np.median(these) - np.median(others)),
        "checkpoint_slowdown_low": float(low),
        "checkpoint_slowdown_high": float(high),
        "checkpoint_slowdown_max": float(these.max()),
        "other_slowdown_max": float(others.max()),
    }


def _medians(values: FloatArray, rng: Generator) -> FloatArray:
    """Medians of resamples, without drawing these: the j-th smallest of n uniform numbers follows Beta(j, n - j + 1), and the
    next one cuts off a Beta(1, n - j) share of what is left above; a number u stands for the value at place floor(n u)."""
    n, ordered = len(values), np.sort(values)
    j = (n + 1) // 2
    lower = rng.beta(j, n - j + 1, NUM_RESAMPLES)
    upper = lower if n % 2 else lower + (1 - lower) * rng.beta(1, n - j, NUM_RESAMPLES)
    places = [np.minimum((n * u).astype(np.int64), n - 1) for u in (lower, upper)]
    return np.asarray((ordered[places[0]] + ordered[places[1]]) / 2)


def checkpoint_line(row: Mapping[str, Any]) -> str | None:
    """The finding in words, None where there is none."""
    if row["checkpoint_slowdown"] is None:
        return None
    low, high = row["checkpoint_slowdown_low"], row["checkpoint_slowdown_high"]
    many = row["checkpoint_steps"]
    these = "step that overlaps" if many == 1 else "steps that overlap"
    slowdown = row["checkpoint_slowdown"]
    longer = f"took {abs(slowdown):.1%} {'more' if slowdown >= 0 else 'less'} time"
    verdict = "; no slowdown that the interval could show" if low <= 0 <= high else ""
    return (
        f"{row['name']}: against others of as many padded tokens, the {many} {these} one of {row['num_checkpoints']} checkpoints "
        f"{longer} (median; 95 % interval {low:+.1%} to {high:+.1%}{verdict}), the longest by "
        f"{row['checkpoint_slowdown_max']:+.1%}; of the steps that overlap none, the longest by {row['other_slowdown_max']:+.1%}."
    )
