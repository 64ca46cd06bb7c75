"""The prefetcher: a feed thread follows the plan, workers load, and each target has one bounded queue.

    planned batches -> feed thread (reserves bytes in plan order) -> W workers (load) -> one queue per target

Workers load side by side, but batches are dispatched in plan order, one at a time: the order in the queues, the round-robin
counts and the statistics are then functions of the plan alone. A batch that was loaded before its turn is staged, and its worker
goes on to the next; whoever brings the batch whose turn it is dispatches it and all staged ones behind it. At most `STAGED` * W
batches are staged, so one slow load lets the others idle only when they are that far ahead, and the queues cover it until then.
The policies with private counters dispatch as it comes, like the historic fault.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dflash_core.pipeline.batch_stats import BatchStats
from dflash_core.pipeline.budget import ByteBudget
from dflash_core.pipeline.channel import Channel, Closed
from dflash_core.pipeline.dispatch import PRIVATE, Policy, make_dispatch
from dflash_core.pipeline.threads import Supervisor
from dflash_core.records import BatchShape, PlannedBatch

# Batches that may be loaded ahead of the turn, per worker. Workers that wait for their turn lose a fifth of their throughput when
# loads take unevenly long; with two per worker they lose nothing (benchmarks/dispatch.py).
STAGED = 2


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
    """What a prefetcher is built with; see `dflash_core.config.PrefetchConfig` for meaning and units.

    `queue_bytes` bounds the bytes in one target's queue. Left out it is the target's share of `max_bytes`. The budget already
    bounds all that is in flight, wherever it is; this bound keeps one slow target from holding more than its share of it,
    which would leave the others without batches. While the targets keep pace with each other it never binds.
    """

    num_targets: int
    num_buckets: int
    num_workers: int = 4
    dispatch: Policy = "round_robin"
    queue_batches: int = 8
    max_bytes: int = 2 * 1024**3
    stall_timeout_s: float = 600.0
    queue_bytes: int | None = None

    @property
    def bytes_per_queue(self) -> int:
        """Most bytes in one target's queue; a single batch above it passes when the queue is empty."""
        return self.queue_bytes if self.queue_bytes is not None else max(1, self.max_bytes // self.num_targets)


class _End:
    """Stands behind the last planned batch; a None in a plan is a mistake and must not look like its end."""


END = _End()
Load = Callable[[PlannedBatch], tuple[BatchShape, Any]]


class BatchPrefetcher:
    """Loads planned batches ahead of the targets.

    One lock guards the queues, the turn and the policy, so that depths and counts can be read as of one moment.

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
        self._lock = threading.RLock()
        self._feed: Channel[tuple[int, PlannedBatch, int]] = Channel("feed", settings.num_workers * 2, supervisor, wait)
        self.queues: list[Channel[Loaded]] = [
            Channel(f"target {t} queue", settings.queue_batches, supervisor, wait, settings.bytes_per_queue, self._lock)
            for t in range(settings.num_targets)
        ]
        self.budget = ByteBudget(settings.max_bytes, supervisor, wait)
        self._stats = BatchStats(settings.num_buckets, settings.num_targets)
        self._choose = make_dispatch(settings.dispatch, self.queues, settings.num_workers)
        self._turn = threading.Condition(self._lock)
        self._next_turn = 0
        self._staged: dict[int, Loaded] = {}
        self._dispatching = False
        self._workers_left = settings.num_workers

    def start(self) -> None:
        """Start the feed thread and the workers."""
        self._supervisor.start("feed", feed_batches, self, done=self._feed.is_closed)
        for worker in range(self._settings.num_workers):
            self._supervisor.start(f"loader {worker}", load_batches, self, worker, done=self._feed.is_drained)

    def get_batch_stats(self) -> dict[str, Any]:
        """One consistent snapshot of everything dispatched so far (keys in docs/design.md 2). Takes no lock."""
        return self._stats.snapshot()

    def depths(self) -> list[int]:
        """Batches waiting in each target's queue, all at one moment."""
        with self._lock:
            return [queue.depth() for queue in self.queues]

    def waits(self) -> dict[str, Any]:
        """Waits so far in seconds, by place, and how full each target's queue was; the queues all at one moment.

        `Channel.stats` tells how to read them. `queue_tokens` are padded tokens waiting now, `queue_bytes` their reserved bytes.
        """
        with self._lock:
            queues = [queue.stats() for queue in self.queues]
        feed = self._feed.stats()
        return {
            "queue_put_wait_s": [queue.put_wait_s for queue in queues],
            "queue_get_wait_s": [queue.get_wait_s for queue in queues],
            "queue_tokens": [queue.load for queue in queues],
            "queue_bytes": [queue.num_bytes for queue in queues],
            "queue_mean_depths": [queue.occupancy.mean_depth for queue in queues],
            "queue_max_depths": [queue.occupancy.max_depth for queue in queues],
            "queue_full_shares": [queue.occupancy.full_share for queue in queues],
            "queue_empty_shares": [queue.occupancy.empty_share for queue in queues],
            "observed_s": queues[0].occupancy.observed_s,
            "budget_wait_s": self.budget.wait_s,
            "loader_idle_s": feed.get_wait_s,
            "reserved_bytes": self.budget.reserved,
            "max_reserved_bytes": self.budget.max_reserved,
        }

    def snapshot(self) -> dict[str, Any]:
        """`get_batch_stats()`, `waits()` and the depths (`prefetch_depths`), as of one moment: nothing is dispatched or taken
        in between."""
        with self._lock:
            return {**self.get_batch_stats(), "prefetch_depths": self.depths(), **self.waits()}

    def _dispatch(self, turn: int, worker: int, loaded: Loaded) -> None:
        """Dispatch a batch when it is its turn, or stage it for whoever dispatches the one before."""
        with self._lock:
            if self._settings.dispatch in PRIVATE:
                self._send(worker, loaded)
                return
            window = STAGED * self._settings.num_workers
            near = lambda: turn < self._next_turn + window  # noqa: E731
            limit_s, seq_no = self._settings.stall_timeout_s, loaded.planned.seq_no
            self._supervisor.wait_for(self._turn, near, limit_s, "dispatch turn", seq_no)
            self._staged[turn] = loaded
            if self._dispatching:
                return
            self._dispatching = True  # also while `put` waits for room, which lets go of the lock
            while self._next_turn in self._staged:
                self._send(worker, self._staged.pop(self._next_turn))
                self._next_turn += 1
                self._turn.notify_all()
            self._dispatching = False

    def _send(self, worker: int, loaded: Loaded) -> None:
        target = self._choose(worker)
        sent = Loaded(loaded.planned, loaded.shape, loaded.payload, loaded.num_bytes, loaded.load_s, time.monotonic(), target)
        self.queues[target].put(sent, loaded.shape.num_padded_tokens, loaded.num_bytes, loaded.planned.seq_no)
        self._stats.record(loaded.shape, target)

    def _worker_done(self) -> None:
        with self._lock:
            self._workers_left -= 1
            if self._workers_left == 0:
                for queue in self.queues:
                    queue.close()


def feed_batches(prefetcher: BatchPrefetcher) -> None:
    """Body of the feed thread: the only one that walks the plan and reserves bytes."""
    batches = iter(prefetcher._planned)
    turn = 0
    while True:
        with prefetcher._supervisor.busy("feed"):  # the first batch of an epoch waits for the epoch's plan
            planned = next(batches, END)
        if isinstance(planned, _End):
            break
        with prefetcher._supervisor.busy("feed", planned.seq_no):
            num_bytes = prefetcher._size_of(planned)
        prefetcher.budget.reserve(num_bytes, planned.seq_no)
        prefetcher._feed.put((turn, planned, num_bytes), batch=planned.seq_no)
        turn += 1
    prefetcher._feed.close()


def load_batches(prefetcher: BatchPrefetcher, worker: int) -> None:
    """Body of a worker: load, wait for the turn, dispatch; the last one to end closes the queues."""
    while True:
        try:
            turn, planned, num_bytes = prefetcher._feed.get()
        except Closed:
            break
        started = time.monotonic()
        with prefetcher._supervisor.busy(f"loader {worker}", planned.seq_no):  # names the batch if loading fails
            shape, payload = prefetcher._load(planned)
        loaded = Loaded(planned, shape, payload, num_bytes, time.monotonic() - started)
        prefetcher._dispatch(turn, worker, loaded)
    prefetcher._worker_done()
