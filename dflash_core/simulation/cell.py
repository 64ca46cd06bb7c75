"""One simulated cell: the stages of docs/design.md 2 as a state machine, with the rules of `dflash_core.pipeline`.

    plan -> feed (reserves bytes in plan order) -> loaders -> one bounded queue per target -> targets
         -> ready buffer, in plan order -> drafter -> join of all cells -> optimizer -> next step

Every method is called at one moment of simulated time and does what can happen then. What the stages wait for is what
they wait for in the pipeline: the feed for bytes and for room in its channel (two batches for each loader), a loader for
its turn and for room in the queue of the target that the policy chose, a target for a batch, the drafter for the next
batch of the plan, and a cell at the end of a step for all others. A batch's bytes are given back once it is trained.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dflash_core.config import Dispatch
from dflash_core.pipeline.dispatch import PRIVATE, PrivateCounter
from dflash_core.simulation.clock import Clock, Pool


@dataclass(frozen=True, slots=True)
class BatchWork:
    """One batch as the simulation sees it. Seconds are those on a device, or a core, of its own.

    Attributes:
        step: optimizer step, from 0.
        num_bytes: reserved until it is trained.
        num_padded_tokens: by which `least_loaded` weighs a queue.
        load_s, target_s, draft_s: work of a loader, of a target, and of the drafter (forward and backward).
    """

    step: int
    num_bytes: int
    num_padded_tokens: int
    load_s: float
    target_s: float
    draft_s: float


@dataclass(frozen=True, slots=True)
class StepWork:
    """What the end of a step costs: the join in seconds that pass, optimizer and logging as work of the drafter's device."""

    reduce_s: float = 0.0
    optimizer_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CellSettings:
    """What a cell is made of; see `dflash_core.config.PrefetchConfig`."""

    num_targets: int
    num_workers: int = 4
    queue_batches: int = 8
    max_bytes: int = 2 * 1024**3
    dispatch: Dispatch = "round_robin"


@dataclass(frozen=True, slots=True)
class CellPools:
    """The devices of a cell; the same pool may stand for several."""

    loaders: Pool
    targets: Sequence[Pool]
    draft: Pool


class Watch:
    """Seconds spent in each of some states; always in one of them."""

    def __init__(self, clock: Clock, state: str) -> None:
        self._clock, self.state, self._since = clock, state, 0.0
        self.seconds: dict[str, float] = {}

    def to(self, state: str) -> None:
        now = self._clock.now
        self.seconds[self.state] = self.seconds.get(self.state, 0.0) + now - self._since
        self.state, self._since = state, now

    def read(self) -> dict[str, float]:
        self.to(self.state)
        return dict(self.seconds)


@dataclass
class Queue:
    """Batches that wait for one target."""

    items: deque[int] = field(default_factory=deque)
    load: int = 0
    num_put: int = 0
    chosen: deque[tuple[int, int]] = field(default_factory=deque)  # (batch, worker) that wait for room


