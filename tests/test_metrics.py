"""Metrics sinks: no finished row is ever lost, whatever fails around it."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_core.metrics import ConsoleSink, FanOut, JsonlSink, MemorySink, OptionalSink, RunLog
from dflash_core.metrics.console import duration
from dflash_core.metrics.panels import NAME_SPACES, panel_values
from tests.fake_runs import FakeRun, batch_rows, stat_rows, step_rows


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_on_disk_when_log_returns_and_keep_nan_and_arrays(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics")
    sink.log("steps", {"step": 0, "loss": math.nan, "grad_norm": math.inf, "clipped": np.bool_(True)})
    sink.log(
        "steps", {"step": np.int64(1), "accuracy_by_position": np.array([0.5, 0.25]), "loss": np.float32(0.5), "text": "zeile\n2"}
    )
    sink.log("events", {"kind": "checkpoint"})
    first, second = lines(tmp_path / "metrics" / "steps.jsonl")  # before any flush
    assert math.isnan(first["loss"]) and first["grad_norm"] == math.inf and first["clipped"] is True
    assert second == {"step": 1, "accuracy_by_position": [0.5, 0.25], "loss": 0.5, "text": "zeile\n2"}
    assert lines(tmp_path / "metrics" / "events.jsonl") == [{"kind": "checkpoint"}]
    assert not (tmp_path / "metrics" / "batches.jsonl").exists()
    sink.close()
    sink.close()
    with pytest.raises(ValueError, match="closed"):
        sink.log("steps", {})


def test_a_row_without_json_form_or_stream_is_the_programmers_error_and_leaves_no_trace(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    with pytest.raises(TypeError, match="object"):
        sink.log("steps", {"step": 0, "loss": object()})
    with pytest.raises(ValueError, match="no metrics stream 'step'"):
        sink.log("step", {})
    sink.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("tail", "kept"),
    [
        (b'{"step":1,"loss":0.', [0, 2]),  # torn in the middle: cut off
        (b'{"step":1}', [0, 1, 2]),  # torn just before its newline: a whole row, completed
        (b'{"step":1,"text":"\xc3', [0, 2]),  # torn inside a character
        (b'{"step":1}\n', [0, 1, 2]),  # not torn
        (b'{"step":' + b"1" * 200_000, [0, 2]),  # longer than the block in which the tail is read
    ],
)
def test_a_torn_last_line_is_mended_before_the_next_row(tmp_path: Path, tail: bytes, kept: list[int]) -> None:
    (tmp_path / "steps.jsonl").write_bytes(b'{"step":0}\n' + tail)
    sink = JsonlSink(tmp_path)
    sink.log("steps", {"step": 2})
    sink.close()
    assert [row["step"] for row in lines(tmp_path / "steps.jsonl")] == kept


def test_a_second_process_never_takes_a_row_being_written_for_a_torn_one(tmp_path: Path) -> None:
    first = JsonlSink(tmp_path)
    first.log("steps", {"step": 0})
    with (tmp_path / "steps.jsonl").open("ab") as file:
        file.write(b'{"step":1,')  # what the second process would see in the middle of a write of the first
    second = JsonlSink(tmp_path)
    second.log("batches", {"seq_no": 0})
    second.log("steps", {"step": 2})
    assert b'{"step":1,{"step":2}\n' in (tmp_path / "steps.jsonl").read_bytes()
    first.close()
    second.close()


def test_threads_lose_and_mix_no_row(tmp_path: Path) -> None:
    sink = RunLog(JsonlSink(tmp_path, fsync_interval_s=0.01), "r", 3)
    text = "x" * 5000

    def write(thread: int) -> None:
        for i in range(100):
            sink.log("stats" if i % 2 else "steps", {"thread": thread, "i": i, "text": text})

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    sink.close()
    rows = lines(tmp_path / "stats.jsonl") + lines(tmp_path / "steps.jsonl")
    assert {(row["thread"], row["i"]) for row in rows} == {(t, i) for t in range(8) for i in range(100)}
    assert len(rows) == 800 and all(row["text"] == text and row["attempt"] == 3 and row["run_id"] == "r" for row in rows)


KILLED = """
import sys
from pathlib import Path
from dflash_core.metrics import JsonlSink
sink = JsonlSink(Path(sys.argv[1]))
for i in range(10**9):
    sink.log("steps", {"step": i, "text": "y" * 300})
    sys.stdout.write(f"{i}\\n"); sys.stdout.flush()
