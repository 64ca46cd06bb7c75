"""Dispatch: the historic fault beside the two policies, and what a hand-over costs.

    python benchmarks/dispatch.py

The fault: a run's target queues (at most 50 batches) once stood at 43, 50, 28, 31, 25 and 39, a spread of 25. Each of four
workers had a round-robin counter of its own, and items that were filtered out still advanced it. The first table models that
in virtual time: real policies and real channels, 6 targets, 4 workers that take unevenly long, and a twentieth of the items
filtered. Depths are sampled once per target batch:

- lock-step: all targets take one batch at the same moment. `same cost`: all take the same time. `by length`: a tick lasts as
  long as its longest batch;
- free: every target takes its next batch when it is done with the one before, and one of six is 4 % slower.

A spread is the largest depth less the smallest, in batches; `token spread` the same of queued tokens, in thousands; `starved`
the part of the targets' time in which they did nothing, in lock-step also because the longest batch of the tick went on. The
second table tells what staging is worth, the third runs the real prefetcher's threads for a moment, and the last one tells what
the parts cost.
"""

from __future__ import annotations

import heapq
import random
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from dflash_core.pipeline import BatchPrefetcher, ByteBudget, Channel, Closed, Loaded, PrefetchSettings, Supervisor
from dflash_core.pipeline.batch_stats import BatchStats
from dflash_core.pipeline.dispatch import Policy, make_dispatch
from dflash_core.pipeline.prefetcher import STAGED
from dflash_core.records import BatchShape, PlannedBatch

TARGETS, WORKERS, CAPACITY, BATCHES = 6, 4, 50, 6000
FILTERED = 0.05
SUPPLY = 1.05  # batches loaded per batch that the targets can take
INCIDENT = (43, 50, 28, 31, 25, 39)
Mode = Literal["lock-step, same cost", "lock-step, by length", "free, same cost", "free, by length"]
MODES: tuple[Mode, ...] = ("lock-step, same cost", "lock-step, by length", "free, same cost", "free, by length")


@dataclass(frozen=True)
class Variant:
    """A policy of the package, and whether what is filtered advances its counter."""

    name: str
    policy: Policy
    skips_advance: bool = False


VARIANTS = (
    Variant("private, with skips (historic)", "per_worker", skips_advance=True),
    Variant("private, without skips", "per_worker"),
    Variant("round_robin", "round_robin"),
    Variant("least_loaded", "least_loaded"),
)


@dataclass
class Seen:
    """Depths and queued tokens over the run."""

    depths: list[list[int]] = field(default_factory=list)
    token_spreads: list[int] = field(default_factory=list)
    starved: float = 0.0

    def look(self, queues: list[Channel[int]]) -> None:
        self.depths.append([queue.depth() for queue in queues])
        loads = [queue.load() for queue in queues]
        self.token_spreads.append(max(loads) - min(loads))

    def line(self) -> str:
        spreads = [max(depths) - min(depths) for depths in self.depths]
        widest = self.depths[spreads.index(max(spreads))]
        return (
            f"{statistics.mean(spreads):6.1f} {max(spreads):4d} {statistics.mean(self.token_spreads) / 1000:7.1f} "
            f"{100 * self.starved:6.1f} %  {widest}"
        )


