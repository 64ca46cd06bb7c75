"""Every detector over every planted cause: what was planted is found, with its cause, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from dflash_core.analysis.findings.detect import find_all
from dflash_core.analysis.findings.finding import Context, Finding
from dflash_core.analysis.runs import Run
from dflash_core.config import AnalyzeConfig
from tests import planted_curves as curves
from tests.planted_queues import Pipeline, made

BALANCED = Pipeline()


@dataclass(frozen=True)
class Case:
    """What is planted, the kinds of findings that it must give, and what the evidence of the first must say.

    An order that drives the loss is told twice by its nature: `batch_order` names the fault in the data, and
    `loss_composition` what it does to the curve; where the gradient spikes in bucket runs, `spikes_in_bucket_runs` too.
    """

    kinds: tuple[str, ...]
    planted: tuple[curves.Plant, ...] = ()
    pipeline: Pipeline = BALANCED
    order: str = "diverse"
    num_steps: int = 160
    batches_per_step: int = 4
    evidence: dict[str, object] = field(default_factory=dict)


def accuracy_falls(steps: Callable[[curves.Streams], object], share: float = 1 / 3, lasts: int = 3) -> curves.Plant:
    """The expected acceptance length, and only it, is down by a share for some steps."""

    def plant(streams: curves.Streams) -> None:
        starts = list(steps(streams))  # type: ignore[call-overload]
        for row in streams["steps"]:
            if any(0 <= row["step"] - start < lasts for start in starts):
                row["expected_acceptance_length"] *= 1 - share

    return plant


AT_CHECKPOINTS = curves.fall_back(curves.at_checkpoints, 0.6, 4.0)
CASES = {
    "order": Case(("batch_order", "loss_composition"), (curves.bucket_offset(0.5),), order="shuffle"),
    "order with spikes": Case(
        ("batch_order", "loss_composition", "spikes_in_bucket_runs"),
        (curves.clustered(12, 10, bucket=4), curves.bucket_offset(0.5), curves.spikes(0.5, only_in_runs_of=4)),
        order="shuffle",
        num_steps=360,
    ),
    # Where the last steps are all of the bucket that loses most, the loss ends higher: that is no divergence.
    "order in groups": Case(("batch_order", "loss_composition"), (curves.bucket_offset(0.5),), order="grouped", num_steps=240),
    "sorted": Case(("batch_order",), (curves.bucket_offset(0.5),), order="sorted", num_steps=401),
    "climb in groups": Case(
        ("divergence", "batch_order", "loss_composition"),
        (curves.bucket_offset(0.5), curves.climb(170, 0.03)),
        order="grouped",
        num_steps=240,
    ),
    "checkpoints": Case(
        ("resets",), (curves.checkpoints_every(32), AT_CHECKPOINTS), num_steps=240, evidence={"cause": "checkpoints"}
    ),
    "accuracy at checkpoints": Case(
        ("resets",),
        (curves.checkpoints_every(25), accuracy_falls(curves.at_checkpoints)),
        num_steps=200,
        evidence={"cause": "checkpoints", "num_in_loss": 0},
    ),
    "epochs": Case(
        ("resets",),
        (curves.epochs_of(48), curves.fall_back(curves.at_epochs, 0.6, 4.0)),
        num_steps=240,
        evidence={"cause": "epoch_starts"},
    ),
    "target": Case(("starved_by_target",), pipeline=replace(BALANCED, target_s=0.4), num_steps=100),
    "drafter": Case(("starved_by_drafter",), pipeline=Pipeline(targets=8, target_s=0.3), num_steps=100, batches_per_step=12),
    "loader": Case(("starved_by_loader",), pipeline=replace(BALANCED, load_s=0.8), num_steps=100, evidence={"cause": "loading"}),
    "dispatch": Case(
        ("unequal_dispatch",),
        pipeline=Pipeline(targets=3, target_s=0.25, skew=0.15, dispatch="per_worker"),
        num_steps=100,
        evidence={"cause": "private counters"},
    ),
    "explosion": Case(("divergence",), (curves.explosion(110),)),
    "none": Case(()),
}


def run_of(folder: Path, case: Case, seed: int) -> Run:
    plants = (curves.calm(seed, memory=0.3), *case.planted)
    return made(folder, case.pipeline, seed, case.num_steps, case.order, case.batches_per_step, plants)


def all_findings(run: Run, seed: int = 0) -> list[Finding]:
    return find_all(run, Context(AnalyzeConfig(), np.random.default_rng(seed)))


def check(folder: Path, name: str, seed: int) -> None:
    case = CASES[name]
    found = {one.kind: one for one in all_findings(run_of(folder / f"{name}-{seed}", case, seed), seed)}
    assert sorted(found) == sorted(case.kinds), (seed, [one.title for one in found.values()])
    for key, value in case.evidence.items():
        assert found[case.kinds[0]].evidence[key] == value, (seed, found[case.kinds[0]].text)


@pytest.mark.parametrize("name", CASES)
def test_each_cause_is_found_and_nothing_else(tmp_path: Path, name: str) -> None:
    check(tmp_path, name, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_with_other_seeds_too(tmp_path: Path, name: str) -> None:
    for seed in range(1, 5):
        check(tmp_path, name, seed)


def clean_alarms(folder: Path, seeds: range, lengths: tuple[int, ...]) -> list[str]:
    """What is found in sound runs of several lengths, orders, step sizes and cells; of shuffled ones only the order may be."""
    alarms = []
    for seed, length, cells, order in product(seeds, lengths, (1, 2), ("diverse", "shuffle")):
        size = (2, 4)[(seed + length) % 2]
        calm = curves.calm(seed, (0, 0.5, 0.8)[seed % 3], norm_tail=(0.2, 0.6)[seed % 2])
        pipeline = replace(BALANCED, cells=cells, target_s=0.17, draft_s=0.1)
        run = made(folder / f"{seed}-{length}-{cells}-{order}", pipeline, seed, length, order, size, (calm,))
        expected = {"batch_order"} if order == "shuffle" else set()
        alarms += [f"{run.run_id}: {one.title}" for one in all_findings(run, seed) if one.kind not in expected]
    return alarms


def test_sound_runs_give_nothing(tmp_path: Path) -> None:
    assert clean_alarms(tmp_path, range(1000, 1001), (60, 130)) == []


@pytest.mark.slow
def test_more_sound_runs_give_nothing(tmp_path: Path) -> None:
    assert clean_alarms(tmp_path, range(1001, 1006), (50, 120, 250)) == []
