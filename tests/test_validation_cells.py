"""Measuring while two cells train: the others wait, and a slow measurement is no stall, but one that hangs is."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from dflash_core.training.run_folder import RunFolder
from tests.harness.bench import Bench, assert_same_run, rows

pytest_plugins = ["tests.harness.fixtures"]
pytestmark = pytest.mark.slow

CELLS = "topology.cells=2"
VALIDATED = ("evaluate.every_steps=4", "evaluate.prompts_while_training=2", "evaluate.max_new_tokens=10", CELLS)


def slow_walk(seconds: list[float], fails: bool = False) -> None:
    """In the child: each measurement takes so long, and may then fail."""
    from dflash_core.evaluation import walk

    real: Callable[..., Any] = walk.walk_draft
    pauses = iter(seconds)

    def walk_draft(*args: Any) -> Any:
        time.sleep(next(pauses, 0.0))
        if fails:
            raise RuntimeError("no figure today")
        return real(*args)

    walk.walk_draft = walk_draft


def signal_while_decoding(number: int) -> None:
    """In the child: a signal to the own process with the first answer."""
    import os

    from dflash_core.evaluation import walk_items

    real: Callable[..., Any] = walk_items.greedy_decode

    def greedy_decode(*args: Any) -> Any:
        os.kill(os.getpid(), number)
        return real(*args)

    walk_items.greedy_decode = greedy_decode


def measured(run_dir: Any) -> list[tuple[int, int]]:
    return [(row["step"], row["cell"]) for row in rows(run_dir, "events") if row["kind"] == "validation"]


def test_the_first_cell_measures_and_the_others_wait(bench: Bench) -> None:
    """Twice for most of the watchdog's limit: with its step it lasts longer than any one wait may, and is no stall."""
    run_dir = bench.make("slow-measurement", *VALIDATED, "prefetch.stall_timeout_s=6.0")
    children = bench.start(run_dir, ("tests.test_validation_cells:slow_walk", {"seconds": [4.5, 4.5]}), patched_cells=(0,))
    assert [child.wait(60.0) for child in children] == [0, 0], [child.output()[-2000:] for child in children]
    assert measured(run_dir) == [(4, 0), (8, 0)]
    assert_same_run(bench.reference(CELLS), run_dir)


def test_a_measurement_that_hangs_is_named_by_its_own_cell(bench: Bench) -> None:
    run_dir = bench.make("measurement-hangs", *VALIDATED, "prefetch.stall_timeout_s=3.0")
    children = bench.start(run_dir, ("tests.test_validation_cells:slow_walk", {"seconds": [50.0]}), patched_cells=(0,))
    assert [child.wait(30.0) for child in children] == [3, 3]
    assert "stage 'validation after 4 steps': no progress" in RunFolder(run_dir).read_manifest()["error"]


def test_one_that_fails_ends_all_cells_and_is_what_the_manifest_says(bench: Bench) -> None:
    run_dir = bench.make("measurement-fails", *VALIDATED)
    patch = ("tests.test_validation_cells:slow_walk", {"seconds": [], "fails": True})
    assert [child.wait(30.0) for child in bench.start(run_dir, patch, patched_cells=(0,))] == [3, 3]
    assert "validation after 4 steps': RuntimeError: no figure today" in RunFolder(run_dir).read_manifest()["error"]
    assert bench.train(run_dir) == [0, 0]
    assert_same_run(bench.reference(CELLS), run_dir)
    assert {step for step, _ in measured(run_dir)} == {4, 8}


@pytest.mark.parametrize("cells", [(0,), (1,)])
def test_a_stop_at_a_due_step_is_made_up_for_by_all_cells(bench: Bench, cells: tuple[int, ...]) -> None:
    run_dir = bench.make(f"stopped-when-due-{cells[0]}", *VALIDATED)
    patch = ("tests.harness.breaks:signal_at_step", {"step": 3, "number": signal.SIGTERM})
    assert {child.wait(30.0) for child in bench.start(run_dir, patch, patched_cells=cells)} == {4}
    before = measured(run_dir)
    assert bench.train(run_dir) == [0, 0]
    assert [step for step, _ in measured(run_dir)] == [4, 8] and len(before) <= 1
    assert_same_run(bench.reference(CELLS), run_dir)


def test_all_cells_stop_while_the_first_one_decodes(bench: Bench) -> None:
    run_dir = bench.make("stopped-while-decoding", *VALIDATED, "evaluate.max_new_tokens=11")
    patch = ("tests.test_validation_cells:signal_while_decoding", {"number": signal.SIGTERM})
    assert [child.wait(30.0) for child in bench.start(run_dir, patch, patched_cells=(0,))] == [4, 4]
    assert RunFolder(run_dir).read_manifest()["state"] == "stopped"
    assert bench.train(run_dir) == [0, 0]
    assert_same_run(bench.reference(CELLS), run_dir)
