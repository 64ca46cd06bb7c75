"""Dispatch and back-pressure of the real prefetcher, under schedules that the test decides."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.errors import StageError
from dflash_core.pipeline import (
    BatchPrefetcher,
    ByteBudget,
    Channel,
    Closed,
    Loaded,
    PrefetchSettings,
    ReorderBuffer,
    Supervisor,
    threads,
)
from dflash_core.pipeline.dispatch import Policy, make_dispatch
from dflash_core.pipeline.prefetcher import STAGED
from dflash_core.records import BatchShape, PlannedBatch

WAIT_S = 5.0
ORDERED: tuple[Policy, ...] = ("round_robin", "least_loaded")


def planned(i: int) -> PlannedBatch:
    """Batch i; its number in the run and its position in the cell differ."""
    return PlannedBatch(seq_no=2 * i, position=i, epoch=0, step=i // 4, cell=0, bucket=0, samples=(i,), ends_step=i % 4 == 3)


def shape(tokens: int = 10) -> BatchShape:
    return BatchShape(0, 1, tokens, tokens, tokens, 1, 1)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.001)


class Gate:
    """A load that ends when the test says so, batch by batch."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.changed = threading.Condition()
        self.here: set[int] = set()
        self.open: set[int] = set()

    def load(self, batch: PlannedBatch) -> tuple[BatchShape, Any]:
        with self.changed:
            self.here.add(batch.position)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: batch.position in self.open, WAIT_S)
        return shape(self.tokens[batch.position]), batch.position

    def release(self, position: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: position in self.here, WAIT_S), f"batch {position} was never loaded"
            self.open.add(position)
            self.changed.notify_all()


@settings(max_examples=20, deadline=None)
@given(
    st.data(),
    st.sampled_from(ORDERED),
    st.integers(1, 6),
    st.integers(1, 4),
    st.lists(st.integers(1, 99), min_size=1, max_size=20),
)
def test_whatever_order_loads_end_in(data: st.DataObject, policy: Policy, targets: int, workers: int, tokens: list[int]) -> None:
    """Loads end, and targets finish, in any drawn order. Batches are dispatched, and reach the trainer, in plan order; after
    any number of them round-robin's counts differ by at most 1, and least-loaded chose a queue with the fewest tokens."""
    count, gate = len(tokens), Gate(tokens)
    sizes = PrefetchSettings(targets, 1, workers, policy, queue_batches=count, stall_timeout_s=WAIT_S)
    with Supervisor("test") as supervisor:
        prefetcher = BatchPrefetcher([planned(i) for i in range(count)], gate.load, lambda _: 1, sizes, supervisor)
        choices: list[int] = []
        choose = prefetcher._choose
        prefetcher._choose = lambda worker: choices.append(choose(worker)) or choices[-1]
        prefetcher.start()
        left = list(range(count))
        while left:  # each worker holds one of the first batches not yet loaded; so far ahead they may be staged
            position = data.draw(st.sampled_from([p for p in left[:workers] if p < left[0] + STAGED * workers]))
            gate.release(position)
            left.remove(position)
        until(lambda: all(queue.is_closed() for queue in prefetcher.queues))

        queued: list[int] = [0] * targets
        counts = [0] * targets
        for position, target in enumerate(choices):
            if policy == "round_robin":
                assert target == position % targets
            else:
                assert target == min(range(targets), key=lambda t: (queued[t], counts[t], t))
            queued[target] += tokens[position]
            counts[target] += 1
            assert policy != "round_robin" or max(counts) - min(counts) <= 1
        assert prefetcher.get_batch_stats()["dispatched_per_target"] == counts == [q.depth() for q in prefetcher.queues]

        ready: ReorderBuffer[int] = ReorderBuffer("ready", 0, supervisor, WAIT_S)
        for target in data.draw(st.permutations(choices)):  # targets finish as they like
            loaded = prefetcher.queues[target].get()
            ready.put(loaded.planned.position, loaded.payload)
        assert [ready.get()[0] for _ in range(count)] == list(range(count))


