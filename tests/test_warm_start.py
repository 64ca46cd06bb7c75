"""Training that begins with the weights of a drafter: exactly these, checked before anything is trained, and only once."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dflash_core import experiment as root
from dflash_core.config import DraftConfig
from dflash_core.errors import ConfigError, DataError
from dflash_core.export import export_checkpoint
from dflash_core.model.draft import DFlashDraft
from dflash_core.model.spec import DraftSpec
from dflash_core.model.target import read_target_shape
from dflash_core.model.warm_start import check_initial_draft, start_from
from dflash_core.model.weights import load_draft, save_draft
from dflash_core.training import assembly as assembly_module
from dflash_core.training.assembly import CellParts
from dflash_core.training.cell import run_cell
from tests.test_cli import dflash, only_line
from tests.test_export import change_config, change_tensors, write_checkpoint
from tests.test_model_draft import SPEC, make_draft
from tests.test_training_run import assert_same_run, losses, start, train_until_it_breaks


@pytest.fixture
def published(tmp_path: Path) -> Path:
    folder = tmp_path / "published"
    save_draft(folder, SPEC, dict(make_draft(5).state_dict()))
    return folder


def micro_drafter(folder: Path, target: Path, seed: int = 11) -> Path:
    spec = DraftSpec.build(DraftConfig(num_layers=2, block_size=4, num_taps=2), read_target_shape(target), 261)
    save_draft(folder, spec, dict(DFlashDraft(spec).initialise(seed).state_dict()))
    return folder


def in_shards(folder: Path) -> None:
    tensors = dict(load_draft(folder).state_dict())
    (folder / "model.safetensors").unlink()
    parts = {"a.safetensors": sorted(tensors)[:9], "b.safetensors": sorted(tensors)[9:]}
    for name, held in parts.items():
        save_file({key: tensors[key].clone() for key in held}, folder / name)
    placed = {key: name for name, held in parts.items() for key in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def test_all_weights_are_those_of_the_folder(published: Path) -> None:
    draft = make_draft(0)
    before = draft.fc.weight.data_ptr()
    start_from(draft, published)
    for name, tensor in draft.state_dict().items():
        assert torch.equal(tensor, make_draft(5).state_dict()[name]), name
    assert draft.fc.weight.data_ptr() == before, "in place: the optimizer holds these parameters"
    assert draft.training


def test_a_file_in_bf16_is_read_into_fp32(published: Path) -> None:
    save_draft(published, SPEC, {name: tensor.bfloat16() for name, tensor in make_draft(5).state_dict().items()})
    draft = make_draft(0)
    start_from(draft, published)
    assert {parameter.dtype for parameter in draft.parameters()} == {torch.float32}
    assert torch.equal(draft.fc.weight, make_draft(5).fc.weight.bfloat16().float())


def test_shards_with_an_index(published: Path) -> None:
    in_shards(published)
    draft = make_draft(0)
    start_from(draft, published)
    assert all(torch.equal(tensor, make_draft(5).state_dict()[name]) for name, tensor in draft.state_dict().items())
    index = published / "model.safetensors.index.json"
    for content, told in (
        ('{"weight_map": {"a": "../../a.safetensors"}}', "does not list files of this folder"),
        ('{"weight_map": {}}', "does not list files of this folder"),
        ('{"weight_map": {"a": "c.safetensors"}}', "lists c.safetensors, which is not there"),
        ('{"weight_map": 3}', "not a readable index"),
        ("{", "not a readable index"),
    ):
        index.write_text(content)
        with pytest.raises(DataError, match=told):
            load_draft(published)


def test_copies_of_the_targets_rows_are_left_aside_with_a_word(published: Path, caplog: pytest.LogCaptureFixture) -> None:
    extra = {"embed_tokens.weight": torch.ones(31, 24), "lm_head.weight": torch.ones(31, 24)}
    change_tensors(published, lambda tensors: tensors.update(extra))
    with caplog.at_level(logging.INFO, "dflash_core"):
        assert torch.equal(load_draft(published).fc.weight, make_draft(5).fc.weight)
    assert "embed_tokens.weight and lm_head.weight not read" in caplog.text


def _pop(*keys: str) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        for key in keys:
            place = config["dflash_config"] if key.startswith("inner ") else config
            place.pop(key.removeprefix("inner "))

    return change


def _rope_of_transformers_5(config: dict[str, Any]) -> None:
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}


@pytest.mark.parametrize(
    "change",
    [
        _pop("block_size"),
        _pop("inner block_size"),
        _pop("layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "is_causal", "dtype"),
        _pop("num_target_layers", "attention_bias"),
        _rope_of_transformers_5,
        lambda config: config.update(sliding_window=4096),  # of no layer
        lambda config: config.update(head_dim=8, target_hidden_size=24, draft_vocab_size=31),
    ],
)
def test_published_configs_that_leave_out_defaults_are_understood(published: Path, change: Any) -> None:
    change_config(published, change)
    assert check_initial_draft(published, SPEC) == []


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "layers": (
        lambda c: c.update(num_hidden_layers=3, layer_types=c["layer_types"][:1] * 3),
        r"num_layers is 3 there and 2 here \(set draft.num_la",
    ),
    "width": (lambda c: c.update(hidden_size=32), "hidden_size is 32 there and 24 here .it was made for another target"),
    "heads": (lambda c: c.update(num_attention_heads=8), "num_heads is 8 there and 4 here"),
    "key heads": (lambda c: c.update(num_key_value_heads=4), "num_kv_heads is 4 there and 2 here"),
    "head width": (lambda c: c.update(head_dim=16), "head_dim is 16 there and 8 here"),
    "vocabulary": (lambda c: c.update(vocab_size=32), "vocab_size is 32 there and 31 here"),
    "MLP": (
        lambda c: c.update(intermediate_size=48),
        r"intermediate_size is 48 there and 40 here \(set draft\.inter",
    ),
    "target": (lambda c: c.update(num_target_layers=8), "num_target_layers is 8 there and 6 here"),
    "taps": (
        lambda c: c["dflash_config"].update(target_layer_ids=[1, 2]),
        r"target_layer_ids is \[1, 2\] there and \[1, 3\] here \(set draft\.target_layer_ids: \[1, 2\]\)",
    ),
    "mask": (
        lambda c: c["dflash_config"].update(mask_token_id=29),
        r"mask_token_id is 29 there and 30 here \(set target\.mask_token_id: 29\)",
    ),
    "base": (lambda c: c.update(rope_theta=1e6), "rope_theta is 1000000.0 there and 10000.0 here"),
    "two": (lambda c: c.update(vocab_size=32, rope_theta=1e6), "vocab_size is 32 .* rope_theta differ, too"),
    "no base": (lambda c: c.pop("rope_theta"), "key 'rope_theta' is missing"),
    "yarn": (lambda c: c.update(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "rope_type: 'yarn' is not supported"),
    "biases": (lambda c: c.update(attention_bias=True), "attention_bias: True is not supported"),
    "causal": (lambda c: c.update(is_causal=True), "is_causal: True is not supported"),
    "block sizes": (lambda c: c.update(block_size=8), "block_size: 8, but dflash_config.block_size is 4"),
    "another width of states": (lambda c: c.update(target_hidden_size=48), "target_hidden_size: 48 is not supported"),
    "no DFlash": (lambda c: c.pop("dflash_config"), "key 'dflash_config' is missing"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_does_not_fit_is_one_line_with_the_key(published: Path, fault: str) -> None:
    change, told = REFUSED[fault]
    change_config(published, change)
    for check in (lambda: check_initial_draft(published, SPEC), lambda: start_from(make_draft(), published)):
        with pytest.raises(ConfigError, match=told) as caught:
            check()
        text = str(caught.value)
        assert text.startswith(f"draft.init_from: {published}") and "\n" not in text


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.pop("fc.weight"), r"tensors do not fit the config: missing fc\.weight"),
        (lambda t: t.update({"layers.0.self_attn.q_proj.bias": torch.ones(32)}), r"left over layers\.0\.self_attn\.q_proj\.bias"),
        (lambda t: t.update({"norm.weight": torch.ones(25)}), r"tensor norm\.weight is \[25\], the config says \[24\]"),
        (lambda t: t["norm.weight"][0].fill_(torch.inf), r"tensor norm\.weight holds numbers that are not finite"),
        (lambda t: t.update({"norm.weight": torch.ones(24, dtype=torch.int8)}), r"tensor norm\.weight is int8"),
    ],
)
def test_tensors_that_do_not_fit_are_named(published: Path, change: Any, told: str) -> None:
    change_tensors(published, change)
    with pytest.raises(ConfigError, match=told):
        start_from(make_draft(), published)


def test_a_damaged_or_missing_folder(published: Path) -> None:
    file = published / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    for folder, told in ((published, "not a readable draft"), (published / "nowhere", "no such folder")):
        with pytest.raises(ConfigError, match=f"draft.init_from: {folder}: {told}"):
            check_initial_draft(folder, SPEC)


def test_what_weights_do_not_depend_on_may_differ(published: Path, caplog: pytest.LogCaptureFixture) -> None:
    draft = DFlashDraft(replace(SPEC, block_size=8, max_position_embeddings=4096))
    start_from(draft, published)
    assert torch.equal(draft.fc.weight, make_draft(5).fc.weight)
    assert "block_size: 4 there, 8 here; weights do not depend on it" in caplog.text
    assert len(check_initial_draft(published, draft.spec)) == 2


def test_a_run_begins_with_the_weights_and_is_resumed_without_them(
    micro_experiment: Path, micro_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the run of a trainer that was given the drafter by hand; a broken one goes on exactly, though the folder is gone."""
    folder = micro_drafter(tmp_path / "drafter", micro_target)
    by_hand = start(micro_experiment, "by-hand")

    def make_trainer(*args: Any) -> Any:
        trainer = assembly_module.make_trainer(*args)
        trainer.draft.load_state_dict(load_draft(folder).state_dict())
        return trainer

    job = root.training_job(root.load_experiment(by_hand / "config.yaml"), by_hand)
    run_cell(job, CellParts(make_trainer=make_trainer))
    broken = start(micro_experiment, "broken", f"draft.init_from={folder}", "train.keep_last=9")
    train_until_it_breaks(broken, monkeypatch)
    assert losses(broken)[0] == losses(by_hand)[0]
    shutil.rmtree(folder)
    assert root.create_run(root.load_experiment(broken / "config.yaml"), "broken", broken) == broken
    root.train_run(root.load_experiment(broken / "config.yaml"), broken)
    assert_same_run(by_hand, broken)
    shutil.rmtree(broken / "checkpoints")
    with pytest.raises(ConfigError, match=r"draft\.init_from: .*no such folder"):
        root.train_run(root.load_experiment(broken / "config.yaml"), broken)


