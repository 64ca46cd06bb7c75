"""The monitor thread: every N steps one snapshot of the prefetcher goes into the metrics (stream `stats`)."""

from __future__ import annotations

import threading
from typing import Any

from dflash_core.metrics.sinks import RunLog
from dflash_core.pipeline import BatchPrefetcher, ReorderBuffer, Supervisor
from dflash_core.training.target_loop import Ready


class Monitor:
    """Wakes when the train loop has done another `every_steps` steps; the loop itself never waits for it."""

    def __init__(
        self,
        prefetcher: BatchPrefetcher,
        ready: ReorderBuffer[Ready],
        sink: RunLog,
        cell: int,
        every_steps: int,
        supervisor: Supervisor,
    ) -> None:
        self.prefetcher, self.ready, self.sink, self.cell = prefetcher, ready, sink, cell
        self.every_steps, self.supervisor = every_steps, supervisor
        self.due = threading.Condition()
        self.steps: list[int] = []
        self.ended = False
        self.thread_done = threading.Event()
        supervisor.start("monitor", watch, self, done=self.thread_done.is_set)

    def mean_target_idle_s(self) -> float:
        """Seconds that the cell's targets have waited for batches so far, averaged over targets."""
        waits = [queue.get_wait_s for queue in self.prefetcher.queues]
        return sum(waits) / len(waits)

    def step_done(self, step: int) -> None:
        """Called by the train loop after each step."""
        if step % self.every_steps == 0:
            with self.due:
                self.steps.append(step)
                self.due.notify_all()

    def finish(self) -> None:
        """Take what is still due, so that a short run has its last snapshot too."""
        with self.due:
            self.ended = True
            self.due.notify_all()
            self.supervisor.wait_for(self.due, self.thread_done.is_set, float("inf"), "monitor's last snapshot")

    def row(self, step: int) -> dict[str, Any]:
        """A row of `stats`: waits and occupancy since the start, in seconds, batches and shares of the time."""
        ready = self.ready.stats()
        return {
            "step": step,
            "cell": self.cell,
            **self.prefetcher.snapshot(),
            "ready_depth": ready.depth,
            "ready_mean_depth": ready.mean_depth,
            "ready_max_depth": ready.max_depth,
            "ready_get_wait_s": ready.get_wait_s,
            "ready_held_up_s": ready.held_up_s,
            "ready_waiting_for": ready.waiting_for,
            "ready_longest_wait_s": ready.longest_wait_s,
            "ready_longest_wait_position": ready.longest_wait_position,
        }


def watch(monitor: Monitor) -> None:
    """Body of the monitor thread."""
    while True:
        with monitor.due:
            some = lambda: bool(monitor.steps) or monitor.ended  # noqa: E731
            # No limit of its own: a stalled run is reported by whoever waits for the batch.
            monitor.supervisor.wait_for(monitor.due, some, float("inf"), "the next step to report on")
            steps, monitor.steps = monitor.steps, []
        for step in steps:
            with monitor.supervisor.busy("monitor"):
                monitor.sink.log("stats", monitor.row(step))
        with monitor.due:
            if monitor.ended and not monitor.steps:
                monitor.thread_done.set()
                monitor.due.notify_all()
                return