def test_a_slow_load_lets_nobody_idle_until_the_others_are_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch 0 stays in its load: the other workers stage what comes behind it, up to the bound, and nothing overtakes it.
    With a poll every half minute only a notification can bring them on afterwards."""
    monkeypatch.setattr(threads, "POLL_S", 30.0)
    count, workers = 20, 4
    gate, sizes = Gate([10] * count), PrefetchSettings(2, 1, workers, queue_batches=count, stall_timeout_s=WAIT_S)
    with Supervisor("test") as supervisor:
        prefetcher = BatchPrefetcher([planned(i) for i in range(count)], gate.load, lambda _: 1, sizes, supervisor)
        prefetcher.start()
        last = STAGED * workers + workers - 2  # the three others end up holding one batch each that is too far ahead
        for position in range(1, last + 1):
            gate.release(position)
        waiting = lambda: sorted(a.batch or 0 for a in supervisor.activities() if a.what == "dispatch turn")  # noqa: E731
        until(lambda: waiting() == [2 * p for p in range(STAGED * workers, last + 1)])
        assert gate.here == set(range(last + 1)) and prefetcher.depths() == [0, 0]
        for position in (0, *range(last + 1, count)):
            gate.release(position)
        until(lambda: prefetcher.depths() == [count // 2, count // 2])
        assert [prefetcher.queues[0].get().payload for _ in range(count // 2)] == list(range(0, count, 2))


@given(st.sampled_from(ORDERED), st.integers(1, 6), st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), max_size=60))
def test_policies_over_queues_that_are_emptied_anyhow(policy: Policy, targets: int, moves: list[tuple[int, int]]) -> None:
    with Supervisor("test") as supervisor:
        queues: list[Channel[int]] = [Channel(str(t), 100, supervisor, WAIT_S) for t in range(targets)]
        choose = make_dispatch(policy, queues, num_workers=4)
        for number, (tokens, taken_from) in enumerate(moves):
            loads = [queue.load() for queue in queues]
            chosen = choose(number % 4)
            if policy == "least_loaded":
                tied = [t for t in range(targets) if loads[t] == min(loads)]
                assert chosen == min(tied, key=lambda t: (queues[t].num_put, t))
            queues[chosen].put(number, load=tokens)
            counts = [queue.num_put for queue in queues]
            assert policy == "least_loaded" or max(counts) - min(counts) <= 1
            if taken_from < targets and queues[taken_from].depth():
                queues[taken_from].get()


class Permits:
    """Batches up to a number may be loaded."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.changed = threading.Condition()

    def more(self, count: int) -> None:
        with self.changed:
            self.number += count
            self.changed.notify_all()

    def load(self, batch: PlannedBatch) -> tuple[BatchShape, Any]:
        with self.changed:
            assert self.changed.wait_for(lambda: batch.position < self.number, WAIT_S)
        return shape(), None


def in_lock_step(policy: Policy, ticks: int, level: int | None) -> Iterator[tuple[Supervisor, BatchPrefetcher, Permits]]:
    """Six consumers that take one batch each per tick; yields after every tick. Loads need a permit, unless `level` is None."""
    targets, capacity = 6, 8
    permits = Permits(10**6 if level is None else level)
    sizes = PrefetchSettings(targets, 1, 4, policy, queue_batches=capacity, stall_timeout_s=WAIT_S)
    gate = threading.Barrier(targets + 1)

    def consume(queue: Channel[Loaded], budget: ByteBudget) -> None:
        for _ in range(ticks):
            gate.wait(WAIT_S)
            budget.release(queue.get().num_bytes)
            gate.wait(WAIT_S)

    total = (level or targets * capacity) + ticks * targets
    with Supervisor("test") as supervisor:
        prefetcher = BatchPrefetcher((planned(i) for i in range(total)), permits.load, lambda _: 1, sizes, supervisor)
        prefetcher.start()
        for target, queue in enumerate(prefetcher.queues):
            supervisor.start(f"target {target}", consume, queue, prefetcher.budget)
        until(lambda: sum(prefetcher.depths()) == (level or targets * capacity))
        for _ in range(ticks):
            gate.wait(WAIT_S)
            gate.wait(WAIT_S)
            yield supervisor, prefetcher, permits
        until(lambda: all(not t.is_alive() for t in supervisor._threads if "target" in t.name))
        assert supervisor.failure is None


