"""Self-checks of the target: each way in which head, embedding, logits, taps or batches mislead a draft is planted and named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_core.config import DraftConfig, TargetConfig
from dflash_core.errors import ConfigError, DFlashError, TrainingError
from dflash_core.model.spec import DraftSpec
from dflash_core.model.target import FrozenTarget, read_target_shape
from dflash_core.training.self_check import check_target
from dflash_core.training.self_check_report import Report
from dflash_core.training.self_check_target import (
    check_batching,
    check_embedding,
    check_head,
    check_logits,
    check_taps,
    some_rows,
)
from tests.conftest import TINY_TARGET

TOKENS = torch.randint(0, 250, (1, 16), generator=torch.Generator().manual_seed(3))
MASK = 261
DTYPES = ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
SIZES = {
    "vocab_size": 96, "hidden_size": 16, "num_hidden_layers": 5, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 16, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


def frozen(folder: Path, dtype: str = "float32") -> FrozenTarget:
    return FrozenTarget(folder, (1, 2), dtype, "sdpa", "cpu")


@pytest.fixture
def target(micro_target: Path) -> FrozenTarget:
    return frozen(micro_target)


def untied(micro_target: Path, folder: Path, **changes: Any) -> Path:
    """The micro target with a head of its own: other rows than the embedding's."""
    shutil.copytree(micro_target, folder)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].roll(1, dims=1)
    tensors |= changes
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / "model.safetensors", {"format": "pt"})
    return folder


def said(error: type[DFlashError], check: Any, *args: Any) -> str:
    """The one line that a failing check leaves."""
    with pytest.raises(error) as caught:
        Report().run("NAME", check, *args)
    assert str(caught.value).startswith("self-check NAME: ") and "\n" not in str(caught.value)
    return str(caught.value).removeprefix("self-check NAME: ")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_tiny_target_passes(dtype: str) -> None:
    """As `dflash doctor` asks it."""
    spec = DraftSpec.build(DraftConfig(num_layers=2, num_taps=3), read_target_shape(TINY_TARGET), MASK)
    found = check_target(TINY_TARGET, TargetConfig(path="tiny", dtype=dtype), spec)  # type: ignore[arg-type]
    assert found["checks"] == ["embedding", "head", "logits", "taps", "batching", "mask", "export"]
    assert found["skipped_checks"] == [] and len(found["tap_rms"]) == 3 and min(found["tap_rms"]) > 0.1
    assert found["logit_scale"] == pytest.approx(1.0, abs=1e-3) and found["num_tensors"] == 3 + 2 * 11
    assert found["tap_difference"] < 1e-2 and found["batch_difference"] < 2e-2


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_of_its_own_passes(micro_target: Path, tmp_path: Path, dtype: str) -> None:
    folder = untied(micro_target, tmp_path / "untied")
    own = frozen(folder, dtype)
    assert not torch.equal(own.head_VH, own.embedding_VH)
    report = Report()
    report.run("head", check_head, own, folder)
    report.run("logits", check_logits, own, TOKENS, "kl")
    assert report.passed == ["head", "logits"] and report.skipped == []


@pytest.mark.parametrize("taps", [(1,), (1, 2)])
def test_a_target_that_also_gives_its_last_state_passes(micro_target: Path, taps: tuple[int, ...]) -> None:
    """As the soft losses load it: the columns behind the taps are no tap's."""
    report, figures = Report(), []
    for last_state in (True, False):
        own = FrozenTarget(micro_target, taps, "float32", "sdpa", "cpu", last_state=last_state)
        report.run("taps", check_taps, own, TOKENS)
        report.run("batching", check_batching, own, TOKENS[:, :9], TOKENS, own.shape.pad_token_id)
        figures.append(report.figures["tap_rms"])
    assert figures[0] == figures[1] and len(figures[0]) == len(taps)


