"""No row is lost: threads and the train loop together, through the sinks that a run has; and what a `kill -9` leaves."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from dflash_core import experiment as root
from dflash_core.metrics import FanOut, JsonlSink, MemorySink, MetricsSink, RunLog
from dflash_core.metrics.background import BackgroundSink
from dflash_core.metrics.panels import EVAL_METRICS, PANELS
from dflash_core.pipeline import Supervisor
from dflash_core.training.monitor import Monitor
from tests.test_metrics import lines
from tests.test_metrics_wandb import inspect

STEPS = 200


class Monitored(Monitor):
    """The monitor with its thread, of a pipeline that is left out."""

    def row(self, step: int) -> dict[str, Any]:
        return {"step": step, "cell": 0, "text": "s" * 2000}


def test_train_loop_monitor_and_event_threads_lose_no_row(tmp_path: Path) -> None:
    shown = MemorySink()
    sinks: list[MetricsSink] = [JsonlSink(tmp_path, fsync_interval_s=0.01), BackgroundSink(shown)]
    log = RunLog(FanOut(sinks), "run", 2)

    def events(thread: int) -> None:
        for i in range(STEPS):
            log.log("events", {"kind": "noise", "step": i, "thread": thread, "text": "e" * 3000})

    with Supervisor("cell", 3.0) as supervisor:
        monitor = Monitored(cast(Any, None), cast(Any, None), log, 0, 2, supervisor)
        threads = [threading.Thread(target=events, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for step in range(STEPS):
            for batch in range(2):
                log.log("batches", {"step": step, "seq_no": 2 * step + batch})
            log.log("steps", {"step": step, "text": "t" * 1000})
            monitor.step_done(step)
        for thread in threads:
            thread.join(timeout=30)
            assert not thread.is_alive()
        monitor.finish()
    log.close()
    rows = {stream: lines(tmp_path / f"{stream}.jsonl") for stream in ("steps", "batches", "stats", "events")}
    assert [row["step"] for row in rows["steps"]] == list(range(STEPS))
    assert [row["seq_no"] for row in rows["batches"]] == list(range(2 * STEPS))
    assert [row["step"] for row in rows["stats"]] == list(range(0, STEPS, 2))
    for thread_number in range(3):
        assert [row["step"] for row in rows["events"] if row["thread"] == thread_number] == list(range(STEPS))
    for stream, written in rows.items():
        assert all(row["run_id"] == "run" and row["attempt"] == 2 and row["time"] > 1.7e9 for row in written)
        key = lambda row: json.dumps(row, sort_keys=True)  # noqa: E731
        assert Counter(map(key, written)) == Counter(map(key, shown.rows[stream])), f"{stream}: another sink has other rows"


KILLED = """
import os, sys, threading
from pathlib import Path
from dflash_core.metrics.background import BackgroundSink
from dflash_core.metrics.sinks import FanOut, JsonlSink, MemorySink, RunLog
folder, shown = Path(sys.argv[1]), MemorySink()
if sys.argv[2] == "wandb":
    from dflash_core.metrics.wandb_sink import WandbSink
    shown = WandbSink("offline", "project", "killed", folder / "wandb", {})
log = RunLog(FanOut([JsonlSink(folder / "metrics"), BackgroundSink(shown)]), "killed", 0)
pause = threading.Event()

def write(thread, stream):
    for i in range(10**9):
        log.log(stream, {"step": i, "thread": thread, "loss": 1.0, "prefetch_depths": [thread, i], "text": "y" * 300})
        os.write(1, f"{stream} {thread} {i}\\n".encode())
        pause.wait(float(sys.argv[3]))

for thread, stream in enumerate(("stats", "stats", "events")):
    threading.Thread(target=write, args=(thread, stream), daemon=True).start()