@pytest.mark.parametrize("policy", ORDERED)
@pytest.mark.parametrize("level", [6, 10, 27])
def test_depth_spread_in_lock_step_is_at_most_one(policy: Policy, level: int) -> None:
    """Depths are sampled before and after the refill of each tick; `level` is no multiple of the number of targets."""
    spreads = []
    for _, prefetcher, permits in in_lock_step(policy, 25, level):
        before = prefetcher.depths()
        permits.more(6)
        until(lambda: sum(prefetcher.depths()) == level)  # noqa: B023 - used at once
        after = prefetcher.depths()
        spreads += [max(before) - min(before), max(after) - min(after)]
    assert len(spreads) == 50 and max(spreads) <= 1


def test_depths_are_one_moment_even_while_dispatch_runs() -> None:
    """Loads run freely: round-robin's depths differ by at most 1 at the end of every tick, in whatever moment they are read."""
    spreads = []
    for supervisor, prefetcher, _ in in_lock_step("round_robin", 60, None):
        for _ in range(5):
            snapshot = prefetcher.snapshot()
            depths = snapshot["prefetch_depths"]
            spreads.append(max(depths) - min(depths))
            got = [n - d for n, d in zip(snapshot["dispatched_per_target"], depths, strict=True)]
            assert len(set(got)) == 1  # as many batches were taken from each queue, in this very snapshot
        assert supervisor.failure is None
    assert max(spreads) <= 1


