"""The detectors about queues: what was planted is found, nothing else is said, and nothing is said about healthy runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from dflash_core.analysis.findings.finding import Context, Finding
from dflash_core.analysis.findings.queues import QUEUE_DETECTORS
from dflash_core.analysis.findings.topology import Costs, Layout, best_layout, targets_that_suffice
from dflash_core.analysis.findings.waits import waits
from dflash_core.analysis.runs import Run, load_run
from dflash_core.bucketing import plan_epoch
from dflash_core.config import AnalyzeConfig
from tests.fake_runs import FakeRun, write_dataset, write_run
from tests.planted_queues import Pipeline, Rows, made

BALANCED = Pipeline()


def found(run: Run, bins: pd.DataFrame | None = None, seed: int = 0) -> list[Finding]:
    context = Context(AnalyzeConfig(), default_rng(seed), bins)
    return [finding for detector in QUEUE_DETECTORS for finding in detector(run, context)]


def the_only(run: Run, kind: str, bins: pd.DataFrame | None = None) -> Finding:
    findings = found(run, bins)
    assert [finding.kind for finding in findings] == [kind], [finding.title for finding in findings]
    check(findings[0])
    return findings[0]


def check(finding: Finding) -> None:
    """What every finding must be."""
    json.dumps(finding.evidence, allow_nan=False)
    assert finding.value >= finding.threshold
    assert (finding.low is None) == (finding.high is None)
    assert finding.low is None or finding.low <= finding.value <= finding.high
    assert all("nan" not in text.lower() for text in (finding.title, finding.text, finding.advice))
    assert finding.advice.endswith(".") and finding.text.endswith(".") and len(finding.title) < 110


# Starvation


@pytest.mark.parametrize("cells", [1, 2])
def test_slow_targets_are_named_with_the_number_that_suffices(tmp_path: Path, cells: int) -> None:
    finding = the_only(made(tmp_path / "run", replace(BALANCED, cells=cells, target_s=0.4)), "starved_by_target")
    assert finding.evidence["targets_that_suffice"] == 4 and "topology.targets_per_cell: 4" in finding.advice
    assert 40 < finding.value < 55 and finding.strength == "moderate"  # no other arrangement of these cards is better
    assert finding.evidence["supply"] == pytest.approx(2 * 0.1 / 0.4, rel=0.15)


def test_another_cell_than_the_first_is_named(tmp_path: Path) -> None:
    """The steps tell of cell 0, which waits in the join: the snapshots tell that it is for cell 1, and what for."""
    finding = the_only(made(tmp_path / "run", replace(BALANCED, cells=2, slow_cell=2.5)), "starved_by_target")
    assert finding.evidence["cell"] == 1 and finding.text.startswith("In cell 1: The drafter waits")
    assert finding.advice.startswith("Look at the devices of cell 1, whose targets take 2.4 times as long")
    assert finding.evidence["target_s_per_batch"] == pytest.approx(2.5 * 0.18, rel=0.1)


def test_too_many_targets_are_named_with_a_better_use_of_the_same_cards(tmp_path: Path) -> None:
    run = made(tmp_path / "run", Pipeline(cells=1, targets=8, target_s=0.3), batches_per_step=12)
    finding = the_only(run, "starved_by_drafter")
    assert "Set topology.cells: 3, topology.targets_per_cell: 2, which uses the same 9 cards 2.0 times better" in finding.advice
    assert finding.strength == "strong" and "frees 5 cards" in finding.advice


def test_slow_loading_is_named_and_not_the_targets_behind_it(tmp_path: Path) -> None:
    finding = the_only(made(tmp_path / "run", replace(BALANCED, load_s=0.8)), "starved_by_loader")
    assert finding.evidence["cause"] == "loading" and "prefetch.num_workers from 4" in finding.advice
    workers = finding.evidence["enough_workers"]  # which are then enough
    assert found(made(tmp_path / "mended", replace(BALANCED, load_s=0.8, num_workers=workers))) == []


@pytest.mark.parametrize(("limits", "key"), [({"in_flight": 2}, "prefetch.max_bytes")])
def test_a_limit_that_is_too_small_is_named_and_not_the_loading(tmp_path: Path, limits: dict[str, int], key: str) -> None:
    finding = the_only(made(tmp_path / "run", replace(BALANCED, **limits)), "starved_by_loader")
    assert finding.evidence["cause"] == key and key in finding.advice and "Loading is not the reason" in finding.text


def test_waiting_for_a_shared_device_is_nobodys_fault(tmp_path: Path) -> None:
    slow = replace(BALANCED, target_s=0.4)
    assert found(made(tmp_path / "cpu", replace(slow, devices="cpu", num_cpus=2))) == []
    assert found(made(tmp_path / "card", replace(slow, colocated=True))) == []
    idle = Pipeline(targets=6, target_s=0.1, devices="cpu", num_cpus=2)
    assert found(made(tmp_path / "idle", idle)) == []
    # With a core for each of them, it is.
    the_only(made(tmp_path / "cores", replace(slow, devices="cpu", num_cpus=64)), "starved_by_target")


def test_a_card_that_computes_while_its_thread_waits_does_not_starve(tmp_path: Path) -> None:
    def launched_ahead(rows: Rows) -> None:
        for batch in rows["batches"]:
            batch["draft_busy_s"] = rows["steps"][batch["step"]]["step_s"] / 4.3

    assert found(made(tmp_path / "run", replace(BALANCED, target_s=0.4), plants=(launched_ahead,))) == []


def test_the_end_at_which_all_is_dispatched_does_not_count(tmp_path: Path) -> None:
    """Half of the run is in flight at once; targets are done long before the drafter, and nobody is to blame."""
    run = made(tmp_path / "run", Pipeline(targets=3, target_s=0.24, in_flight=200, queue_batches=200), num_steps=100)
    assert np.mean(run.steps["data_wait_s"].to_numpy()[-30:]) > 0.1 and found(run) == []


def test_nothing_where_nothing_says_on_which_devices_it_ran(tmp_path: Path) -> None:
    run = made(tmp_path / "run", replace(BALANCED, target_s=0.4))
    assert found(replace(run, provenance={})) == []


@pytest.mark.parametrize(
    "pipeline",
    [
        replace(BALANCED, target_s=0.205),  # the drafter waits for some 10 %
        Pipeline(targets=1, target_s=0.085, num_workers=1, load_s=0.095),
        Pipeline(targets=3, target_s=0.25),  # targets idle for a fifth, and no arrangement of four cards is better
    ],
)
def test_effects_below_the_threshold_are_not_printed(tmp_path: Path, pipeline: Pipeline) -> None:
    assert found(made(tmp_path / "run", pipeline)) == []


def test_short_runs_and_missing_columns_say_nothing(tmp_path: Path) -> None:
    run = made(tmp_path / "short", replace(BALANCED, target_s=0.4), num_steps=18)
    assert found(run) == []
    run = made(tmp_path / "run", replace(BALANCED, target_s=0.4))
    for table, names in (("steps", ("step_s", "target_wait_s", "forward_s")), ("batches", ("target_forward_s", "target"))):
        for name in names:
            columns = getattr(run, table)
            nulls = pa.nulls(len(columns), columns.schema.field(name).type)
            without = replace(run, **{table: columns.set_column(columns.column_names.index(name), name, nulls)})
            assert [f.kind for f in found(without)] in ([], ["starved_by_target"]), name
    assert [f.kind for f in found(replace(run, stats=run.stats.slice(0, 0)))] == ["starved_by_target"]
    odd = run.stats.set_column(
        run.stats.column_names.index("queue_get_wait_s"), "queue_get_wait_s", pa.array(["?"] * len(run.stats))
    )
    assert [f.kind for f in found(replace(run, stats=odd))] == ["starved_by_target"]


# Topology arithmetic


@given(
    target=st.floats(0.01, 2),
    draft=st.floats(0.01, 2),
    step=st.floats(0, 1),
    batches=st.integers(1, 64),
    cards=st.integers(2, 32),
)
@settings(max_examples=60, deadline=None)
def test_the_best_layout_is_the_best_of_all(target: float, draft: float, step: float, batches: int, cards: int) -> None:
    costs = Costs(target, draft, step, batches)
    now = Layout(1, cards - 1)
    best = best_layout(costs, cards, colocated=False, now=now)
    assert best is not None and best.layout.cards <= cards and best.layout.cells <= batches
    every = [Layout(c, t) for c in range(1, cards) for t in range(1, cards) if c * (t + 1) <= cards and c <= batches]
    assert costs.step_s(best.layout) <= min(map(costs.step_s, every)) + 1e-8
    assert best.gain >= 1 - 1e-6
    enough = targets_that_suffice(costs, 1)
    assert costs.supply(1, enough) >= 1 - 1e-6 and (enough == 1 or costs.supply(1, enough - 1) < 1)


# Dispatch


def historic(rows: Rows) -> None:
    """The depths of the incident: six targets, each loading thread with a counter of its own."""
    rng = default_rng(7)
    for row in rows["stats"]:
        row["prefetch_depths"] = np.clip(np.array([43, 50, 28, 31, 25, 39]) + rng.integers(-2, 3, 6), 0, 50).tolist()


def test_the_depths_of_the_incident(tmp_path: Path) -> None:
    pipeline = Pipeline(targets=6, target_s=0.58, dispatch="per_worker", queue_batches=50, in_flight=300)
    finding = the_only(made(tmp_path / "run", pipeline, plants=(historic,)), "unequal_dispatch")
    assert finding.evidence["cause"] == "private counters" and "round_robin" in finding.advice
    assert finding.value == pytest.approx(24, abs=2) and "43, 49, 28, 31, 25, 39 of at most 50" in finding.text
    assert "target 1 has" in finding.title and "target 4" in finding.title


def test_unequal_counts(tmp_path: Path) -> None:
    pipeline = Pipeline(targets=3, target_s=0.25, skew=0.15, dispatch="per_worker")
    finding = the_only(made(tmp_path / "run", pipeline), "unequal_dispatch")
    counts = finding.evidence["batches_per_target"]
    assert sum(counts) == 480 and max(counts) == counts[0] and str(counts[0]) in finding.title
    assert "head-of-line" in finding.text and "prefetch.dispatch: per_worker" in finding.text


def test_one_slow_target_under_round_robin_and_not_under_least_loaded(tmp_path: Path) -> None:
    pipeline = Pipeline(targets=3, target_s=0.25, slow=2.5)
    finding = the_only(made(tmp_path / "run", pipeline), "unequal_dispatch")
    assert finding.evidence["cause"] == "slow target" and "device of target 0" in finding.advice
    assert "head-of-line" in finding.text and finding.strength == "strong"
    # It evens out what is queued: counts differ by design, and what is lost is the slow card's.
    run = made(tmp_path / "even", replace(pipeline, dispatch="least_loaded", target_s=0.2))
    counts = np.bincount(run.batches["target"].to_numpy())
    assert counts[0] < 0.7 * counts[1] and found(run) == []


@pytest.mark.parametrize("policy", ["per_worker", "per_worker_skipping"])
def test_counts_a_little_apart_are_the_work_of_private_counters(tmp_path: Path, policy: str) -> None:
    """They harm nobody, so without private counters they are no finding; with them they are what these do."""
    run = made(tmp_path / "run", Pipeline(targets=3, target_s=0.25, skew=0.02, dispatch=policy))
    counts = np.bincount(run.batches["target"].to_numpy())
    assert 1 < np.ptp(counts) < 0.1 * counts.mean()
    finding = the_only(run, "unequal_dispatch")
    assert finding.strength == "weak" and "called weak: that is what is lost by it, the cause is certain" in finding.text
    assert f"The busiest target has {counts.max() / counts.mean() - 1:.0%} more than an equal part" in finding.text
    assert f"prefetch.dispatch: {policy}" in finding.text and "at most 1" in finding.text
    shared = {**run.config, "prefetch": {**run.config["prefetch"], "dispatch": "round_robin"}}
    assert found(replace(run, config=shared)) == []
    # Three threads take turns by chance: counts that differ by 1 need no private counters.
    assert found(made(tmp_path / "even", Pipeline(targets=3, target_s=0.25, dispatch=policy))) == []


def test_depths_that_wander_without_idle_targets_are_not_unequal(tmp_path: Path) -> None:
    """Two equal targets that are never idle: one queue is full for good, and nothing is lost by it."""
    run = made(tmp_path / "run", replace(BALANCED, target_s=0.4))
    depths = np.array(run.stats["prefetch_depths"].to_pylist())[10:-10].mean(axis=0)
    assert np.ptp(depths) > 3
    the_only(run, "starved_by_target")


# Order


def test_plain_shuffling_is_named_with_its_share_and_what_reaches_the_steps(tmp_path: Path) -> None:
    finding = the_only(made(tmp_path / "run", BALANCED, order="shuffle"), "batch_order")
    assert finding.evidence["looks_like"] == "shuffle" and "plain shuffling" in finding.text and finding.strength == "strong"
    assert (
        "52% of its batches" in finding.text
        and finding.text.startswith("In epoch ")
        and "bucketing.order: diverse instead of shuffle" in finding.advice
    )
    low, high = finding.evidence["shuffled_longest_run"]
    assert low <= finding.value <= high and f"In a random order one epoch of them has {low} to {high}" in finding.text


def test_in_long_steps_less_of_it_is_left(tmp_path: Path) -> None:
    finding = the_only(made(tmp_path / "run", BALANCED, order="shuffle", num_steps=60, batches_per_step=32), "batch_order")
    assert finding.strength == "moderate"
    assert "The needless part, 8 points, is why this is called moderate (moderate from 5, strong from 15 on)" in finding.text


@pytest.mark.parametrize("order", ["grouped", "sorted"])
def test_worse_than_shuffling(tmp_path: Path, order: str) -> None:
    run = made(tmp_path / "run", BALANCED, order=order)
    finding = the_only(run, "batch_order")
    assert finding.evidence["looks_like"] == "clustered" and "cluster more than in a random order" in finding.text
    first, last = (int(word) for word in finding.rows.split() if word.isdigit())
    longest = run.buckets()[first : last + 1]
    assert len(longest) == finding.value and len(set(longest.tolist())) == 1


def of_order(bucket: np.ndarray, epoch: np.ndarray, per_step: int = 4) -> Run:
    """A run of which only the order of its batches is known."""
    n = len(bucket)
    columns = {"seq_no": np.arange(n), "step": np.arange(n) // per_step, "epoch": epoch, "bucket": bucket}
    lengths = 100.0 * (bucket + 1) + default_rng(0).uniform(0, 50, n)
    batches = pa.table({**columns, "mean_seq_len": lengths, "num_tokens": lengths.astype(int)})
    nothing = pa.table({"step": pa.array([], pa.int64())})
    return Run(
        Path(), "run", "run", {}, {}, {}, 1, pa.table({"step": np.arange(-(-n // per_step))}), batches, nothing, nothing, nothing
    )


@given(seed=st.integers(0, 10_000), buckets=st.integers(1, 8), cells=st.integers(1, 2), per_step=st.integers(1, 8))
@settings(max_examples=25, deadline=None)
def test_the_planner_s_diverse_order_never_triggers(seed: int, buckets: int, cells: int, per_step: int) -> None:
    """Any lengths, several epochs, also the first part of the last one."""
    rng = default_rng(seed)
    lengths = np.clip(rng.lognormal(5, rng.uniform(0.1, 1.2), int(rng.integers(50, 400))), 4, 1000).astype(int)
    edges = tuple(np.unique(np.quantile(lengths, np.arange(1, buckets + 1) / buckets, method="higher")).astype(int).tolist())
    per_step *= cells
    plans = [
        plan_epoch(lengths, edges, token_budget=1000, batches_per_step=per_step, num_cells=cells, epoch=epoch, seed=seed)
        for epoch in range(3)
    ]
    bucket = np.concatenate([plan.bucket for plan in plans]).astype(np.int64)
    epoch = np.repeat(np.arange(3), [len(plan.bucket) for plan in plans])
    end = len(bucket) - int(rng.integers(0, len(plans[-1].bucket)))
    assert found(of_order(bucket[:end], epoch[:end], per_step)) == []


def test_runs_that_join_where_epochs_meet_and_one_batch_too_many_are_no_finding() -> None:
    base = np.tile([0, 1, 0, 2], 20)
    bucket, epoch = np.concatenate([base, [0, 0], [0, 0], base]), np.repeat([0, 1], len(base) + 2)
    assert found(of_order(bucket, epoch)) == []
    longer = np.concatenate([base, [0, 0, 0], base])  # a run of 3 where 2 are possible... and one more is let pass
    assert found(of_order(longer, np.zeros(len(longer), dtype=int))) != []
    shorter = np.concatenate([base, [0, 0], base])
    assert found(of_order(shorter, np.zeros(len(shorter), dtype=int))) == []


def test_neighbours_of_like_length_are_named_though_runs_are_short() -> None:
    """Long and short halves of an epoch, well mixed in themselves."""
    bucket = np.concatenate([np.tile([0, 1], 60), np.tile([2, 3], 60)])
    (finding,) = found(of_order(bucket, np.zeros(240, dtype=int)))
    assert finding.kind == "batch_order" and "alike in length" in finding.text and finding.measure.startswith("lag-1")
    check(finding)


# Padding


def dataset(folder: Path) -> tuple[pd.DataFrame, np.ndarray]:
    """Length bins, and the lengths behind them."""
    write_dataset(folder)
    lengths = np.clip(default_rng(0).lognormal(5.6, 0.7, 5000), 8, 512).astype(int)
    return pd.read_parquet(folder / "length_bins.parquet"), lengths


def cut_at(edges: tuple[int, ...], lengths: np.ndarray, token_budget: int = 2048, **settings_: Any) -> Run:
    """A run whose batches the planner made with these edges."""
    plan = plan_epoch(lengths, edges, token_budget=token_budget, batches_per_step=4, **settings_)
    n = len(plan.bucket)
    names = ("num_sequences", "num_tokens", "num_padded_tokens")
    columns = {name: np.asarray(getattr(plan, name)).astype(np.int64) for name in names}
    longest = columns["num_padded_tokens"] // columns["num_sequences"]
    batches = pa.table(
        {**columns, "seq_no": np.arange(n), "step": plan.step, "epoch": np.zeros(n, int), "bucket": plan.bucket.astype(np.int64),
         "mean_seq_len": np.asarray(plan.mean_length, dtype=float), "max_seq_len": longest}
    )  # fmt: skip
    run = of_order(plan.bucket.astype(np.int64), np.zeros(n, int))
    config = {"bucketing": {"token_budget": token_budget, "boundaries": list(edges), "num_buckets": len(edges), "sort_window": 0}}
    return replace(run, config=config, batches=batches)


def efficiency(run: Run) -> float:
    return float(np.sum(run.batches["num_tokens"].to_numpy()) / np.sum(run.batches["num_padded_tokens"].to_numpy()))


@pytest.mark.parametrize("known", [True, False])
def test_wasteful_boundaries_are_named_with_better_ones_that_keep_what_they_promise(tmp_path: Path, known: bool) -> None:
    bins, lengths = dataset(tmp_path / "data")
    run = cut_at((448, 464, 480, 496, 504, 512), lengths)
    finding = the_only(run, "padding", bins if known else None)
    assert finding.threshold == (4 if known else 8) and "bucketing.boundaries: min_padding" in finding.advice
    then = efficiency(cut_at(tuple(finding.evidence["better_edges"]), lengths))
    assert 100 * (then - efficiency(run)) == pytest.approx(finding.value, abs=2.0 if known else 4.0)


def test_sorted_windows_are_proposed_where_boundaries_are_good_and_keep_what_they_promise() -> None:
    lengths = np.clip(default_rng(0).lognormal(6.5, 1.0, 5000), 16, 8192).astype(int)
    edges = (354, 628, 1016, 1633, 2723, 8192)
    run = cut_at(edges, lengths, token_budget=8192)
    run.config["bucketing"]["boundaries"] = "min_padding"  # type: ignore[index]
    width = 16
    bins = pd.DataFrame({"upper": width * (lengths // width + 1), "num_sequences": 1, "num_tokens": lengths})
    bins = bins.groupby("upper", as_index=False).sum()
    finding = the_only(run, "padding", bins)
    window = finding.evidence["sort_window"]
    then = cut_at(tuple(finding.evidence["better_edges"]), lengths, sort_window=window, token_budget=8192)
    assert 100 * (efficiency(then) - efficiency(run)) == pytest.approx(finding.value, abs=2.0)


def test_good_boundaries_packed_rows_and_foreign_bins_say_nothing(tmp_path: Path) -> None:
    bins, lengths = dataset(tmp_path / "data")
    good = cut_at((136, 199, 256, 338, 409, 512), lengths)
    assert found(good, bins) == found(good) == []
    bad = cut_at((448, 464, 480, 496, 504, 512), lengths)
    packed = {"bucketing": {**bad.config["bucketing"], "strategy": "packed"}}
    assert found(replace(bad, config=packed), bins) == []
    assert found(bad, bins.assign(num_tokens=bins["num_tokens"] * 50)) == []
    assert found(bad, bins.iloc[:0]) == []


# All of them


@pytest.mark.parametrize("num_cells", [1, 2])
def test_the_common_fake_run_is_healthy(tmp_path: Path, num_cells: int) -> None:
    data = write_dataset(tmp_path / "data")
    bins = pd.read_parquet(data / "length_bins.parquet")
    run = load_run(write_run(tmp_path / "run", FakeRun(num_cells=num_cells), data))
    assert found(run, bins) == found(run) == []
    bare = load_run(write_run(tmp_path / "bare", FakeRun(num_cells=num_cells, stats=False, evals=False)))
    assert found(bare) == []


@pytest.mark.parametrize(("targets", "cells", "dispatch"), [(1, 1, "round_robin"), (2, 2, "round_robin"), (6, 1, "least_loaded")])
def test_healthy_runs_say_nothing(tmp_path: Path, targets: int, cells: int, dispatch: str) -> None:
    for seed, num_steps in ((1, 30), (2, 100)):
        pipeline = Pipeline(targets=targets, cells=cells, dispatch=dispatch, target_s=0.095 * targets)
        assert found(made(tmp_path / f"run{seed}", pipeline, seed, num_steps)) == []


@pytest.mark.slow
def test_false_alarms_are_rare(tmp_path: Path) -> None:
    alarms = []
    for seed in range(24):
        rng = default_rng(1000 + seed)
        targets, cells = int(rng.choice([1, 2, 6])), int(rng.choice([1, 2]))
        pipeline = Pipeline(
            targets=targets,
            cells=cells,
            target_s=0.1 * targets / rng.uniform(1.0, 1.14),
            jitter=float(rng.choice([0.02, 0.15, 0.3])),
            dispatch=str(rng.choice(["round_robin", "least_loaded"])),
        )
        run = made(tmp_path / f"run{seed}", pipeline, seed, 1000 if seed == 0 else int(rng.integers(30, 200)))
        alarms += [(seed, finding.title) for finding in found(run)]
    assert alarms == []


def test_the_table_of_waits_adds_up(tmp_path: Path) -> None:
    run = made(tmp_path / "run", replace(BALANCED, cells=2))
    rows = pd.DataFrame(waits(run))
    assert list(rows.columns) == ["run_id", "cell", "stage", "seconds", "share_of_time", "per_batch_s"]
    first = rows[rows["cell"] == 0].set_index("stage")
    drafter = first[first.index.str.startswith("drafter.")]
    assert drafter["seconds"].sum() == pytest.approx(sum(run.steps["step_s"].to_pylist()))
    assert drafter["share_of_time"].sum() == pytest.approx(1)
    target = first.loc[["target.forward", "target.idle"], "share_of_time"]
    assert target.sum() == pytest.approx(1, abs=0.05) and target.min() > 0.05
    assert first.loc["loader.load", "per_batch_s"] == pytest.approx(0.005, rel=0.1)
    assert set(rows[rows["cell"] == 1]["stage"]) >= {"target.forward", "drafter.wait", "feed.budget_wait"}
    bare = waits(load_run(write_run(tmp_path / "bare", FakeRun(stats=False))))
    assert {row["stage"] for row in bare} >= {"drafter.wait", "drafter.other", "loader.load"}
    assert all(np.isfinite(row["seconds"]) for row in bare)
