"""The two clocks behind every counter of a hand-over: how long was waited, and how full it was meanwhile.

Neither has a lock of its own; whoever owns one holds its lock. Times are monotonic seconds, given by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass


class WaitClock:
    """Seconds waited by any number of waiters. A wait counts while it lasts, not only once it has ended."""

    def __init__(self) -> None:
        self._ended_s = 0.0
        self._waiting = 0
        self._sum_of_starts = 0.0

    def start(self, now: float) -> None:
        self._waiting += 1
        self._sum_of_starts += now

    def end(self, started: float, now: float) -> None:
        """End a wait that began at `started`."""
        self._waiting -= 1
        self._sum_of_starts -= started
        self._ended_s += now - started
        if not self._waiting:
            self._sum_of_starts = 0.0  # what adding and taking away has left behind

    def seconds(self, now: float) -> float:
        return self._ended_s + self._waiting * now - self._sum_of_starts


@dataclass(frozen=True, slots=True)
class OccupancyStats:
    """How full something was over `observed_s` seconds: depth in items, weighted by time; shares of the time, 0 to 1."""

    observed_s: float
    mean_depth: float
    max_depth: int
    full_share: float
    empty_share: float


class Occupancy:
    """Depth over time. `change` is called at every change with what holds from then on."""

    def __init__(self, now: float) -> None:
        self._began = self._changed = now
        self._depth = self._max_depth = 0
        self._full = False
        self._depth_s = self._full_s = self._empty_s = 0.0

    def change(self, now: float, depth: int, full: bool) -> None:
        self._advance(now)
        self._depth, self._full = depth, full
        self._max_depth = max(self._max_depth, depth)

    def _advance(self, now: float) -> None:
        passed, self._changed = now - self._changed, now
        self._depth_s += passed * self._depth
        if self._full:
            self._full_s += passed
        if self._depth == 0:
            self._empty_s += passed

    def stats(self, now: float) -> OccupancyStats:
        self._advance(now)
        observed = now - self._began
        if observed <= 0.0:
            return OccupancyStats(0.0, float(self._depth), self._max_depth, float(self._full), float(self._depth == 0))
        return OccupancyStats(
            observed, self._depth_s / observed, self._max_depth, self._full_s / observed, self._empty_s / observed
        )