"""


def test_sigkill_loses_no_row_whose_log_call_returned(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= 500:
            break
    os.kill(process.pid, signal.SIGKILL)
    confirmed = [int(line) for line in process.stdout.read().split("\n")[:-1]] or [500]
    process.stdout.close()
    assert process.wait(timeout=10) == -signal.SIGKILL
    sink = JsonlSink(tmp_path)
    sink.log("steps", {"step": "after"})
    sink.close()
    steps = [row["step"] for row in lines(tmp_path / "steps.jsonl")]
    assert steps[-1] == "after" and steps[:-1] == list(range(len(steps) - 1)) and len(steps) - 2 >= confirmed[-1]


def test_a_full_disk_reaches_the_caller_and_leaves_no_torn_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = JsonlSink(tmp_path)
    sink.log("steps", {"step": 0})
    real, calls = os.write, []

    def half_then_full(file: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) == 1:
            return real(file, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", half_then_full)
    with pytest.raises(OSError, match="No space left"):
        sink.log("steps", {"step": 1, "text": "z" * 100})
    monkeypatch.setattr(os, "write", real)
    sink.log("steps", {"step": 2})
    sink.close()
    assert [row["step"] for row in lines(tmp_path / "steps.jsonl")] == [0, 2]


def test_fsync_happens_at_most_once_per_interval_and_on_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    now = [1000.0]
    monkeypatch.setattr("dflash_core.metrics.sinks.os.fsync", calls.append)
    monkeypatch.setattr("dflash_core.metrics.sinks.time.monotonic", lambda: now[0])
    sink = JsonlSink(tmp_path, fsync_interval_s=30)
    for second in range(100):
        now[0] = 1000.0 + second
        sink.log("steps", {"step": second})
    assert len(calls) == 3
    sink.flush()
    assert len(calls) == 4
    sink.close()
    assert len(calls) == 5


class Broken(OptionalSink):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def log(self, stream: str, row: Any) -> None:
        self.calls.append("log")
        raise RuntimeError("server gone")

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")
        raise RuntimeError("still gone")


class BrokenTruth(MemorySink):
    def log(self, stream: str, row: Any) -> None:
        raise OSError("disk gone")

    def close(self) -> None:
        raise OSError("disk gone")


def test_an_optional_sink_that_fails_is_switched_off_once_and_still_closed(caplog: pytest.LogCaptureFixture) -> None:
    truth, broken = MemorySink(), Broken()
    sink = FanOut([broken, truth])
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            sink.log("steps", {"step": step})
        sink.flush()
        assert len(caplog.records) == 1 and "server gone" in caplog.text
        sink.close()
    assert "still gone" not in caplog.text
    assert [row["step"] for row in truth.rows["steps"]] == [0, 1, 2] and truth.closed
    assert broken.calls == ["log", "close"]


def test_a_required_sink_that_fails_stops_the_caller_and_the_others_are_closed() -> None:
    other = MemorySink()
    sink = FanOut([BrokenTruth(), other])
    with pytest.raises(OSError, match="disk gone"):
        sink.log("steps", {})
    with pytest.raises(OSError, match="disk gone"):
        sink.close()
    assert other.closed


def test_run_log_stamps_rows_and_keeps_a_rows_own_time() -> None:
    memory = MemorySink()
    log = RunLog(memory, "run-1", 2)
    log.log("steps", {"step": 0})
    log.log("steps", {"step": 1, "time": 5.0})
    first, second = memory.rows["steps"]
    assert first["run_id"] == "run-1" and first["attempt"] == 2 and 1.7e9 < first["time"] < 1e11
    assert second["time"] == 5.0


def test_console_tells_progress_rates_and_what_the_run_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    sink = ConsoleSink(total_steps=100, every_s=5.0, clock=lambda: now[0])
    base = {"num_tokens": 1000, "num_anchors": 50, "step_s": 2.0, "forward_s": 0.3, "backward_s": 0.2, "skipped": False}
    waits = {"data_wait_s": 0.1, "target_wait_s": 1.3}
    with caplog.at_level(logging.INFO):
        for step in range(100):
            now[0] += 2.0
            row = {"step": step, "loss": 2.5, "grad_norm": 0.5, "expected_acceptance_length": 1.75, **base, **waits}
            sink.log("steps", row | ({"skipped": True, "loss": math.nan, "grad_norm": math.inf} if step == 2 else {}))
            sink.log("batches", {"seq_no": step})
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 34 and texts[0].startswith("step 1/100 | loss 2.5000")  # every third step of 2 s
    assert (
        "acceptance length (expected, +1 incl.) 1.75 | gradient norm 0.5 | 500 tokens/s, 25 anchors/s | 3 min 18 s left"
        in texts[0]
    )
    assert "mostly target (65%)" in texts[0]
    assert texts[1].startswith("step 4/100") and texts[1].endswith("1 skipped") and "skipped" not in texts[2]
    assert texts[-1].startswith("step 100/100") and "| 0 s left |" in texts[-1]


def test_console_copes_with_rows_that_lack_fields(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        ConsoleSink(3, 1.0).log("steps", {"step": 0, "loss": math.nan, "grad_norm": None})
    assert caplog.messages == ["step 1/3 | loss nan"]
    assert [duration(s) for s in (0.4, 59.6, 65, 7620)] == ["0 s", "1 min 00 s", "1 min 05 s", "2 h 07 min"]


def test_panels_of_a_step_are_computed_and_carry_their_step_axis() -> None:
    fake = FakeRun(num_steps=4)
    rng = np.random.default_rng(0)
    step = step_rows("r", fake, batch_rows("r", fake, rng), rng)[3]
    values = panel_values("steps", step) | panel_values("stats", stat_rows("r", fake, rng)[0])
    assert values["batch/padding_efficiency"] == step["num_tokens"] / step["num_padded_tokens"]
    assert sum(values[f"batch/bucket_share/{i}"] for i in range(6)) == pytest.approx(1)
    assert values["train/step"] == 3 and {name.split("/")[0] for name in values} < set(NAME_SPACES)


def test_panels_of_evaluations_and_of_rows_without_a_place_in_a_chart() -> None:
    row = {"step": 9, "kind": "trained", "source": "all", "position": 2, "metric": "prefix_survival", "value": 0.5}
    assert panel_values("evals", row) == {"eval/trained/all/prefix_survival/slot_2": 0.5, "eval/step": 9}
    assert panel_values("evals", row | {"value": None}) == {}
    assert set(panel_values("evals", row | {"source": "a*"})) == {"eval/trained/a_/prefix_survival/slot_2", "eval/step"}
    assert panel_values("events", {"kind": "validation", "step": 9, "validation_s": 2.0}) == {
        "eval/validation_s": 2.0,
        "eval/step": 9,
    }
    assert panel_values("events", {"kind": "skip", "step": 9, "validation_s": 2.0}) == {}
    assert panel_values("batches", {"step": 1, "bucket": 0}) == {} == panel_values("steps", {"loss": 1.0})
    assert panel_values("steps", {"step": 1, "num_tokens": 5, "num_padded_tokens": 0}) == {}
