"""Self-check of what is written: tensor names, shapes and config keys of the z-lab / Hugging Face format.

The lists stand here once more, written from the format (docs/field.md 1, 'Export') and not from the draft's modules or
from `DraftSpec`: a module that is renamed keeps training and resuming, and serves nothing.
"""

from __future__ import annotations

from typing import Any

from dflash_core.errors import TrainingError
from dflash_core.model.draft import DFlashDraft
from dflash_core.model.weights import draft_config
from dflash_core.training.self_check_report import Figures

# Keys of which serving engines read a value that must be this one.
FIXED_KEYS: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "is_causal": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "rope_scaling": None,
}
NEEDED_KEYS = (
    "head_dim", "hidden_size", "intermediate_size", "layer_types", "max_position_embeddings", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "num_target_layers", "rms_norm_eps", "rope_theta", "sliding_window",
    "tie_word_embeddings", "vocab_size",
)  # fmt: skip
# Rotary variants of some targets. A draft rotates all of head_dim by plain angles; an engine that finds these turns otherwise,
# training and its evaluation look right, and no proposal is accepted.
FORBIDDEN_KEYS = ("partial_rotary_factor", "rotary_dim", "mrope_section", "mrope_interleaved")


def expected_tensors(
    *, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int, taps: int
) -> dict[str, list[int]]:
    """Names and shapes of the tensors of a draft in the z-lab format: no embedding, no head."""
    shapes = {"fc.weight": [hidden, taps * hidden], "hidden_norm.weight": [hidden], "norm.weight": [hidden]}
    for i in range(layers):
        shapes |= {
            f"layers.{i}.input_layernorm.weight": [hidden],
            f"layers.{i}.post_attention_layernorm.weight": [hidden],
            f"layers.{i}.self_attn.q_proj.weight": [heads * head_dim, hidden],
            f"layers.{i}.self_attn.k_proj.weight": [kv_heads * head_dim, hidden],
            f"layers.{i}.self_attn.v_proj.weight": [kv_heads * head_dim, hidden],
            f"layers.{i}.self_attn.o_proj.weight": [hidden, heads * head_dim],
            f"layers.{i}.self_attn.q_norm.weight": [head_dim],
            f"layers.{i}.self_attn.k_norm.weight": [head_dim],
            f"layers.{i}.mlp.gate_proj.weight": [intermediate, hidden],
            f"layers.{i}.mlp.up_proj.weight": [intermediate, hidden],
            f"layers.{i}.mlp.down_proj.weight": [hidden, intermediate],
        }
    return shapes


def check_export_keys(draft: DFlashDraft) -> Figures:
    """What a checkpoint of this draft will hold is what serving engines look for."""
    tensors = draft.state_dict()
    config = draft_config(draft.spec, tensors)
    _check_config(config, draft.spec.block_size)
    _check_tensors(config, {name: list(tensor.shape) for name, tensor in tensors.items()})
    return {"num_tensors": len(tensors)}


def _check_tensors(config: dict[str, Any], found: dict[str, list[int]]) -> None:
    expected = expected_tensors(
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        taps=len(config["dflash_config"]["target_layer_ids"]),
    )
    missing, unknown = sorted(expected.keys() - found), sorted(found.keys() - expected)
    wrong = [f"{name} is {found[name]}, not {shape}" for name, shape in expected.items() if found.get(name, shape) != shape]
    problems = [f"{name} is missing" for name in missing] + [f"{name} is not known" for name in unknown] + wrong
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise TrainingError(
            f"a checkpoint of this draft could not be served: {'; '.join(problems[:3])}{more} (tensors of the z-lab format)"
        )


def _check_config(config: dict[str, Any], block_size: int) -> None:
    inner = config.get("dflash_config", {})
    problems = [f"{key} is missing" for key in NEEDED_KEYS if key not in config]
    found = {key: config.get(key, "missing") for key in FIXED_KEYS}
    problems += [f"{key} is {found[key]!r}, not {value!r}" for key, value in FIXED_KEYS.items() if found[key] != value]
    rope = config.get("rope_parameters") or {}
    problems += [f"{key} must not be there" for key in FORBIDDEN_KEYS if key in config or key in rope]
    if len(config.get("layer_types") or ()) != config.get("num_hidden_layers"):
        problems.append(f"layer_types has not one entry for each of {config.get('num_hidden_layers')} layers")
    if "sliding_attention" in (config.get("layer_types") or ()) and not isinstance(config.get("sliding_window"), int):
        problems.append("sliding_window is no number of positions, but a layer slides")
    if inner.get("causal", False):
        problems.append("dflash_config.causal is not false")
    problems += [f"dflash_config.{key} is missing" for key in ("mask_token_id", "target_layer_ids") if key not in inner]
    for where, keys in (("", config), ("dflash_config.", inner)):
        if keys.get("block_size") != block_size:
            problems.append(f"{where}block_size is {keys.get('block_size', 'missing')}, not {block_size}")
    if problems:
        raise TrainingError(f"a checkpoint of this draft would be served wrongly: {'; '.join(problems[:3])} (config.json)")
