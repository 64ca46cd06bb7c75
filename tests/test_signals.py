"""SIGTERM and SIGINT: the state is saved, the exit code is 4, and a resume goes on exactly there."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from dflash_core import experiment as root
from dflash_core.training.checkpoint import newest_checkpoint
from dflash_core.training.run_folder import RunFolder
from tests.harness.bench import Bench, assert_same_run, assert_whole, is_writing, rows
from tests.harness.client import Child, wait_until

pytest_plugins = ["tests.harness.fixtures"]

TWO_CELLS = "topology.cells=2"
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def is_running(run_dir: Path) -> bool:
    """Whether the run's cells have met; what they train is built after this."""
    return bool(RunFolder(run_dir).read_manifest()["state"] == "running")


def assert_stopped(run_dir: Path, children: list[Child]) -> int:
    """Ended as a stop ends; returns the step that comes next."""
    codes = [child.wait(30.0) for child in children]
    assert set(codes) == {4}, children[0].output()
    manifest = RunFolder(run_dir).read_manifest()
    assert manifest["state"] == "stopped" and manifest["error"] is None
    found = newest_checkpoint(run_dir / "checkpoints")
    assert_whole(run_dir)
    assert not is_writing(run_dir)
    [[line], *others] = [child.errors() for child in children]
    if "before the first step of this attempt; run again to resume" in line:  # alone, and there was nothing to save
        assert not others
        return 0 if found is None else int(found[1]["next_step"])
    assert found is not None and found[1]["next_step"] == manifest["num_steps"]
    for [told] in ([line], *others):
        assert told.startswith("error: stopped by ") and "None" not in told
        assert f"after step {manifest['num_steps']} of 10; run again to resume" in told
    return int(manifest["num_steps"])


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.slow
def test_stopped_at_random_moments(bench: Bench, seed: int) -> None:
    """From the moment that the run is running, so also while it is built; every attempt is stopped again."""
    generator, reference = random.Random(seed), bench.reference()
    run_dir = bench.make(f"stopped-{seed}")
    for attempt in range(4):
        [child] = bench.start(run_dir)
        if attempt < 3:
            wait_until(lambda child=child: is_running(run_dir) or child.poll() is not None)
            time.sleep(generator.uniform(0.0, 0.5 * bench.duration_s()))
            child.send(SIGNALS[(seed + attempt) % 2])
        child.wait(30.0)
        if RunFolder(run_dir).read_manifest()["state"] == "completed":
            break  # nobody listens any more, and there is nothing to save
        assert_stopped(run_dir, [child])
    assert_same_run(reference, run_dir)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_stopped_before_the_first_step(bench: Bench, number: signal.Signals) -> None:
    run_dir = bench.make(f"built-{number.name}")
    children = bench.start(run_dir, ("tests.harness.breaks:signal_while_building", {"number": number}))
    assert assert_stopped(run_dir, children) == 0
    assert bench.train(run_dir) == [0]
    assert_same_run(bench.reference(), run_dir)


@pytest.mark.slow
def test_several_signals_are_one_stop(bench: Bench) -> None:
    """The second comes while the state is being saved; it must not break that off."""
    run_dir = bench.make("twice")
    signals = {"step": 5, "number": signal.SIGTERM, "again": signal.SIGINT, "saving": "step-000006"}
    children = bench.start(run_dir, ("tests.harness.breaks:signal_at_step_and_while_saving", signals))
    assert assert_stopped(run_dir, children) == 6
    assert "SIGINT" in children[0].errors()[0], "the second signal did not come: this test has lost its sense"
    assert bench.train(run_dir) == [0]
    assert_same_run(bench.reference(), run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("cells", [(1,), (0,), (0, 1)])
def test_a_signal_to_one_of_two_cells_stops_both(bench: Bench, cells: tuple[int, ...]) -> None:
    run_dir = bench.make(f"cells-{len(cells)}-{cells[0]}", TWO_CELLS)
    patch = ("tests.harness.breaks:signal_at_step", {"step": 4, "number": signal.SIGTERM})
    assert assert_stopped(run_dir, bench.start(run_dir, patch, patched_cells=cells)) in (5, 6)
    names = {row["cell"]: row["name"] for row in rows(run_dir, "events") if row["kind"] == "signal"}
    assert set(names) == {0, 1} and "SIGTERM" in names.values()
    assert bench.train(run_dir) == [0, 0]
    assert_same_run(bench.reference(TWO_CELLS), run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_before_there_is_anything_to_save(bench: Bench, number: signal.Signals) -> None:
    run_dir = bench.make(f"early-{number.name}")
    [child] = bench.start(run_dir, ("tests.harness.breaks:signal_before_the_run", {"number": number}))
    assert child.wait() == (-signal.SIGTERM if number == signal.SIGTERM else 130)
    assert root.run_state(run_dir) == "created"
    assert bench.train(run_dir) == [0]
    assert_same_run(bench.reference(), run_dir)


def until_it_says(child: Child, word: str) -> None:
    """Wait until a process has written a word."""
    deadline = time.monotonic() + 60.0
    while word not in child.output():
        assert child.poll() is None and time.monotonic() < deadline, child.output()
        time.sleep(0.05)


def test_a_stop_does_not_wait_for_a_target_that_is_being_loaded(bench: Bench) -> None:
    run_dir = bench.make("slow-load")
    [child] = bench.start(run_dir, ("tests.harness.breaks:slow_target_load", {"seconds": 50.0}))
    until_it_says(child, "loading")
    asked = time.monotonic()
    child.send(signal.SIGTERM)
    assert assert_stopped(run_dir, [child]) == 0
    assert child.ended - asked < 10.0
    assert bench.train(run_dir) == [0]
    assert_same_run(bench.reference(), run_dir)


@pytest.mark.slow
def test_a_stop_does_not_wait_for_a_target_that_hangs(bench: Bench) -> None:
    """What is trained so far is saved, although the batch that is waited for never comes and its thread never ends."""
    run_dir = bench.make("hanging")
    [child] = bench.start(run_dir, ("tests.harness.breaks:break_stage", {"stage": "target", "kind": "blocks", "number": 12}))
    until_it_says(child, "broken at")
    time.sleep(1.0)
    asked = time.monotonic()
    child.send(signal.SIGTERM)
    assert assert_stopped(run_dir, [child]) == 5
    assert child.ended - asked < 10.0
    assert bench.train(run_dir) == [0]
    assert_same_run(bench.reference(), run_dir)
