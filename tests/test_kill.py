"""`kill -9` at any moment loses nothing: resumed until done, a run is bit for bit the one that was never interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dflash_core import experiment as root
from dflash_core.training.run_folder import RunFolder
from tests.harness.bench import (
    KILLED,
    Bench,
    assert_same_run,
    assert_whole,
    delays,
    is_writing,
    last_attempts,
    rows,
    trained_batches,
    trained_steps,
)
from tests.harness.client import Child, wait_until

pytest_plugins = ["tests.harness.fixtures"]

OFTEN = "train.checkpoint_every=1"
SIGNAL_AT_STEP = "tests.harness.breaks:signal_at_step"
TWO_CELLS = "topology.cells=2"
MOST_KILLS = 4
SEEDS = [pytest.param(seed, marks=pytest.mark.slow if seed > 0 else ()) for seed in range(10)]


def whole_lines(run_dir: Path) -> dict[str, bytes]:
    """What each metrics file holds up to its last newline."""
    contents = {path.name: path.read_bytes() for path in (run_dir / "metrics").glob("*.jsonl")}
    return {name: data[: data.rfind(b"\n") + 1] for name, data in contents.items()}


def assert_nothing_lost(run_dir: Path, before: dict[str, bytes]) -> None:
    now = whole_lines(run_dir)
    for name, data in before.items():
        assert now[name].startswith(data), f"{name}: rows that were there are gone"


def kill(children: list[Child]) -> list[int]:
    for child in children:
        child.send(signal.SIGKILL)
    return [child.wait() for child in children]


def kill_and_resume_until_done(bench: Bench, run_dir: Path, longest_s: float, seed: int) -> tuple[int, int]:
    """Returns how many kills there were, and how many fell into the writing of a checkpoint."""
    writing = 0
    for kills, delay_s in enumerate(delays(seed, longest_s)):
        rows_before, attempt = whole_lines(run_dir), root.run_attempt(run_dir)
        children = bench.start(run_dir)
        if kills < MOST_KILLS:
            time.sleep(delay_s)
            rows_before |= whole_lines(run_dir)
            codes = kill(children)
        else:
            codes = [child.wait() for child in children]
        assert_nothing_lost(run_dir, rows_before)
        assert_whole(run_dir, killed=True)
        assert root.run_attempt(run_dir) - attempt in (0, 1)
        if set(codes) == {0}:
            return kills, writing
        assert KILLED in codes, children[0].output()
        writing += is_writing(run_dir)
        assert root.run_state(run_dir) in ("created", "stopped", "failed", "completed")
    raise AssertionError("not reached")


def assert_finished_like(reference: Path, run_dir: Path) -> None:
    assert_same_run(reference, run_dir)
    assert RunFolder(run_dir).read_manifest()["state"] == "completed"
    assert not is_writing(run_dir), "a part of a checkpoint is left"
    assert rows(run_dir, "steps")[-1]["attempt"] <= root.run_attempt(run_dir)


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_at_random_moments(bench: Bench, seed: int, record_property: Callable[[str, object], None]) -> None:
    reference = bench.reference(OFTEN)
    run_dir = bench.make(f"killed-{seed}", OFTEN)
    kills, writing = kill_and_resume_until_done(bench, run_dir, bench.duration_s(OFTEN), seed)
    record_property("kills", kills)
    record_property("kills while a checkpoint was written", writing)
    assert_finished_like(reference, run_dir)


@pytest.mark.parametrize("first", [1, 2, 3])
@pytest.mark.slow
def test_killed_before_each_change_of_a_file_while_checkpoints_are_written(bench: Bench, first: int) -> None:
    """One attempt dies before the first change of a file, the next before the second, and so on over two checkpoints."""
    reference = bench.reference(OFTEN)
    run_dir = bench.make(f"file-change-{first}", OFTEN)
    below = str(run_dir / "checkpoints")
    partial = 0
    for number in range(first, 40, 3):
        before = whole_lines(run_dir)
        [code] = bench.train(run_dir, ("tests.harness.breaks:die_at_file_change", {"number": number, "below": below}))
        assert code in (0, KILLED)
        assert_whole(run_dir, killed=True)
        assert_nothing_lost(run_dir, before)
        if code == 0:
            break
        partial += is_writing(run_dir)
    assert partial >= 3, "hardly any kill left a part of a checkpoint: this test has lost its sense"
    assert set(bench.train(run_dir)) == {0}
    assert_finished_like(reference, run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_two_cells_killed_together_at_random_moments(bench: Bench, seed: int) -> None:
    reference = bench.reference(OFTEN, TWO_CELLS)
    run_dir = bench.make(f"two-killed-{seed}", OFTEN, TWO_CELLS)
    kill_and_resume_until_done(bench, run_dir, bench.duration_s(OFTEN, TWO_CELLS), seed)
    assert_finished_like(reference, run_dir)


LONG = ("train.max_steps=400", "train.num_epochs=400")


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_cell_whose_peer_is_killed_ends_by_itself(bench: Bench, killed: int) -> None:
    run_dir = bench.make(f"peer-of-{killed}", TWO_CELLS, *LONG)
    children = bench.start(run_dir)
    wait_until(lambda: len(rows(run_dir, "steps")) >= 3)
    children[killed].kill()
    left = children[1 - killed]
    assert left.wait() == 3
    assert left.ended - children[killed].ended < 5.0
    assert len(left.errors()) == 1 and "another cell ended" in left.errors()[0]
    assert root.run_state(run_dir) == "failed"
    assert RunFolder(run_dir).read_manifest()["error"] in ("the training process was killed", left.errors()[0][7:])
    assert_whole(run_dir, killed=True)


@pytest.mark.slow
def test_the_number_of_cells_may_change_between_attempts(bench: Bench) -> None:
    """1, 2, 1: the batches are the same; only the order of summation differs."""
    reference = bench.reference(OFTEN)
    run_dir = bench.make("changing", OFTEN)
    for cells, dies_at in ((1, 3), (2, 7), (1, None)):
        bench.change(run_dir, f"topology.cells={cells}")
        patch = None if dies_at is None else (SIGNAL_AT_STEP, {"step": dies_at, "number": signal.SIGKILL})
        assert bench.train(run_dir, patch) == [0 if dies_at is None else KILLED] * cells
    by_cell = {(row["step"] >= 3, row["step"] >= 7, row["cell"]) for row in last_attempts(rows(run_dir, "batches"))}
    assert by_cell == {(False, False, 0), (True, False, 0), (True, False, 1), (True, True, 0)}
    planned = ("seq_no", "step", "epoch", "bucket", "num_tokens", "num_anchors")
    expected, found = trained_batches(reference), trained_batches(run_dir)
    assert [[row[key] for key in planned] for row in found] == [[row[key] for key in planned] for row in expected]
    for key in ("loss", "grad_norm"):
        expected, found = ([row[key] for row in trained_steps(path)] for path in (reference, run_dir))
        assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_torchrun_starts_all_cells_again_when_one_is_killed(bench: Bench) -> None:
    run_dir = bench.make("restarted", OFTEN, TWO_CELLS, "topology.max_restarts=1")
    command = root.train_command(run_dir)
    assert "--max-restarts=1" in command
    with (run_dir / "out.txt").open("wb") as out:
        launcher = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=dict(os.environ))
    try:
        wait_until(lambda: len(rows(run_dir, "steps")) >= 3)
        # Its own rows of that step, too: a kill between the step and its row would lose the row, which is allowed.
        wait_until(lambda: any(row["cell"] == 1 and row["step"] >= 2 for row in rows(run_dir, "batches")))
        cells = [p for p in psutil.Process(launcher.pid).children() if "dflash_core" in p.cmdline()]
        [second] = [cell for cell in cells if cell.environ()["RANK"] == "1"]
        second.kill()
        assert launcher.wait(90.0) == 0, (run_dir / "out.txt").read_text()[-4000:]
    finally:
        launcher.kill()
        launcher.wait()
    assert root.run_attempt(run_dir) == 1
    assert_finished_like(bench.reference(OFTEN, TWO_CELLS), run_dir)
