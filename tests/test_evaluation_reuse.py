"""What an evaluation counts, and when a finished one is used again: where settings, target or folders changed since."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pyarrow as pa
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dflash_core import experiment as root
from dflash_core import experiment_evaluation
from dflash_core.analysis.run_tables import evals
from dflash_core.data import Prompt
from dflash_core.errors import DataError
from dflash_core.evaluation import acceptance as acceptance_module
from dflash_core.evaluation.decode import Decoded
from dflash_core.evaluation.walk import WalkItem, walk_draft
from dflash_core.export import Exporting, exporting
from dflash_core.export.folder import export_folder
from dflash_core.export.model_card import card_text
from dflash_core.export.run_facts import RunFacts
from dflash_core.model.draft import DFlashDraft
from dflash_core.model.weights import save_draft
from tests.conftest import write_micro_experiment
from tests.test_export_speculators import SPEC, random_draft, rows

RESULT = {"acceptance_length": 1.5, "acceptance_length_untrained": 1.0, "lossless": True}


class Measured:
    """Stands for an evaluation that took hours."""

    def __init__(self) -> None:
        self.trained = SimpleNamespace(prompt_rows=list, rows=lambda *_: [])
        self.untrained = None
        speed = {"target_forwards_saved": None, "single": None, "batched": None}
        self.result = {**RESULT, "speed": speed}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Nothing is decoded; holds the experiments that would have been measured."""
    seen: list[Any] = []

    def measure(config: Any, *_: Any, **__: Any) -> Measured:
        seen.append(config)
        return Measured()

    monkeypatch.setattr(experiment_evaluation, "_measure", measure)
    return seen


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, micro_target: Path) -> Iterator[tuple[Path, Path]]:
    """An experiment file with a target of its own, and a run of it with a checkpoint that nobody trained."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_HOME", str(folder / "workspace"))
        path = write_micro_experiment(folder, Path(shutil.copytree(micro_target, folder / "target")))
        config = root.load_experiment(path)
        root.prepare(config)
        run_dir = root.create_run(config, "run", folder / "run")
        spec = experiment_evaluation.draft_spec(config)
        save_draft(run_dir / "checkpoints" / "step-000004", spec, dict(DFlashDraft(spec).initialise(0).state_dict()))
        yield path, run_dir


@pytest.fixture
def run(made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Path]:
    """The experiment, and a copy of its run."""
    run_dir = Path(shutil.copytree(made[1], tmp_path / "run"))
    folder, state = run_dir / "checkpoints" / "step-000004", {"next_step": 4, "digests": {"model.safetensors": "of these"}}
    monkeypatch.setattr(experiment_evaluation, "_checkpoint", lambda *_: (folder, state))
    return root.load_experiment(made[0]), run_dir


def test_a_refused_export_does_not_lose_the_evaluation(run: tuple[Any, Path], measured: list[Any]) -> None:
    _, run_dir = run
    (run_dir / "export").mkdir()
    (run_dir / "export" / "notes.txt").write_text("somebody's")
    for _ in range(2):
        with pytest.raises(DataError, match=r"notes\.txt"):
            root.evaluate_run(run_dir)
    assert len(measured) == 1, "the second time only the export is tried"
    manifest = json.loads((run_dir / "manifest.json").read_text())
    assert manifest["acceptance_length"] == 1.5 and manifest["export"] is None
    (run_dir / "export" / "notes.txt").unlink()
    assert root.evaluate_run(run_dir)["acceptance_length"] == 1.5 and len(measured) == 1
    assert json.loads((run_dir / "manifest.json").read_text())["export"] == "export"


def test_another_target_under_the_same_name_is_not_measured(run: tuple[Any, Path], measured: list[Any]) -> None:
    config, run_dir = run
    root.evaluate_run(run_dir)
    path = Path(config.target.path) / "model.safetensors"
    before = path.read_bytes()
    try:
        save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
        with pytest.raises(DataError, match="other weights than those of the target that the run was trained on"):
            root.evaluate_run(run_dir)
    finally:
        path.write_bytes(before)
    assert len(measured) == 1


@pytest.mark.parametrize("change", ["target.dtype=bfloat16", "target.feature_dtype=bfloat16", "target.attn_implementation=eager"])
def test_another_way_to_run_the_target_is_another_evaluation(
    made: tuple[Path, Path], run: tuple[Any, Path], measured: list[Any], tmp_path: Path, change: str
) -> None:
    _, run_dir = run
    draft, out = run_dir / "checkpoints" / "step-000004", tmp_path / "out"
    for changes in ([], [], [change], [change]):
        config = root.load_experiment(made[0], changes)
        experiment_evaluation.evaluate_folder(config, draft, out=out)
    assert len(measured) == 2


def test_where_nothing_can_be_written_nothing_is_measured(run: tuple[Any, Path], measured: list[Any], tmp_path: Path) -> None:
    config, run_dir = run
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DataError, match=f"--out {out}: cannot be written"):
            experiment_evaluation.evaluate_folder(config, run_dir / "checkpoints" / "step-000004", out=out)
    assert not measured


def test_a_published_draft_need_not_say_how_many_layers_the_target_has(run: tuple[Any, Path]) -> None:
    config, run_dir = run
    spec = experiment_evaluation.draft_spec(config)
    for layers, fits in ((0, True), (spec.num_target_layers, True), (spec.num_target_layers + 1, False)):
        theirs = type(spec)(**{**vars(spec), "num_target_layers": layers})
        if fits:
            experiment_evaluation._check_fits(theirs, config, run_dir)
        else:
            with pytest.raises(DataError, match="num_target_layers"):
                experiment_evaluation._check_fits(theirs, config, run_dir)


def test_a_source_called_all_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file `all.jsonl` without sources gives this name."""
    decoded = Decoded((1, 2, 3, 4), (2,), 1)
    monkeypatch.setattr(acceptance_module, "speculative_decode_many", lambda *_: [decoded])
    draft = random_draft()
    found = acceptance_module.evaluate_draft(cast(Any, None), draft, [Prompt("1", "all", (5,))], 4)
    assert found.overall.num_prompts == 1 and sum(found.overall.histogram()) == 1 and found.num_plain_forwards == 3
    item = WalkItem((5,), (1, 2, 3, 4, 5, 6, 7, 8), 4, False, "all", lambda n: torch.zeros(n, 3 * SPEC.hidden_size))
    walked = walk_draft(draft.eval(), [item], rows(1), rows(2))
    assert walked is not None and walked.by_source["all"].num_prompts == 1
    assert walked.accuracy["all"].count[0] == item.num_anchors


