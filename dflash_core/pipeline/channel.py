"""Bounded hand-over between threads, with the counters that tell which side is slow.

How to read a channel's counters: high `put_wait_s` and a high mean depth: the consumer is slow. High `get_wait_s` and a
mean depth near 0: the producer is slow. Both low: it keeps pace.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

from dflash_core.pipeline.threads import Supervisor

Item = TypeVar("Item")


class Closed(Exception):
    """The channel was closed and everything in it has been taken."""


class Channel(Generic[Item]):
    """First in, first out, at most `capacity` items. Closing lets the consumers drain it."""

    def __init__(self, name: str, capacity: int, supervisor: Supervisor, timeout_s: float) -> None:
        self.name, self.capacity = name, capacity
        self._supervisor, self._timeout_s = supervisor, timeout_s
        self._items: deque[tuple[Item, int]] = deque()
        self._condition = threading.Condition()
        self._closed = False
        self._load = 0
        self.put_wait_s = self.get_wait_s = 0.0
        self.num_put = 0

    def put(self, item: Item, load: int = 0) -> None:
        """Append, waiting for room; `load` (tokens) adds to `load()` until the item is taken."""
        with self._condition:
            room = lambda: len(self._items) < self.capacity  # noqa: E731 - read where it is used
            self.put_wait_s += self._supervisor.wait_for(self._condition, room, self._timeout_s, f"{self.name} (full)")
            if self._closed:
                raise Closed
            self._items.append((item, load))
            self._load += load
            self.num_put += 1
            self._condition.notify_all()

    def get(self) -> Item:
        """Take the oldest item, waiting for one; raises `Closed` at the end."""
        with self._condition:
            some = lambda: bool(self._items) or self._closed  # noqa: E731
            self.get_wait_s += self._supervisor.wait_for(self._condition, some, self._timeout_s, f"{self.name} (empty)")
            if not self._items:
                raise Closed
            item, load = self._items.popleft()
            self._load -= load
            self._condition.notify_all()
            return item

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def depth(self) -> int:
        """Items now waiting."""
        with self._condition:
            return len(self._items)

    def load(self) -> int:
        """Sum of the loads of the items now waiting."""
        with self._condition:
            return self._load


class ByteBudget:
    """Bounds the bytes in flight. Reserved in plan order by one thread, released in any order.

    Invariant: reserved <= max(limit, largest single reservation). The head of the line passes whenever nothing is in
    flight, so one batch above the limit cannot block for ever; and as reservations follow the plan, everything that the
    next batch to be trained needs is always already in flight.
    """

    def __init__(self, limit: int, supervisor: Supervisor, timeout_s: float) -> None:
        self._limit, self._supervisor, self._timeout_s = limit, supervisor, timeout_s
        self._condition = threading.Condition()
        self._reserved = 0
        self.wait_s = 0.0

    def reserve(self, num_bytes: int) -> None:
        with self._condition:
            fits = lambda: self._reserved == 0 or self._reserved + num_bytes <= self._limit  # noqa: E731
            self.wait_s += self._supervisor.wait_for(self._condition, fits, self._timeout_s, "byte budget (full)")
            self._reserved += num_bytes

    def release(self, num_bytes: int) -> None:
        with self._condition:
            self._reserved -= num_bytes
            assert self._reserved >= 0
            self._condition.notify_all()

    @property
    def reserved(self) -> int:
        with self._condition:
            return self._reserved


class ReorderBuffer(Generic[Item]):
    """Gives items back in the order of their positions 0, 1, 2, ... however they arrive.

    `put` never waits: what can be in here is bounded by the byte budget. High `get_wait_s` with depth 0 means that the
    stage before is slow; a high depth with a waiting consumer means that one straggler holds up the line.
    """

    def __init__(self, name: str, first: int, supervisor: Supervisor, timeout_s: float) -> None:
        self.name = name
        self._next = first
        self._supervisor, self._timeout_s = supervisor, timeout_s
        self._items: dict[int, Item] = {}
        self._condition = threading.Condition()
        self.get_wait_s = 0.0

    def put(self, position: int, item: Item) -> None:
        with self._condition:
            assert position >= self._next and position not in self._items
            self._items[position] = item
            self._condition.notify_all()

    def get(self) -> tuple[Item, float]:
        """The item at the next position, and the seconds waited for it."""
        with self._condition:
            here = lambda: self._next in self._items  # noqa: E731
            waited = self._supervisor.wait_for(self._condition, here, self._timeout_s, f"{self.name} (batch {self._next})")
            self.get_wait_s += waited
            item = self._items.pop(self._next)
            self._next += 1
            return item, waited

    def depth(self) -> int:
        with self._condition:
            return len(self._items)
