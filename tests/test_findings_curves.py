"""Detectors of causes in curves: each planted cause is found by its own detector and by no other, and calm runs give nothing."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from dflash_core.analysis.findings.curves import CURVE_DETECTORS
from dflash_core.analysis.findings.finding import Context, Finding
from dflash_core.analysis.runs import Run, load_run
from dflash_core.config import AnalyzeConfig
from tests import planted_curves as plants
from tests.fake_runs import FakeRun, write_run


def made(folder: Path, *planted: plants.Plant, **fake: object) -> Run:
    """A calm run with causes planted."""
    settings = {"num_steps": 300, "batches_per_step": 2, "seed": 0, "stats": False, "order": "diverse", **fake}
    calm = settings.pop("calm", None) or plants.calm(int(settings["seed"]), memory=0.3)
    return load_run(write_run(folder, FakeRun(plants=(calm, *planted), **settings)))


def findings(run: Run, seed: int = 0) -> list[Finding]:
    found = [one for detect in CURVE_DETECTORS for one in detect(run, Context(AnalyzeConfig(), np.random.default_rng(seed)))]
    for one in found:
        assert one.run_id == run.run_id
        assert "nan" not in (one.title + one.text + one.advice).lower(), one
        assert one.low is None or one.high is None or one.low <= one.value <= one.high
    return found


def only(run: Run, kind: str) -> Finding:
    found = findings(run)
    assert [one.kind for one in found] == [kind], [one.title for one in found]
    return found[0]


@pytest.mark.parametrize(("order", "batches_per_step"), [("shuffle", 4), ("shuffle", 1), ("grouped", 4)])
def test_a_loss_that_follows_the_bucket_mix_is_told_so(tmp_path: Path, order: str, batches_per_step: int) -> None:
    fake = {"order": order, "batches_per_step": batches_per_step}
    found = only(made(tmp_path / "run", plants.bucket_offset(0.4), **fake), "loss_composition")
    # A share p of the batches in the bucket gives steps of m batches (of a grouped step, of one kind) an offset of variance
    # 0.4^2 p (1 - p) / m, beside noise of 0.05.
    variance = 0.4**2 * 0.52 * 0.48 / (4 if order == "shuffle" and batches_per_step == 4 else 1)
    assert found.value == pytest.approx(variance / (variance + 0.05**2), abs=0.06)
    assert found.low is not None and found.low > 0.6
    assert "bucket 5" in found.text
    assert found.evidence["offset_nats_by_bucket"]["5"] == pytest.approx(0.4 * 0.48, abs=0.05)


@pytest.mark.parametrize(
    ("cause", "planted"),
    [
        ("checkpoints", (plants.checkpoints_every(50), plants.fall_back(plants.at_checkpoints))),
        ("checkpoints", (plants.fall_back(plants.at_checkpoints, 0.25, 4.0, 0.2),)),
        ("epoch_starts", (plants.epochs_of(67), plants.fall_back(plants.at_epochs))),
        # Every epoch starts behind a checkpoint, but checkpoints within epochs do nothing.
        ("epoch_starts", (plants.epochs_of(80), plants.fall_back(plants.at_epochs))),
        ("resumes", (plants.resumed_at(133, 251), plants.fall_back(plants.at_steps(133, 251)))),
        ("lr_changes", (plants.rate_changed_at(90, 170, 230, 290), plants.fall_back(plants.at_steps(90, 170, 230, 290)))),
        ("none", (plants.fall_back(plants.at_steps(111, 190, 268, 333)),)),
    ],
)
def test_resets_are_laid_to_what_they_come_with(tmp_path: Path, cause: str, planted: tuple[plants.Plant, ...]) -> None:
    found = only(made(tmp_path / "run", *planted, num_steps=400), "resets")
    assert found.evidence["cause"] == cause
    for key, one in found.evidence["candidates"].items():
        if key == cause:
            assert one["hits"] >= 0.9 * one["resets"]
            assert one["hits"] > one["expected_high"]
    if cause not in ("checkpoints",) and "heckpoints fit less" not in found.text:
        assert "not checkpoints:" in found.text.lower()
    assert ("none of the known causes" in found.title) == (cause == "none")


def test_causes_that_coincide_are_not_told_apart(tmp_path: Path) -> None:
    planted = (plants.epochs_of(80), plants.checkpoints_every(80), plants.fall_back(plants.at_epochs))
    found = only(made(tmp_path / "run", *planted, num_steps=400), "resets")
    assert found.evidence["cause"] == "checkpoints or epoch_starts"
    assert "cannot be told apart" in found.text


def test_one_large_reset_behind_a_resume(tmp_path: Path) -> None:
    planted = (plants.resumed_at(533), plants.fall_back(plants.at_steps(533), 1.2))
    found = only(made(tmp_path / "run", *planted, num_steps=800, batches_per_step=2), "resets")
    assert found.evidence["cause"] == "resumes"
    assert found.at_steps == (533,)
    assert "once, right behind a resume" in found.title


def test_resets_that_the_bucket_mix_makes_are_laid_to_it(tmp_path: Path) -> None:
    planted = (plants.clustered(length=3, num_runs=9), plants.bucket_offset(1.0))
    found = {one.kind: one for one in findings(made(tmp_path / "run", *planted, num_steps=400, batches_per_step=4))}
    assert set(found) == {"loss_composition", "resets"}
    assert found["resets"].evidence["cause"] == "bucket_mix"
    assert "bucket mix" in found["resets"].title


@pytest.mark.parametrize("batches_per_step", [1, 4])
def test_gradient_spikes_in_bucket_runs(tmp_path: Path, batches_per_step: int) -> None:
    planted = (plants.clustered(), plants.spikes(0.15, only_in_runs_of=5))
    if batches_per_step == 1:  # single steps of bucket 5 are everywhere there, and would spike outside of runs
        planted = (plants.clustered(), plants.clustered(bucket=4, seed=1), plants.spikes(0.15, only_in_runs_of=4))
    run = made(tmp_path / "run", *planted, num_steps=800, batches_per_step=batches_per_step)
    found = only(run, "spikes_in_bucket_runs")
    assert found.evidence["bucket"] == (5 if batches_per_step == 4 else 4)
    assert found.value > 0.7
    assert found.evidence["expected"] < 0.4 * found.evidence["num_spikes"]
    assert "by chance" in found.text


@pytest.mark.parametrize(
    ("planted", "first", "words"),
    [
        (plants.explosion(200), 200, "explodes at step 200"),
        (plants.not_finite_from(220), 220, "stops being finite at step 220 (80 of 300"),
        (plants.climb(200, 0.03), 200, "climbs from step 20"),
    ],
)
def test_divergence_names_the_first_step(tmp_path: Path, planted: plants.Plant, first: int, words: str) -> None:
    found = only(made(tmp_path / "run", planted), "divergence")
    assert words in found.title
    assert first <= found.evidence["first_step"] <= first + 9


def test_one_skipped_step_is_weak(tmp_path: Path) -> None:
    def skip(streams: plants.Streams) -> None:
        streams["steps"][150] |= {"grad_norm": float("nan"), "skipped": True}
        batch = next(batch for batch in streams["batches"] if batch["step"] == 150)
        batch["loss_sum"] = float("nan")

    found = only(made(tmp_path / "run", skip), "divergence")
    assert (found.strength, found.value) == ("weak", 1.0)
    assert "batch 300 of step 150 (bucket " in found.text


@pytest.mark.parametrize(("slots", "accuracy"), [((5, 6, 7), 0.0), ((4,), 0.005), ((1,), 0.0)])
def test_dead_positions(tmp_path: Path, slots: tuple[int, ...], accuracy: float) -> None:
    found = only(made(tmp_path / "run", plants.dead_slots(*slots, accuracy=accuracy)), "dead_positions")
    assert found.evidence["slots"] == list(slots)


@pytest.mark.parametrize(("measured", "strength"), [(1.1, "strong"), (1.4, "moderate"), (9.0, "weak")])
def test_train_serve_gap(tmp_path: Path, measured: float, strength: str) -> None:
    found = only(made(tmp_path / "run", plants.measures(measured)), "train_serve_gap")
    assert found.strength == strength
    assert f"decoding measures {measured:.2f}" in found.title
    assert found.evidence["direction"] == ("decoding gives more" if measured > 5 else "decoding gives less")


def test_a_small_part_of_the_roughness_is_not_told(tmp_path: Path) -> None:
    """An eighth of the variance is the mix for sure, and not worth a word."""
    run = made(tmp_path / "run", plants.bucket_offset(0.074), order="shuffle", batches_per_step=4)
    assert "loss_composition" not in [one.kind for one in findings(run)]


def test_resets_two_steps_behind_checkpoints_are_theirs(tmp_path: Path) -> None:
    late = plants.fall_back(lambda streams: [step + 2 for step in plants.at_checkpoints(streams)])
    found = only(made(tmp_path / "run", plants.checkpoints_every(50), late), "resets")
    assert found.evidence["cause"] == "checkpoints"


@pytest.mark.parametrize(("num_prompts", "told"), [(2, 0), (7, 0), (8, 1)])
def test_a_few_prompts_tell_no_train_serve_gap(tmp_path: Path, num_prompts: int, told: int) -> None:
    """Two prompts that give the same length have an interval of no width: that is no certainty."""

    def measured(streams: plants.Streams) -> None:
        plants.measures(1.1)(streams)
        known = [row for row in streams["evals"] if (row["kind"], row["metric"]) == ("trained", "acceptance_length")]
        streams["evals"] += [row | {"metric": "num_prompts", "value": float(num_prompts)} for row in known]

    found = findings(made(tmp_path / "run", measured))
    assert [one.kind for one in found].count("train_serve_gap") == told


@pytest.mark.parametrize(
    "planted",
    [
        plants.bucket_offset(0.02),
        plants.fall_back(plants.at_checkpoints, 0.03, 6.0, 0.02),
        plants.fall_back(plants.at_steps(200), 0.1, 2.0, 0.03),
        plants.spikes(0.03),
        plants.explosion(200, times=30.0, lasts=1),
        plants.climb(200, 0.001),
        plants.dead_slots(7, accuracy=0.12),
        plants.measures(1.8),
        plants.measures(3.5),
    ],
)
def test_what_is_too_small_to_matter_is_not_printed(tmp_path: Path, planted: plants.Plant) -> None:
    assert findings(made(tmp_path / "run", planted, order="shuffle")) == []


def test_spikes_beside_runs_are_not_laid_to_them(tmp_path: Path) -> None:
    run = made(tmp_path / "run", plants.clustered(), plants.spikes(0.05), num_steps=800, batches_per_step=2)
    assert findings(run) == []


def clean_runs(folder: Path, seeds: range, lengths: tuple[int, ...]) -> list[str]:
    """The alarms of clean runs, of all orders, sizes, noises."""
    alarms = []
    for seed, length, size, order in product(seeds, lengths, (1, 4), ("shuffle", "diverse", "grouped", "sorted")):
        place = seed + length // 10 + size
        calm = plants.calm(seed + 1000 * size, (0, 0.5, 0.9)[place % 3], norm_tail=(0.2, 0.6, 1.0)[place // 3 % 3])
        run = made(
            folder / f"{seed}-{length}-{size}-{order}",
            num_steps=length,
            batches_per_step=size,
            order=order,
            seed=seed,
            calm=calm,
        )
        alarms += [f"{run.run_id}: {one.title}" for one in findings(run, seed)]
    return alarms


def test_clean_runs_give_nothing(tmp_path: Path) -> None:
    assert clean_runs(tmp_path, range(1), (150,)) == []


@pytest.mark.slow
def test_more_clean_runs_give_nothing(tmp_path: Path) -> None:
    assert clean_runs(tmp_path, range(1, 4), (60, 150, 1000)) == []
