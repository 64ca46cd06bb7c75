"""Exports: the same drafter after writing and reading, whole or not at all, and every planted fault is found and named."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_core.errors import DataError
from dflash_core.export import Exporting, export_checkpoint, export_draft
from dflash_core.export import exporting as exporting_module
from dflash_core.export.target_rows import TargetRows, read_target_rows
from dflash_core.export.verify import BF16_TOLERANCE, compare_outputs, verify_zlab
from dflash_core.model.draft import DFlashDraft
from dflash_core.model.weights import expected_shapes, load_draft
from dflash_core.training.checkpoint import CheckpointStore, take_snapshot
from dflash_core.training.retention import Retention
from tests.test_model_draft import SPEC, make_draft, run

FILES = ["README.md", "config.json", "model.safetensors"]


def write_checkpoint(root: Path, draft: DFlashDraft, step: int = 7) -> Path:
    root.mkdir()
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1.0)
    return CheckpointStore(root / "checkpoints", Retention(9)).write(take_snapshot(step, draft, optimizer, {})).folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "run", make_draft())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def test_a_drafter_with_random_weights_is_the_same_after_export_and_reload(checkpoint: Path, tmp_path: Path) -> None:
    """Logits through a head, to the last bit, computed here and not by the verification."""
    generator = torch.Generator().manual_seed(3)
    inputs = {
        "features": torch.randn(2, 11, 2 * SPEC.hidden_size, generator=generator),
        "embedding": torch.randn(SPEC.vocab_size, SPEC.hidden_size, generator=generator),
        "anchors": torch.tensor([[0, 4, 7], [2, 5, 9]]),
        "tokens": torch.randint(0, 30, (2, 11), generator=generator),
    }
    head = torch.randn(SPEC.vocab_size, SPEC.hidden_size, generator=generator)
    folder = export_checkpoint(checkpoint, tmp_path / "served")
    assert names(folder) == FILES
    assert torch.equal(run(load_draft(folder), inputs) @ head.T, run(make_draft(), inputs) @ head.T)


def test_names_and_shapes_of_the_contract_are_those_of_the_network() -> None:
    """Two lists made apart: from the published format, and from the modules."""
    assert expected_shapes(SPEC) == {name: tuple(tensor.shape) for name, tensor in make_draft().state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_rows", [False, True])
def test_verification_gives_figures(checkpoint: Path, tmp_path: Path, dtype: torch.dtype, with_rows: bool) -> None:
    target = None
    if with_rows:
        target = tmp_path / "target"
        target.mkdir()
        rows = torch.randn(SPEC.vocab_size, SPEC.hidden_size, generator=torch.Generator().manual_seed(1))
        save_file({"model.embed_tokens.weight": rows}, target / "model.safetensors")
    result = export_draft(Exporting(checkpoint, tmp_path / "served", dtype, target=target), verify=True)
    found = json.loads(json.dumps(result))["verified"]
    assert found["compared"] == ("logits" if with_rows else "final states")
    assert found["max_difference"] == 0.0 and found["num_tensors"] == 25
    assert found["num_parameters"] == sum(tensor.numel() for tensor in make_draft().state_dict().values())
    if dtype == torch.float32:
        assert found["relative_difference_to_fp32"] == 0.0 == found["tolerance_to_fp32"]
    else:
        assert 1e-4 < found["relative_difference_to_fp32"] < BF16_TOLERANCE == found["tolerance_to_fp32"]
        assert {tensor.dtype for tensor in load_file(tmp_path / "served" / "model.safetensors").values()} == {torch.bfloat16}
        assert json.loads((tmp_path / "served" / "config.json").read_text())["dtype"] == "bfloat16"


def _swapped(tensors: dict[str, torch.Tensor]) -> None:
    one, other = "layers.0.self_attn.k_proj.weight", "layers.0.self_attn.v_proj.weight"
    tensors[one], tensors[other] = tensors[other], tensors[one]


def _set(key: str, value: Any, inside: bool = True) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        (config["dflash_config"] if inside else config)[key] = value

    return change


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "swapped": (lambda f: change_tensors(f, _swapped), r"layers\.0\.self_attn\.k_proj\.weight differs from the checkpoint's in"),
    "one number": (lambda f: change_tensors(f, lambda t: t["norm.weight"][3].add_(1e-3)), r"norm\.weight differs .* in 1 of 24"),
    "not a number": (
        lambda f: change_tensors(f, lambda t: t["norm.weight"][3].fill_(torch.nan)),
        r"norm\.weight differs .* in 1 of 24",
    ),
    "transposed": (
        lambda f: change_tensors(f, lambda t: t.update({"fc.weight": t["fc.weight"].T})),
        r"fc\.weight is \[48, 24\], the config says \[24, 48\]",
    ),
    "tensor missing": (lambda f: change_tensors(f, lambda t: t.pop("hidden_norm.weight")), r"hidden_norm\.weight is missing"),
    "tensor too many": (
        lambda f: change_tensors(f, lambda t: t.update({"mask_hidden": torch.ones(2)})),
        r"mask_hidden is not one of a draft",
    ),
    "mask": (lambda f: change_config(f, _set("mask_token_id", 29)), r"dflash_config\.mask_token_id is 29, expected 30"),
    "taps": (
        lambda f: change_config(f, _set("target_layer_ids", [1, 2])),
        r"dflash_config\.target_layer_ids is \[1, 2\], expected \[1, 3\]",
    ),
    "key missing": (lambda f: change_config(f, lambda c: c.pop("rope_theta")), r"key rope_theta is missing"),
    "inner key missing": (
        lambda f: change_config(f, lambda c: c["dflash_config"].pop("mask_token_id")),
        r"key dflash_config\.mask_token_id is missing",
    ),
    "no causality": (lambda f: change_config(f, lambda c: c.pop("is_causal")), r"key is_causal is missing"),
    "causal": (lambda f: change_config(f, _set("is_causal", True, inside=False)), r"is_causal is True, expected False"),
    "block sizes": (lambda f: change_config(f, _set("block_size", 8, inside=False)), r"block_size is 8, expected 4"),
    "partial rotation": (
        lambda f: change_config(f, _set("partial_rotary_factor", 0.5, inside=False)),
        r"another rotation than the plain one",
    ),
    "scaled rotation": (
        lambda f: change_config(f, _set("rope_scaling", {"rope_type": "yarn", "factor": 4.0}, inside=False)),
        r"another rotation than the plain one",
    ),
    "truncated": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-100]),
        r"model\.safetensors: cannot be read",
    ),
    "header cut": (lambda f: (f / "model.safetensors").write_bytes(b"\0\0"), r"model\.safetensors: cannot be read"),
    "no file": (lambda f: (f / "model.safetensors").unlink(), r"model\.safetensors: cannot be read"),
    "config cut": (lambda f: (f / "config.json").write_text('{"a": '), r"not a readable draft"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found_and_named(
    checkpoint: Path, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted between writing and verification, in an export that is to replace an earlier one, which then stays."""
    served = export_checkpoint(write_checkpoint(tmp_path / "earlier", make_draft(5)), tmp_path / "served")
    before = {path.name: path.read_bytes() for path in served.iterdir()}
    plant, expected = FAULTS[fault]
    zlab = exporting_module.FORMATS["zlab"]

    def write_wrongly(folder: Path, draft: DFlashDraft, what: Exporting) -> None:
        zlab.write(folder, draft, what)
        plant(folder)

    wrong = exporting_module.ExportFormat(write_wrongly, zlab.read)
    monkeypatch.setitem(exporting_module.FORMATS, "zlab", wrong)
    with pytest.raises(DataError, match=expected) as caught:
        export_checkpoint(checkpoint, served)
    assert str(served) in str(caught.value) and ".building" not in str(caught.value) and "\n" not in str(caught.value)
    assert {path.name: path.read_bytes() for path in served.iterdir()} == before
    assert names(tmp_path) == [".served.lock", "earlier", "run", "served"]


