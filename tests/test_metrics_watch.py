"""`dflash watch`: what it shows, that it reads no more than what is new, and how it ends."""

from __future__ import annotations

import io
import json
import os
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from dflash_core.metrics import JsonlSink
from dflash_core.metrics.follow import SAMPLE_BYTES, SAMPLES, TAIL_BYTES, JsonlFollower
from dflash_core.metrics.watch import WatchedRun, watch
from tests.fake_runs import FakeRun, write_jsonl, write_run
from tests.test_cli import dflash, only_line

NOW = 1.77e9 + 200.0
Streams = dict[str, list[dict[str, Any]]]


def shown(folder: Path, now: float = NOW) -> str:
    return drawn(WatchedRun(folder), now)


def drawn(run: WatchedRun, now: float = NOW) -> str:
    console = Console(file=io.StringIO(), width=180)
    console.print(run.look(now))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def warnings(folder: Path, now: float = NOW) -> list[str]:
    return [line[2:].strip() for line in shown(folder, now).splitlines() if line.startswith("! ")]


def full_stats(streams: Streams) -> None:
    """The fields that the monitor writes and fake runs leave out; two targets, evenly served."""
    for row in streams["stats"]:
        done = row["step"] + 1
        row |= {
            "cell": 0, "current_run": 1, "mean_run": 1.25, "dispatched_per_target": [2 * done, 2 * done],
            "observed_s": 0.5 * done, "queue_get_wait_s": [0.1 * done, 0.2 * done],
            "queue_put_wait_s": [0.05 * done, 0.0], "queue_max_depths": [8, 8],
            "budget_wait_s": 12.5, "prefetch_depths": [6, 5],
        }  # fmt: skip


def running(**fields: Any) -> FakeRun:
    """A run under way, trained by this process."""
    manifest = {"pid": os.getpid(), "num_planned_steps": 240, "acceptance_length": None, **fields.pop("manifest", {})}
    return FakeRun(state="running", manifest=manifest, plants=(full_stats, *fields.pop("plants", ())), **fields)


def test_the_view_of_a_running_run(tmp_path: Path) -> None:
    text = shown(
        write_run(tmp_path / "run", running(manifest={"identity": {"edges": [64, 128, 192, 256, 384, 512]}})), 1.77e9 + 61
    )
    assert "diverse · run · running · 1 cell, order diverse" in text
    assert "step 120 of 240 · 50% · 1 min 00 s left" in text
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics" / "steps.jsonl").read_text().splitlines()]
    assert (
        f"{steps[-1]['loss']:.4f}  " in text and "▁" in text and f"highest {max(s['grad_norm'] for s in steps[70:]):.3g}" in text
    )
    assert f"expected {steps[-1]['expected_acceptance_length']:.2f} · not measured yet" in text
    assert " ".join(f"{k}:{a:.2f}" for k, a in enumerate(steps[-1]["accuracy_by_position"], 1)) in text
    assert "waiting for" in text and "drafter 74% · target 16% · other 6% · loader 4% (last 50 steps)" in text
    share = sum(s["bucket_counts"][5] for s in steps[70:]) / sum(s["num_batches"] for s in steps[70:])
    assert f"≤512: {share:.0%}" in text
    assert "current 1 · longest 2 · mean 1.25 batches" in text
    assert "depth 6 (mean 6.0) · waited for batches 20% · loaders waited for room 10% · 222 batches dispatched" in text
    assert "depth 5 (mean 5.0) · waited for batches 40% · loaders waited for room 0% · 222 batches dispatched" in text
    assert "loading waited 12.5 s so far for the byte budget" in text
    assert "step 120: checkpoint step-000120 written in 0.8 s" in text and "checkpoint_begin" not in text
    assert "! " not in text, "a run that is well has no warnings"


def test_an_ended_run_and_one_that_has_not_begun(tmp_path: Path) -> None:
    ended = write_run(
        tmp_path / "ended", FakeRun(manifest={"evaluation": {"step": 120}, "error": None}, config={"train.max_steps": 120})
    )
    text = shown(ended, NOW + 1e6)
    assert (
        "completed" in text and "step 120 of 120 · 100%" in text and "measured 2.40 after 120 steps" in text and "! " not in text
    )
    failed = shown(
        write_run(tmp_path / "failed", FakeRun(state="failed", manifest={"error": "stage 'loader 1', batch 7: [gone]"}))
    )
    assert "stage 'loader 1', batch 7: [gone]" in failed and "step 120" in failed and " of " not in failed.splitlines()[2]
    begun = write_run(tmp_path / "begun", running(num_steps=2, stats=False))
    for file in (begun / "metrics").iterdir():
        file.unlink()
    text = shown(begun)
    assert "step 0 of 240" in text and "no snapshot yet" in text and "! " not in text


