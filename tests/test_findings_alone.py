"""What is said of a run does not depend on the runs beside it: alone, before or behind others, in one process or in several."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.analysis.compare import comparison_rows
from dflash_core.analysis.findings.detect import find_all
from dflash_core.analysis.findings.finding import Context, Finding
from dflash_core.analysis.intervals import named_rng
from dflash_core.analysis.many_runs import analyze_each
from dflash_core.analysis.one_run import RunAnalysis
from dflash_core.analysis.runs import Run, load_all_facts, load_run
from dflash_core.config import AnalyzeConfig
from tests import planted_curves as curves
from tests.fake_runs import FakeRun, write_run

CONFIG = AnalyzeConfig()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three runs with checkpoints, composition and spikes: every interval that there is, is there."""
    root = tmp_path_factory.mktemp("alone")
    plants = (curves.calm(0), curves.bucket_offset(0.5))
    fakes = [FakeRun(name=f"r{i}", num_steps=60, seed=i, order="shuffle", plants=plants) for i in range(3)]
    return [write_run(root / fake.name, fake) for fake in fakes]


def assert_equal(one: RunAnalysis, other: RunAnalysis) -> None:
    assert one.row == other.row and one.findings == other.findings and one.cleared == other.cleared
    assert all(one.tables[name].equals(other.tables[name]) for name in one.tables)
    for metric, estimate in one.estimates.items():
        resampled = other.estimates[metric].resampled
        assert (estimate.resampled is None) == (resampled is None), metric
        assert estimate.resampled is None or np.array_equal(estimate.resampled, resampled), metric


@given(order=st.permutations(range(3)), count=st.integers(1, 3))
@settings(max_examples=6, deadline=None)
def test_a_run_is_judged_alike_alone_and_beside_others(folders: list[Path], order: list[int], count: int) -> None:
    together = analyze_each(load_all_facts([folders[i] for i in order[:count]]), CONFIG, None, 1)
    last = order[count - 1]
    (alone,) = analyze_each(load_all_facts([folders[last]]), CONFIG, None, 1)
    assert alone.row["checkpoint_slowdown_low"] is not None and alone.findings
    assert_equal(together[count - 1], alone)


@pytest.mark.slow
def test_and_in_several_processes(folders: list[Path]) -> None:
    one, several = (analyze_each(load_all_facts(folders), CONFIG, None, count) for count in (1, 2))
    for here, there in zip(one, several, strict=True):
        assert_equal(here, there)


def test_two_runs_are_compared_alike_whoever_is_beside_them(folders: list[Path]) -> None:
    def compared(chosen: list[Path]) -> dict[str, tuple[float, float]]:
        runs = analyze_each(load_all_facts(chosen), CONFIG, None, 1)
        rows = comparison_rows({run.run_id: run.estimates for run in runs})
        wanted = [row for row in rows if {row["run_a"], row["run_b"]} == {"r0", "r1"}]
        return {row["metric"]: (row["ci_low"], row["ci_high"]) for row in wanted}

    two, three = compared(folders[:2]), compared([folders[2], *folders[:2]])
    assert two == three and any(low is not None for low, _ in two.values())


def test_a_detector_draws_alike_whichever_others_run(folders: list[Path]) -> None:
    def one(run: Run, context: Context) -> list[Finding]:
        drawn.append(float(context.rng.random()))
        return []

    def two(run: Run, context: Context) -> list[Finding]:
        drawn.append(float(context.rng.random()))
        return []

    drawn: list[float] = []
    run, rng = load_run(folders[0]), np.random.default_rng(5)
    find_all(run, Context(CONFIG, rng), (one, two))
    rng.random(10)
    find_all(run, Context(CONFIG, rng), (two, one))
    assert drawn[0] == drawn[3] != drawn[1] == drawn[2]


def test_named_streams_differ_by_name_by_path_and_by_seed() -> None:
    root = np.random.default_rng(1)
    found = {
        float(rng.random())
        for rng in (
            named_rng(root, "a"),
            named_rng(root, "b"),
            named_rng(named_rng(root, "a"), "b"),
            named_rng(named_rng(root, "b"), "a"),
            named_rng(np.random.default_rng(2), "a"),
        )
    }
    assert len(found) == 5
    assert named_rng(root, "a").random() == named_rng(np.random.default_rng(1), "a").random()
