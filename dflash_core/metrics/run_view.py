"""What is known of a run from its rows, in bounded memory: the state behind the live console and `dflash watch`.

Rows may be fed as they are logged or as they are read from the JSONL files. A resumed run trains some steps again: with the
first row of a later attempt, what the earlier one said of that step and those behind it is forgotten.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

WINDOW_STEPS = 50  # steps that "recent" figures are of
SNAPSHOTS = 20  # of each cell, for recent waits and depths
SHOWN_EVENTS = 6
MOST_POINTS = 2048
QUIET_EVENTS = ("checkpoint_begin", "target_checked", "self_check")  # expected, and told by another one or by the log

# What a step's time goes to, and what that means in words. `loader`: the drafter waited for states while the targets waited for
# batches; `target`: it waited for states and the targets were busy.
TIME_PARTS = {
    "loader": "data_wait_s and target_wait_s at once",
    "target": "the rest of target_wait_s",
    "drafter": "forward_s, backward_s, optimizer_s",
    "cells": "reduce_s of several cells",
    "checkpoint": "snapshot_s and wait_s of the event checkpoint_begin",
    "validation": "validation_s",
    "logging": "log_s",
    "other": "what is left of step_s",
}


class History:
    """A series over the whole run as at most `MOST_POINTS` points: when there are more, neighbours are joined to their mean."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []

    def add(self, step: int, value: float) -> None:
        """Take one point; steps rise. Values that are not finite are left out."""
        if not math.isfinite(value):
            return
        self.points.append((step, value))
        if len(self.points) > MOST_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=False)
            odd = self.points[-1:] if len(self.points) % 2 else []
            self.points = [(first, (a + b) / 2) for (first, a), (_, b) in pairs] + odd

    def forget_from(self, step: int) -> None:
        """Drop the points of `step` and behind it."""
        while self.points and self.points[-1][0] >= step:
            self.points.pop()

    def columns(self, count: int) -> list[float]:
        """Means over at most `count` equal stretches of steps, those without a point left out."""
        if not self.points:
            return []
        last = self.points[-1][0] + 1
        sums: dict[int, list[float]] = {}
        for step, value in self.points:
            sums.setdefault(step * count // last, []).append(value)
        return [sum(values) / len(values) for _, values in sorted(sums.items())]


@dataclass
class RunView:
    """State of one run. `total_steps` is None where it is not known.

    Attributes:
        loss: over the whole run.
        recent: the last `steps` rows, at most `WINDOW_STEPS`.
        stats: of each cell the last `stats` rows of this attempt, at most `SNAPSHOTS`.
        events: the last `events` rows worth showing.
        measured: step and acceptance length of the newest measurement on held-out prompts.
        num_skipped: skipped steps among all rows taken.
        last_time: the newest row's `time`, seconds since 1970.
    """

    total_steps: int | None = None
    num_cells: int = 1
    attempt: int = 0
    loss: History = field(default_factory=History)
    recent: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    stats: dict[int, deque[Mapping[str, Any]]] = field(default_factory=dict)
    events: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=SHOWN_EVENTS))
    measured: tuple[int, float] | None = None
    num_skipped: int = 0
    last_time: float | None = None
    saving_since: tuple[int, float] | None = None
    _pauses: deque[tuple[int, str, float]] = field(default_factory=lambda: deque(maxlen=4 * WINDOW_STEPS))

    def take(self, stream: str, row: Mapping[str, Any]) -> None:
        """Take one row. Rows of an attempt that is over, and streams that are not needed, are passed by."""
        attempt = int(row.get("attempt") or 0)
        if attempt < self.attempt or stream not in ("steps", "stats", "events"):
            return
        if attempt > self.attempt:
            self._begin_attempt(attempt, row)
        time = row.get("time")
        if time is not None:
            self.last_time = max(self.last_time or 0.0, float(time))
        if stream == "steps":
            self._take_step(row)
        elif stream == "stats":
            self.stats.setdefault(int(row.get("cell") or 0), deque(maxlen=SNAPSHOTS)).append(row)
        else:
            self._take_event(row)

    def sample(self, row: Mapping[str, Any]) -> None:
        """Take a `steps` row from the middle of a long file for the loss alone."""
        if row.get("step") is not None and row.get("loss") is not None:
            self.loss.forget_from(row["step"])
            self.loss.add(row["step"], row["loss"])

    def _begin_attempt(self, attempt: int, row: Mapping[str, Any]) -> None:
        self.attempt = attempt
        self.stats.clear()
        self._pauses.clear()
        self.saving_since = None
        if row.get("step") is not None:
            self._forget_from(row["step"])

    def _forget_from(self, step: int) -> None:
        self.loss.forget_from(step)
        while self.recent and self.recent[-1]["step"] >= step:
            self.recent.pop()
        if self.measured is not None and self.measured[0] > step:
            self.measured = None

    def _take_step(self, row: Mapping[str, Any]) -> None:
        if row.get("step") is None:
            return
        if self.recent and self.recent[-1]["step"] >= row["step"]:  # the first step of a later attempt
            self._forget_from(row["step"])
        self.recent.append(row)
        self.num_skipped += bool(row.get("skipped"))
        if row.get("loss") is not None:
            self.loss.forget_from(row["step"])
            self.loss.add(row["step"], row["loss"])

    def _take_event(self, row: Mapping[str, Any]) -> None:
        kind, step = row.get("kind"), int(row.get("step") or 0)
        if kind == "checkpoint_begin":
            self._pauses.append((step, "checkpoint", (row.get("snapshot_s") or 0.0) + (row.get("wait_s") or 0.0)))
            self.saving_since = step, float(row.get("time") or 0.0)
        elif kind == "checkpoint_end":
            self.saving_since = None
        elif kind == "validation":
            self._pauses.append((step, "validation", row.get("validation_s") or 0.0))
            if row.get("acceptance_length") is not None:
                self.measured = step, row["acceptance_length"]
        if kind not in QUIET_EVENTS:
            self.events.append(row)

    @property
    def num_done(self) -> int:
        """Steps that are done."""
        return self.recent[-1]["step"] + 1 if self.recent else 0

    def newest(self, name: str) -> Any:
        """A field of the last step, None where there is none."""
        return self.recent[-1].get(name) if self.recent else None

    def recent_values(self, name: str) -> list[float]:
        """A field of the recent steps, finite values only."""
        return [float(v) for row in self.recent if (v := row.get(name)) is not None and math.isfinite(v)]

    def recent_sum(self, *names: str) -> float:
        """Sum of fields over the recent steps."""
        return sum(sum(self.recent_values(name)) for name in names)

    def per_second(self, name: str) -> float | None:
        """A count per second of the recent steps, pauses between steps not counted."""
        seconds = self.recent_sum("step_s")
        return self.recent_sum(name) / seconds if seconds > 0 else None

    def seconds_per_step(self) -> float | None:
        """Wall time of a recent step, pauses for checkpoints and validation included where rows carry their time."""
        rows = list(self.recent)
        same = [row for row in rows if row.get("attempt") == rows[-1].get("attempt")] if rows else []
        times = [row["time"] for row in same if row.get("time") is not None]
        if len(times) > 1 and times[-1] > times[0]:
            return float(times[-1] - times[0]) / (len(times) - 1)
        steps = self.recent_values("step_s")
        return sum(steps) / len(steps) if steps else None

    def seconds_left(self) -> float | None:
        """Time to the last step at the recent pace."""
        pace = self.seconds_per_step()
        return None if pace is None or self.total_steps is None else max(0, self.total_steps - self.num_done) * pace

    def time_shares(self) -> dict[str, float]:
        """Shares of the recent time by `TIME_PARTS`; empty where the rows carry no times."""
        parts = dict.fromkeys(TIME_PARTS, 0.0)
        for row in self.recent:
            wait, idle = row.get("target_wait_s") or 0.0, row.get("data_wait_s") or 0.0
            reduce_s, log_s = row.get("reduce_s") or 0.0, row.get("log_s") or 0.0
            draft = sum(row.get(name) or 0.0 for name in ("forward_s", "backward_s", "optimizer_s"))
            if self.num_cells == 1:  # there is nobody to wait for: it is the device's own work that is waited for
                draft, reduce_s = draft + reduce_s, 0.0
            loader = min(wait, max(0.0, idle))
            parts["loader"] += loader
            parts["target"] += wait - loader
            parts["drafter"] += draft
            parts["cells"] += reduce_s
            parts["logging"] += log_s
            parts["other"] += max(0.0, (row.get("step_s") or 0.0) - wait - draft - reduce_s)
        first = self.recent[0]["step"] if self.recent else 0
        for step, kind, seconds in self._pauses:
            if step > first:
                parts[kind] += seconds
        total = sum(parts.values())
        return {name: seconds / total for name, seconds in parts.items()} if total > 0 else {}

    def bucket_shares(self) -> list[float]:
        """Share of each bucket among the batches of the recent steps."""
        sums = _add_up(row["bucket_counts"] for row in self.recent if row.get("bucket_counts"))
        total = sum(sums)
        return [value / total for value in sums] if total else []

    def queue_shares(self, cell: int, name: str) -> list[float | None]:
        """How much of the recent time each target's queue was waited at (`queue_get_wait_s` or `queue_put_wait_s`)."""
        rows = self.stats.get(cell)
        if not rows or not isinstance(rows[-1].get(name), list):
            return []
        last, first = rows[-1], rows[0] if len(rows) > 1 else {}
        seconds = (last.get("observed_s") or 0.0) - (first.get("observed_s") or 0.0)
        before = first.get(name) or [0.0] * len(last[name])
        return [(b - a) / seconds if seconds > 0 else None for a, b in zip(before, last[name], strict=False)]

    def mean_depths(self, cell: int) -> list[float]:
        """Mean depth of each target's queue at the recent snapshots."""
        rows = [row["prefetch_depths"] for row in self.stats.get(cell, ()) if row.get("prefetch_depths")]
        return [value / len(rows) for value in _add_up(rows)]


def _add_up(rows: Iterable[Iterable[float]]) -> list[float]:
    """Element-wise sums of lists, which may differ in length."""
    sums: list[float] = []
    for row in rows:
        for i, value in enumerate(row):
            if i == len(sums):
                sums.append(0.0)
            sums[i] += value
    return sums
