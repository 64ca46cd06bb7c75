"""Groups of seeds, and runs at equal anchors, against slow and obvious computations."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy import stats

from dflash_core.analysis import analyze_runs
from dflash_core.analysis.compare import Estimate, comparison_rows
from dflash_core.analysis.equal_anchors import window
from dflash_core.analysis.groups import EFFECT_KIND, Group, group_comparison_rows, group_rows, groups_of
from dflash_core.analysis.runs import RunFacts
from dflash_core.config import AnalyzeConfig
from tests.fake_runs import FakeRun, write_jsonl, write_run

NOWHERE = Path("runs")


def facts(name: str, order: str, seed: int, run_id: str | None = None, **manifest: Any) -> RunFacts:
    config = {"name": "x", "bucketing": {"order": order, "token_budget": 8}, "train": {"seed": seed, "lr": 1e-3}}
    return RunFacts(NOWHERE, run_id or name, name, {"name": name, **manifest}, config, {})


def named(runs: list[RunFacts]) -> dict[str, list[str]]:
    return {group.name: list(group.run_ids) for group in groups_of(runs)}


def test_runs_that_differ_only_in_seeds_are_a_group() -> None:
    runs = [facts(f"{order}-seed{seed}", order, seed) for seed in (0, 1, 2) for order in ("diverse", "shuffle")]
    found = named(runs)
    assert found == {order: [f"{order}-seed{seed}" for seed in (0, 1, 2)] for order in ("diverse", "shuffle")}
    assert groups_of(runs)[0].seeds == (0, 1, 2)
    other_data = facts("diverse-seed3", "diverse", 3, dataset_fingerprint="beef")
    assert len(groups_of([*runs, other_data])) == 3


def test_groups_are_named_by_what_tells_them_apart() -> None:
    assert named([facts("a", "diverse", 0), facts("b", "diverse", 1), facts("c", "shuffle", 0)]) == {
        "order=diverse": ["a", "b"],
        "order=shuffle": ["c"],
    }
    # Names that are equal but for the seed do not tell the groups apart.
    alike = [facts("r0", "diverse", 0), facts("r1", "diverse", 1), facts("r2", "sorted", 0), facts("r3", "sorted", 1)]
    assert list(named(alike)) == ["order=diverse", "order=sorted"]
    assert list(named([facts("one", "diverse", 0), facts("two", "shuffle", 0)])) == ["one", "two"]
    assert list(named([facts("x", "diverse", 0, "i1"), facts("y", "diverse", 7, "i2")])) == ["i1"]


def estimate(values: dict[str, float | None]) -> dict[str, dict[str, Estimate]]:
    return {run_id: {"loss": Estimate(value, "nats")} for run_id, value in values.items()}


def group(name: str, seeds: tuple[int, ...]) -> Group:
    return Group(name, tuple(f"{name}{i}" for i in range(len(seeds))), seeds)


def test_means_and_intervals_over_runs_are_students() -> None:
    values = [1.0, 1.4, 1.3, 1.9]
    found = estimate({f"a{i}": value for i, value in enumerate(values)} | {"b0": 2.0, "c0": math.nan, "c1": None})
    rows = {row["group"]: row for row in group_rows([group("a", (0, 1, 2, 3)), group("b", (0,)), group("c", (0, 1))], found)}
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert (rows["a"]["low"], rows["a"]["high"]) == pytest.approx((low, high)) and rows["a"]["num_runs"] == 4
    assert rows["a"]["mean"] == pytest.approx(np.mean(values)) and rows["a"]["sd"] == pytest.approx(np.std(values, ddof=1))
    assert (rows["b"]["mean"], rows["b"]["sd"], rows["b"]["low"], rows["b"]["high"]) == (2.0, None, None, None)
    assert "c" not in rows


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_groups_of_the_same_seeds_are_compared_seed_by_seed(order: tuple[int, ...]) -> None:
    a, shift = np.array([1.0, 2.0, 4.0]), np.array([0.1, 0.12, 0.15])
    found = estimate({f"a{i}": a[i] for i in range(3)} | {f"b{i}": (a + shift)[seed] for i, seed in enumerate(order)})
    (row,) = group_comparison_rows([group("a", (0, 1, 2)), group("b", order)], found)
    low, high = stats.t.interval(0.95, 2, shift.mean(), stats.sem(shift))
    assert row["paired"] and (row["ci_low"], row["ci_high"]) == pytest.approx((low, high)) and row["ci_low"] > 0
    assert row["difference"] == pytest.approx(shift.mean()) and (row["num_a"], row["num_b"]) == (3, 3)
    pooled = math.sqrt((np.var(a, ddof=1) + np.var(a + shift, ddof=1)) / 2)
    assert row["effect_size"] == pytest.approx(shift.mean() / pooled) and row["effect_kind"] == EFFECT_KIND


def test_groups_of_other_seeds_are_compared_as_welch_does() -> None:
    a, b = np.array([1.0, 1.2, 1.1, 1.6]), np.array([1.5, 2.4, 2.2])
    found = estimate({f"a{i}": v for i, v in enumerate(a)} | {f"b{i}": v for i, v in enumerate(b)} | {"c0": 3.0})
    groups = [group("a", (0, 1, 2, 3)), group("b", (0, 1, 2)), group("c", (0,))]
    rows = {(row["group_a"], row["group_b"]): row for row in group_comparison_rows(groups, found)}
    expected = stats.ttest_ind(b, a, equal_var=False).confidence_interval(0.95)
    assert not rows["a", "b"]["paired"] and rows["a", "b"]["ci_low"] == pytest.approx(expected.low)
    assert rows["a", "b"]["ci_high"] == pytest.approx(expected.high)
    pooled = math.sqrt((3 * np.var(a, ddof=1) + 2 * np.var(b, ddof=1)) / 5)
    assert rows["a", "b"]["effect_size"] == pytest.approx((b.mean() - a.mean()) / pooled)
    assert rows["a", "c"]["ci_low"] is None and rows["a", "c"]["difference"] == pytest.approx(3.0 - a.mean())
    assert group_comparison_rows([group("b", (0,)), group("c", (0,))], found) == []


def test_of_more_than_twelve_runs_each_is_compared_with_the_first() -> None:
    found = estimate({f"r{i:02d}": float(i) for i in range(13)})
    rows = comparison_rows(found)
    assert [(row["run_a"], row["run_b"]) for row in rows] == [("r00", f"r{i:02d}") for i in range(1, 13)]
    assert len(comparison_rows(dict(list(found.items())[:12]))) == 66


# Equal anchors


def test_windows_hold_the_steps_that_end_in_them() -> None:
    seen = np.array([10.0, 20, 30, 40, 50])
    assert [window(seen, point, 20) for point in (20, 30, 35, 50)] == [(0, 2), (1, 3), (1, 3), (3, 5)]
    assert window(seen, 50, 5) == (4, 5) and window(seen, 34, 2) == (2, 3) and window(seen, 5, 20) == (0, 0)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """Two runs of one loss as a function of anchors seen; the second one takes steps of half the size, and twice as many."""
    root = tmp_path_factory.mktemp("anchors")
    folders = []
    for name, num_steps, anchors in (("coarse", 300, 200), ("fine", 700, 100)):
        rng = np.random.default_rng(num_steps)

        def same_loss(rows: dict[str, list[dict[str, Any]]], anchors: int = anchors, rng: Any = rng) -> None:
            for number, step in enumerate(rows["steps"], start=1):
                noise = float(rng.normal(0, 0.05))
                step |= {"num_anchors": anchors, "loss": 2 + 3 * math.exp(-number * anchors / 40_000) + noise}
                step["expected_acceptance_length"] = 1 + number * anchors / 100_000

        folders.append(write_run(root / name, FakeRun(name=name, num_steps=num_steps, plants=(same_loss,))))
    path = folders[0] / "metrics" / "evals.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    base = {"kind": "training", "run_id": "coarse", "attempt": 0, "time": 1.77e9, "source": "all", "position": None}
    rows += [{**base, "metric": "acceptance_length", "step": step, "value": step / 100} for step in (100, 200)]
    rows += [{**base, "metric": "acceptance_length", "step": 150, "value": 9.0, "source": "long"}]
    write_jsonl(path, rows)
    analyze_runs(folders, root / "report", AnalyzeConfig())
    return root / "report", folders


def test_progress_is_on_one_grid_and_its_means_are_those_of_the_steps(measured: tuple[Path, list[Path]]) -> None:
    report, folders = measured
    rows = pq.read_table(report / "progress.parquet").to_pylist()
    points = {name: [row["num_anchors_seen"] for row in rows if row["run_id"] == name] for name in ("coarse", "fine")}
    assert points["coarse"] == [3000 * k for k in range(1, 21)] and points["fine"] == [*points["coarse"], 70_000]
    for folder, anchors in zip(folders, (200, 100), strict=True):
        losses = [json.loads(line)["loss"] for line in (folder / "metrics" / "steps.jsonl").open()]
        for row in (row for row in rows if row["run_id"] == folder.name):
            end = row["num_anchors_seen"] // anchors
            part = losses[max(0, end - 6000 // anchors) : end]
            assert row["step"] == end - 1 and row["loss"] == pytest.approx(np.mean(part))
            assert row["loss_adjusted"] == pytest.approx(row["loss"], rel=1e-3)  # the mix explains next to nothing
            if len(part) >= 20:
                half = (row["loss_high"] - row["loss_low"]) / 2
                assert row["loss_low"] < row["loss"] < row["loss_high"]
                assert 0.4 < half / (1.96 * 0.05 / math.sqrt(len(part))) < 3  # of 30 steps, Student's quantile is 1.5 times 1.96


def test_the_measured_acceptance_is_the_newest_one_up_to_the_point(measured: tuple[Path, list[Path]]) -> None:
    rows = pq.read_table(measured[0] / "progress.parquet").to_pylist()
    coarse = {row["num_anchors_seen"]: row["acceptance_length"] for row in rows if row["run_id"] == "coarse"}
    assert coarse[18_000] is None and coarse[21_000] == 1.0 and coarse[39_000] == 1.0 and coarse[42_000] == 2.0
    assert coarse[57_000] == 2.0 and coarse[60_000] == 2.4  # `trained`, at the end
    assert [row["acceptance_length"] for row in rows if row["run_id"] == "fine"][-2:] == [None, 2.4]


def test_runs_of_one_curve_do_not_differ_at_equal_anchors(measured: tuple[Path, list[Path]]) -> None:
    rows = {row["metric"]: row for row in pq.read_table(measured[0] / "comparisons.parquet").to_pylist()}
    loss, acceptance = rows["loss_at_equal_anchors"], rows["expected_acceptance_at_equal_anchors"]
    assert loss["ci_low"] < 0 < loss["ci_high"] and loss["effect_kind"] == "standardised difference"
    assert rows["final_loss"]["ci_high"] < 0  # the end of the fine one is 10,000 anchors later
    assert acceptance["value_a"] == pytest.approx(acceptance["value_b"], abs=2e-3) and acceptance["ci_low"] is not None
