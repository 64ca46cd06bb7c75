"""Drafts in the speculators format: what is written stands here a second time, what is read back is the same draft, and what
would load but mean something else is refused."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dflash_core.errors import ConfigError, DataError
from dflash_core.export.speculators import read_speculators, write_speculators
from dflash_core.model.draft import DFlashDraft
from dflash_core.model.spec import DraftSpec

REPOSITORY = Path(__file__).resolve().parents[1]
PEERS = REPOSITORY / ".venv-peers" / "bin" / "python"
SPEC = DraftSpec(
    hidden_size=24, intermediate_size=40, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=31,
    rms_norm_eps=1e-6, rope_theta=20_000.0, max_position_embeddings=128, tie_word_embeddings=True, num_target_layers=6,
    block_size=4, mask_token_id=29, target_layer_ids=(0, 2, 5),
)  # fmt: skip
TARGET = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def random_draft(spec: DraftSpec = SPEC) -> DFlashDraft:
    draft = DFlashDraft(spec)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return draft


def rows(seed: int) -> torch.Tensor:
    return torch.randn(SPEC.vocab_size, SPEC.hidden_size, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return write_speculators(tmp_path / "draft", random_draft(), rows(1), rows(2), "org/target", TARGET)


def change(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


def nested(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config["transformer_layer_config"].update({key: value})


def test_config_is_what_the_format_asks_for(written: Path) -> None:
    """Key by key, from the classes of speculators 0.9.0 and from what vLLM 0.32 makes of such a file."""
    config = json.loads((written / "config.json").read_text())
    layers = config.pop("transformer_layer_config")
    assert config == {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
        "aux_hidden_state_layer_ids": [1, 3, 6],  # our ids plus 1: places in hidden_states
        "mask_token_id": 29,
        "block_size": 4,
        "draft_vocab_size": 31,
        "target_hidden_size": None,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,  # vLLM takes the opposite of it as causal for all layers
        "tie_word_embeddings": False,
        "num_target_layers": 6,
        "dtype": "float32",
    }
    assert "model_type" not in config  # vLLM would not take the file for one of this format
    expected = {
        "model_type": "qwen3",
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 31,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128,
        "hidden_act": "silu",
        "attention_bias": False,
        "layer_types": ["full_attention", "full_attention"],
        "is_causal": False,
        "rope_theta": 20_000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0},  # vLLM reads nothing else
    }
    assert {key: layers[key] for key in expected} == expected
    assert not {"dflash_config", "block_size", "num_target_layers", "architectures"} & layers.keys()


def test_tensors_have_the_names_and_shapes_of_the_format(written: Path) -> None:
    tensors = load_file(written / "model.safetensors")
    layer = {
        "input_layernorm.weight": [24],
        "post_attention_layernorm.weight": [24],
        "self_attn.q_proj.weight": [32, 24],
        "self_attn.k_proj.weight": [16, 24],
        "self_attn.v_proj.weight": [16, 24],
        "self_attn.o_proj.weight": [24, 32],
        "self_attn.q_norm.weight": [8],
        "self_attn.k_norm.weight": [8],
        "mlp.gate_proj.weight": [40, 24],
        "mlp.up_proj.weight": [40, 24],
        "mlp.down_proj.weight": [24, 40],
    }
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": [24, 72],
        "hidden_norm.weight": [24],
        "norm.weight": [24],
        "embed_tokens.weight": [31, 24],
        "lm_head.weight": [31, 24],
        **{f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()},
    }
    assert torch.equal(tensors["embed_tokens.weight"], rows(1))
    assert torch.equal(tensors["lm_head.weight"], rows(2))


def test_round_trip_is_exact(written: Path) -> None:
    draft, read = random_draft(), read_speculators(written)
    assert read.spec == draft.spec
    assert not read.training
    for name, tensor in draft.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor), name


SPECS = st.fixed_dictionaries(
    {
        "target_layer_ids": st.sets(st.integers(0, 11), min_size=1, max_size=5).map(lambda ids: tuple(sorted(ids))),
        "block_size": st.integers(2, 16),
        "mask_token_id": st.integers(0, 30),
        "rope_theta": st.floats(1e3, 1e7),
        "sliding_window": st.none() | st.integers(1, 64),
        "num_target_layers": st.sampled_from([0, 12]),
    }
)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SPECS)
def test_any_spec_survives(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Sliding layers, and a target of unknown depth, included."""
    kinds = ("full_attention", "full_attention" if changes["sliding_window"] is None else "sliding_attention")
    spec = DraftSpec(**{**SPEC.as_dict(), **changes, "layer_types": kinds})
    write_speculators(tmp_path, random_draft(spec), rows(1), rows(2), "org/target", TARGET)
    assert read_speculators(tmp_path).spec == spec


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_is_written_twice_and_in_the_format_asked_for(tmp_path: Path, dtype: torch.dtype) -> None:
    embedding, name = rows(1), str(dtype).removeprefix("torch.")
    write_speculators(tmp_path, random_draft(), embedding, embedding, "org/target", {}, dtype)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    assert torch.equal(tensors["embed_tokens.weight"], embedding.to(dtype))
    assert torch.equal(tensors["lm_head.weight"], embedding.to(dtype))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == config["transformer_layer_config"]["dtype"] == name
    assert config["speculators_config"]["verifier"]["architectures"] == []
    assert torch.equal(read_speculators(tmp_path).fc.weight, random_draft().fc.weight.to(dtype).float())


