"""What is said about checkpoints and other events of a run, also of one in which nothing is found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dflash_core.analysis.findings.cleared import Cleared, _held_against_others, _rises, cleared
from dflash_core.analysis.findings.loss_parts import fit_loss, without_mix
from dflash_core.analysis.reader import numbers
from dflash_core.analysis.runs import Run, load_run
from tests import planted_curves as plants
from tests.fake_runs import FakeRun, write_run


def judged(run: Run) -> list[Cleared]:
    return cleared(run, without_mix(numbers(run.steps, "loss"), fit_loss(run)))


def made(folder: Path, *planted: plants.Plant, num_steps: int = 300, order: str = "diverse") -> Run:
    calm = plants.calm(0, memory=0.3)
    return load_run(write_run(folder, FakeRun(plants=(calm, *planted), num_steps=num_steps, order=order, stats=False)))


def of(run: Run) -> dict[str, Cleared]:
    return {one.key: one for one in judged(run)}


@pytest.mark.parametrize("order", ["diverse", "shuffle"])
def test_checkpoints_that_do_nothing_are_cleared(tmp_path: Path, order: str) -> None:
    one = of(made(tmp_path / "run", plants.bucket_offset(0.5), order=order))["checkpoints"]
    assert one.is_clear and one.low < 0 < one.high < 0.1 and one.num_events == 13
    assert one.sentence().startswith(
        "Checkpoints: the loss of the 3 steps behind one does not measurably differ from what other steps"
    )


def test_checkpoints_that_set_the_loss_back_are_not(tmp_path: Path) -> None:
    one = of(made(tmp_path / "run", plants.fall_back(plants.at_checkpoints, 0.6, 4.0)))["checkpoints"]
    assert not one.is_clear and 0.3 < one.low < one.difference < one.high < 0.7
    assert "is above what other steps let expect" in one.sentence()


def test_nothing_is_said_of_few_events_or_short_runs(tmp_path: Path) -> None:
    assert set(of(made(tmp_path / "run"))) == {"checkpoints"}
    assert judged(made(tmp_path / "short", num_steps=20)) == []


def test_the_interval_covers_what_is_true() -> None:
    """No effect, noise of any memory: about one interval in twenty misses 0."""
    missed = 0
    for seed in range(400):
        rng = np.random.default_rng(seed)
        noise, memory = rng.normal(size=200), (0.0, 0.5, 0.8)[seed % 3]
        for i in range(1, 200):
            noise[i] = memory * noise[i - 1] + np.sqrt(1 - memory**2) * noise[i]
        every = (25, 40)[seed % 2]
        one = _held_against_others("checkpoints", _rises(noise), np.arange(every, 200, every), 20)
        assert one is not None
        missed += not one.is_clear
    assert 4 <= missed <= 32, missed
