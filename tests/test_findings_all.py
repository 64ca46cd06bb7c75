"""Every detector over every planted cause: what was planted is found, with its cause, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from dflash_core.analysis.findings.detect import find_all
from dflash_core.analysis.findings.finding import Context, Finding
from dflash_core.analysis.runs import Run
from dflash_core.config import AnalyzeConfig
from tests import planted_curves as curves
from tests.planted_queues import Pipeline, made

BALANCED = Pipeline()


Rows = list[dict[str, Any]]
Check = Callable[[Run, Finding, Rows], bool]


@dataclass(frozen=True)
class Expected:
    """One finding: its kind, what its evidence must say (a value, or what must hold of it), and what must hold of the rows
    that it says to look at, which a query over the table that it names gives."""

    kind: str
    rows: Check
    evidence: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """What is planted, and the findings that it must give, each once.

    An order that drives the loss is told twice by its nature: `batch_order` names the fault in the data, and
    `loss_composition` what it does to the curve; where the gradient spikes in bucket runs, `spikes_in_bucket_runs` too.
    """

    expected: tuple[Expected, ...] = ()
    planted: tuple[curves.Plant, ...] = ()
    pipeline: Pipeline = BALANCED
    order: str = "diverse"
    num_steps: int = 160
    batches_per_step: int = 4


def is_the_longest_run(run: Run, finding: Finding, rows: Rows) -> bool:
    """All batches of one bucket, one behind the other, as many as the finding says."""
    numbers = [row["seq_no"] for row in rows]
    return (
        {row["bucket"] for row in rows} == {finding.evidence["bucket"]}
        and numbers == list(range(numbers[0], numbers[0] + int(finding.value)))
        and set(finding.at_steps) == {row["step"] for row in rows[: 4 * 300]}
    )


def hold_the_dear_bucket(run: Run, finding: Finding, rows: Rows) -> bool:
    """All batches of the bucket that was made to lose more are among them, and not those of all others."""
    dear = [row for row in rows if row["bucket"] == 5]
    return len(dear) == int((run.buckets() == 5).sum()) and len({row["bucket"] for row in rows}) == 2 < run.num_buckets


def are_spikes_in_runs_of_four(run: Run, finding: Finding, rows: Rows) -> bool:
    usual = float(np.median(run.steps["grad_norm"].to_numpy()))
    return all(row["grad_norm"] > 3 * usual and row["bucket_counts"][4] == sum(row["bucket_counts"]) for row in rows)


def starts_at(planted: Callable[[Run], set[int]]) -> Check:
    """The steps marked are planted ones, three of five of these at least, and the rows are those around them."""

    def check(run: Run, finding: Finding, rows: Rows) -> bool:
        truth = planted(run)
        near = [{step for step in truth if abs(step - marked) <= 1} for marked in finding.at_steps]
        found = set().union(*near)
        around = all(min(abs(row["step"] - step) for step in found) <= 5 for row in rows)
        return all(near) and len(found) >= 0.6 * len(truth) and around and found <= {row["step"] for row in rows}

    return check


def begun_checkpoints(run: Run) -> set[int]:
    events = run.events.to_pylist()
    return {event["step"] for event in events if event["kind"] == "checkpoint_begin" and event["step"] < len(run.steps)}


def epoch_starts(run: Run) -> set[int]:
    epoch = run.steps["epoch"].to_numpy()
    return set((np.flatnonzero(np.diff(epoch)) + 1).tolist())


def wait(name: str, least: float) -> Check:
    """In the rows' own steps, waiting takes at least this share of the time."""

    def check(run: Run, finding: Finding, rows: Rows) -> bool:
        steps = {row["step"] for row in rows}
        of_them = [row for row in run.steps.to_pylist() if row["step"] in steps]
        share = sum(row[name] for row in of_them) / sum(row["step_s"] for row in of_them)
        return len(steps) > len(run.steps) / 3 and share >= least

    return check


def show_the_counts(run: Run, finding: Finding, rows: Rows) -> bool:
    counts = np.bincount([row["target"] for row in rows])
    return counts.tolist() == finding.evidence["batches_per_target"] and len(rows) == len(run.batches)


def begin_where_planted(first: int, early: int = 0, late: int = 0) -> Check:
    """The rows hold the first step marked, which is the first planted one, or so many steps before or behind it."""
    return lambda run, finding, rows: (
        first - early <= finding.at_steps[0] <= first + late and finding.at_steps[0] in {row["step"] for row in rows}
    )


def batch_order(bucket: int = 5, looks_like: str = "shuffle") -> Expected:
    return Expected("batch_order", is_the_longest_run, {"bucket": bucket, "looks_like": looks_like})


def resets(cause: str, planted: Callable[[Run], set[int]], **evidence: object) -> Expected:
    return Expected("resets", starts_at(planted), {"cause": cause, **evidence})


def offsets_name_bucket_five(offsets: object) -> bool:
    """It was given half a nat more than the others."""
    assert isinstance(offsets, dict)
    return all(0.3 < offsets["5"] - offset < 0.7 for bucket, offset in offsets.items() if bucket != "5")