write(3, "steps")
"""


@pytest.mark.parametrize(
    ("sink", "pause_s", "kill_after"),
    [("memory", 0.0, 2000), pytest.param("wandb", 0.01, 1200, marks=pytest.mark.slow)],
)
def test_sigkill_amid_logging_threads_keeps_every_row_whose_log_call_returned(
    tmp_path: Path, sink: str, pause_s: float, kill_after: int, record_property: Any
) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), sink, str(pause_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    confirmed = [line for line, _ in zip(process.stdout, range(kill_after), strict=False)]
    helpers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    confirmed += process.stdout.read().splitlines(keepends=True)
    process.stdout.close()
    process.wait(timeout=10)
    assert not psutil.wait_procs(helpers, timeout=30)[1], "helper processes outlive the run"
    kept: dict[tuple[str, int], list[int]] = {}
    for stream in ("steps", "stats", "events"):
        for line in (tmp_path / "metrics" / f"{stream}.jsonl").read_bytes().split(b"\n")[:-1]:
            row = json.loads(line)  # no broken line in the middle
            kept.setdefault((stream, row["thread"]), []).append(row["step"])
    for steps in kept.values():
        assert steps == list(range(len(steps)))
    missing = [
        line
        for line in confirmed
        if line.endswith("\n") and int(line.split()[2]) >= len(kept[line.split()[0], int(line.split()[1])])
    ]
    assert len(confirmed) >= kill_after and not missing
    if sink == "wandb":
        (written,) = (tmp_path / "wandb").rglob("*.wandb")
        charted = sum(len(steps) for (stream, _), steps in kept.items() if stream != "events")
        history, _ = inspect(written, tmp_path)
        record_property("rows_in_wandb", f"{len(history)} of {charted}")
        assert 0 < len(history) <= charted  # the end is missing there, and only the end
        for number in (0, 1):
            steps = [int(row["queue/depth/target_1"]) for row in history if row.get("queue/depth/target_0") == number]  # type: ignore[call-overload]
            assert steps == list(range(len(steps)))


@pytest.mark.slow
def test_a_real_run_fills_every_panel_and_every_row_reaches_wandb(micro_experiment: Path, tmp_path: Path) -> None:
    overrides = ["metrics.wandb=offline", "evaluate.every_steps=5", "topology.targets_per_cell=2", "train.max_steps=20"]
    config = root.load_experiment(micro_experiment, overrides)
    root.prepare(config)
    run_dir = root.create_run(config, "micro", tmp_path / "run")
    manifest = root.train_run(config, run_dir)
    assert manifest["num_planned_steps"] == manifest["num_steps"] == 20
    rows = {stream: lines(run_dir / "metrics" / f"{stream}.jsonl") for stream in ("steps", "batches", "stats", "evals", "events")}
    assert [row["step"] for row in rows["steps"]] == list(range(20))
    assert len(rows["batches"]) == sum(row["num_batches"] for row in rows["steps"])
    assert [row["step"] for row in rows["stats"]] == list(range(0, 20, 2))
    (written,) = run_dir.rglob("*.wandb")
    history, axes = inspect(written, tmp_path)
    validations = [row for row in rows["events"] if row["kind"] == "validation"]
    valued = [row for row in rows["evals"] if row["value"] is not None]
    assert len(validations) == 4
    assert len(history) == len(rows["steps"]) + len(rows["stats"]) + len(valued) + len(validations)
    names = {name for row in history for name in row}
    assert {panel.name for panel in PANELS if panel.name not in names and panel.name.format(0) not in names} == set()
    for metric in ("acceptance_length", "expected_acceptance_length", "accuracy/slot_1"):
        assert f"eval/training/all/{metric}" in names and metric.split("/")[0] in EVAL_METRICS
    for name in names - {"_step", "_runtime", "_timestamp"}:
        space = name.split("/")[0]
        assert name == f"{space}/step" or axes[name] == f"{space}/step"
        points = [row[f"{space}/step"] for row in history if name in row]
        assert points == sorted(cast(Any, points)), f"{name}: its points come out of order"