class SimulatedCell:
    """Args:
    clock: simulated time.
    works: the cell's batches in plan order.
    num_steps: steps of the run; the cell may have no batch in some.
    settings: sizes and policy.
    pools: its devices.
    arrive: called when the cell is at the end of a step; it calls `joined` back once all cells are.
    step_work: what the end of a step costs.
    """

    def __init__(
        self,
        clock: Clock,
        works: Sequence[BatchWork],
        num_steps: int,
        settings: CellSettings,
        pools: CellPools,
        arrive: Callable[[], None],
        step_work: StepWork,
    ) -> None:
        self._works, self._settings, self._pools = works, settings, pools
        self._arrive, self._step_work = arrive, step_work
        self._left = [0] * num_steps
        for work in works:
            self._left[work.step] += 1
        self._reserved, self._next_feed = 0, 0
        self._held: int | None = None
        self._feed: deque[int] = deque()
        self._idle_workers = deque(range(settings.num_workers))
        self._loaded: dict[int, int] = {}  # batch -> the worker that waits for its turn
        self._turn = 0
        skips = settings.dispatch == "per_worker_skipping"
        self._counters = [PrivateCounter(worker, skips) for worker in range(settings.num_workers)]
        self._turn_target: int | None = None
        self._queues = [Queue() for _ in range(settings.num_targets)]
        self._ready: set[int] = set()
        self.trained: list[int] = []
        self.step, self.step_ends = 0, [0.0] * num_steps
        self._clock = clock
        self.drafter = Watch(clock, "wait")
        self.targets = [Watch(clock, "idle") for _ in range(settings.num_targets)]
        self.feed_watch = Watch(clock, "other")
        self.snapshots: list[dict[str, float]] = []
        self.bytes_seen = self.num_seen = 0

    def start(self) -> None:
        """Begin: the feed goes as far as it can, and the drafter waits for its first batch."""
        self._feed_batches()
        self._draft_next()

    # feed and loaders

    def _feed_batches(self) -> None:
        while True:
            if self._held is None:
                if self._next_feed == len(self._works):
                    return self.feed_watch.to("other")
                need = self._works[self._next_feed].num_bytes
                if self._reserved and self._reserved + need > self._settings.max_bytes:
                    return self.feed_watch.to("budget")
                self._reserved += need
                self._held = self._next_feed
                self._next_feed += 1
            if len(self._feed) >= 2 * self._settings.num_workers:
                return self.feed_watch.to("other")
            self._feed.append(self._held)
            self._held = None
            self._start_loaders()

    def _start_loaders(self) -> None:
        while self._idle_workers and self._feed:
            worker, batch = self._idle_workers.popleft(), self._feed.popleft()
            self._pools.loaders.start(self._works[batch].load_s, lambda w=worker, b=batch: self._end_load(w, b))  # type: ignore[misc]

    def _end_load(self, worker: int, batch: int) -> None:
        if self._settings.dispatch in PRIVATE:  # no turns: it goes to the worker's own next target
            target = self._counters[worker].draw() % len(self._queues)
            self._queues[target].chosen.append((batch, worker))
            self._fill(target)
        else:
            self._loaded[batch] = worker
            self._dispatch()

    def _dispatch(self) -> None:
        """Ordered policies: the batch whose turn it is chooses a target and holds the turn until there is room."""
        while self._turn in self._loaded and self._turn_target is None:
            batch, self._turn_target = self._turn, self._choose()
            self._queues[self._turn_target].chosen.append((batch, self._loaded.pop(batch)))
            self._fill(self._turn_target)

    def _choose(self) -> int:
        if self._settings.dispatch == "round_robin":
            return self._turn % len(self._queues)
        return min(range(len(self._queues)), key=lambda t: (self._queues[t].load, self._queues[t].num_put, t))

    def _fill(self, target: int) -> None:
        queue = self._queues[target]
        while queue.chosen and len(queue.items) < self._settings.queue_batches:
            batch, worker = queue.chosen.popleft()
            queue.items.append(batch)
            queue.load += self._works[batch].num_padded_tokens
            queue.num_put += 1
            if self._settings.dispatch not in PRIVATE:
                self._turn += 1
                self._turn_target = None
            self._idle_workers.append(worker)
            self._start_target(target)
        self._start_loaders()
        self._feed_batches()

    # targets and drafter

    def _start_target(self, target: int) -> None:
        queue, watch = self._queues[target], self.targets[target]
        if watch.state == "busy" or not queue.items:
            return
        batch = queue.items.popleft()
        queue.load -= self._works[batch].num_padded_tokens
        watch.to("busy")
        self._pools.targets[target].start(self._works[batch].target_s, lambda: self._end_target(target, batch))

    def _end_target(self, target: int, batch: int) -> None:
        self.targets[target].to("idle")
        self._ready.add(batch)
        self._start_target(target)
        self._fill(target)
        self._dispatch()
        if self.drafter.state == "wait":
            self._draft_next()

    def _draft_next(self) -> None:
        if self._left[self.step] == 0:
            self.drafter.to("barrier")
            return self._arrive()
        batch = len(self.trained)
        if batch not in self._ready:
            return self.drafter.to("wait")
        self._ready.remove(batch)
        self.drafter.to("draft")
        self._pools.draft.start(self._works[batch].draft_s, lambda: self._end_draft(batch))

    def _end_draft(self, batch: int) -> None:
        self.trained.append(batch)
        self._left[self.step] -= 1
        self.bytes_seen, self.num_seen = self.bytes_seen + self._reserved, self.num_seen + 1
        self._reserved -= self._works[batch].num_bytes
        self._feed_batches()
        self._draft_next()

    def joined(self) -> None:
        """All cells are at the end of the step; the join itself takes its time."""
        self.drafter.to("reduce")
        self._clock.at(self._clock.now + self._step_work.reduce_s, self._optimize)

    def _optimize(self) -> None:
        self.drafter.to("optimizer")
        self._pools.draft.start(self._step_work.optimizer_s, self._end_step)

    def _end_step(self) -> None:
        self.step_ends[self.step] = self._clock.now
        self.step += 1
        self.drafter.to("wait")
        self.snapshots.append(self._snapshot())
        if self.step < len(self._left):
            self._draft_next()

    def _snapshot(self) -> dict[str, float]:
        """Seconds so far, by stage and state."""
        busy = sum(watch.read().get("busy", 0.0) for watch in self.targets)
        feed = self.feed_watch.read().get("budget", 0.0)
        card = self._pools.draft.settle()
        return {**self.drafter.read(), "target_busy": busy, "budget": feed, "card": card, "now": self._clock.now}