class Model:
    """The prefetcher in virtual time. Time 1 is a mean batch of one target."""

    def __init__(self, variant: Variant, mode: Mode, supervisor: Supervisor, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.variant, self.mode = variant, mode
        self.ordered = variant.policy != "per_worker"
        self.queues: list[Channel[int]] = [Channel(str(t), CAPACITY, supervisor, 1.0) for t in range(TARGETS)]
        self.choose = make_dispatch(variant.policy, self.queues, WORKERS)
        sizes = (2048, 4096, 6144, 8192) if mode.endswith("by length") else (5120,)
        self.tokens = [rng.choice(sizes) for _ in range(BATCHES)]
        kept = 1.0 - (FILTERED if variant.skips_advance else 0.0)
        self.load_times = [rng.uniform(0.2, 1.8) * WORKERS * kept / (TARGETS * SUPPLY) for _ in range(2 * BATCHES)]
        self.filtered = [rng.random() < FILTERED for _ in range(2 * BATCHES)]
        self.next_item = self.next_batch = self.next_turn = 0
        self.busy: dict[int, int] = {}  # worker: the batch that it loads
        self.waiting: dict[int, int] = {}  # worker: the batch that it has loaded and cannot get rid of
        self.staged: set[int] = set()
        self.dispatcher: int | None = None
        self.chosen: dict[int, int] = {}  # by worker, or by 0 for the one that dispatches in order
        self.events: list[tuple[float, int, str, int]] = []
        self.num_events = 0
        self.seen, self.idle, self.busy_time = Seen(), set(range(TARGETS)), 0.0

    def at(self, time_: float, kind: str, who: int) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (time_, self.num_events, kind, who))

    def take_up(self, worker: int, now: float) -> None:
        """The worker goes on to the next item that is not filtered; with the historic fault it counts the others too."""
        spent = 0.0
        while self.variant.skips_advance and self.filtered[self.next_item % len(self.filtered)]:
            self.choose(worker)
            spent += self.load_times[self.next_item % len(self.load_times)]
            self.next_item += 1
        if self.next_batch < BATCHES:
            self.busy[worker] = self.next_batch
            self.next_batch += 1
            self.at(now + spent + self.load_times[self.next_item % len(self.load_times)], "loaded", worker)
            self.next_item += 1

    def dispatch(self, now: float) -> None:
        """Dispatch all that can be: in plan order with the ordered policies, else as it comes."""
        moved = True
        while moved:
            moved = self.dispatch_in_order(now) if self.ordered else self.dispatch_as_it_comes(now)

    def dispatch_as_it_comes(self, now: float) -> bool:
        moved = False
        for worker, batch in list(self.waiting.items()):
            if worker not in self.chosen:  # a choice stands, as a thread waits in the queue's put
                self.chosen[worker] = self.choose(worker)
            if self.put(batch, self.chosen[worker]):
                del self.waiting[worker], self.chosen[worker]
                self.take_up(worker, now)
                moved = True
        return moved

    def dispatch_in_order(self, now: float) -> bool:
        moved = False
        for worker, batch in sorted(self.waiting.items(), key=lambda entry: entry[1]):
            if batch < self.next_turn + STAGED * WORKERS:
                del self.waiting[worker]
                self.staged.add(batch)
                moved = True
                if self.dispatcher is None and batch == self.next_turn:
                    self.dispatcher = worker
                else:
                    self.take_up(worker, now)
        while self.dispatcher is not None and self.next_turn in self.staged:
            if 0 not in self.chosen:
                self.chosen[0] = self.choose(self.dispatcher)
            if not self.put(self.next_turn, self.chosen[0]):
                return moved
            del self.chosen[0]
            self.staged.remove(self.next_turn)
            self.next_turn += 1
            moved = True
        if self.dispatcher is not None:
            self.take_up(self.dispatcher, now)
            self.dispatcher = None
        return moved

    def put(self, batch: int, target: int) -> bool:
        if self.queues[target].depth() == CAPACITY:
            return False
        self.queues[target].put(batch, load=self.tokens[batch])
        return True

    def cost(self, target: int, batch: int) -> float:
        return self.tokens[batch] / 5120 * (1.04 if self.mode.startswith("free") and target == 2 else 1.0)

    def feed_targets(self, now: float) -> None:
        """Idle targets take what is there; in lock-step all at once or none."""
        if self.mode.startswith("lock-step"):
            if len(self.idle) < TARGETS or any(queue.depth() == 0 for queue in self.queues):
                return
            costs = [self.cost(target, queue.get()) for target, queue in enumerate(self.queues)]
            self.busy_time += sum(costs)
            for target in range(TARGETS):
                self.at(now + max(costs), "done", target)
            self.idle.clear()
            return
        for target in sorted(self.idle):
            if self.queues[target].depth():
                cost = self.cost(target, self.queues[target].get())
                self.busy_time += cost
                self.at(now + cost, "done", target)
                self.idle.remove(target)

    def run(self) -> Seen:
        for worker in range(WORKERS):
            self.take_up(worker, 0.0)
        now, next_look = 0.0, 0.0
        while self.events and self.next_batch < BATCHES:
            now, _, kind, who = heapq.heappop(self.events)
            if kind == "loaded":
                self.waiting[who] = self.busy.pop(who)
            else:
                self.idle.add(who)
            if self.events and self.events[0][0] == now:
                continue  # what happens at the same moment belongs together
            self.feed_targets(now)
            self.dispatch(now)
            self.feed_targets(now)
            self.dispatch(now)
            if now >= next_look:
                self.seen.look(self.queues)
                next_look = now + 1.0
        self.seen.starved = 1.0 - self.busy_time / (now * TARGETS)
        return self.seen


