"""Simulated time, and devices that several pieces of work share.

A pool is a device, or a machine's cores. Each piece of work on it runs on one core; when there are more pieces than cores
they share them evenly (processor sharing), as threads do on a CPU and two streams on a GPU. All pieces go on at the same
rate, so a pool keeps one virtual time: what a piece has done since it started is how far the virtual time has moved. The
next to finish is then the least of a heap, and starting or ending a piece costs the logarithm of their number.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

Callback = Callable[[], None]


class Clock:
    """Events in order of time; those of one time in the order in which they were made."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callback]] = []
        self._number = 0

    def at(self, time: float, event: Callback) -> None:
        """Call `event` at `time`, in seconds, which is not before now."""
        self._number += 1
        heappush(self._events, (max(time, self.now), self._number, event))

    def run(self, done: Callable[[], bool]) -> None:
        """Go from event to event until `done`, which is asked after each one, or until there is none left."""
        while self._events and not done():
            self.now, _, event = heappop(self._events)
            event()


class Pool:
    """`cores` equal cores that pieces of work share.

    Args:
        clock: simulated time.
        cores: pieces of work that run at full speed at once.
        crowded: share of the cores that is left when more pieces than cores want to run: those that do run wait for what
            one that does not run holds, such as an interpreter's lock.
    """

    def __init__(self, clock: Clock, cores: float, crowded: float = 1.0) -> None:
        self._clock, self.cores, self._crowded = clock, cores, crowded
        self._work: list[tuple[float, int, Callback]] = []
        self._virtual = self._since = self.busy_s = 0.0
        self._number = self._version = 0

    def rate(self) -> float:
        """Seconds of work that each piece does in a second, from 0 to 1."""
        active = len(self._work)
        return 1.0 if active <= self.cores else self.cores * self._crowded / active

    def start(self, seconds: float, done: Callback) -> None:
        """Begin a piece of work of `seconds`, if it had a core of its own; `done` is called when it ends."""
        self._advance()
        self._number += 1
        heappush(self._work, (self._virtual + seconds, self._number, done))
        self._plan_next()

    def settle(self) -> float:
        """Core seconds used until now."""
        self._advance()
        return self.busy_s

    def _advance(self) -> None:
        passed = self._clock.now - self._since
        self._since = self._clock.now
        if self._work and passed > 0.0:
            self._virtual += passed * self.rate()
            self.busy_s += passed * len(self._work) * self.rate()

    def _plan_next(self) -> None:
        self._version += 1
        if self._work:
            version = self._version
            left = max(0.0, self._work[0][0] - self._virtual)
            self._clock.at(self._clock.now + left / self.rate(), lambda: self._finish(version))

    def _finish(self, version: int) -> None:
        if version != self._version:  # another piece has started or ended since: a later event knows better
            return
        self._advance()
        self._virtual, _, done = heappop(self._work)
        self._plan_next()
        done()
