"""What the train loop does with the pipeline: the monitor's rows, and when bytes are given back."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dflash_core.metrics.sinks import RunLog
from dflash_core.pipeline import (
    BatchPrefetcher,
    ByteBudget,
    Loaded,
    PrefetchSettings,
    ReorderBuffer,
    Stopped,
    Supervisor,
    threads,
    watchdog,
)
from dflash_core.records import BatchShape, PlannedBatch
from dflash_core.training.loop import DraftTrainer, StepTotals, take_batches
from dflash_core.training.monitor import Monitor
from dflash_core.training.target_loop import Ready

WAIT_S = 5.0
# What analysis and panels read, from before there was more.
KEPT = {
    "step", "cell", "num_batches", "bucket_counts", "dispatched_per_target", "longest_run", "prefetch_depths", "ready_depth",
    "ready_get_wait_s", "queue_put_wait_s", "queue_get_wait_s", "budget_wait_s", "loader_idle_s", "reserved_bytes",
}  # fmt: skip
PER_TARGET = {
    "dispatched_per_target", "prefetch_depths", "queue_put_wait_s", "queue_get_wait_s", "queue_tokens", "queue_bytes",
    "queue_mean_depths", "queue_max_depths", "queue_full_shares", "queue_empty_shares",
}  # fmt: skip


class Sink:
    def __init__(self, blocks: threading.Event | None = None) -> None:
        self.rows: list[dict[str, Any]] = []
        self.blocks = blocks

    def log(self, stream: str, row: dict[str, Any]) -> None:
        if self.blocks is not None:
            self.blocks.wait(WAIT_S)
        assert stream == "stats"
        self.rows.append(row)


def parts(supervisor: Supervisor, sink: Sink, every_steps: int = 2) -> tuple[BatchPrefetcher, ReorderBuffer[Any], Monitor]:
    batches = [PlannedBatch(i, i, 0, 0, 0, 0, (i,), False) for i in range(6)]
    settings = PrefetchSettings(2, 1, 2, queue_batches=3, stall_timeout_s=WAIT_S)
    load = lambda batch: (BatchShape(0, 1, 10, 12, 10, 1, 1), None)  # noqa: E731
    prefetcher = BatchPrefetcher(batches, load, lambda _: 100, settings, supervisor)
    ready: ReorderBuffer[Any] = ReorderBuffer("ready buffer", 0, supervisor, WAIT_S)
    return prefetcher, ready, Monitor(prefetcher, ready, cast(RunLog, sink), 3, every_steps, supervisor)


def test_rows_hold_depths_counts_waits_and_occupancy_of_every_target() -> None:
    sink = Sink()
    with Supervisor("test") as supervisor:
        prefetcher, ready, monitor = parts(supervisor, sink)
        prefetcher.start()
        deadline = time.monotonic() + WAIT_S
        while sum(prefetcher.depths()) < 6 and time.monotonic() < deadline:
            time.sleep(0.001)
        prefetcher.queues[0].get()
        ready.put(1, "early")
        for step in range(5):
            monitor.step_done(step)
        monitor.finish()
    assert [row["step"] for row in sink.rows] == [0, 2, 4]
    row = sink.rows[-1]
    assert set(row) >= KEPT | PER_TARGET
    assert all(len(row[key]) == 2 for key in PER_TARGET)
    assert (row["cell"], row["prefetch_depths"], row["dispatched_per_target"]) == (3, [2, 3], [3, 3])
    assert (row["queue_tokens"], row["queue_bytes"], row["queue_max_depths"]) == ([24, 36], [200, 300], [3, 3])
    assert all(0.0 < mean <= 3.0 for mean in row["queue_mean_depths"]) and row["observed_s"] > 0.0
    assert (row["ready_depth"], row["ready_max_depth"], row["ready_waiting_for"]) == (1, 1, None)
    assert (row["reserved_bytes"], row["max_reserved_bytes"]) == (600, 600)


def test_finish_is_woken_and_needs_no_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "POLL_S", 30.0)
    sink, ended = Sink(), threading.Event()
    with Supervisor("test") as supervisor:
        _, _, monitor = parts(supervisor, sink)
        time.sleep(0.05)  # the monitor waits by now
        monitor.step_done(2)
        supervisor.start("trainer", lambda: (monitor.finish(), ended.set()))
        assert ended.wait(WAIT_S)
    assert [row["step"] for row in sink.rows] == [2]


def test_a_sink_that_hangs_is_named_and_holds_nobody_up() -> None:
    blocks = threading.Event()
    with Supervisor("test", join_timeout_s=WAIT_S) as supervisor:
        _, _, monitor = parts(supervisor, Sink(blocks), every_steps=1)
        with watchdog(supervisor, 0.3, lambda error: None):
            for step in range(3):
                monitor.step_done(step)  # the loop goes on
            with pytest.raises(Stopped):
                monitor.finish()
        blocks.set()
    assert "stage 'monitor': no progress for 0." in str(supervisor.failure)


def test_the_trainer_gives_bytes_back_only_after_training() -> None:
    with Supervisor("test") as supervisor:
        budget = ByteBudget(500, supervisor, WAIT_S)
        ready: ReorderBuffer[Ready] = ReorderBuffer("ready buffer", 0, supervisor, WAIT_S)
        for i in range(3):
            budget.reserve(100)
            loaded = Loaded(PlannedBatch(i, i, 0, 0, 0, 0, (i,), False), BatchShape(0, 1, 10, 12, 10, 1, 1), None, 100)
            ready.put(i, Ready(loaded, cast(Any, None), 0.0, 0.0, 0.0))
        seen: list[int] = []
        trainer = cast(DraftTrainer, SimpleNamespace(add=lambda totals, item: seen.append(budget.reserved)))
        assert take_batches(trainer, 3, ready, budget, StepTotals(1, 4), lambda: False, supervisor)
        assert seen == [300, 200, 100] and budget.reserved == 0