def compare_in_virtual_time() -> None:
    print(f"{'':22} {'':30} {'depth spread':>11} {'token':>7}")
    print(f"{'targets':22} {'counters':30} {'mean':>6} {'max':>4} {'spread':>7} {'starved':>8}  depths at the widest")
    print(f"{'the incident':22} {'':30} {'':6} {max(INCIDENT) - min(INCIDENT):4d} {'':7} {'':8}  {list(INCIDENT)}")
    for mode in MODES:
        for variant in VARIANTS:
            with Supervisor("model") as supervisor:
                print(f"{mode:22} {variant.name:30} {Model(variant, mode, supervisor).run().line()}")


def compare_staging() -> None:
    """Part of the workers' time that goes into loading, with the loads of the model and queues that never fill."""
    rng = random.Random(3)
    loads = [rng.uniform(0.2, 1.8) for _ in range(BATCHES)]
    print(f"\nloading with {WORKERS} workers: share of their time, by how many batches may be loaded before their turn")
    for window in (1, 2, WORKERS, STAGED * WORKERS):
        free = [0.0] * WORKERS
        dispatched: list[float] = []
        for batch, load_time in enumerate(loads):
            loaded = heapq.heappop(free) + load_time
            dispatched.append(max(loaded, dispatched[-1] if dispatched else 0.0))
            ahead = batch - window + 1 if window == 1 else batch - window  # with 1 a worker waits for its own turn
            heapq.heappush(free, max(loaded, dispatched[ahead] if ahead >= 0 else 0.0))
        print(f"{window:4d} {100 * sum(loads) / WORKERS / dispatched[-1]:6.1f} %")