COMPOSITION = Expected("loss_composition", hold_the_dear_bucket, {"offset_nats_by_bucket": offsets_name_bucket_five})
SPIKES = Expected("spikes_in_bucket_runs", are_spikes_in_runs_of_four, {"bucket": 4})


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
    "order": Case((batch_order(), COMPOSITION), (curves.bucket_offset(0.5),), order="shuffle"),
    "order with spikes": Case(
        (batch_order(4, "clustered"), COMPOSITION, SPIKES),
        (curves.clustered(12, 10, bucket=4), curves.bucket_offset(0.5), curves.spikes(0.5, only_in_runs_of=4)),
        order="shuffle",
        num_steps=360,
    ),
    # Where the last steps are all of the bucket that loses most, the loss ends higher: that is no divergence.
    "order in groups": Case(
        (batch_order(looks_like="clustered"), COMPOSITION), (curves.bucket_offset(0.5),), order="grouped", num_steps=240
    ),
    "sorted": Case((batch_order(looks_like="clustered"),), (curves.bucket_offset(0.5),), order="sorted", num_steps=401),
    "climb in groups": Case(
        (
            Expected("divergence", begin_where_planted(171, 6, 20), {"num_exploded": 0, "num_not_finite_or_skipped": 0}),
            batch_order(looks_like="clustered"),
            COMPOSITION,
        ),
        (curves.bucket_offset(0.5), curves.climb(170, 0.03)),
        order="grouped",
        num_steps=240,
    ),
    "checkpoints": Case(
        (resets("checkpoints", begun_checkpoints),), (curves.checkpoints_every(32), AT_CHECKPOINTS), num_steps=240
    ),
    "accuracy at checkpoints": Case(
        (resets("checkpoints", begun_checkpoints, num_in_loss=0),),
        (curves.checkpoints_every(25), accuracy_falls(curves.at_checkpoints)),
        num_steps=200,
    ),
    "epochs": Case(
        (resets("epoch_starts", epoch_starts),),
        (curves.epochs_of(48), curves.fall_back(curves.at_epochs, 0.6, 4.0)),
        num_steps=240,
    ),
    "target": Case(
        (
            Expected(
                "starved_by_target",
                wait("target_wait_s", 0.4),
                {"cell": 0, "targets_that_suffice": 4, "target_s_per_batch": pytest.approx(0.4, rel=0.1)},
            ),
        ),
        pipeline=replace(BALANCED, target_s=0.4),
        num_steps=100,
    ),
    "drafter": Case(
        (
            Expected(
                "starved_by_drafter",
                wait("data_wait_s", 0.5),
                {"cell": 0, "drafter_wait_share": lambda share: share < 0.05, "drafter_s_per_batch": pytest.approx(0.1, rel=0.1)},
            ),
        ),
        pipeline=Pipeline(targets=8, target_s=0.3),
        num_steps=100,
        batches_per_step=12,
    ),
    "loader": Case(
        (
            Expected(
                "starved_by_loader",
                wait("data_wait_s", 0.4),
                {"cell": 0, "cause": "loading", "load_s": pytest.approx(0.8, rel=0.1)},
            ),
        ),
        pipeline=replace(BALANCED, load_s=0.8),
        num_steps=100,
    ),
    "dispatch": Case(
        (
            Expected(
                "unequal_dispatch",
                show_the_counts,
                {
                    "cause": "private counters",
                    "dispatch": "per_worker",
                    "cell": 0,
                    "batches_per_target": lambda counts: counts[0] > 1.2 * max(counts[1:]),
                },
            ),
        ),
        pipeline=Pipeline(targets=3, target_s=0.25, skew=0.15, dispatch="per_worker"),
        num_steps=100,
    ),
    "explosion": Case(
        (Expected("divergence", begin_where_planted(110), {"first_step": 110, "num_exploded": 5}),), (curves.explosion(110),)
    ),
    "none": Case(),
}


def run_of(folder: Path, case: Case, seed: int) -> Run:
    plants = (curves.calm(seed, memory=0.3), *case.planted)
    return made(folder, case.pipeline, seed, case.num_steps, case.order, case.batches_per_step, plants)


def all_findings(run: Run, seed: int = 0) -> list[Finding]:
    return find_all(run, Context(AnalyzeConfig(), np.random.default_rng(seed)))


def rows_to_look_at(run: Run, finding: Finding) -> Rows:
    """What the query gives that a finding tells to make."""
    with duckdb.connect() as database:
        database.register("t", getattr(run, finding.table))
        key = "seq_no" if finding.table == "batches" else "step"
        found = database.sql(f"SELECT * FROM t WHERE {finding.rows} ORDER BY {key}").to_arrow_table()
    return found.to_pylist()


def compare(case: Case, run: Run, found: list[Finding]) -> None:
    """Every expected finding once, and none besides."""
    told = [one.title for one in found]
    assert sorted(one.kind for one in found) == sorted(one.kind for one in case.expected), told
    by_kind = {one.kind: one for one in found}
    for expected in case.expected:
        finding = by_kind[expected.kind]
        assert finding.run_id == run.run_id
        for key, value in expected.evidence.items():
            said = finding.evidence[key]
            assert value(said) if callable(value) else said == value, (key, said, finding.text)
        rows = rows_to_look_at(run, finding)
        assert rows and expected.rows(run, finding, rows), (finding.kind, finding.rows, finding.at_steps)


def check(folder: Path, name: str, seed: int) -> None:
    run = run_of(folder / f"{name}-{seed}", CASES[name], seed)
    compare(CASES[name], run, all_findings(run, seed))


def test_a_finding_told_twice_or_of_another_cause_or_place_is_noticed(tmp_path: Path) -> None:
    case = CASES["checkpoints"]
    run = run_of(tmp_path / "run", case, 0)
    (one,) = all_findings(run)
    compare(case, run, [one])
    for wrong in (
        [one, one],
        [],
        [replace(one, evidence={**one.evidence, "cause": "epoch_starts"})],
        [replace(one, rows="step BETWEEN 60 AND 70")],
        [replace(one, run_id="another")],
    ):
        with pytest.raises(AssertionError):
            compare(case, run, wrong)


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
