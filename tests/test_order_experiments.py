"""The experiments on batch order and the replayed incident: what their files promise, and the arithmetic of the comparison."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_core import experiment as root
from dflash_core.config import RunVariant
from tests.fake_runs import FakeRun, write_run

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import order_ab  # noqa: E402 - a script, found by its folder

FILES = {"order_ab.yaml": "grouped", "order_ab_single.yaml": "clustered"}


@pytest.mark.parametrize(("name", "clustering"), FILES.items())
def test_runs_of_one_seed_differ_in_nothing_but_order(name: str, clustering: str) -> None:
    config = root.load_experiment(ROOT / "flows/experiments" / name)
    orders = ["diverse", "shuffle", clustering]
    expected = [
        RunVariant(name=f"{order}-s{seed}", set={"bucketing.order": order, "train.seed": seed})
        for seed in range(3)
        for order in orders
    ]
    assert list(config.runs) == expected and len(config.variants()) == 9
    assert config.train.max_steps is None  # whole epochs: every order sees every batch of them


def test_both_halves_share_data_and_batches() -> None:
    """They differ in the size of a step and what belongs to it."""
    halves = [
        root.load_experiment(ROOT / "flows/experiments" / name).model_dump(exclude={"name", "description", "runs"})
        for name in FILES
    ]
    different = {(part, key) for part in halves[0] for key in halves[0][part] if halves[0][part][key] != halves[1][part][key]}
    assert different == {("bucketing", "batches_per_step"), ("train", "lr"), ("train", "betas"), ("train", "checkpoint_every")}


def test_the_incident_and_its_cure_differ_in_order_and_dispatch() -> None:
    runs = dict(root.load_experiment(ROOT / "flows/experiments/incident.yaml").variants())
    faulty, cured = runs["faulty"], runs["cured"]
    assert (faulty.bucketing.order, faulty.prefetch.dispatch) == ("shuffle", "per_worker_skipping")
    assert (cured.bucketing.order, cured.prefetch.dispatch) == ("diverse", "round_robin")
    same = [
        run.model_copy(
            update={
                "bucketing": run.bucketing.model_copy(update={"order": "diverse"}),
                "prefetch": run.prefetch.model_copy(update={"dispatch": "round_robin"}),
            }
        )
        for run in (faulty, cured)
    ]
    assert same[0] == same[1]
    assert (cured.topology.cells, cured.topology.targets_per_cell, cured.prefetch.num_workers) == (1, 6, 4)


@pytest.mark.slow
def test_the_incident_has_half_of_its_batches_in_the_longest_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path))
    config = root.load_experiment("flows/experiments/incident.yaml")
    root.prepare(config)
    found: dict[str, Any] = root.plan(config)
    assert len(found["edges"]) == 6 and found["bucket_pct"][-1] == pytest.approx(52, abs=0.5)
    shuffled, diverse = found["orders"]["shuffle"], found["orders"]["diverse"]
    assert diverse["longest_run"] == diverse["shortest_possible_longest_run"] == 2
    assert shuffled["longest_run"] >= 3 * diverse["longest_run"]


def test_paired_differences_have_student_intervals() -> None:
    # Differences 1, 2, 3: mean 2, standard error 1 / sqrt(3), t of two degrees of freedom 4.303.
    assert order_ab.paired([1.0, 1.0, 1.0], [2.0, 3.0, 4.0]) == "+2.000 [-0.484, +4.484]"
    assert order_ab.paired([1.0, 5.0, 9.0], [2.0, 6.0, 10.1]).endswith("*")
    assert order_ab.paired([1.0], [2.0]) == "+1.000 (one seed)"


def test_what_composition_explains_is_taken_out() -> None:
    rng = np.random.default_rng(0)
    shares = rng.dirichlet([1.0] * 3, 200)
    noise = rng.normal(0, 0.1, 200)
    left = order_ab.beside(shares @ [1.0, 2.0, 3.0] + noise, np.hstack([shares, np.zeros((200, 1))]))
    assert left.std() == pytest.approx(noise.std(), rel=0.05)
    assert order_ab.beside(noise, shares).std() == pytest.approx(noise.std(), rel=0.02)


def test_runs_with_other_batches_are_not_compared(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / order, FakeRun(name=order, order=order, num_steps=30)) for order in ("diverse", "shuffle")]
    with pytest.raises(SystemExit, match=re.escape("the runs of seed 0 differ in more than order: batches and anchors")):
        order_ab.compare(folders)
    tables = order_ab.compare(folders[:1])
    assert tables[0].startswith("1 seeds; 30 steps of 4 batches")
