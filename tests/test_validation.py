"""Measuring while training: the same run, the loop's own figure, each due step once, and a failure that is named."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_core import experiment as root
from dflash_core.config import TrainConfig
from dflash_core.data import load_tokenizer, read_prompts
from dflash_core.errors import ConfigError, StageError, StoppedBySignal
from dflash_core.evaluation import evaluate_draft
from dflash_core.evaluation import walk as walk_module
from dflash_core.evaluation import walk_items as items_module
from dflash_core.experiment_validation import how_to_validate
from dflash_core.model.target import FrozenTarget
from dflash_core.model.weights import load_draft
from dflash_core.training.checkpoint import best_checkpoint, check_checkpoint
from dflash_core.training.run_folder import RunFolder
from dflash_core.training.validation import HowToValidate
from tests.conftest import write_micro_experiment
from tests.harness.bench import assert_same_run, last_attempts, rows
from tests.test_training_run import start, train

VALIDATED = ("evaluate.every_steps=3", "evaluate.prompts_while_training=2", "evaluate.max_new_tokens=10", "train.keep_best=true")
KEEP_ALL = ("train.checkpoint_every=2", "train.keep_last=9")
DUE = [2, 3, 4, 6, 8, 9, 10]


@pytest.fixture(scope="module")
def made(micro_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """The experiment, and its validated run. Tests must not change them."""
    folder = tmp_path_factory.mktemp("validation")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_HOME", str(folder / "workspace"))
        experiment = write_micro_experiment(folder, micro_target)
        yield experiment, train(experiment, "validated", *VALIDATED, *KEEP_ALL)


def validations(run_dir: Path) -> list[dict[str, Any]]:
    """What was measured, in the order of steps, the last attempt of each step."""
    found = [row for row in rows(run_dir, "events") if row["kind"] == "validation"]
    return [
        {key: row[key] for key in ("step", "acceptance_length", "expected_acceptance_length", "by_source")}
        for row in last_attempts(found)
    ]


def scores(run_dir: Path) -> dict[int, tuple[float, str]]:
    states = [check_checkpoint(folder) for folder in sorted((run_dir / "checkpoints").iterdir())]
    return {state["next_step"]: (state["score"], state["score_kind"]) for state in states}


def resume(run_dir: Path) -> dict[str, Any]:
    return root.train_run(root.load_experiment(run_dir / "config.yaml"), run_dir)


def test_losses_weights_and_optimizer_are_those_of_the_run_without(made: tuple[Path, Path]) -> None:
    experiment, run_dir = made
    assert_same_run(train(experiment, "plain", *KEEP_ALL), run_dir)


def test_what_is_told_is_what_the_loop_measures(made: tuple[Path, Path], micro_target: Path) -> None:
    experiment, run_dir = made
    told = validations(run_dir)
    assert [row["step"] for row in told] == DUE
    evals = rows(run_dir, "evals")
    assert {row["kind"] for row in evals} == {"training"} and {row["step"] for row in evals} == set(DUE)
    overall = {row["step"]: row["value"] for row in evals if (row["source"], row["metric"]) == ("all", "acceptance_length")}
    assert overall == {row["step"]: row["acceptance_length"] for row in told}
    prompts = read_prompts(experiment.parent / "held_out.jsonl", load_tokenizer(micro_target), 2)
    for step in (2, 10):
        draft = load_draft(run_dir / "checkpoints" / f"step-{step:06d}")
        target = FrozenTarget(micro_target, draft.spec.target_layer_ids, "float32", "sdpa", "cpu")
        measured = evaluate_draft(target, draft, prompts, 10)
        row = next(row for row in told if row["step"] == step)
        assert row["acceptance_length"] == measured.overall.acceptance_length
        assert row["by_source"] == {name: part.acceptance_length for name, part in measured.by_source.items()}


def test_scores_and_the_best_are_what_was_measured(made: tuple[Path, Path]) -> None:
    _, run_dir = made
    measured = {row["step"]: row["acceptance_length"] for row in validations(run_dir)}
    found = scores(run_dir)
    assert {step: value for step, (value, _) in found.items()} == {step: measured[step] for step in (2, 4, 6, 8, 10)}
    (kind,) = {kind for _, kind in found.values()}
    assert kind.startswith("acceptance_length on 2 prompts of at most 10 new tokens (")
    highest = min(found, key=lambda step: (-found[step][0], step))
    best = RunFolder(run_dir).read_manifest()["best"]
    folder = f"step-{highest:06d}"
    assert best["checkpoint"] == f"checkpoints/{folder}" and best["step"] == highest and best["score_kind"] == kind
    assert best["acceptance_length"] == measured[highest]
    chosen = best_checkpoint(run_dir / "checkpoints")
    assert chosen is not None and chosen[0].name == folder and chosen[1]["score"] == measured[highest]


def test_the_console_has_a_line_for_it(made: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    from dflash_core.metrics.console import ConsoleSink

    event = next(row for row in rows(made[1], "events") if row["kind"] == "validation")
    with caplog.at_level(logging.INFO):
        ConsoleSink(10, 5.0).log("events", event)
        ConsoleSink(10, 5.0).log("events", {**event, "acceptance_length": None})
        ConsoleSink(10, 5.0).log("events", {"kind": "skip", "step": 3})
    first, second = caplog.messages
    assert "(+1 incl.) after 2 steps: measured on held-out prompts " + f"{event['acceptance_length']:.2f}" in first
    assert "measured on held-out prompts no figure" in second


@pytest.mark.slow
def test_a_stop_leaves_out_what_is_due_and_the_resume_makes_up_for_it(
    made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes while the draft is measured at a checkpoint; nothing is measured twice or never, scores are the same."""
    experiment, reference = made
    run_dir = start(experiment, "stopped", *VALIDATED, *KEEP_ALL)
    real, calls = walk_module.walk_draft, []

    def walk_draft(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:  # at step 4
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(walk_module, "walk_draft", walk_draft)
        with pytest.raises(StoppedBySignal, match="after step 4 of 10"):
            resume(run_dir)
    assert [row["step"] for row in validations(run_dir)] == [2, 3]
    assert scores(run_dir)[4][1] == "expected_acceptance_length"
    assert RunFolder(run_dir).read_manifest()["best"]["step"] == 2
    monkeypatch.setattr(items_module, "greedy_decode", None)  # the answers are found in the cache
    assert resume(run_dir)["state"] == "completed"
    assert_same_run(reference, run_dir)
    assert validations(run_dir) == validations(reference) and scores(run_dir) == scores(reference)
    told = [(row["step"], row["attempt"]) for row in rows(run_dir, "events") if row["kind"] == "validation"]
    assert told == [(step, 0 if step < 4 else 1) for step in DUE]


def test_a_measurement_that_fails_stops_the_run_and_is_named(made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = start(made[0], "failed", *VALIDATED, *KEEP_ALL)
    real, calls = walk_module.walk_draft, []

    def walk_draft(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 6:  # at step 9, where no checkpoint is due
            raise RuntimeError("out of something")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(walk_module, "walk_draft", walk_draft)
        with pytest.raises(StageError, match="stage 'validation after 9 steps': RuntimeError: out of something"):
            resume(run_dir)
    manifest = RunFolder(run_dir).read_manifest()
    assert manifest["state"] == "failed" and "validation after 9 steps" in manifest["error"]
    assert sorted(scores(run_dir)) == [2, 4, 6, 8]  # all whole


def test_a_stop_is_heard_while_the_answers_are_decoded(made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = start(made[0], "early", *VALIDATED, "evaluate.max_new_tokens=7")

    def greedy_decode(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal was not heard")

    monkeypatch.setattr(items_module, "greedy_decode", greedy_decode)
    with pytest.raises(StoppedBySignal, match="before the first step"):
        resume(run_dir)
    assert RunFolder(run_dir).read_manifest()["state"] == "stopped" and not list((run_dir / "metrics").glob("*.jsonl"))


@pytest.mark.parametrize("override", ["evaluate.every_steps=3", "train.keep_best=true"])
def test_without_prompts_there_is_nothing_to_measure_on(made: tuple[Path, Path], tmp_path: Path, override: str) -> None:
    experiment, reference = made
    config = root.load_experiment(experiment, ["data.held_out=null", override])
    key = override.split("=")[0]
    with pytest.raises(ConfigError, match=f"^{key}: data.held_out names no file"):
        root.check(config)
    shutil.copytree(reference, tmp_path / "run")
    RunFolder(tmp_path / "run").update_manifest(state="stopped")
    with pytest.raises(ConfigError, match=f"^{key}: data.held_out names no file"):
        root.train_run(config, tmp_path / "run")


def test_nothing_is_measured_unless_asked_for(made: tuple[Path, Path]) -> None:
    experiment, _ = made
    assert how_to_validate(root.load_experiment(experiment)) is None
    assert how_to_validate(root.load_experiment(experiment, ["data.held_out=null"])) is None


def test_when_a_measurement_is_due() -> None:
    def due(every: int | None, keep_best: bool) -> list[int]:
        how = HowToValidate(every, lambda *_: None)  # type: ignore[arg-type, return-value]
        train = TrainConfig(checkpoint_every=4, keep_best=keep_best)
        return [step for step in range(1, 11) if how.is_due(train, step, 10)]

    assert due(None, False) == []
    assert due(3, False) == [3, 6, 9]
    assert due(None, True) == [4, 8, 10]
    assert due(3, True) == [3, 4, 6, 8, 9, 10]


@pytest.mark.slow
def test_an_answer_without_rounds_gives_no_score(made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Then there is nothing to compare, and the run goes on."""
    real = items_module.prepare_walk

    def prepare_walk(*args: Any, **more: Any) -> Any:
        return [replace(item, limit=1) for item in real(*args, **more)]

    monkeypatch.setattr(items_module, "prepare_walk", prepare_walk)
    run_dir = train(made[0], "short", *VALIDATED, "train.max_steps=2", "train.checkpoint_every=2")
    assert [row["acceptance_length"] for row in validations(run_dir)] == [None]
    assert scores(run_dir)[2][1] == "expected_acceptance_length"
    assert RunFolder(run_dir).read_manifest()["best"] is None
    assert all(json.dumps(row) for row in rows(run_dir, "evals"))
