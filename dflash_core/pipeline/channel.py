"""Bounded hand-over between threads, with the counters that tell which side is slow.

How to read `Channel.stats()`, and what to do about it:

| put wait | get wait | mean depth | mostly | the bottleneck is | what helps |
|---|---|---|---|---|---|
| high | low | near the capacity | full | the consumer | faster or more consumers; never a longer queue |
| low | high | near 0 | empty | the producer | more loading threads, a faster disk |
| both at times | both at times | in between | neither | each in turn: uneven work | a longer queue, if there is memory |
| low | low | any | neither | elsewhere | nothing here |

Full although `max_depth` is below the capacity: the bytes are the bound, so a longer queue changes nothing and more bytes do.
Depths of several queues that drift apart: their consumers are not equally fast or their items not equally dear
(`least_loaded` evens that out). All counters run from the making of the channel; for a stretch of time take the difference of
two snapshots (of waits as they are, of a mean or share after multiplying it by `observed_s`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from dflash_core.pipeline.occupancy import Occupancy, OccupancyStats, WaitClock
from dflash_core.pipeline.threads import Supervisor

Item = TypeVar("Item")


class Closed(Exception):
    """The channel was closed: nothing can be put any more, and everything in it has been taken."""


@dataclass(frozen=True, slots=True)
class ChannelStats:
    """One consistent snapshot of a channel; the module's docstring tells how to read it.

    Attributes:
        depth, load, num_bytes: items waiting now, the sum of their loads (tokens), and of their bytes.
        num_put, num_got: items so far; `num_put - num_got == depth`.
        put_wait_s, get_wait_s: seconds waited so far for room and for an item, waits still under way included.
        occupancy: how full it was. Full means that there was no room for the next item: by count, by bytes, or
            because a put was waiting.
    """

    depth: int
    load: int
    num_bytes: int
    num_put: int
    num_got: int
    put_wait_s: float
    get_wait_s: float
    occupancy: OccupancyStats


class Channel(Generic[Item]):
    """First in, first out, at most `capacity` items and `max_bytes` bytes. Closing lets the consumers drain it.

    Invariant: depth <= capacity and num_bytes <= max(max_bytes, largest single item). An item above `max_bytes` passes
    once the channel is empty. Several threads that wait to put are served in the order in which they came, so that a large
    item cannot be passed for ever by small ones.

    Args:
        name: for messages.
        capacity: most items.
        supervisor: whose stop ends every wait.
        timeout_s: limit of a single wait without progress anywhere in the cell.
        max_bytes: most bytes, or None for no such bound.
        lock: to be shared by channels that are to be looked at together; by default the channel has its own.
    """

    def __init__(
        self,
        name: str,
        capacity: int,
        supervisor: Supervisor,
        timeout_s: float,
        max_bytes: int | None = None,
        lock: threading.RLock | None = None,
    ) -> None:
        self.name, self.capacity, self.max_bytes = name, capacity, max_bytes
        self._supervisor, self._timeout_s = supervisor, timeout_s
        self._lock = threading.RLock() if lock is None else lock
        self._room, self._some = threading.Condition(self._lock), threading.Condition(self._lock)
        self._items: deque[tuple[Item, int, int]] = deque()
        self._putters: deque[object] = deque()
        self._closed = False
        self._load = self._num_bytes = self._num_put = self._num_got = 0
        self._put_clock, self._get_clock = WaitClock(), WaitClock()
        self._occupancy = Occupancy(time.monotonic())

    def put(self, item: Item, load: int = 0, num_bytes: int = 0, batch: int | None = None) -> None:
        """Append, waiting for room.

        Args:
            item: what is handed over.
            load: its cost (tokens); adds to `load()` until the item is taken.
            num_bytes: counts against `max_bytes` until the item is taken.
            batch: number to name when the wait fails.

        Raises:
            Closed: the channel is, or was while waiting, closed.
            Stopped, StageError: see `Supervisor.wait_for`.
        """
        with self._lock:
            ticket = object()
            self._putters.append(ticket)
            try:
                room = lambda: self._closed or (self._putters[0] is ticket and self._fits(num_bytes))  # noqa: E731
                self._wait(self._room, room, self._put_clock, "full", batch)
            except BaseException:
                self._drop(ticket)
                self._note()
                raise
            self._drop(ticket)
            if self._closed:
                raise Closed
            self._items.append((item, load, num_bytes))
            self._load += load
            self._num_bytes += num_bytes
            self._num_put += 1
            self._note()
            self._some.notify()

    def get(self) -> Item:
        """Take the oldest item, waiting for one; raises `Closed` at the end, else as `put`."""
        with self._lock:
            some = lambda: bool(self._items) or self._closed  # noqa: E731 - read where it is used
            self._wait(self._some, some, self._get_clock, "empty", None)
            if not self._items:
                raise Closed
            item, load, num_bytes = self._items.popleft()
            self._load -= load
            self._num_bytes -= num_bytes
            self._num_got += 1
            self._note()
            if self._putters:
                self._room.notify_all()
            return item

    def _drop(self, ticket: object) -> None:
        self._putters.remove(ticket)
        if self._putters:  # who came next is now at the head
            self._room.notify_all()

    def _fits(self, num_bytes: int) -> bool:
        if not self._items:
            return True
        small = self.max_bytes is None or self._num_bytes + num_bytes <= self.max_bytes
        return small and len(self._items) < self.capacity

    def _note(self) -> None:
        full = bool(self._putters) or not self._fits(1)
        self._occupancy.change(time.monotonic(), len(self._items), full and bool(self._items))

    def _wait(
        self, condition: threading.Condition, ready: Callable[[], bool], clock: WaitClock, why: str, batch: int | None
    ) -> None:
        if ready():
            self._supervisor.pass_by()
            return
        started = time.monotonic()
        clock.start(started)
        self._note()
        try:
            self._supervisor.wait_for(condition, ready, self._timeout_s, f"{self.name} ({why})", batch)
        finally:
            clock.end(started, time.monotonic())

    def close(self) -> None:
        """No more puts; what is in here can still be taken. Wakes everybody."""
        with self._lock:
            self._closed = True
            self._room.notify_all()
            self._some.notify_all()

    def is_drained(self) -> bool:
        """Whether it was closed and everything has been taken."""
        with self._lock:
            return self._closed and not self._items

    def is_closed(self) -> bool:
        with self._lock:
            return self._closed

    def depth(self) -> int:
        """Items now waiting."""
        with self._lock:
            return len(self._items)

    def load(self) -> int:
        """Sum of the loads of the items now waiting."""
        with self._lock:
            return self._load

    def pressure(self) -> tuple[int, int]:
        """`load()` and `num_put` at one moment: what `least_loaded` compares."""
        with self._lock:
            return self._load, self._num_put

    @property
    def num_put(self) -> int:
        with self._lock:
            return self._num_put

    @property
    def put_wait_s(self) -> float:
        with self._lock:
            return self._put_clock.seconds(time.monotonic())

    @property
    def get_wait_s(self) -> float:
        with self._lock:
            return self._get_clock.seconds(time.monotonic())

    def stats(self) -> ChannelStats:
        """All counters at one moment."""
        with self._lock:
            now = time.monotonic()
            return ChannelStats(
                depth=len(self._items),
                load=self._load,
                num_bytes=self._num_bytes,
                num_put=self._num_put,
                num_got=self._num_got,
                put_wait_s=self._put_clock.seconds(now),
                get_wait_s=self._get_clock.seconds(now),
                occupancy=self._occupancy.stats(now),
            )