def test_attempts_and_cells(tmp_path: Path) -> None:
    def resumed_with_two_cells(streams: Streams) -> None:
        again = [row | {"attempt": 1, "loss": 9.0, "time": row["time"] + 30} for row in streams["steps"][100:110]]
        streams["steps"] += again
        streams["stats"] += [row | {"attempt": 1, "cell": cell} for row in streams["stats"][-3:] for cell in (0, 1)]
        streams["events"].append({"kind": "resume", "step": 100, "attempt": 1, "passed_over": ["step-000110"], "time": NOW})

    folder = write_run(tmp_path / "run", running(plants=(resumed_with_two_cells,)))
    run = WatchedRun(folder)
    text = drawn(run)
    assert "step 110 of 240" in text and "attempt 2" in text and "9.0000" in text
    assert [step for step, _ in run.view.loss.points] == list(range(110)) and run.view.loss.points[99][
        1
    ] < 9 == run.view.loss.points[100][1]
    assert "target 1 of cell 0" in text and "target 0 of cell 1" in text and "bucket runs of cell 1" in text
    assert "resumed, passed over ['step-000110']" in text


@pytest.mark.parametrize(
    ("change", "now", "expected"),
    [
        ({"prefetch_depths": [7, 0]}, NOW, "queues are uneven in cell 0: target 0 has 7.0 batches waiting, target 1 0.0"),
        ({"prefetch_depths": [0, 0]}, NOW, None),  # the loader is slow, which is no fault of the dispatch
        ({"prefetch_depths": [8, 4]}, NOW, None),
        ({"dispatched_per_target": [300, 150]}, NOW, "were given unequal numbers of batches: 300, 150"),
        ({"dispatched_per_target": [300, 298]}, NOW, None),
        ({"dispatched_per_target": [3, 1]}, NOW, None),
        ({}, NOW, None),
        ({}, NOW + 125, "no row has come for 2 min 35 s"),
    ],
)
def test_warnings_and_no_false_ones(tmp_path: Path, change: dict[str, Any], now: float, expected: str | None) -> None:
    def plant(streams: Streams) -> None:
        for rows in streams.values():
            for row in rows:
                row["time"] += 100.0
        for row in streams["stats"]:
            row |= change

    found = warnings(write_run(tmp_path / "run", running(plants=(plant,))), now - 10)
    assert len(found) == (expected is not None) and (expected or "") in "".join(found)


def test_warnings_about_skipped_steps_a_lost_process_and_broken_lines(tmp_path: Path) -> None:
    def plant(streams: Streams) -> None:
        streams["steps"][-3] |= {"skipped": True, "loss": float("nan"), "grad_norm": float("inf")}

    folder = write_run(tmp_path / "run", running(plants=(plant,), manifest={"pid": 2**22 - 1}))
    with (folder / "metrics" / "stats.jsonl").open("a") as file:
        file.write("not JSON\n[1]\n")
    found = warnings(folder)
    assert (
        len(found) == 3
        and "process 4194303" in found[0]
        and "1 of the last 50 steps were not finite, the last one 117" in found[1]
    )
    assert found[2].startswith("2 lines of the metrics")
    unequal = running(plants=(lambda streams: streams["stats"][-1].update(dispatched_per_target=[900, 90]),))
    assert warnings(write_run(tmp_path / "unequal", unequal), 1.77e9 + 61)
    config = yaml.safe_load((tmp_path / "unequal" / "config.yaml").read_text()) | {"prefetch": {"dispatch": "least_loaded"}}
    (tmp_path / "unequal" / "config.yaml").write_text(yaml.safe_dump(config))
    assert not warnings(tmp_path / "unequal", 1.77e9 + 61), "where equal numbers are not meant"


@settings(max_examples=40)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=12), st.lists(st.integers(1, 400), min_size=1, max_size=30))
def test_every_row_is_taken_once_however_its_file_grows(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], cuts: list[int]
) -> None:
    path = tmp_path_factory.mktemp("follow") / "steps.jsonl"
    rows = [{"step": i, "text": "ä" * size} for i, size in enumerate(sizes)]
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    follower, taken = JsonlFollower(path), []
    assert follower.read() == ([], [])
    with path.open("ab", buffering=0) as file:
        for cut in [*cuts, len(data)]:
            file.write(data[:cut])
            data = data[cut:]
            samples, new = follower.read()
            assert not samples
            taken += new
    assert taken == rows and follower.num_bad == 0


def test_a_torn_line_that_the_next_writer_cuts_off_is_no_row(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b'{"step":0}\n{"step":1,"loss":0.')
    follower = JsonlFollower(path)
    assert follower.read()[1] == [{"step": 0}]
    sink = JsonlSink(tmp_path)
    sink.log("steps", {"step": 2})
    sink.close()
    assert follower.read()[1] == [{"step": 2}] and follower.num_bad == 0
    path.write_bytes(b'{"step":7}\n')  # a new run in the same folder
    assert follower.read()[1] == [{"step": 7}]
    path.unlink()
    assert follower.read() == ([], [])


