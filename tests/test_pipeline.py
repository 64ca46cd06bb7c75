"""Threads, channels and the prefetcher, without models: what they promise, under workers that are slow or fail."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from dflash_core.errors import StageError
from dflash_core.pipeline import (
    BatchPrefetcher,
    ByteBudget,
    Channel,
    Closed,
    Loaded,
    PrefetchSettings,
    ReorderBuffer,
    Stopped,
    Supervisor,
)
from dflash_core.pipeline.batch_stats import BatchStats
from dflash_core.records import BatchShape, PlannedBatch

WAIT_S = 5.0


def planned(i: int, bucket: int = 0) -> PlannedBatch:
    return PlannedBatch(seq_no=i, position=i, epoch=0, step=i // 4, cell=0, bucket=bucket, samples=(i,), ends_step=i % 4 == 3)


def shape_of(batch: PlannedBatch) -> BatchShape:
    tokens = 10 * (batch.bucket + 1)
    return BatchShape(batch.bucket, 1, tokens, tokens + 2, tokens, 1, 1)


def jittery_load(seed: int) -> Callable[[PlannedBatch], tuple[BatchShape, Any]]:
    rng = random.Random(seed)

    def load(batch: PlannedBatch) -> tuple[BatchShape, Any]:
        time.sleep(rng.random() * 0.003)
        return shape_of(batch), batch.seq_no

    return load


def drain(channel: Channel[Loaded], taken: list[Loaded], budget: ByteBudget, pause_s: float = 0.0) -> None:
    while True:
        try:
            item = channel.get()
        except Closed:
            return
        taken.append(item)
        budget.release(item.num_bytes)
        time.sleep(pause_s)


def run_prefetcher(
    count: int, load: Callable[[PlannedBatch], tuple[BatchShape, Any]], **settings: Any
) -> tuple[list[list[Loaded]], BatchPrefetcher]:
    batches = [planned(i, bucket=i % 3) for i in range(count)]
    sizes = PrefetchSettings(num_buckets=3, stall_timeout_s=WAIT_S, **settings)
    taken: list[list[Loaded]] = [[] for _ in range(sizes.num_targets)]
    with Supervisor("test") as supervisor:
        prefetcher = BatchPrefetcher(batches, load, lambda _: 100, sizes, supervisor)
        prefetcher.start()
        for t, queue in enumerate(prefetcher.queues):
            supervisor.start(f"target {t}", drain, queue, taken[t], prefetcher.budget, 0.001 * t)
        deadline = time.monotonic() + WAIT_S
        while sum(map(len, taken)) < count and supervisor.failure is None and time.monotonic() < deadline:
            time.sleep(0.005)
        if supervisor.failure is not None:
            raise supervisor.failure
    return taken, prefetcher


@pytest.mark.parametrize("workers", [1, 4])
def test_round_robin_follows_the_plan_whatever_the_workers_do(workers: int) -> None:
    for seed in range(3):
        taken, prefetcher = run_prefetcher(60, jittery_load(seed), num_targets=3, num_workers=workers)
        for target, items in enumerate(taken):
            assert [item.planned.seq_no for item in items] == list(range(target, 60, 3))
        assert prefetcher.get_batch_stats()["dispatched_per_target"] == [20, 20, 20]


@pytest.mark.parametrize("dispatch", ["round_robin", "least_loaded", "per_worker", "per_worker_skipping"])
def test_nothing_is_lost_or_repeated(dispatch: str) -> None:
    taken, prefetcher = run_prefetcher(50, jittery_load(1), num_targets=3, num_workers=4, dispatch=dispatch, queue_batches=2)
    assert sorted(item.planned.seq_no for items in taken for item in items) == list(range(50))
    assert all(item.payload == item.planned.seq_no and item.target == t for t, items in enumerate(taken) for item in items)
    assert prefetcher.budget.reserved == 0


def test_least_loaded_spares_the_slow_target() -> None:
    taken, _ = run_prefetcher(80, jittery_load(2), num_targets=3, num_workers=4, dispatch="least_loaded", queue_batches=4)
    assert len(taken[2]) < len(taken[0])  # target 2 takes 2 ms a batch, target 0 none


def test_per_worker_counters_can_drift_apart_and_the_shared_one_cannot() -> None:
    """Worker 0 always sleeps longest, so with private counters the first targets get what the quick workers begin with."""

    def uneven(batch: PlannedBatch) -> tuple[BatchShape, Any]:
        if threading.current_thread().name.endswith("loader 0"):
            time.sleep(0.02)
        return shape_of(batch), None

    for policy, bound in (("round_robin", 1), ("per_worker", 4)):
        _, prefetcher = run_prefetcher(40, uneven, num_targets=3, num_workers=4, dispatch=policy)
        counts = prefetcher.get_batch_stats()["dispatched_per_target"]
        assert max(counts) - min(counts) <= bound


def test_every_snapshot_adds_up() -> None:
    snapshots: list[dict[str, Any]] = []
    stats, stop = BatchStats(num_buckets=3, num_targets=2), threading.Event()

    def write(worker: int) -> None:
        for i in range(3000):
            stats.record(shape_of(planned(i, bucket=i % 3)), target=worker)

    def read() -> None:
        while not stop.is_set():
            snapshots.append(stats.snapshot())

    threads = [threading.Thread(target=write, args=(w,)) for w in range(2)] + [threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    for thread in threads[:2]:
        thread.join(WAIT_S)
    stop.set()
    threads[2].join(WAIT_S)
    for snapshot in [*snapshots, stats.snapshot()]:
        batches = snapshot["num_batches"]
        assert sum(snapshot["bucket_counts"]) == sum(snapshot["dispatched_per_target"]) == batches
        assert snapshot["num_sequences"] == batches
        assert snapshot["num_tokens"] == sum(10 * (b + 1) * n for b, n in enumerate(snapshot["bucket_counts"]))
        assert snapshot["num_padded_tokens"] == snapshot["num_tokens"] + 2 * batches
    assert stats.snapshot()["num_batches"] == 6000


def test_bucket_runs_in_the_statistics() -> None:
    stats = BatchStats(num_buckets=3, num_targets=1)
    for i, bucket in enumerate([0, 0, 2, 2, 2, 1, 0, 0]):
        stats.record(shape_of(planned(i, bucket)), 0)
    snapshot = stats.snapshot()
    assert (snapshot["longest_run"], snapshot["current_run"], snapshot["mean_run"]) == (3, 2, 2.0)
    assert snapshot["bucket_pct"] == [50.0, 12.5, 37.5]
    assert snapshot["padding_efficiency"] == snapshot["num_tokens"] / snapshot["num_padded_tokens"]


def test_a_failing_loader_stops_everything_and_names_the_batch() -> None:
    def load(batch: PlannedBatch) -> tuple[BatchShape, Any]:
        if batch.seq_no == 7:
            raise OSError("shard is gone")
        return shape_of(batch), None

    started = time.monotonic()
    with pytest.raises(StageError, match=r"loader \d.*batch 7: OSError: shard is gone") as caught:
        run_prefetcher(500, load, num_targets=2, num_workers=4)
    assert isinstance(caught.value.__cause__, OSError)
    assert time.monotonic() - started < WAIT_S


def test_the_first_failure_is_kept_and_others_end_quietly() -> None:
    def fail(text: str, delay_s: float) -> None:
        time.sleep(delay_s)
        raise ValueError(text)

    with Supervisor("test") as supervisor:
        channel: Channel[int] = Channel("lonely", 1, supervisor, WAIT_S)
        supervisor.start("waiter", channel.get)
        supervisor.start("first", fail, "one", 0.0)
        supervisor.start("second", fail, "two", 0.1)
        with pytest.raises((StageError, Stopped)):
            while True:
                supervisor.check()
                time.sleep(0.005)
        time.sleep(0.2)
        assert str(supervisor.failure) == "stage 'first': ValueError: one"


def test_a_stall_is_an_error_that_names_the_place() -> None:
    with Supervisor("test") as supervisor:
        channel: Channel[int] = Channel("target 0 queue", 1, supervisor, timeout_s=0.1)
        with pytest.raises(StageError, match=r"target 0 queue \(empty\).*no progress"):
            channel.get()
        channel.put(1)
        with pytest.raises(StageError, match=r"target 0 queue \(full\).*no progress"):
            channel.put(2)
        buffer: ReorderBuffer[int] = ReorderBuffer("ready buffer", 3, supervisor, timeout_s=0.1)
        buffer.put(4, 4)
        with pytest.raises(StageError, match=r"ready buffer \(position 3\)"):
            buffer.get()


def test_a_thread_that_does_not_end_is_reported() -> None:
    release = threading.Event()
    with pytest.raises(StageError, match="did not end"), Supervisor("test", join_timeout_s=0.1) as supervisor:
        supervisor.start("deaf", release.wait, WAIT_S)
    release.set()


def test_channel_keeps_order_counts_waits_and_drains_after_close() -> None:
    with Supervisor("test") as supervisor:
        channel: Channel[int] = Channel("c", 2, supervisor, WAIT_S)
        channel.put(1, load=10)
        channel.put(2, load=20)
        assert (channel.depth(), channel.load()) == (2, 30)
        supervisor.start("late taker", lambda: (time.sleep(0.1), channel.get()))
        channel.put(3)
        assert channel.put_wait_s > 0.05
        channel.close()
        assert [channel.get(), channel.get()] == [2, 3]
        with pytest.raises(Closed):
            channel.get()


def test_the_head_of_the_line_always_passes_the_byte_budget() -> None:
    with Supervisor("test") as supervisor:
        budget = ByteBudget(100, supervisor, timeout_s=0.1)
        budget.reserve(1000)  # larger than the limit, alone in flight
        with pytest.raises(StageError, match="byte budget"):
            budget.reserve(1)
        budget.release(1000)
        budget.reserve(60)
        budget.reserve(40)
        with pytest.raises(StageError):
            budget.reserve(1)


def test_the_byte_budget_bounds_what_is_in_flight() -> None:
    seen: list[int] = []
    holder: dict[str, BatchPrefetcher] = {}

    def load(batch: PlannedBatch) -> tuple[BatchShape, Any]:
        seen.append(holder["prefetcher"].budget.reserved)
        return shape_of(batch), None

    batches = [planned(i) for i in range(40)]
    settings = PrefetchSettings(num_targets=2, num_buckets=3, num_workers=4, max_bytes=350, stall_timeout_s=WAIT_S)
    taken: list[Loaded] = []
    with Supervisor("test") as supervisor:
        prefetcher = holder["prefetcher"] = BatchPrefetcher(batches, load, lambda _: 100, settings, supervisor)
        prefetcher.start()
        for t, queue in enumerate(prefetcher.queues):
            supervisor.start(f"target {t}", drain, queue, taken, prefetcher.budget)
        deadline = time.monotonic() + WAIT_S
        while len(taken) < 40 and time.monotonic() < deadline:
            time.sleep(0.005)
    assert len(taken) == 40 and max(seen) <= 300


def test_reorder_buffer_gives_items_back_in_order() -> None:
    with Supervisor("test") as supervisor:
        buffer: ReorderBuffer[int] = ReorderBuffer("r", 0, supervisor, WAIT_S)
        positions = list(range(50))
        random.Random(0).shuffle(positions)

        def put_all() -> None:
            for position in positions:
                buffer.put(position, position * 10)
                time.sleep(0.0005)

        supervisor.start("putter", put_all)
        assert [buffer.get()[0] for _ in range(50)] == [10 * p for p in range(50)]
        assert buffer.depth() == 0


def test_threads_run_in_the_starters_context() -> None:
    from contextvars import ContextVar

    name: ContextVar[str] = ContextVar("name", default="nobody")
    seen: list[str] = []
    name.set("run 7")
    with Supervisor("test") as supervisor:
        supervisor.start("reader", lambda: seen.append(name.get()))
    assert seen == ["run 7"]