def test_a_head_that_is_not_in_the_files_is_refused(micro_target: Path, tmp_path: Path) -> None:
    """transformers warns and goes on with random rows."""
    folder = untied(micro_target, tmp_path / "headless", **{"lm_head.weight": None})
    message = said(ConfigError, check_head, frozen(folder), folder)
    assert "tie_word_embeddings: false, but the weight files hold no lm_head.weight, so that the head was drawn at" in message
    assert message.startswith(f"target.path: {folder}")


@pytest.mark.parametrize("damage", [lambda head: head.flip(0), torch.randn_like, lambda head: head.roll(1, 0)])
def test_a_head_other_than_the_stored_one_is_refused(micro_target: Path, tmp_path: Path, damage: Any) -> None:
    folder = untied(micro_target, tmp_path / "other")
    own = frozen(folder)
    own.model.get_output_embeddings().weight.data = damage(own.head_VH)
    assert "the head of the loaded model is not lm_head.weight of the weight files" in said(ConfigError, check_head, own, folder)


def test_an_embedding_other_than_the_stored_one_is_refused(target: FrozenTarget, micro_target: Path) -> None:
    target.embedding_VH[:] = target.embedding_VH.flip(0).clone()
    message = said(ConfigError, check_head, target, micro_target)
    assert "the embedding of the loaded model is not model.embed_tokens.weight of the weight files" in message


def test_a_tied_head_that_is_not_the_embedding_is_refused(target: FrozenTarget, micro_target: Path) -> None:
    target.model.lm_head.weight = torch.nn.Parameter(target.head_VH.clone(), requires_grad=False)
    Report().run("a copy is the same", check_head, target, micro_target)
    target.model.lm_head.weight[5, 3] += 1
    message = said(ConfigError, check_head, target, micro_target)
    assert "config.json says tie_word_embeddings: true, but the head that was loaded is not the embedding" in message


def test_weights_in_several_files_are_found_and_others_are_left_out(micro_target: Path, tmp_path: Path) -> None:
    folder = untied(micro_target, tmp_path / "sharded")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(names)}
    for file in set(shards.values()):
        save_file({n: tensors[n] for n in names if shards[n] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    own = frozen(folder)
    Report().run("head", check_head, own, folder)
    own.model.get_output_embeddings().weight.data = own.head_VH.flip(0)
    assert "is not lm_head.weight" in said(ConfigError, check_head, own, folder)
    for file in (*set(shards.values()), "model.safetensors.index.json"):
        (folder / file).unlink()
    report = Report()
    report.run("head", check_head, own, folder)
    assert report.skipped == [f"head: {folder} holds no safetensors to compare head and embedding with"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "plant",
    [
        lambda logits: 30 * torch.tanh(logits / 30),  # capped
        lambda logits: logits + torch.linspace(-4, 4, logits.shape[-1]),  # a bias
        lambda logits: logits.roll(1, dims=-1),  # the rows of the head in another order
        lambda logits: torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)),  # another head
        lambda logits: -logits,
        lambda logits: logits * torch.nan,
    ],
)
def test_logits_that_are_no_multiple_of_head_and_state_are_refused(micro_target: Path, plant: Any, dtype: str) -> None:
    own = frozen(micro_target, dtype)
    own.model.lm_head.register_forward_hook(lambda _m, _a, logits: plant(logits.float()))
    message = said(ConfigError, check_logits, own, TOKENS, "cross_entropy")
    assert "target.path: the target's logits are not its head applied to its last state" in message