def test_a_snapshot_is_taken_under_one_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be dispatched or taken between the parts of it."""
    held: list[bool] = []
    with Supervisor("test") as supervisor:
        prefetcher = BatchPrefetcher([], lambda b: (shape(), None), lambda _: 1, PrefetchSettings(2, 1), supervisor)
        for method in ("get_batch_stats", "depths", "waits"):
            whole = getattr(prefetcher, method)
            seen = lambda whole=whole: (held.append(prefetcher._lock._is_owned()), whole())[1]  # noqa: E731
            monkeypatch.setattr(prefetcher, method, seen)
        assert {"num_batches", "prefetch_depths", "queue_mean_depths"} <= set(prefetcher.snapshot())
        assert held == [True, True, True] and not prefetcher._lock._is_owned()


def test_batch_stats_wait_for_nobody() -> None:
    """Neither a writer at work nor a dispatch that holds the lock makes `get_batch_stats` wait."""
    read: list[int] = []
    with Supervisor("test") as supervisor:
        prefetcher = BatchPrefetcher([], lambda b: (shape(), None), lambda _: 1, PrefetchSettings(2, 1), supervisor)
        prefetcher._stats.record(shape(), 1)
        with prefetcher._lock, prefetcher._stats._lock:
            supervisor.start("reader", lambda: read.append(prefetcher.get_batch_stats()["num_batches"]))
            until(lambda: bool(read))
    assert read == [1]


def train_all(
    sizes: list[int], settings_: PrefetchSettings, load: Callable[[PlannedBatch], tuple[BatchShape, Any]]
) -> tuple[list[int], BatchPrefetcher]:
    """Everything but the arithmetic: prefetcher, target threads, ready buffer, and the trainer here."""
    trained: list[int] = []
    with Supervisor("test") as supervisor:
        batches = [planned(i) for i in range(len(sizes))]
        prefetcher = BatchPrefetcher(batches, load, lambda b: sizes[b.position], settings_, supervisor)
        ready: ReorderBuffer[Loaded] = ReorderBuffer("ready buffer", 0, supervisor, WAIT_S)

        def forward(queue: Channel[Loaded]) -> None:
            while True:
                try:
                    loaded = queue.get()
                except Closed:
                    return
                ready.put(loaded.planned.position, loaded)

        prefetcher.start()
        for target, queue in enumerate(prefetcher.queues):
            supervisor.start(f"target {target}", forward, queue, done=queue.is_drained)
        for _ in sizes:
            loaded, _waited = ready.get()
            trained.append(loaded.planned.position)
            prefetcher.budget.release(loaded.num_bytes)
    return trained, prefetcher


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=20), st.integers(1, 400), st.integers(1, 400), st.integers(1, 3),
    st.integers(1, 4), st.integers(1, 4), st.sampled_from(get_args(Policy)),
)  # fmt: skip
def test_no_bounds_lock_the_pipeline_up(
    sizes: list[int], max_bytes: int, queue_bytes: int, capacity: int, targets: int, workers: int, policy: Policy
) -> None:
    """Whatever the sizes and bounds, also with every batch above them: all batches are trained, in order, within the bounds."""
    bounds = PrefetchSettings(targets, 1, workers, policy, capacity, max_bytes, WAIT_S, queue_bytes)
    trained, prefetcher = train_all(sizes, bounds, lambda batch: (shape(), None))
    assert trained == list(range(len(sizes)))
    assert prefetcher.budget.reserved == 0
    assert prefetcher.budget.max_reserved <= max(max_bytes, max(sizes))
    assert all(count <= capacity for count in prefetcher.waits()["queue_max_depths"])


@pytest.mark.parametrize("policy", get_args(Policy))
def test_nothing_in_the_pipeline_waits_for_a_poll(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """All bounds are tight, so that every kind of wait occurs; a poll comes every half minute only."""
    monkeypatch.setattr(threads, "POLL_S", 30.0)
    rng = random.Random(0)

    def load(batch: PlannedBatch) -> tuple[BatchShape, Any]:
        time.sleep(0.001 * rng.random())
        return shape(), None

    bounds = PrefetchSettings(3, 1, 4, policy, queue_batches=1, max_bytes=500, stall_timeout_s=WAIT_S)
    started = time.monotonic()
    trained, _ = train_all([100] * 60, bounds, load)
    assert trained == list(range(60)) and time.monotonic() - started < threads.POLL_S


@pytest.mark.parametrize("workers", [1, 4])
def test_bytes_are_reserved_in_plan_order_before_loading(workers: int) -> None:
    sizes = [50, 10, 70, 20, 90, 30] * 5
    reserved: list[int] = []
    too_early: list[int] = []

    def load(batch: PlannedBatch) -> tuple[BatchShape, Any]:
        if batch.seq_no not in reserved:
            too_early.append(batch.seq_no)
        return shape(), None

    original = ByteBudget.reserve

    def reserve(self: ByteBudget, num_bytes: int, batch: int | None = None) -> None:
        original(self, num_bytes, batch)
        assert batch is not None and num_bytes == sizes[batch // 2]
        reserved.append(batch)

    bounds = PrefetchSettings(2, 1, workers, max_bytes=150, stall_timeout_s=WAIT_S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ByteBudget, "reserve", reserve)
        train_all(sizes, bounds, load)
    assert reserved == [2 * i for i in range(len(sizes))] and too_early == []


def test_bytes_stay_reserved_until_the_batch_was_trained() -> None:
    """Taken by a target is not enough: without a release nothing is loaded beyond the limit, and each release loads one more."""
    loaded: list[int] = []

    def load(batch: PlannedBatch) -> tuple[BatchShape, Any]:
        loaded.append(batch.position)
        return shape(), None

    with Supervisor("test") as supervisor:
        bounds = PrefetchSettings(2, 1, 4, max_bytes=500, stall_timeout_s=WAIT_S)
        prefetcher = BatchPrefetcher([planned(i) for i in range(20)], load, lambda _: 100, bounds, supervisor)
        prefetcher.start()
        for released in range(4):
            for position in range(0 if released == 0 else 4 + released, 5 + released):
                assert prefetcher.queues[position % 2].get().planned.position == position
            feeding = lambda: [a.batch for a in supervisor.activities() if a.what == "byte budget (full)"]  # noqa: E731
            until(lambda: feeding() == [2 * (5 + released)])  # noqa: B023 - used at once
            assert sorted(loaded) == list(range(5 + released)) and prefetcher.budget.reserved == 500
            prefetcher.budget.release(100)


def test_a_slow_target_holds_no_more_than_its_share_of_the_budget() -> None:
    """Target 0 takes nothing; the bound of its queue leaves the budget to the others until the line has to wait for it."""
    bounds = PrefetchSettings(4, 1, 4, "least_loaded", queue_batches=50, max_bytes=1200, stall_timeout_s=WAIT_S)
    assert bounds.bytes_per_queue == 300
    assert PrefetchSettings(4, 1, max_bytes=3).bytes_per_queue == 1
    assert PrefetchSettings(4, 1, max_bytes=1200, queue_bytes=7).bytes_per_queue == 7
    with Supervisor("test") as supervisor:
        # One token each at target 0, many elsewhere: least-loaded would fill its queue with everything.
        sizes = PrefetchSettings(2, 1, 4, "least_loaded", queue_batches=50, max_bytes=1000, stall_timeout_s=WAIT_S)
        load = lambda batch: (shape(1000 if batch.position == 1 else 1), None)  # noqa: E731
        prefetcher = BatchPrefetcher([planned(i) for i in range(50)], load, lambda _: 100, sizes, supervisor)
        prefetcher.start()
        until(lambda: any(a.what == "target 0 queue (full)" for a in supervisor.activities()))
        assert prefetcher.depths() == [5, 1] and prefetcher.queues[0].stats().num_bytes == 500


@pytest.mark.parametrize("place", ["plan", "size", "load", "target", "policy"])
@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
def test_whatever_fails_wherever_names_itself_and_ends_everything(place: str, kind: type[BaseException]) -> None:
    def at(here: str, position: int) -> None:
        if here == place and position == 9:
            raise kind("broken")

    def batches() -> Iterator[PlannedBatch]:
        for i in range(30):
            at("plan", i)
            yield planned(i)

    def size_of(batch: PlannedBatch) -> int:
        at("size", batch.position)
        return 1

    def load(batch: PlannedBatch) -> tuple[BatchShape, Any]:
        at("load", batch.position)
        return shape(), batch.position

    def consume(queue: Channel[Loaded]) -> None:
        while True:
            loaded = queue.get()
            with supervisor.busy("target", loaded.planned.seq_no):
                at("target", loaded.payload)

    with Supervisor("test") as supervisor:
        sizes = PrefetchSettings(3, 1, 4, stall_timeout_s=WAIT_S)
        prefetcher = BatchPrefetcher(batches(), load, size_of, sizes, supervisor)
        if place == "policy":
            prefetcher._choose = lambda worker: 99
            kind = IndexError
        prefetcher.start()
        for target, queue in enumerate(prefetcher.queues):
            supervisor.start(f"target {target}", consume, queue)
        until(lambda: supervisor.failure is not None)
        assert supervisor.close() == []
    failure = supervisor.failure
    assert isinstance(failure, StageError) and isinstance(failure.__cause__, kind)
    assert failure.stage.startswith({"plan": "feed", "size": "feed", "target": "target"}.get(place, "loader"))
    assert failure.batch == {"load": 18, "target": 18, "size": 18}.get(place)