def planned(i: int, bucket: int = 0) -> PlannedBatch:
    return PlannedBatch(i, i, 0, i // 8, 0, bucket, (i,), False)


def shape(tokens: int, bucket: int = 0) -> BatchShape:
    return BatchShape(bucket, 1, tokens, tokens, tokens, 1, 1)


def drain(queue: Channel[Loaded], budget: ByteBudget, seconds_per_token: float) -> None:
    while True:
        try:
            loaded = queue.get()
        except Closed:
            return
        budget.release(loaded.num_bytes)
        if seconds_per_token:
            time.sleep(loaded.shape.num_tokens * seconds_per_token)


def run_threads(policy: Policy, count: int, tokens: list[int], load_s: float, seconds_per_token: float) -> list[list[int]]:
    """The real prefetcher with 4 workers and 6 sleeping targets; returns depths sampled every 5 ms after a warm-up."""
    rng = random.Random(1)
    pauses = [load_s * rng.uniform(0.2, 1.8) for _ in range(count)]

    def load(batch: PlannedBatch) -> tuple[BatchShape, Any]:
        if load_s:
            time.sleep(pauses[batch.position])
        return shape(tokens[batch.position % len(tokens)]), None

    samples = []
    with Supervisor("benchmark") as supervisor:
        settings = PrefetchSettings(TARGETS, 1, WORKERS, policy, queue_batches=12)
        prefetcher = BatchPrefetcher((planned(i) for i in range(count)), load, lambda _: 1, settings, supervisor)
        prefetcher.start()
        for target, queue in enumerate(prefetcher.queues):
            supervisor.start(f"target {target}", drain, queue, prefetcher.budget, seconds_per_token)
        while not all(queue.is_drained() for queue in prefetcher.queues):
            supervisor.check()
            if load_s:
                stats = prefetcher.snapshot()
                if count // 4 < stats["num_batches"] < count:
                    samples.append(stats["prefetch_depths"])
            supervisor.sleep(0.005)
    return samples


def compare_threads() -> None:
    print("\nthreads: 6 targets of 10 ms per mean batch, 4 loaders, costs by length, at most 12 batches in a queue")
    print(f"{'counters':14} {'mean spread':>11} {'max':>4}  depths at the widest")
    rng = random.Random(2)
    tokens = [rng.choice((2048, 4096, 6144, 8192)) for _ in range(1200)]
    for policy in ("per_worker", "round_robin", "least_loaded"):
        depths = run_threads(policy, 1200, tokens, load_s=0.0055, seconds_per_token=0.010 / 5120)
        spreads = [max(d) - min(d) for d in depths]
        print(f"{policy:14} {statistics.mean(spreads):11.1f} {max(spreads):4d}  {depths[spreads.index(max(spreads))]}")


def microseconds(work: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(1e6 * (time.perf_counter() - started))
    return sorted(times)


def show(name: str, times: list[float]) -> None:
    print(f"{name:62} {statistics.median(times):9.1f} {times[int(0.99 * len(times))]:9.1f}")


def time_stats(writers: int, pause_s: float) -> list[float]:
    """`snapshot()`, which is `get_batch_stats()`, while `writers` threads record batches."""
    stats, stop = BatchStats(num_buckets=8, num_targets=TARGETS), threading.Event()
    shapes = [shape(100 * (b + 1), b) for b in range(8)]

    def write(worker: int) -> None:
        i = worker
        while not stop.is_set():
            stats.record(shapes[i % 8], i % TARGETS)
            i += 1
            if pause_s:
                time.sleep(pause_s)

    threads = [threading.Thread(target=write, args=(w,)) for w in range(writers)]
    for thread in threads:
        thread.start()
    times = microseconds(stats.snapshot, 20_000 if not writers or not pause_s else 5_000)
    stop.set()
    for thread in threads:
        thread.join()
    return times


def time_hand_over() -> None:
    with Supervisor("benchmark") as supervisor:
        channel: Channel[int] = Channel("c", 8, supervisor, 5.0, max_bytes=1000)

        def both() -> None:
            channel.put(1, 100, 100)
            channel.get()

        show("channel: put and get in one thread", microseconds(both, 20_000))
        there: Channel[int] = Channel("there", 1, supervisor, 5.0)
        back: Channel[int] = Channel("back", 1, supervisor, 5.0)

        def echo() -> None:
            for _ in range(3000):
                back.put(there.get())

        def round_trip() -> None:
            there.put(1)
            back.get()

        supervisor.start("echo", echo)
        show("channel: to a waiting thread and back, two hand-overs", microseconds(round_trip, 3000))


def time_dispatch() -> None:
    count = 20_000
    for policy in ("round_robin", "least_loaded"):
        wall, cpu = time.perf_counter(), time.process_time()
        run_threads(policy, count, [4096], 0.0, 0.0)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        name = f"prefetcher, {policy}: all of it per batch, wall / CPU"
        print(f"{name:62} {1e6 * wall / count:9.1f} {1e6 * cpu / count:9.1f}")
    with Supervisor("benchmark") as supervisor:
        queues: list[Channel[int]] = [Channel(str(t), 8, supervisor, 5.0) for t in range(TARGETS)]
        for policy in ("round_robin", "least_loaded"):
            choose = make_dispatch(policy, queues, WORKERS)
            show(f"{policy}: one choice among {TARGETS}", microseconds(lambda: choose(0), 20_000))  # noqa: B023


def main() -> None:
    compare_in_virtual_time()
    compare_staging()
    compare_threads()
    print(f"\n{'microseconds':62} {'median':>9} {'99 %':>9}")
    time_hand_over()
    show("get_batch_stats(), 8 buckets, 6 targets, no writer", time_stats(0, 0.0))
    show("get_batch_stats(), 4 writers of a batch per ms each", time_stats(4, 0.001))
    show("get_batch_stats(), 4 writers without a pause (99 %: turns at the GIL)", time_stats(4, 0.0))
    time_dispatch()


if __name__ == "__main__":
    main()