def test_outputs_alone_show_what_a_config_of_another_checkpoint_would_do(checkpoint: Path, tmp_path: Path) -> None:
    """The comparison of outputs does not lean on that of keys and tensors: a wrong mask token or weight shows in it alone."""
    draft = verify_zlab(export_checkpoint(checkpoint, tmp_path / "served"), checkpoint)
    rows = TargetRows(torch.randn(SPEC.vocab_size, 24), torch.randn(SPEC.vocab_size, 24))
    for given in (None, rows):
        compare_outputs(draft, checkpoint, torch.float32, given, tmp_path)
        other = DFlashDraft(replace(SPEC, mask_token_id=29))
        other.load_state_dict(draft.state_dict())
        with pytest.raises(DataError, match="outputs differ"):
            compare_outputs(other, checkpoint, torch.float32, given, tmp_path)
    with torch.no_grad():
        draft.layers[1].mlp.up_proj.weight.mul_(1.001)  # type: ignore[union-attr, operator]
    with pytest.raises(DataError, match="outputs differ from the checkpoint's by up to"):
        compare_outputs(draft, checkpoint, torch.bfloat16, None, tmp_path)


def test_an_earlier_export_is_replaced_as_a_whole_through_a_link_too(checkpoint: Path, tmp_path: Path) -> None:
    served, link = tmp_path / "served", tmp_path / "link"
    export_checkpoint(write_checkpoint(tmp_path / "earlier", make_draft(5)), served)
    link.symlink_to(served)
    export_checkpoint(checkpoint, link, torch.bfloat16)
    assert link.is_symlink() and names(served) == FILES
    assert names(tmp_path) == [".served.lock", "earlier", "link", "run", "served"]
    assert torch.equal(load_draft(served).fc.weight, make_draft().fc.weight.bfloat16().float())