def granite(folder: Path) -> Path:
    config = transformers.GraniteConfig(**SIZES, embedding_multiplier=12.0, logits_scaling=8.0, tie_word_embeddings=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.GraniteForCausalLM(config).save_pretrained(folder)
    return folder


def test_what_a_model_multiplies_outside_its_modules_is_followed_by_losses_on_labels(tmp_path: Path) -> None:
    """Granite: serving hands the draft plain rows and the plain head, and so does training."""
    own = frozen(granite(tmp_path))
    report = Report()
    report.run("embedding", check_embedding, own, TOKENS[0] % 96)
    report.run("head", check_head, own, tmp_path)
    report.run("logits", check_logits, own, TOKENS % 96, "dpace")
    assert report.figures["logit_scale"] == pytest.approx(1 / 8, rel=1e-4)
    message = said(ConfigError, check_logits, own, TOKENS % 96, "kl")
    assert message.startswith("train.loss: kl compares with the target's own distribution, but the target multiplies its logits")
    assert "by 0.125, which a draft's are not; use cross_entropy or dpace" in message


def test_an_embedding_that_multiplies_inside_its_module_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    """Gemma: vLLM hands the draft plain rows, transformers scaled ones."""
    sizes = SIZES | {"layer_types": ["full_attention"] * 5}
    transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"the embedding of Gemma3ForCausalLM gives 4 times its rows, and serving engines"
    ) as caught:
        frozen(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("plant", [lambda x: 5 * x, lambda x: x + 1, lambda x: x.roll(1, 0)])
def test_rows_that_are_not_what_the_target_embeds_are_refused(target: FrozenTarget, plant: Any) -> None:
    Report().run("embedding", check_embedding, target, TOKENS[0])
    target.model.get_input_embeddings().register_forward_hook(lambda _m, _a, given: plant(given))
    assert "the target's input embedding does not give its rows (" in said(ConfigError, check_embedding, target, TOKENS[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_taps_at_another_layer_are_refused_before_the_first_batch(micro_target: Path, dtype: str) -> None:
    own = FrozenTarget(micro_target, (2, 3), dtype, "sdpa", "cpu")
    own.layer_ids = (1, 2)
    message = said(TrainingError, check_taps, own, TOKENS)
    assert "captured states of layer 1 are not its own: the output of layer 2 is closer" in message
    assert "draft.target_layer_ids: [1, 2], where i is the output of decoder layer i, from 0" in message


@pytest.mark.parametrize(
    ("value", "tap", "words"),
    [
        (0.0, 0, "layer 1 are all zero"),
        (0.0, 1, "layer 2 are all zero"),
        (torch.nan, 1, "layer 2 are not finite"),
        (0.0, None, "all zero"),
    ],
)
def test_useless_states_are_refused(target: FrozenTarget, value: float, tap: int | None, words: str) -> None:
    real = target.features

    def damaged(tokens: Tensor) -> Tensor:
        features = real(tokens).clone()
        size = target.shape.hidden_size
        features[..., slice(None) if tap is None else slice(tap * size, (tap + 1) * size)] = value
        return features

    target.features = damaged  # type: ignore[method-assign,assignment]
    assert words in said(TrainingError, check_taps, target, TOKENS)


def test_states_that_depend_on_the_batch_are_refused(target: FrozenTarget) -> None:
    """Such as those of a layer that looks at the whole batch, or at the padding behind a sequence."""
    short = TOKENS[:, 3:9]
    Report().run("batching", check_batching, target, short, TOKENS, 256)
    layer = target.model.get_decoder().layers[0]  # before the tapped ones
    across = layer.register_forward_hook(lambda _m, _a, x: x + 0.3 * x.mean(dim=0, keepdim=True))
    message = said(ConfigError, check_batching, target, short, TOKENS, 256)
    assert "the states of a sequence depend on what else is in its batch, or on padding behind it (layer " in message
    across.remove()
    layer.register_forward_hook(lambda _m, _a, x: x + 0.3 * x.mean(dim=1, keepdim=True))
    assert "depend on what else is in its batch" in said(ConfigError, check_batching, target, short, TOKENS, 256)


def test_a_check_that_breaks_is_one_line() -> None:
    def no_memory() -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    assert said(TrainingError, no_memory) == "it could not be made: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"


def test_rows_are_spread_from_the_first_to_the_last() -> None:
    for count in (1, 5, 256, 257, 151_936):
        rows = some_rows(count).tolist()
        assert rows == sorted(set(rows)) and (rows[0], rows[-1], len(rows)) == (0, count - 1, min(count, 256))
