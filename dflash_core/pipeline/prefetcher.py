"""The prefetcher: a feed thread follows the plan, workers load, and each target has one bounded queue.

    planned batches -> feed thread (reserves bytes in plan order) -> W workers (load) -> one queue per target

Workers load side by side but dispatch in plan order, one at a time: the order in the queues, the round-robin counts and
the statistics are then functions of the plan alone. The price is that a slow load holds up the dispatch of the batches
behind it, by at most W batches; the queues cover that. `per_worker` dispatches as it comes, like the historic fault.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dflash_core.errors import StageError
from dflash_core.pipeline.batch_stats import BatchStats
from dflash_core.pipeline.channel import ByteBudget, Channel, Closed
from dflash_core.pipeline.dispatch import Policy, make_dispatch
from dflash_core.pipeline.threads import Stopped, Supervisor
from dflash_core.records import BatchShape, PlannedBatch


@dataclass(frozen=True, slots=True)
class Loaded:
    """One batch on its way to a target. `payload` is the trainer's; the pipeline does not look into it."""

    planned: PlannedBatch
    shape: BatchShape
    payload: Any
    num_bytes: int
    load_s: float = 0.0
    dispatched_at: float = 0.0
    target: int = 0


@dataclass(frozen=True)
class PrefetchSettings:
    """What a prefetcher is built with; see `dflash_core.config.PrefetchConfig` for meaning and units."""

    num_targets: int
    num_buckets: int
    num_workers: int = 4
    dispatch: Policy = "round_robin"
    queue_batches: int = 8
    max_bytes: int = 2 * 1024**3
    stall_timeout_s: float = 600.0


Load = Callable[[PlannedBatch], tuple[BatchShape, Any]]


class BatchPrefetcher:
    """Loads planned batches ahead of the targets.

    Args:
        planned: batches in plan order.
        load: makes shape and payload of one batch; called by several threads at once.
        size_of: bytes that a batch will hold until it is trained, known before it is loaded.
        settings: sizes and policy.
        supervisor: owner of the threads.
    """

    def __init__(
        self,
        planned: Iterable[PlannedBatch],
        load: Load,
        size_of: Callable[[PlannedBatch], int],
        settings: PrefetchSettings,
        supervisor: Supervisor,
    ) -> None:
        self._planned, self._load, self._size_of = planned, load, size_of
        self._settings, self._supervisor = settings, supervisor
        wait = settings.stall_timeout_s
        self._feed: Channel[tuple[int, PlannedBatch, int]] = Channel("feed", settings.num_workers * 2, supervisor, wait)
        self.queues: list[Channel[Loaded]] = [
            Channel(f"target {t} queue", settings.queue_batches, supervisor, wait) for t in range(settings.num_targets)
        ]
        self.budget = ByteBudget(settings.max_bytes, supervisor, wait)
        self._stats = BatchStats(settings.num_buckets, settings.num_targets)
        self._choose = make_dispatch(settings.dispatch, self.queues, settings.num_workers)  # type: ignore[arg-type]
        self._turn = threading.Condition()
        self._next_turn = 0
        self._workers_left = settings.num_workers

    def start(self) -> None:
        """Start the feed thread and the workers."""
        self._supervisor.start("feed", feed_batches, self)
        for worker in range(self._settings.num_workers):
            self._supervisor.start(f"loader {worker}", load_batches, self, worker)

    def get_batch_stats(self) -> dict[str, Any]:
        """One consistent snapshot of everything dispatched so far (keys in docs/design.md 2)."""
        return self._stats.snapshot()

    def depths(self) -> list[int]:
        """Batches waiting in each target's queue."""
        return [queue.depth() for queue in self.queues]

    def waits(self) -> dict[str, Any]:
        """Seconds waited so far, by place: a full queue, an empty queue, the byte budget, an empty feed."""
        return {
            "queue_put_wait_s": [queue.put_wait_s for queue in self.queues],
            "queue_get_wait_s": [queue.get_wait_s for queue in self.queues],
            "budget_wait_s": self.budget.wait_s,
            "loader_idle_s": self._feed.get_wait_s,
            "reserved_bytes": self.budget.reserved,
        }

    def _dispatch(self, turn: int, worker: int, loaded: Loaded) -> None:
        ordered = self._settings.dispatch != "per_worker"
        with self._turn:
            if ordered:
                mine = lambda: self._next_turn == turn  # noqa: E731
                self._supervisor.wait_for(self._turn, mine, self._settings.stall_timeout_s, "dispatch turn")
            target = self._choose(worker)
        # Outside the lock: with an ordered policy nobody else may act before the turn moves on anyway.
        sent = Loaded(loaded.planned, loaded.shape, loaded.payload, loaded.num_bytes, loaded.load_s, time.monotonic(), target)
        self.queues[target].put(sent, load=loaded.shape.num_padded_tokens)
        self._stats.record(loaded.shape, target)
        with self._turn:
            self._next_turn += 1
            self._turn.notify_all()

    def _worker_done(self) -> None:
        with self._turn:
            self._workers_left -= 1
            last = self._workers_left == 0
        if last:
            for queue in self.queues:
                queue.close()


def feed_batches(prefetcher: BatchPrefetcher) -> None:
    """Body of the feed thread: the only one that walks the plan and reserves bytes."""
    for turn, planned in enumerate(prefetcher._planned):
        num_bytes = prefetcher._size_of(planned)
        prefetcher.budget.reserve(num_bytes)
        prefetcher._feed.put((turn, planned, num_bytes))
    prefetcher._feed.close()


def load_batches(prefetcher: BatchPrefetcher, worker: int) -> None:
    """Body of a worker: load, wait for the turn, dispatch; the last one to end closes the queues."""
    while True:
        try:
            turn, planned, num_bytes = prefetcher._feed.get()
        except Closed:
            break
        started = time.monotonic()
        try:
            with prefetcher._supervisor.busy(f"loader {worker}", planned.seq_no):
                shape, payload = prefetcher._load(planned)
        except Stopped:
            raise
        except Exception as error:
            raise StageError(f"loader {worker}", planned.seq_no, error) from error
        loaded = Loaded(planned, shape, payload, num_bytes, time.monotonic() - started)
        prefetcher._dispatch(turn, worker, loaded)
    prefetcher._worker_done()
