"""The figures that the curve detectors give besides findings, and odd runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.analysis.findings.curve_tools import (
    binomial_range,
    binomial_tail,
    moving_mean,
    ratio_interval,
    shifted_overlaps,
    trend,
    wilson_interval,
)
from dflash_core.analysis.findings.curves import CURVE_DETECTORS
from dflash_core.analysis.findings.divergence import explosions
from dflash_core.analysis.findings.finding import Context
from dflash_core.analysis.findings.jumps import recurrent_jumps, upward_jumps
from dflash_core.analysis.findings.loss_parts import (
    LossParts,
    bucket_shares,
    fit_composition,
    fit_loss,
    parts_of,
    without_mix,
)
from dflash_core.analysis.findings.positions import dead_slots
from dflash_core.analysis.findings.reset_causes import lr_changes
from dflash_core.analysis.findings.spikes import Runs, best_overlap, first_of_bursts, norm_by_position, positions
from dflash_core.analysis.reader import numbers
from dflash_core.analysis.runs import Run, load_run
from dflash_core.config import AnalyzeConfig
from tests import planted_curves as plants
from tests.fake_runs import FakeRun, write_run


def made(folder: Path, *planted: plants.Plant, **fake: object) -> Run:
    values = {"num_steps": 200, "batches_per_step": 2, "order": "shuffle", "stats": False, **fake}
    return load_run(write_run(folder, FakeRun(plants=(plants.calm(0, 0.3), *planted), **values)))


def loss_parts(run: Run, rng: np.random.Generator) -> LossParts | None:
    fit = fit_loss(run)
    return None if fit is None else parts_of(fit, rng)


def adjusted_loss(run: Run) -> np.ndarray:
    return without_mix(numbers(run.steps, "loss"), fit_loss(run))


def test_the_three_parts_add_up_and_the_adjusted_loss_is_what_was_there_before(tmp_path: Path) -> None:
    before = numbers(made(tmp_path / "plain").steps, "loss")
    run = made(tmp_path / "mixed", plants.bucket_offset(0.5))
    parts = loss_parts(run, np.random.default_rng(0))
    assert parts is not None
    assert parts.share_composition + parts.share_trend + parts.share_rest == pytest.approx(1)
    assert parts.share_low < parts.share_composition < parts.share_high
    assert parts.sd_composition == pytest.approx(0.5 * np.sqrt(0.52 * 0.48 / 2), rel=0.2)
    assert parts.sd_fluff == pytest.approx(np.hypot(parts.sd_composition, parts.sd_rest))
    adjusted = adjusted_loss(run)
    assert adjusted.shape == before.shape
    off = adjusted - before
    assert (off[20:] - off[20:].mean()).std() < 0.15 * parts.sd_composition
    # What a step of the run's mean mix would have lost.
    assert off[20:].mean() == pytest.approx(0.5 * 0.52, abs=0.05)


def test_where_the_mix_does_not_matter_the_adjusted_loss_is_the_loss(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    parts, loss = loss_parts(run, np.random.default_rng(0)), numbers(run.steps, "loss")
    assert parts is not None and parts.of_fluff < 0.05
    assert np.abs(adjusted_loss(run) - loss).max() < 0.03


def test_offsets_that_grow_while_the_draft_learns(tmp_path: Path) -> None:
    def growing(streams: plants.Streams) -> None:
        plants.bucket_offset(0.8)(streams)
        for row in streams["steps"]:
            share = row["bucket_counts"][5] / sum(row["bucket_counts"])
            row["loss"] -= 0.8 * share * np.exp(-row["step"] / 80)

    run = made(tmp_path / "run", growing, num_steps=400)
    parts = loss_parts(run, np.random.default_rng(0))
    assert parts is not None
    assert parts.offsets[5] - parts.offsets[4] == pytest.approx(0.8, abs=0.12)
    assert parts.of_fluff > 0.9


def test_many_buckets_and_few_steps_explain_nothing(tmp_path: Path) -> None:
    def spread(streams: plants.Streams) -> None:
        rng = np.random.default_rng(3)
        for batch in streams["batches"]:
            batch["bucket"] = int(rng.integers(0, 30))

    for seed in range(3):
        run = made(tmp_path / str(seed), spread, num_steps=60, seed=seed)
        parts = loss_parts(run, np.random.default_rng(0))
        assert parts is None or parts.of_fluff < 0.35


def test_shares_come_from_bucket_counts_where_batches_are_missing(tmp_path: Path) -> None:
    run = made(tmp_path / "run", num_steps=60)
    step = numbers(run.steps, "step")
    path = run.folder / "metrics" / "batches.jsonl"
    kept = [line for line in path.read_text().splitlines() if json.loads(line)["step"] != 7]
    path.write_text("\n".join(kept) + "\n")
    shares, whole = bucket_shares(load_run(run.folder), step), bucket_shares(run, step)
    np.testing.assert_allclose(shares, whole, atol=0.06)
    assert (shares[7] * 2 == np.round(shares[7] * 2)).all()


def test_too_short_to_split(tmp_path: Path) -> None:
    run = made(tmp_path / "run", num_steps=30)
    assert loss_parts(run, np.random.default_rng(0)) is None
    np.testing.assert_array_equal(adjusted_loss(run), numbers(run.steps, "loss"))


def test_norm_by_position(tmp_path: Path) -> None:
    def growing(streams: plants.Streams) -> None:
        position, last = 0, None
        for batch, row in zip(streams["batches"], streams["steps"], strict=True):
            position = position + 1 if batch["bucket"] == last else 1
            last = batch["bucket"]
            row["grad_norm"] = float(position)

    run = made(tmp_path / "run", growing, num_steps=400, batches_per_step=1)
    rows = [row for row in norm_by_position(run, np.random.default_rng(0)) if row["level"] == "batch"]
    assert [row["position"] for row in rows] == list(range(1, len(rows) + 1))
    assert sum(row["num_steps"] for row in rows) == 360
    for row in rows:
        assert row["grad_norm_mean"] == row["position"]
        assert (row["grad_norm_low"] is None) == (row["num_steps"] < 20)
        if row["loss_low"] is not None:
            assert row["loss_low"] < row["loss_mean"] < row["loss_high"]
    assert set(rows[0]) == {
        "run_id", "level", "position", "num_steps", "grad_norm_mean", "grad_norm_low", "grad_norm_high", "loss_mean", "loss_low",
        "loss_high",
    }  # fmt: skip


def test_positions_by_step_only_where_steps_hold_several_batches(tmp_path: Path) -> None:
    run = made(tmp_path / "run", plants.clustered(length=10, num_runs=6), order="diverse", num_steps=300)
    rows = norm_by_position(run, np.random.default_rng(0))
    assert {row["level"] for row in rows} == {"step"}
    assert max(row["position"] for row in rows) >= 10


BARE = ("run_id", "attempt", "time", "step", "loss")
ODD_STEPS = {
    "no norm": {"grad_norm": None},
    "all nan": {"loss": float("nan"), "grad_norm": float("nan")},
    "constant": {"loss": 1.0, "grad_norm": 1.0, "lr": 1e-3},
}
ODD_BATCHES = {"one bucket": {"bucket": 0}, "no weights": {"weight_sum": None, "loss_sum": None}}


def odd(kind: str) -> plants.Plant:
    def plant(streams: plants.Streams) -> None:
        for row in streams["steps"]:
            row |= {key: None for key in row if key not in BARE} if kind == "bare" else ODD_STEPS.get(kind, {})
        for batch in streams["batches"]:
            batch |= ODD_BATCHES.get(kind, {})
        if kind == "no events":
            streams["events"].clear()
        elif kind == "hole":
            streams["steps"][:] = [row for row in streams["steps"] if not 40 <= row["step"] < 60]

    return plant


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["no norm", "all nan", "bare", "constant", "one bucket", "no weights", "no events", "hole"])
def test_odd_runs_raise_nothing_and_get_no_false_finding(tmp_path: Path, kind: str) -> None:
    run = made(tmp_path / "run", odd(kind), num_steps=80)
    found = [one for detect in CURVE_DETECTORS for one in detect(run, Context(AnalyzeConfig(), np.random.default_rng(0)))]
    assert [one.kind for one in found] == (["divergence"] if kind == "all nan" else [])
    norm_by_position(run, np.random.default_rng(0))
    assert len(adjusted_loss(run)) == len(run.steps)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("num_steps", [2, 3, 8, 13, 21, 41])
def test_short_runs_raise_nothing(tmp_path: Path, num_steps: int) -> None:
    run = made(tmp_path / "run", num_steps=num_steps, evals=False)
    for detect in CURVE_DETECTORS:
        assert detect(run, Context(AnalyzeConfig(), np.random.default_rng(0))) == []


def test_learning_rate_changes() -> None:
    warm = np.linspace(0.1, 1, 10)
    flat = np.ones(30)
    assert lr_changes(np.concatenate((warm, flat))).tolist() == [9]
    assert lr_changes(np.concatenate((flat, 0.5 * flat, flat))).tolist() == [30, 60]
    assert lr_changes(0.5 * (1 + np.cos(np.linspace(0, np.pi, 400)))).tolist() == []
    assert lr_changes(np.full(30, np.nan)).tolist() == []


def test_jumps() -> None:
    rng = np.random.default_rng(0)
    noise = 2 + rng.normal(0, 0.05, 400)
    assert upward_jumps(noise) == []
    up = noise.copy()
    up[200] += 1
    up[300:310] += 0.6
    assert [one.at for one in upward_jumps(up)] == [200, 300]
    assert upward_jumps(up)[1].back_after == 10
    # What stays up is a change for good, and what goes both ways is noise.
    stays = noise + 0.8 * (np.arange(400) >= 250)
    assert upward_jumps(stays) == []
    both = up.copy()
    both[[50, 120, 350]] -= 1
    assert upward_jumps(both) == []


def test_jumps_that_recur_often() -> None:
    rng = np.random.default_rng(0)
    events = np.arange(15, 400, 15)
    since = (np.arange(400) - 15) % 15
    curve = 2 + rng.normal(0, 0.05, 400) + 0.3 * np.exp(-since / 5)
    assert {one.at for one in recurrent_jumps(curve, events)} >= set(events[1:-2].tolist())
    assert recurrent_jumps(curve, events + 7) == []
    assert recurrent_jumps(curve, events[:3]) == []


def test_explosions_are_held_against_the_steps_before() -> None:
    norm = np.concatenate((np.full(5, 150.0), np.full(95, 0.5)))
    assert not explosions(norm).any()
    norm[60] = 100.0
    assert np.flatnonzero(explosions(norm)).tolist() == [60]
    wide = np.exp(np.random.default_rng(0).normal(0, 2, 400))
    assert not explosions(wide).any()


def test_dead_slots() -> None:
    many = np.full(6, 5000.0)
    healthy = 0.6 * 0.75 ** np.arange(6)
    assert dead_slots(healthy, many)[0] == []
    assert dead_slots(np.array([0.6, 0.5, 0.0, 0.4, 0.3, 0.2]), many) == ([3], 2)
    assert dead_slots(np.array([0.6, 0.5, 0.0, 0.0, 0.0, 0.0]), many)[0] == [3, 4, 5, 6]
    assert dead_slots(np.array([0.6, 0.5, 0.0, 0.4, 0.3, 0.2]), np.full(6, 50.0))[0] == []
    assert dead_slots(np.array([0.6, 0.5, 0.0, 0.4, 0.3, 0.2]), np.full(6, 299.0))[0] == []
    # A draft that fades out, and one that has not begun to learn.
    assert dead_slots(0.6 * 0.4 ** np.arange(6), many)[0] == []
    assert dead_slots(np.array([0.02, 0.0, 0.0, 0.0, 0.0, 0.0]), many)[0] == []


def test_binomials_against_draws() -> None:
    drawn = np.random.default_rng(0).binomial(14, 0.13, 200_000)
    for hits in range(6):
        assert binomial_tail(hits, 14, 0.13) == pytest.approx((drawn >= hits).mean(), abs=0.004)
    low, high = binomial_range(14, 0.13)
    assert low == np.quantile(drawn, 0.025) and high == np.quantile(drawn, 0.975)
    assert binomial_range(3, 0.0) == (0, 0)


def test_wilson() -> None:
    low, high = wilson_interval(8, 10)
    assert (low, high) == (pytest.approx(0.490, abs=1e-3), pytest.approx(0.943, abs=1e-3))
    assert wilson_interval(0, 0) == (0.0, 1.0)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=40))
def test_shifted_overlaps_against_rolling(flags: list[tuple[bool, bool]]) -> None:
    marks, members = np.array(flags).T
    expected = [(np.roll(marks, shift) & members).sum() for shift in range(len(marks))]
    np.testing.assert_array_equal(shifted_overlaps(marks, [members])[0], expected)


@settings(max_examples=30, deadline=None)
@given(st.integers(9, 80), st.integers(3, 30))
def test_moving_mean_against_slices(n: int, width: int) -> None:
    series = np.random.default_rng(n).normal(size=(2, n))
    half = max(3, min(width, n // 3)) // 2
    expected = [[row[max(0, i - half) : i + half + 1].mean() for i in range(n)] for row in series]
    np.testing.assert_allclose(moving_mean(series, width), expected, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_positions_in_runs(values: list[int]) -> None:
    expected, last = [], None
    for value in values:
        expected.append(expected[-1] + 1 if value == last else 1)
        last = value
    assert positions(np.array(values)).tolist() == expected


def test_trend_follows_a_slope_to_its_ends_and_is_deaf_to_spikes() -> None:
    for n in (10, 60, 5000):
        line = np.linspace(3, 1, n)
        spiked = line.copy()
        spiked[n // 2] += 50
        assert np.abs(trend(spiked, 61) - line).max() < 2 / n * 4 or n == 10


def test_ratio_interval_covers_and_widens_with_autocorrelation() -> None:
    rng = np.random.default_rng(0)
    white = rng.normal(1, 0.5, 2000)
    slow = 1 + np.convolve(rng.normal(0, 0.5, 2019), np.ones(20) / np.sqrt(20), mode="valid")
    ones = np.ones(2000)
    narrow, wide = ratio_interval(white, ones, rng), ratio_interval(slow, ones, rng)
    assert narrow is not None and wide is not None
    assert narrow[0] < white.mean() < narrow[1]
    assert wide[1] - wide[0] > 2 * (narrow[1] - narrow[0])
    assert ratio_interval(white[:10], ones[:10], rng) is None


def test_bursts_count_once() -> None:
    spike = np.zeros(30, dtype=bool)
    spike[[3, 4, 6, 15, 29]] = True
    assert np.flatnonzero(first_of_bursts(spike)).tolist() == [3, 15, 29]


def test_one_burst_in_one_run_is_luck_and_many_in_many_are_not() -> None:
    members = np.arange(400) % 97 < 25
    burst, many = np.zeros(400, dtype=bool), np.zeros(400, dtype=bool)
    burst[100:110] = True
    many[[3, 20, 99, 110, 118, 197, 203, 214, 292, 310, 389, 393]] = True
    runs = [Runs("step", 5, members)]
    assert best_overlap(burst, runs) is None
    best = best_overlap(many, runs)
    assert best is not None and best.observed == 12
    assert best_overlap(np.arange(400) % 29 == 5, runs) is None


def test_a_sorted_order_has_as_many_independent_steps_as_changes_of_the_mix(tmp_path: Path) -> None:
    slow = plants.calm(1110, 0.9, norm_tail=0.6)  # its noise happens to follow the eleven changes of the mix
    run = made(tmp_path / "run", slow, num_steps=150, batches_per_step=1, order="sorted", seed=110)
    fit = fit_composition(run, numbers(run.steps, "loss"))
    assert fit is not None and fit.independent_steps <= 11
    assert fit.explained < 0.2
