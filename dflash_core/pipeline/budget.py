"""The bound on the bytes of a cell: everything from before a batch is loaded until it has been trained on."""

from __future__ import annotations

import threading
import time

from dflash_core.pipeline.occupancy import WaitClock
from dflash_core.pipeline.threads import Supervisor


class ByteBudget:
    """Bounds the bytes in flight. Reserved in plan order by one thread, released in any order.

    Invariant: reserved <= max(limit, largest single reservation). The head of the line passes whenever nothing is in
    flight, so one batch above the limit cannot block for ever; and as reservations follow the plan, everything that the
    next batch to be trained needs is always already in flight.

    High `wait_s` is normal where targets or drafter are the bottleneck: loading has run ahead as far as it may. Together
    with high get waits of the target queues it means that the limit is too small for the pipeline to fill.
    """

    def __init__(self, limit: int, supervisor: Supervisor, timeout_s: float) -> None:
        self._limit, self._supervisor, self._timeout_s = limit, supervisor, timeout_s
        self._condition = threading.Condition()
        self._reserved = self._max_reserved = 0
        self._clock = WaitClock()

    def reserve(self, num_bytes: int, batch: int | None = None) -> None:
        """Take `num_bytes`, waiting until they fit; `batch` is named when the wait fails."""
        with self._condition:
            fits = lambda: self._reserved == 0 or self._reserved + num_bytes <= self._limit  # noqa: E731
            started = time.monotonic()
            self._clock.start(started)
            try:
                self._supervisor.wait_for(self._condition, fits, self._timeout_s, "byte budget (full)", batch)
            finally:
                self._clock.end(started, time.monotonic())
            self._reserved += num_bytes
            self._max_reserved = max(self._max_reserved, self._reserved)

    def release(self, num_bytes: int) -> None:
        """Give bytes back, once the batch has been trained on."""
        with self._condition:
            self._reserved -= num_bytes
            assert self._reserved >= 0
            self._condition.notify_all()

    @property
    def wait_s(self) -> float:
        """Seconds waited so far, a wait under way included."""
        with self._condition:
            return self._clock.seconds(time.monotonic())

    @property
    def reserved(self) -> int:
        with self._condition:
            return self._reserved

    @property
    def max_reserved(self) -> int:
        """Most bytes that were in flight at once."""
        with self._condition:
            return self._max_reserved
