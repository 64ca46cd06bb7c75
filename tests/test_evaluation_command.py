"""`dflash evaluate`: of a run's checkpoints and of draft folders; mistakes are one line, and nothing is written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_core import experiment as root
from dflash_core import experiment_evaluation
from dflash_core.evaluation import speed
from dflash_core.model.target import FrozenTarget
from tests.conftest import write_corpus, write_micro_experiment
from tests.test_cli import dflash, only_line


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, micro_target: Path) -> Iterator[tuple[Path, Path]]:
    """An experiment file and its run of four steps with checkpoints at 2 and 4, of which the earlier has the higher score."""
    folder = tmp_path_factory.mktemp("evaluation")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_HOME", str(folder / "workspace"))
        path = write_micro_experiment(folder, micro_target)
        changes = ["train.max_steps=4", "train.checkpoint_every=2", "evaluate.max_new_tokens=6", "evaluate.max_prompts=3"]
        config = root.load_experiment(path, changes)
        root.prepare(config)
        run_dir = root.create_run(config, "run", folder / "run")
        root.train_run(config, run_dir)
        yield path, run_dir


@pytest.fixture
def run_dir(trained: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run that a test may change."""
    monkeypatch.setenv("DFLASH_HOME", str(trained[0].parent / "workspace"))
    return Path(shutil.copytree(trained[1], tmp_path / "run"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Nothing is timed; counts the evaluations that really decode."""
    from dflash_core import evaluation

    ran: list[int] = []
    found = {"single": None, "batched": None, "device": "cpu", "dtype": "float32", "threads": 1, "note": "not timed here"}

    def untimed(*_: Any) -> dict[str, Any]:
        ran.append(1)
        return dict(found)

    monkeypatch.setattr(evaluation, "measure_speed", untimed)
    return ran


def files(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_runs_own_evaluation(run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(speed, "NUM_TURNS", 1)
    code, out, err = dflash(monkeypatch, capsys, "evaluate", run_dir)
    result = json.loads(out)
    assert code == 0 and "acceptance length" in err and "lossless: all texts equal" in err and "█" in err
    rows = [json.loads(line) for line in (run_dir / "evaluation.jsonl").read_text().splitlines()]
    assert [set(row) for row in rows] == [
        {"id", "source", "num_prompt_tokens", "prompt_ids", "tokens", "accepted", "equals_greedy"}
    ] * 3
    kept = [n for row in rows for n in row["accepted"]]
    assert result["acceptance_length"] == pytest.approx(1 + sum(kept) / len(kept)) and all(row["equals_greedy"] for row in rows)
    assert sum(result["histogram"]) == len(kept) == result["num_target_forwards"]
    low, high = result["acceptance_interval"]
    assert low <= result["acceptance_length"] <= high
    assert len(result["conditional_by_position"]) == len(result["prefix_survival_by_position"]) == 3
    assert result["speed"]["num_plain_forwards"] == result["num_tokens"] - 3 and result["speed"]["single"]["speedup"] > 0
    steps = [json.loads(line) for line in (run_dir / "metrics" / "steps.jsonl").read_text().splitlines()]
    assert result["training"]["num_anchors"] == sum(row["num_anchors"] for row in steps) and result["training"]["steps"] == 4
    assert result["training"]["seconds"] == pytest.approx(sum(row["step_s"] for row in steps))
    manifest = json.loads((run_dir / "manifest.json").read_text())
    assert manifest["evaluation"] == result and manifest["acceptance_length"] == result["acceptance_length"]
    metrics = {json.loads(line)["metric"] for line in (run_dir / "metrics" / "evals.jsonl").read_text().splitlines()}
    assert {"acceptance_length_low", "histogram", "target_forwards_saved", "single_speedup"} <= metrics
    before = files(run_dir)
    code, out, _ = dflash(monkeypatch, capsys, "evaluate", run_dir, "--checkpoint", "4", "--max-prompts", "3")
    assert code == 0 and json.loads(out) == result and files(run_dir) == before, "the same evaluation is used again"


def test_other_checkpoints_and_prompts_stand_beside_it(
    run_dir: Path, quick: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = files(run_dir)
    scores = {step: json.loads((run_dir / f"checkpoints/step-00000{step}/state.json").read_text())["score"] for step in (2, 4)}
    best = max(scores, key=lambda step: scores[step])
    code, out, _ = dflash(monkeypatch, capsys, "evaluate", run_dir, "--checkpoint", "2")
    earlier = json.loads(out)
    assert code == 0 and earlier["step"] == 2 and earlier["checkpoint"] == "checkpoints/step-000002"
    other = write_corpus(tmp_path / "other.jsonl", 2)
    words = ("--prompts", other, "--max-prompts", "1")
    code, out, _ = dflash(monkeypatch, capsys, "evaluate", run_dir, "--checkpoint", "best", *words)
    assert code == 0 and json.loads(out)["step"] == best and json.loads(out)["num_prompts"] == 1
    assert json.loads(out)["acceptance_interval"] is None
    assert {name: time for name, time in files(run_dir).items() if not name.startswith("evaluations/")} == before
    assert len(list((run_dir / "evaluations").glob("*/evaluation.json"))) == len(quick) == 2
    assert json.loads(dflash(monkeypatch, capsys, "evaluate", run_dir, "--checkpoint", "2")[1]) == earlier
    assert len(quick) == 2, "the finished evaluation is used again"
    other.write_text(other.read_text().replace("question number 0", "another question"))
    dflash(monkeypatch, capsys, "evaluate", run_dir, "--checkpoint", "best", *words)
    assert len(quick) == 3, "other prompts under the same name are another evaluation"


def test_a_draft_folder_on_an_experiments_target(
    trained: tuple[Path, Path], run_dir: Path, quick: list[int], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], tmp_path: Path,
) -> None:  # fmt: skip
    """The same figures as the run's own evaluation of that checkpoint; an unchanged evaluation in --out is used again."""
    draft = Path(shutil.copytree(run_dir / "checkpoints" / "step-000004", tmp_path / "draft"))
    before = files(run_dir)
    code, out, _ = dflash(monkeypatch, capsys, "evaluate", run_dir, "--draft", draft)
    assert code == 0 and files(run_dir) == before
    by_folder = json.loads(out)
    words = ("--set", "evaluate.max_new_tokens=6", "--set", "evaluate.max_prompts=3", "--out", tmp_path / "result")
    code, out, _ = dflash(monkeypatch, capsys, "evaluate", trained[0], "--draft", draft, *words)
    assert code == 0 and json.loads(out) == by_folder and by_folder["step"] is None
    own = root.evaluate_run(run_dir)
    assert {key: by_folder[key] for key in ("acceptance_length", "histogram", "lossless")} == {
        key: own[key] for key in ("acceptance_length", "histogram", "lossless")
    }
    assert (tmp_path / "result" / "evaluation.jsonl").read_text() == (run_dir / "evaluation.jsonl").read_text()
    assert json.loads(dflash(monkeypatch, capsys, "evaluate", trained[0], "--draft", draft, *words)[1]) == by_folder
    assert len(quick) == 3, "the finished evaluation is used again"


def test_mistakes_are_one_line_and_nothing_is_written(
    trained: tuple[Path, Path], run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = files(tmp_path)

    def refused(*words: Any) -> str:
        code, out, err = dflash(monkeypatch, capsys, "evaluate", *words)
        assert code == 2 and not out, err
        assert files(tmp_path) == before
        return only_line(err)

    experiment = trained[0]
    assert "no checkpoint '3'; there are newest, best and the steps 2, 4" in refused(run_dir, "--checkpoint", "3")
    assert "no checkpoint '-1'" in refused(run_dir, "--checkpoint", "-1")
    assert "missing.jsonl" in refused(run_dir, "--prompts", tmp_path / "missing.jsonl")
    assert "needs --draft" in refused(experiment)
    assert "no such draft folder" in refused(experiment, "--draft", tmp_path / "nothing")
    assert "not a readable draft" in refused(experiment, "--draft", tmp_path)
    assert "--checkpoint" in refused(run_dir, "--draft", run_dir / "checkpoints" / "step-000004", "--checkpoint", "2")
    assert "--out" in refused(run_dir, "--out", tmp_path / "out")
    assert "max-prompts" in refused(run_dir, "--max-prompts", "0")
    assert str(tmp_path / "no_run") in refused(tmp_path / "no_run")
    shutil.rmtree(run_dir / "checkpoints")
    before = files(tmp_path)
    assert "no checkpoint to evaluate (state: completed)" in refused(run_dir)
    assert "no checkpoint to evaluate" in refused(run_dir, "--checkpoint", "best")


def test_a_draft_that_does_not_fit_the_target(
    trained: tuple[Path, Path], run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Found before the target is loaded, which for a large one takes minutes."""
    draft = Path(shutil.copytree(run_dir / "checkpoints" / "step-000004", tmp_path / "draft"))
    config = json.loads((draft / "config.json").read_text())
    monkeypatch.setattr(FrozenTarget, "__init__", lambda *_: pytest.fail("the target was loaded"))

    def refused(out: Path, **changes: Any) -> str:
        (draft / "config.json").write_text(json.dumps({**config, **changes}))
        code, _, err = dflash(monkeypatch, capsys, "evaluate", trained[0], "--draft", draft, "--out", out)
        assert code == 2 and not out.exists(), err
        return only_line(err)

    out, dflash_config = tmp_path / "out", config["dflash_config"]
    assert "num_target_layers 9" in refused(out, num_target_layers=9)
    assert "target_layer_ids [1, 5]" in refused(out, dflash_config={**dflash_config, "target_layer_ids": [1, 5]})
    assert "mask_token_id: 999 is not below vocab_size" in refused(out, dflash_config={**dflash_config, "mask_token_id": 999})
    assert "vocab_size" in refused(out, vocab_size=5)
    assert "layer_types: 2 layers for a draft of 1" in refused(out, num_hidden_layers=1)
    assert "tensors do not fit" in refused(out, num_hidden_layers=1, layer_types=["full_attention"])
    (run_dir / "config.yaml").write_text((run_dir / "config.yaml").read_text().replace("block_size: 4", "block_size: 5"))
    code, _, err = dflash(monkeypatch, capsys, "evaluate", run_dir)
    assert code == 2 and "describes another draft" in only_line(err) and not (run_dir / "evaluation.jsonl").exists()


def test_a_damaged_checkpoint_asked_for_by_its_step(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = run_dir / "checkpoints" / "step-000002" / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x00\xff"[file.tell() % 2 :][:1])
    code, _, err = dflash(monkeypatch, capsys, "evaluate", run_dir, "--checkpoint", "2")
    assert code == 2 and "damaged" in only_line(err)


def test_training_behind_a_checkpoint_without_metrics_is_unknown(run_dir: Path, quick: list[int]) -> None:
    for stream in (run_dir / "metrics").iterdir():
        stream.unlink()
    training = root.evaluate_run(run_dir)["training"]
    assert training == {"steps": 4, "num_anchors": None, "seconds": None, "hours": None} and experiment_evaluation.SCHEMA_VERSION
