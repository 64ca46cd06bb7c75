"""Puts back in order what several targets finish in any order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from dflash_core.pipeline.occupancy import Occupancy, WaitClock
from dflash_core.pipeline.threads import Supervisor

Item = TypeVar("Item")


class GivenUp(Exception):
    """Whoever waited for an item needs it no more."""


@dataclass(frozen=True, slots=True)
class ReorderStats:
    """One consistent snapshot of a `ReorderBuffer`. Seconds so far; waits under way are included.

    Attributes:
        depth, mean_depth, max_depth: items that are here before their turn, now, weighted by time, and at most.
        get_wait_s: the consumer waited.
        held_up_s: part of it in which later items were already here, and one straggler held up the line. The rest of the
            wait nothing was here at all: the stages before are slower than the consumer.
        waiting_for: position that is waited for now, or None.
        longest_wait_s, longest_wait_position: the position that was waited for longest, None before the first wait.
    """

    depth: int
    mean_depth: float
    max_depth: int
    get_wait_s: float
    held_up_s: float
    waiting_for: int | None
    longest_wait_s: float
    longest_wait_position: int | None


class ReorderBuffer(Generic[Item]):
    """Gives items back in the order of their positions `first`, `first` + 1, ... however they arrive. One consumer.

    `put` never waits: what can be in here is bounded by the byte budget. How to read `stats()`: a high `get_wait_s` with
    little `held_up_s` means that targets are the bottleneck (more or faster ones). A high `held_up_s` means that they are
    fast enough together, but one is slow, or has long batches queued up: look at the depths of the target queues and at the
    batch at `longest_wait_position`; `least_loaded` helps against uneven batches. A high `mean_depth` without waits: the
    drafter is the bottleneck.
    """

    def __init__(self, name: str, first: int, supervisor: Supervisor, timeout_s: float) -> None:
        self.name = name
        self._next = first
        self._supervisor, self._timeout_s = supervisor, timeout_s
        self._items: dict[int, Item] = {}
        self._condition = threading.Condition()
        self._clock, self._held_up = WaitClock(), WaitClock()
        self._waiting_since: float | None = None
        self._held_up_since: float | None = None
        self._longest: tuple[float, int | None] = (0.0, None)
        self._occupancy = Occupancy(time.monotonic())

    def put(self, position: int, item: Item) -> None:
        """Hand in an item; each position once."""
        with self._condition:
            assert position >= self._next and position not in self._items, f"{self.name}: position {position} came twice"
            self._items[position] = item
            self._note(time.monotonic())
            if position == self._next:
                self._condition.notify_all()

    def get(self, give_up: Callable[[], bool] = lambda: False) -> tuple[Item, float]:
        """The item at the next position, and the seconds waited for it.

        Raises:
            GivenUp: the item is not there, and `give_up`, which is asked all the time, says that nobody needs it any more.
            Stopped, StageError: as `Supervisor.wait_for`.
        """
        with self._condition:
            started = time.monotonic()
            if self._next not in self._items:
                self._clock.start(started)
                self._waiting_since = started
                self._note(started)
            where = f"{self.name} (position {self._next})"
            try:
                here = lambda: self._next in self._items or give_up()  # noqa: E731 - read where it is used
                waited = self._supervisor.wait_for(self._condition, here, self._timeout_s, where)
            finally:
                self._end_of_wait(time.monotonic())
            if self._next not in self._items:
                raise GivenUp
            item = self._items.pop(self._next)
            self._next += 1
            self._note(time.monotonic())
            return item, waited

    def _note(self, now: float) -> None:
        """Keep the clocks: whether the line is held up changes with what arrives during a wait."""
        self._occupancy.change(now, len(self._items), full=False)
        held_up = self._waiting_since is not None and bool(self._items) and self._next not in self._items
        if held_up and self._held_up_since is None:
            self._held_up_since = now
            self._held_up.start(now)
        elif not held_up and self._held_up_since is not None:
            self._held_up.end(self._held_up_since, now)
            self._held_up_since = None

    def _end_of_wait(self, now: float) -> None:
        if self._waiting_since is None:
            return
        self._clock.end(self._waiting_since, now)
        self._longest = self._longest_now(now)
        self._waiting_since = None
        self._note(now)

    def _longest_now(self, now: float) -> tuple[float, int | None]:
        if self._waiting_since is not None and now - self._waiting_since > self._longest[0]:
            return now - self._waiting_since, self._next
        return self._longest

    def depth(self) -> int:
        with self._condition:
            return len(self._items)

    @property
    def get_wait_s(self) -> float:
        with self._condition:
            return self._clock.seconds(time.monotonic())

    def stats(self) -> ReorderStats:
        """All counters at one moment."""
        with self._condition:
            now = time.monotonic()
            seen, (longest_s, longest_position) = self._occupancy.stats(now), self._longest_now(now)
            return ReorderStats(
                depth=len(self._items),
                mean_depth=seen.mean_depth,
                max_depth=seen.max_depth,
                get_wait_s=self._clock.seconds(now),
                held_up_s=self._held_up.seconds(now),
                waiting_for=None if self._waiting_since is None else self._next,
                longest_wait_s=longest_s,
                longest_wait_position=longest_position,
            )
