"""What checkpoints cost, found again where it was planted, and not found where it was not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from dflash_core.analysis import analyze_runs
from dflash_core.analysis.checkpoints import _line, _medians, checkpoint_line, checkpoint_rows, checkpoint_summary, checkpoints_of
from dflash_core.analysis.runs import load_run
from dflash_core.config import AnalyzeConfig
from tests.fake_runs import FakeRun, write_jsonl, write_run

SECONDS_PER_TOKEN, NOISE, SNAPSHOT_S = 5e-5, 0.03, 0.02


def rows(folder: Path, stream: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics" / f"{stream}.jsonl").read_text().splitlines()]


def timed_run(
    folder: Path, slowdown: float, num_steps: int = 200, every: int = 20, write_s: float = 0.3
) -> tuple[Path, set[int]]:
    """A run whose steps take time by their padded tokens; checkpoints last into the step behind them and lengthen it.

    Returns the folder and the steps that overlap a checkpoint.
    """
    write_run(folder, FakeRun(num_steps=num_steps))
    rng = np.random.default_rng(3)
    steps, events, now, busy_until, overlap = rows(folder, "steps"), [], 1.77e9, 0.0, set()
    for row in steps:
        number = row["step"]
        if number and number % every == 0:
            now += SNAPSHOT_S
            base = {"run_id": folder.name, "attempt": 0, "step": number, "cell": 0}
            events.append({**base, "kind": "checkpoint_begin", "time": now, "snapshot_s": SNAPSHOT_S, "wait_s": 0.0})
            busy_until = now + write_s
            ended = {"kind": "checkpoint_end", "time": busy_until, "write_s": write_s, "num_bytes": 10_000_000}
            events.append({**base, **ended})
        seconds = (0.05 + SECONDS_PER_TOKEN * row["num_padded_tokens"]) * (1 + NOISE * rng.standard_normal())
        if now < busy_until:
            overlap.add(number)
            seconds *= 1 + slowdown
        if number % 37 == 36:
            seconds *= 5  # something else happens to a step now and then
        now += seconds
        row |= {"step_s": seconds, "time": now}
    write_jsonl(folder / "metrics" / "steps.jsonl", steps)
    write_jsonl(folder / "metrics" / "events.jsonl", events)
    return folder, overlap


def summary(folder: Path) -> dict[str, Any]:
    return checkpoint_summary(load_run(folder), np.random.default_rng(0))


def test_a_planted_slowdown_is_found_and_none_is_not_made_up(tmp_path: Path) -> None:
    typical_s = 0.05 + SECONDS_PER_TOKEN * 8000
    snapshot = SNAPSHOT_S / typical_s
    for planted in (0.0, 0.3):
        folder, overlap = timed_run(tmp_path / str(planted), planted)
        found = summary(folder)
        assert found["num_checkpoints"] == 9 and found["checkpoint_steps"] == len(overlap)
        assert found["checkpoint_slowdown_low"] < planted + snapshot < found["checkpoint_slowdown_high"]
        assert found["checkpoint_slowdown"] == pytest.approx(planted + snapshot, abs=0.03)
        assert found["checkpoint_slowdown_high"] - found["checkpoint_slowdown_low"] < 0.15
        assert 3 < found["other_slowdown_max"] < 5  # the steps that something else happened to


def test_steps_that_overlap_a_checkpoint_are_no_measure_of_themselves(tmp_path: Path) -> None:
    """Not even where they are the larger part."""
    folder, overlap = timed_run(tmp_path / "run", 0.3, every=3, write_s=0.8)
    assert len(overlap) > 110
    assert summary(folder)["checkpoint_slowdown"] == pytest.approx(0.32, abs=0.06)


def test_a_row_per_checkpoint(tmp_path: Path) -> None:
    folder, overlap = timed_run(tmp_path / "run", 0.5, write_s=0.9)
    found = checkpoint_rows(load_run(folder))
    assert [row["step"] for row in found] == list(range(20, 200, 20))
    assert sum(row["num_steps"] for row in found) == len(overlap) > len(found)
    for row in found:
        assert (row["snapshot_s"], row["write_s"], row["num_bytes"]) == (SNAPSHOT_S, 0.9, 10_000_000)
        assert row["slowdown"] == pytest.approx(0.5, abs=0.15)


@pytest.mark.parametrize(
    "odd", [{"snapshot_s": None}, {"write_s": None}, {"num_bytes": None}, {"time": None}, {"wait_s": None}], ids=str
)
def test_a_row_that_is_not_as_it_was_written_costs_one_checkpoint_and_not_the_report(tmp_path: Path, odd: dict[str, Any]) -> None:
    folder, _ = timed_run(tmp_path / "run", 0.0, write_s=0.9)
    events = [{**e, **{k: v for k, v in odd.items() if k in e and e["step"] == 60}} for e in rows(folder, "events")]
    write_jsonl(folder / "metrics" / "events.jsonl", events)
    assert [one.step for one in checkpoints_of(load_run(folder))] == [20, 40, *range(80, 200, 20)]


def test_what_an_attempt_left_unfinished_or_trained_again_does_not_count(tmp_path: Path) -> None:
    folder, _ = timed_run(tmp_path / "run", 0.0, write_s=0.9)
    events = rows(folder, "events")
    # Killed while the checkpoint of step 100 was written, resumed from 80.
    killed = [event for event in events if (event["step"], event["kind"]) < (100, "checkpoint_end")]
    steps = rows(folder, "steps")
    again = [{**row, "attempt": 1} for row in steps if row["step"] >= 80]
    write_jsonl(folder / "metrics" / "steps.jsonl", [row for row in steps if row["step"] < 104] + again)
    write_jsonl(folder / "metrics" / "events.jsonl", killed + [{**e, "attempt": 1} for e in events if e["step"] >= 100])
    run = load_run(folder)
    assert [(one.attempt, one.step) for one in checkpoints_of(run)] == [
        *((0, step) for step in (20, 40, 60, 80)),
        *((1, step) for step in (100, 120, 140, 160, 180)),
    ]
    by_step = {row["step"]: row for row in checkpoint_rows(run)}
    assert by_step[80]["num_steps"] == 0 and by_step[80]["slowdown"] is None  # its steps were trained again
    assert by_step[60]["num_steps"] > 0 and by_step[100]["num_steps"] > 0


@pytest.mark.parametrize("steps", [5, 120])
def test_a_run_without_checkpoints_or_with_few_steps_says_nothing(tmp_path: Path, steps: int) -> None:
    folder = write_run(tmp_path / "run", FakeRun(num_steps=steps))
    if steps == 120:
        write_jsonl(
            folder / "metrics" / "events.jsonl",
            [{"run_id": "run", "attempt": 0, "time": 1.77e9, "step": 20, "kind": "checkpoint"}],
        )
    found = summary(folder)
    assert found["num_checkpoints"] == 0 and found["checkpoint_slowdown"] is None
    manifest = analyze_runs([folder], tmp_path / "report", AnalyzeConfig())
    assert not any("that overlap one of" in line for line in manifest["summary"])
    assert manifest["num_rows"]["checkpoints"] == 0
    (folder / "metrics" / "events.jsonl").unlink()
    for compacted in (folder / "metrics").glob("*.parquet"):
        compacted.unlink()
    assert summary(folder)["num_checkpoints"] == 0


def test_the_report_says_it_in_one_line(tmp_path: Path) -> None:
    folder, _ = timed_run(tmp_path / "run", 0.3)
    manifest = analyze_runs([folder], tmp_path / "report", AnalyzeConfig())
    lines = [line for line in manifest["summary"] if "that overlap one of" in line]
    assert len(lines) == 1 and "95 % interval" in lines[0]
    table = pq.read_table(tmp_path / "report" / "checkpoints.parquet")
    assert len(table) == 9 and table.schema.metadata[b"dflash.schema"] == b"checkpoints"
    row = pq.read_table(tmp_path / "report" / "runs.parquet").to_pylist()[0]
    assert f"took {row['checkpoint_slowdown']:.1%} more time" in lines[0] and "no slowdown" not in lines[0]
    assert lines[0] in (tmp_path / "report" / "report.md").read_text().replace("\\", "")


@pytest.mark.parametrize("size", [1, 2, 7, 40])
def test_medians_of_resamples_without_drawing_them(size: int) -> None:
    values = np.random.default_rng(size).gamma(1.0, 1.0, size)
    rng = np.random.default_rng(1)
    slow = np.median(rng.choice(values, (20_000, size)), axis=1)
    fast = np.concatenate([_medians(values, rng) for _ in range(20)])
    for quantile in (0.05, 0.25, 0.5, 0.75, 0.95):
        at = np.quantile(fast, quantile)
        assert (slow < at).mean() - 0.02 <= quantile <= (slow <= at).mean() + 0.02


def test_the_line_has_the_least_absolute_deviations() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(1e5, 2e5, 200)
    y = 3.0 + 2e-5 * x + rng.normal(0, 0.1, 200)
    y[::10] += 20  # steps that took several times as long
    found = _line(np.array([1e5, 2e5]), x, y)

    def deviation(ends: np.ndarray) -> float:
        return float(np.abs(y - ends[0] - (ends[1] - ends[0]) * (x - 1e5) / 1e5).sum())

    best = deviation(found)
    assert found == pytest.approx([5.0, 7.0], abs=0.1)
    assert all(deviation(found + rng.normal(0, 0.02, 2)) >= best * (1 - 1e-4) for _ in range(100))


@pytest.mark.parametrize(
    ("many", "said"), [(1, "the 1 step that overlaps one of 2 checkpoints took 10.0% more time"), (2, "the 2 steps that")]
)
def test_the_line_counts_in_english(many: int, said: str) -> None:
    row = {"name": "a", "checkpoint_steps": many, "num_checkpoints": 2, "other_slowdown_max": 0.5, "checkpoint_slowdown_max": 0.2}
    line = checkpoint_line(row | {f"checkpoint_slowdown{end}": 0.1 for end in ("", "_low", "_high")})
    assert line is not None and said in line and "no slowdown" not in line
    faster = checkpoint_line(
        row | {"checkpoint_slowdown": -0.05, "checkpoint_slowdown_low": -0.1, "checkpoint_slowdown_high": 0.1}
    )
    assert faster is not None and "took 5.0% less time" in faster and "no slowdown that the interval could show" in faster