def test_of_an_evaluation_that_was_made_again_the_last_one_is_shown() -> None:
    """Both stand in `evals.jsonl`, of the same attempt and step; a curve through both would go back and forth."""
    row = {"kind": "trained", "metric": "prefix_survival", "source": "all", "step": 4}
    written = [{**row, "position": k, "value": value} for value in (0.25, 0.5) for k in (1, 2)]
    written += [{**row, "metric": "acceptance_length", "position": None, "value": value} for value in (1.0, 2.0)]
    table = pa.Table.from_pandas(pd.DataFrame(written))
    run = cast(Any, SimpleNamespace(evals=table))
    assert evals(run.evals, "trained", "prefix_survival")["value"].tolist() == [0.5, 0.5]
    assert evals(run.evals, "trained", "acceptance_length")["value"].tolist() == [2.0]


def test_a_draft_with_numbers_that_are_not_finite_is_not_measured(run: tuple[Any, Path], tmp_path: Path) -> None:
    """All its proposals would be wrong, and it would pass for a draft that learned nothing."""
    config, _ = run
    spec = experiment_evaluation.draft_spec(config)
    tensors = dict(DFlashDraft(spec).initialise(0).state_dict())
    tensors["norm.weight"][0] = float("nan")
    save_draft(tmp_path / "draft", spec, tensors)
    with pytest.raises(DataError, match=r"draft: tensor norm\.weight holds numbers that are not finite"):
        experiment_evaluation.evaluate_folder(config, tmp_path / "draft")


@pytest.mark.parametrize("content", ['{"architectures": ["Qwen3ForCausalLM"]}', "{}", "[]", "damaged"])
def test_another_model_with_the_files_of_an_export_is_not_replaced(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "model.safetensors").write_text("somebody's")
    with pytest.raises(DataError, match="another model"), export_folder(tmp_path):
        pass
    assert (tmp_path / "model.safetensors").read_text() == "somebody's"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("which", ["embedding_VD", "head_VD", None])
def test_copies_of_the_targets_rows_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str | None, dtype: torch.dtype
) -> None:
    checkpoint, target = tmp_path / "checkpoint", tmp_path / "target"
    spec = type(SPEC)(**{**vars(SPEC), "tie_word_embeddings": False})
    save_draft(checkpoint, spec, dict(random_draft(spec).state_dict()))
    target.mkdir()
    save_file({"model.embed_tokens.weight": rows(1), "lm_head.weight": rows(2)}, target / "model.safetensors")
    (target / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    write = exporting.write_speculators

    def faulty(folder: Path, draft: Any, embedding: torch.Tensor, head: torch.Tensor, *more: Any) -> Path:
        embedding, head = embedding.clone(), head.clone()
        (embedding if which == "embedding_VD" else head)[3, 5] += 1.0
        return write(folder, draft, embedding, head, *more)

    if which:
        monkeypatch.setattr(exporting, "write_speculators", faulty)
    what = Exporting(checkpoint, tmp_path / "out", dtype, "speculators", target, "org/target")
    if which:
        with pytest.raises(DataError, match=f"copy of the target's {which.removesuffix('_VD')} differs"):
            exporting.export_draft(what)
        assert not (tmp_path / "out").exists()
    else:
        figures = exporting.export_draft(what, verify=True)["verified"]
        assert figures["compared"] == "logits" and figures["max_difference"] == 0.0
        assert (figures["relative_difference_to_fp32"] > 0) == (dtype == torch.bfloat16)


@settings(max_examples=25)
@given(st.text(st.characters(codec="utf-8"), min_size=1))
def test_the_head_of_a_model_card_is_yaml_whatever_the_target_is_called(name: str) -> None:
    facts = RunFacts(step=1, config={"target": {"path": name}, "data": {"name": name}, "train": {"loss": "kl"}}, manifest={})
    begin, head, _ = card_text(facts, SPEC, "float32", "zlab").split("---\n", 2)
    assert begin == "" and set(yaml.safe_load(head)) >= {"library_name", "pipeline_tag", "tags"}


def test_commands_of_a_model_card_quote_the_targets_name() -> None:
    text = card_text(RunFacts(config={"target": {"path": "models/My Target's"}}), SPEC, "float32", "zlab")
    assert """vllm serve 'My Target'"'"'s' --spec""" in text and """--model-path 'My Target'"'"'s' --spec""" in text