def test_a_look_costs_the_same_for_a_run_of_a_hundred_thousand_steps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", running(num_steps=20))
    path = folder / "metrics" / "steps.jsonl"
    row = json.loads(path.read_text().splitlines()[-1])
    row["time"] = NOW
    cells = [row | {"step": 77_777_777, "loss": 88.125}]
    pattern = json.dumps(cells[0])
    before, middle, after = pattern.partition("77777777")
    first, _, last = after.partition("88.125")
    assert middle
    with path.open("w") as file:
        file.writelines(f"{before}{step}{first}{100_000 - step}{last}\n" for step in range(100_000))
    run = WatchedRun(folder)
    follower = run.followers["steps"]
    text = drawn(run)
    assert "step 100,000 of" in text and "█▇" in text.replace("██", "█") and path.stat().st_size > 60e6
    assert follower.num_bytes_read <= TAIL_BYTES + SAMPLES * SAMPLE_BYTES < 1.4e6
    points = run.view.loss.points
    assert points[0] == (0, 100_000.0) and all(value == 100_000 - step for step, value in points)
    assert max(b - a for (a, _), (b, _) in pairwise(points)) <= 2 * 100_000 / SAMPLES
    for added in (0, 10, 1):
        start = follower.num_bytes_read
        with path.open("a") as file:
            file.writelines(json.dumps(row | {"step": 100_000 + i}) + "\n" for i in range(added))
        drawn(run)
        assert follower.num_bytes_read - start <= added * (len(pattern) + 20)


def test_it_ends_with_the_run_and_shows_its_last_rows(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", running(num_steps=30))
    console = Console(file=io.StringIO(), width=150)
    thread = threading.Thread(target=watch, args=(folder, 0.02), kwargs={"console": console})
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    with (folder / "metrics" / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "signal", "name": "SIGTERM", "step": 30, "attempt": 0, "time": NOW}) + "\n")
    manifest = json.loads((folder / "manifest.json").read_text()) | {"state": "stopped"}
    (folder / "manifest.new").write_text(json.dumps(manifest))
    (folder / "manifest.new").replace(folder / "manifest.json")
    thread.join(10)
    assert not thread.is_alive()
    assert isinstance(console.file, io.StringIO)
    last = console.file.getvalue().rpartition("diverse · run")[2]
    assert "stopped" in last and "asked by SIGTERM" in last


def test_on_a_terminal_the_last_view_stays(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", FakeRun(num_steps=30))
    console = Console(file=io.StringIO(), width=150, height=8, force_terminal=True)
    watch(folder, console=console)
    assert isinstance(console.file, io.StringIO)
    assert "checkpoint step-000020" in console.file.getvalue(), "whole, though it is higher than the terminal"


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, home: Path) -> None:
    folder = write_run(tmp_path / "run", running(num_steps=30))
    code, out, _ = dflash(monkeypatch, capsys, "watch", folder, "--once")
    assert code == 0 and "step 30 of 240" in out and "\x1b" not in out

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("dflash_core.metrics.watch.time.sleep", interrupted)
        code, _, err = dflash(monkeypatch, capsys, "watch", folder)
        assert code == 130 and only_line(err) == "error: interrupted"
    (folder / "metrics" / "events.jsonl").open("a").write('{"kind": "sk')  # torn, as a writer leaves it
    before = sorted(path.name for path in (folder / "metrics").iterdir())
    code, out, _ = dflash(monkeypatch, capsys, "watch", folder, "--report")
    assert code == 0 and out.splitlines()[-1] == str(home / "reports" / "run" / "report.html")
    assert (home / "reports" / "run" / "report.html").is_file()
    assert sorted(path.name for path in (folder / "metrics").iterdir()) == before, "a run that is not over is not compacted"


def test_bad_folders_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def refused(folder: Path) -> str:
        code, out, err = dflash(monkeypatch, capsys, "watch", folder, "--once")
        assert code == 2 and out == ""
        return only_line(err)

    assert f"{tmp_path / 'no'}: no such run folder" in refused(tmp_path / "no")
    assert "manifest.json: not a run folder" in refused(tmp_path)
    folder = write_run(tmp_path / "run", running(num_steps=3))
    manifest, config = (folder / "manifest.json").read_text(), (folder / "config.yaml").read_text()
    for name, text, said in (
        ("manifest.json", "{", "damaged"),
        ("manifest.json", "[]", "not the manifest of a run"),
        ("config.yaml", "a: [", "damaged"),
        ("config.yaml", "\x00", "damaged"),
    ):
        (folder / "manifest.json").write_text(manifest)
        (folder / "config.yaml").write_text(config)
        (folder / name).write_text(text)
        assert said in refused(folder) and name in refused(folder)
    (folder / "config.yaml").write_text("[]")
    (folder / "manifest.json").write_text(manifest)
    assert dflash(monkeypatch, capsys, "watch", folder, "--once")[0] == 0
    for row in (
        {"step": "x", "loss": []},
        {"step": 3, "grad_norm": "high"},
        {"step": 4, "bucket_counts": 7},
        {"attempt": [1]},
        {"attempt": 1e999},
    ):
        write_jsonl(folder / "metrics" / "steps.jsonl", [row])
        assert "a field has a value of another kind" in refused(folder)
    (folder / "metrics" / "steps.jsonl").unlink()
    (folder / "metrics" / "steps.jsonl").mkdir()
    assert f"{folder / 'metrics' / 'steps.jsonl'}: cannot be read: Is a directory" in refused(folder)