@pytest.mark.parametrize("which", ["embed_tokens.weight", "lm_head.weight"])
def test_rows_of_another_target_are_refused_before_anything_is_written(tmp_path: Path, which: str) -> None:
    embedding, head = (rows(1)[:-1] if name == which else rows(1) for name in ("embed_tokens.weight", "lm_head.weight"))
    with pytest.raises(DataError, match=rf"{which} of the target is 30 x 24, the draft needs 31 x 24"):
        write_speculators(tmp_path / "draft", random_draft(), embedding, head, "org/target", TARGET)
    assert not (tmp_path / "draft").exists()


def test_a_file_as_speculators_itself_writes_it(written: Path) -> None:
    """No causality, no `rope_theta`, no depth of the target, `sliding_window_non_causal` false, no embedding, no head."""

    def as_published(config: dict[str, Any]) -> None:
        del config["num_target_layers"]
        config["sliding_window_non_causal"] = False
        for key in ("is_causal", "rope_theta", "rope_scaling"):
            del config["transformer_layer_config"][key]

    change(written, as_published)
    tensors = load_file(written / "model.safetensors")
    body = {name: tensor for name, tensor in tensors.items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    save_file({**body, "verifier_norm.weight": torch.ones(24)}, written / "model.safetensors")
    read = read_speculators(written)
    assert read.spec.rope_theta == 20_000.0
    assert read.spec.target_layer_ids == (0, 2, 5)
    assert read.spec.num_target_layers == 0


REFUSED = {
    "speculators_model_type' is missing": lambda c: c.pop("speculators_model_type"),
    "speculators_model_type: 'eagle3'": lambda c: c.update(speculators_model_type="eagle3"),
    "transformer_layer_config: None": lambda c: c.pop("transformer_layer_config"),
    "transformer_layer_config: 'qwen3'": lambda c: c.update(transformer_layer_config="qwen3"),
    r"aux_hidden_state_layer_ids: \[0, 3\]": lambda c: c.update(aux_hidden_state_layer_ids=[0, 3]),
    "aux_hidden_state_layer_ids: None": lambda c: c.update(aux_hidden_state_layer_ids=None),
    r"aux_hidden_state_layer_ids: \[True\]": lambda c: c.update(aux_hidden_state_layer_ids=[True]),
    "sample_from_anchor: true": lambda c: c.update(sample_from_anchor=True),
    "draft_vocab_size: 16": lambda c: c.update(draft_vocab_size=16),
    "target_hidden_size: 48": lambda c: c.update(target_hidden_size=48),
    "mask_token_id' is missing": lambda c: c.update(mask_token_id=None),
    "mask_token_id: 31": lambda c: c.update(mask_token_id=31),
    "block_size: 'four'": lambda c: c.update(block_size="four"),
    "hidden_size: '24'": nested("hidden_size", "24"),
    "hidden_act: 'gelu'": nested("hidden_act", "gelu"),
    "attention_bias: True": nested("attention_bias", True),
    "is_causal: True": nested("is_causal", True),
    "rope_type: 'yarn'": nested("rope_parameters", {"rope_type": "yarn", "rope_theta": 20_000.0}),
    "partial_rotary_factor: 0.5": nested("partial_rotary_factor", 0.5),
    "rope_parameters.rope_theta: 5.0, but rope_theta is 20000.0": nested(
        "rope_parameters", {"rope_type": "default", "rope_theta": 5.0}
    ),
    "layer_types: 5 is not a list": nested("layer_types", 5),
    "layer_types: 1 layers": nested("layer_types", ["full_attention"]),
    "quantization_config": lambda c: c.update(quantization_config={"bits": 4}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_other_kinds_of_drafts_are_refused_by_name(written: Path, message: str) -> None:
    change(written, REFUSED[message])
    with pytest.raises(ConfigError, match=message) as caught:
        read_speculators(written)
    assert "\n" not in str(caught.value)
    assert str(written / "config.json") in str(caught.value)


def test_causal_sliding_layers_are_refused(written: Path) -> None:
    def sliding(config: dict[str, Any]) -> None:
        config["sliding_window_non_causal"] = False
        window = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8, "use_sliding_window": True}
        config["transformer_layer_config"].update(window)

    change(written, sliding)
    with pytest.raises(ConfigError, match="sliding_window_non_causal: not true"):
        read_speculators(written)
    change(written, lambda config: config.update(sliding_window_non_causal=True))
    assert read_speculators(written).spec.layer_windows == (None, 8)


def test_damaged_folders_are_named(written: Path) -> None:
    (written / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="speculators_model_type"):
        read_speculators(written)
    (written / "config.json").write_text("{")
    with pytest.raises(DataError, match="not a readable draft"):
        read_speculators(written)
    with pytest.raises(DataError, match="not a readable draft"):
        read_speculators(written / "nowhere")


@pytest.mark.parametrize("edit", ["missing", "left over", "shape"])
def test_tensors_that_do_not_fit_are_named(written: Path, edit: str) -> None:
    tensors = load_file(written / "model.safetensors")
    if edit == "missing":
        del tensors["fc.weight"]
    elif edit == "left over":
        tensors["layers.0.self_attn.g_proj.weight"] = torch.ones(2)
    else:
        tensors["fc.weight"] = torch.ones(24, 24)
    save_file(tensors, written / "model.safetensors")
    with pytest.raises(DataError, match=r"(fc|g_proj)\.weight"):
        read_speculators(written)


@pytest.mark.slow
def test_speculators_computes_the_same_states() -> None:
    """benchmarks/speculators_parity.py, in the environment that `make peers` makes."""
    if not PEERS.exists():
        pytest.skip("no .venv-peers: `make peers` installs the speculators library there")
    command = [str(PEERS), "-m", "benchmarks.speculators_parity", "--only-tiny"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "limit 1e-04: met" in done.stdout