@pytest.mark.parametrize("what", ["notes.txt", "data", "mask_embedding.pt"])
def test_a_folder_that_holds_something_else_is_left_alone(checkpoint: Path, tmp_path: Path, what: str) -> None:
    served = export_checkpoint(checkpoint, tmp_path / "served")
    (served / what).mkdir() if what == "data" else (served / what).write_text("mine")
    with pytest.raises(DataError, match=f"holds {what}, which no export writes"):
        export_checkpoint(checkpoint, served)
    assert names(served) == sorted([*FILES, what])


def test_places_that_cannot_be_written(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder, expected in ((tmp_path / "file", "is a file"), (tmp_path / "file" / "below", "cannot be written")):
        with pytest.raises(DataError, match=expected):
            export_checkpoint(checkpoint, folder)


@pytest.mark.parametrize("broken", ["card_text", "verify"])
def test_an_export_that_fails_between_two_files_leaves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    if broken == "card_text":
        monkeypatch.setattr(exporting_module, "card_text", fail)
    else:
        monkeypatch.setattr("dflash_core.export.zlab.draft_config", fail)
    with pytest.raises(DataError, match=r"served: cannot be written .No space left"):
        export_checkpoint(checkpoint, tmp_path / "served")
    assert names(tmp_path) == [".served.lock", "run"]


def test_an_export_that_is_killed_between_two_files_leaves_nothing_that_looks_finished(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next one sweeps up what is left, whatever it is."""
    served = tmp_path / "served"
    child = os.fork()
    if child == 0:
        monkeypatch.setattr("dflash_core.export.zlab.draft_config", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        try:
            export_checkpoint(checkpoint, served)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert names(tmp_path) == [".served.building", ".served.lock", "run"]
    assert names(tmp_path / ".served.building") == ["model.safetensors"]
    (tmp_path / ".served.building" / "mask_embedding.pt").write_text("an engine would read it")
    export_checkpoint(checkpoint, served)
    assert names(served) == FILES and names(tmp_path) == [".served.lock", "run", "served"]


def test_two_exports_at_once_do_not_mix(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = exporting_module.card_text

    def export_again(*args: Any) -> str:
        with pytest.raises(DataError, match="another process"):
            export_checkpoint(checkpoint, tmp_path / "served")
        return real(*args)

    monkeypatch.setattr(exporting_module, "card_text", export_again)
    assert names(export_checkpoint(checkpoint, tmp_path / "served")) == FILES


def test_a_targets_rows_are_found_in_its_files_or_not_at_all(tmp_path: Path, micro_target: Path) -> None:
    from dflash_core.config import DraftConfig
    from dflash_core.model.spec import DraftSpec
    from dflash_core.model.target import FrozenTarget, read_target_shape

    spec = DraftSpec.build(DraftConfig(num_layers=1, num_taps=1, block_size=4), read_target_shape(micro_target), 261)
    rows, target = read_target_rows(micro_target, spec), FrozenTarget(micro_target, (1,), "float32", "sdpa", "cpu")
    assert rows is not None and torch.equal(rows.head_VD, target.head_VH) and torch.equal(rows.embedding_VD, target.embedding_VH)
    small = {name: torch.zeros(SPEC.vocab_size, SPEC.hidden_size) for name in ("a.embed_tokens.weight", "b.embed_tokens.weight")}
    save_file(small, tmp_path / "model.safetensors")
    assert read_target_rows(tmp_path, SPEC) is None, "two of them: which one is not known"
    save_file({"a.embed_tokens.weight": small["a.embed_tokens.weight"]}, tmp_path / "model.safetensors")
    assert read_target_rows(tmp_path, SPEC) is not None
    untied = replace(SPEC, tie_word_embeddings=False)
    assert read_target_rows(tmp_path, untied) is None, "an embedding is no head"
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert read_target_rows(tmp_path, SPEC) is None