@pytest.mark.slow
def test_a_folder_that_changed_is_another_run(
    micro_experiment: Path,
    micro_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = micro_drafter(tmp_path / "drafter", micro_target)
    more = ("--set", f"draft.init_from={folder}", "--set", "train.max_steps=1")
    run_dir = tmp_path / "run"
    assert dflash(monkeypatch, capsys, "train", micro_experiment, "--run-dir", run_dir, *more)[0] == 0
    moved = shutil.copytree(folder, tmp_path / "moved")
    same = ("--set", f"draft.init_from={moved}", "--set", "train.max_steps=2")
    assert dflash(monkeypatch, capsys, "train", micro_experiment, "--run-dir", run_dir, *same)[0] == 0, "the weights are meant"
    change_tensors(folder, lambda tensors: tensors["norm.weight"].add_(0.5))
    code, _, err = dflash(monkeypatch, capsys, "train", micro_experiment, "--run-dir", run_dir, *more)
    assert code == 2 and "holds a run with another draft.init_from" in only_line(err)
    code, out, err = dflash(monkeypatch, capsys, "doctor", micro_experiment, *more)
    assert code == 0 and json.loads(out)["init_from"] == {"run": {"path": str(folder), "differs": []}}, err
    for wrong, told in (
        ("draft.num_layers=1", "num_layers is 2 there and 1 here"),
        (f"draft.init_from={tmp_path}", "draft.init_"),
    ):
        for command in ("doctor", "train"):
            code, _, err = dflash(monkeypatch, capsys, command, micro_experiment, *more, "--set", wrong)
            assert code == 2 and told in only_line(err)


def test_a_checkpoint_and_an_export_are_such_folders(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "run", make_draft(5))
    for folder in (checkpoint, export_checkpoint(checkpoint, tmp_path / "served")):
        draft = make_draft(0)
        start_from(draft, folder)
        assert all(torch.equal(tensor, make_draft(5).state_dict()[name]) for name, tensor in draft.state_dict().items())
