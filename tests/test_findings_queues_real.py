"""The detectors about queues on counters of the real pipeline, whose stages sleep: who is really slow is named."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from numpy.random import default_rng

from dflash_core.analysis.findings.finding import Context, Finding
from dflash_core.analysis.findings.queues import QUEUE_DETECTORS
from dflash_core.analysis.runs import load_run
from dflash_core.config import AnalyzeConfig
from dflash_core.pipeline import BatchPrefetcher, Channel, Closed, Loaded, PrefetchSettings, ReorderBuffer, Supervisor
from dflash_core.records import BatchShape, PlannedBatch
from dflash_core.training.monitor import Monitor

PER_STEP, STEPS, TOKENS = 4, 40, 1000
WAIT_S = 20.0


class Rows:
    """Takes the place of the metrics."""

    def __init__(self) -> None:
        self.streams: dict[str, list[dict[str, Any]]] = {"steps": [], "batches": [], "stats": [], "events": []}
        self.lock = threading.Lock()

    def log(self, stream: str, row: dict[str, Any]) -> None:
        with self.lock:
            self.streams[stream].append({"run_id": "run", "attempt": 0, "time": time.time(), **row})


def planned() -> list[PlannedBatch]:
    # Two buckets in turn, three times the second: an order that nobody minds.
    return [
        PlannedBatch(seq_no=i, position=i, epoch=0, step=i // PER_STEP, cell=0, bucket=i % 2, samples=(i,), ends_step=i % 4 == 3)
        for i in range(PER_STEP * STEPS)
    ]


def serve(
    queue: Channel[Loaded], ready: ReorderBuffer[tuple[Loaded, float, float]], seconds: float, supervisor: Supervisor
) -> None:
    """Body of a target: it sleeps."""
    while True:
        try:
            loaded = queue.get()
        except Closed:
            return
        started = time.monotonic()
        time.sleep(seconds)
        ready.put(loaded.planned.position, (loaded, started - loaded.dispatched_at, time.monotonic() - started))


def run_pipeline(folder: Path, load_s: float, target_s: list[float], draft_s: float, settings: PrefetchSettings) -> Path:
    """What a cell of sleepers leaves behind: the real feed, loaders, queues, buffer and monitor, and a train loop as ours."""
    rows = Rows()

    def load(batch: PlannedBatch) -> tuple[BatchShape, Any]:
        time.sleep(load_s)
        return BatchShape(batch.bucket, 4, TOKENS, TOKENS, 250, 4, 100), None

    with Supervisor("test") as supervisor:
        prefetcher = BatchPrefetcher(planned(), load, lambda _: 1, settings, supervisor)
        ready: ReorderBuffer[tuple[Loaded, float, float]] = ReorderBuffer("ready", 0, supervisor, WAIT_S)
        for number, (queue, seconds) in enumerate(zip(prefetcher.queues, target_s, strict=True)):
            supervisor.start(f"target {number}", serve, queue, ready, seconds, supervisor, done=queue.is_drained)
        monitor = Monitor(prefetcher, ready, rows, 0, 1, supervisor)  # type: ignore[arg-type]
        prefetcher.start()
        for step in range(STEPS):
            started, idle, waited, worked = time.monotonic(), monitor.mean_target_idle_s(), 0.0, 0.0
            for _ in range(PER_STEP):
                (loaded, queued_s, forward_s), wait_s = ready.get()
                begun = time.monotonic()
                time.sleep(draft_s)
                spent = time.monotonic() - begun
                waited, worked = waited + wait_s, worked + spent
                prefetcher.budget.release(loaded.num_bytes)
                plan = loaded.planned
                sizes = {"num_sequences": 4, "mean_seq_len": 250.0 + plan.bucket, "max_seq_len": 250, "num_tokens": TOKENS}
                times = {"load_s": loaded.load_s, "queued_s": queued_s, "target_forward_s": forward_s, "draft_busy_s": spent}
                place = {
                    "seq_no": plan.seq_no,
                    "step": step,
                    "epoch": 0,
                    "cell": 0,
                    "target": loaded.target,
                    "bucket": plan.bucket,
                }
                rows.log("batches", {**place, **sizes, "num_padded_tokens": TOKENS, **times})
            waits = {"data_wait_s": monitor.mean_target_idle_s() - idle, "target_wait_s": waited}
            work = {"forward_s": worked / 2, "backward_s": worked / 2, "reduce_s": 0.0, "optimizer_s": 0.0}
            step_s = time.monotonic() - started
            rows.log("steps", {"step": step, "epoch": 0, "num_batches": PER_STEP, "loss": 1.0, **waits, **work, "step_s": step_s})
            monitor.step_done(step)
        monitor.finish()
    return write(folder, rows, settings)


def write(folder: Path, rows: Rows, settings: PrefetchSettings) -> Path:
    (folder / "metrics").mkdir(parents=True)
    for stream, found in rows.streams.items():
        (folder / "metrics" / f"{stream}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    config = {
        "bucketing": {"num_buckets": 2, "batches_per_step": PER_STEP, "token_budget": TOKENS, "order": "diverse"},
        "topology": {"cells": 1, "targets_per_cell": settings.num_targets},
        "prefetch": {
            "num_workers": settings.num_workers,
            "dispatch": settings.dispatch,
            "queue_batches": settings.queue_batches,
            "max_bytes": settings.max_bytes,
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "manifest.json").write_text(json.dumps({"run_id": "run", "state": "completed"}))
    # Sleepers share nothing, as cards do.
    devices = [f"cuda:{number}" for number in range(settings.num_targets + 1)]
    (folder / "provenance.json").write_text(json.dumps({"devices": devices, "num_cpus": 2}))
    return folder


def found(folder: Path) -> list[Finding]:
    run = load_run(folder)
    return [finding for detector in QUEUE_DETECTORS for finding in detector(run, Context(AnalyzeConfig(), default_rng(0)))]


@pytest.mark.parametrize(
    ("kind", "cause", "load_s", "target_s", "draft_s", "limits"),
    [
        ("starved_by_loader", "loading", 0.020, [0.004, 0.004], 0.002, {"num_workers": 2}),
        pytest.param(
            "starved_by_loader", "prefetch.max_bytes", 0.0, [0.004, 0.004], 0.004, {"max_bytes": 1}, marks=pytest.mark.slow
        ),
        pytest.param("starved_by_target", None, 0.0, [0.020, 0.020], 0.004, {"num_workers": 2}, marks=pytest.mark.slow),
        pytest.param("starved_by_drafter", None, 0.0, [0.002] * 4, 0.010, {"num_workers": 2}, marks=pytest.mark.slow),
        pytest.param(None, None, 0.0, [0.006], 0.009, {"num_workers": 2}, marks=pytest.mark.slow),  # healthy
        ("unequal_dispatch", "slow target", 0.0, [0.020, 0.004, 0.004], 0.001, {"num_workers": 2}),
    ],
)
def test_the_slow_stage_of_the_real_pipeline_is_named(
    tmp_path: Path,
    kind: str | None,
    cause: str | None,
    load_s: float,
    target_s: list[float],
    draft_s: float,
    limits: dict[str, int],
) -> None:
    # In flight: six batches for each target, so that a queue of four fills up behind a slow one.
    sizes = {"queue_batches": 4, "max_bytes": 6 * len(target_s), "queue_bytes": 100, **limits}
    settings = PrefetchSettings(len(target_s), 2, stall_timeout_s=WAIT_S, **sizes)  # type: ignore[arg-type]
    findings = found(run_pipeline(tmp_path / "run", load_s, target_s, draft_s, settings))
    assert [finding.kind for finding in findings] == ([kind] if kind else []), [
        (finding.title, finding.text) for finding in findings
    ]
    assert not findings or findings[0].evidence.get("cause") == cause
