"""The monitor thread: every N steps one snapshot of the prefetcher goes into the metrics (stream `stats`)."""

from __future__ import annotations

import threading

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
        supervisor.start("monitor", watch, self)

    def mean_target_idle_s(self) -> float:
        """Seconds that the cell's targets have waited for batches so far, averaged over targets."""
        waits = [queue.get_wait_s for queue in self.prefetcher.queues]
        return sum(waits) / len(waits)

    def step_done(self, step: int) -> None:
        """Called by the train loop after each step."""
        if step % self.every_steps == 0:
            with self.due:
                self.steps.append(step)
                self.due.notify()

    def finish(self) -> None:
        """Take what is still due, so that a short run has its last snapshot too."""
        with self.due:
            self.ended = True
            self.due.notify()
        while not self.thread_done.is_set():
            self.supervisor.check()
            self.supervisor.sleep(0.01)


def watch(monitor: Monitor) -> None:
    """Body of the monitor thread."""
    while True:
        with monitor.due:
            some = lambda: bool(monitor.steps) or monitor.ended  # noqa: E731
            # No limit of its own: a stalled run is reported by whoever waits for the batch.
            monitor.supervisor.wait_for(monitor.due, some, float("inf"), "monitor")
            steps, monitor.steps = monitor.steps, []
        for step in steps:
            monitor.sink.log(
                "stats",
                {
                    "step": step,
                    "cell": monitor.cell,
                    **monitor.prefetcher.get_batch_stats(),
                    "prefetch_depths": monitor.prefetcher.depths(),
                    "ready_depth": monitor.ready.depth(),
                    "ready_get_wait_s": monitor.ready.get_wait_s,
                    **monitor.prefetcher.waits(),
                },
            )
        if monitor.ended and not monitor.steps:
            monitor.thread_done.set()
            return
