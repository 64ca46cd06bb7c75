"""Drafts in the format of the speculators library (0.9.0), which vLLM reads too.

A folder with `config.json` and `model.safetensors`. What differs from the z-lab format (docs/field.md 1, 'Export'):

- The layers' own configuration is nested under `transformer_layer_config`; what belongs to DFlash stands beside it.
- `aux_hidden_state_layer_ids` count from 1: the id of a tapped layer plus 1, which is its place in `hidden_states`.
- The target's embedding and head are in the file. speculators takes both from the verifier where that can be read.
- `speculators_config` says how to propose, and names the target ("verifier").

Causality is written twice, for vLLM's default in this format is causal: it takes `is_causal` of the nested configuration, else
the opposite of `sliding_window_non_causal`, which speculators writes as false for drafts that are not causal at all.

The rotary base stands in `rope_parameters` (which vLLM reads from the nested configuration; without it, it takes 1,000,000)
and in `rope_theta` (for transformers before 5).

Shapes: V vocabulary, D hidden.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from dflash_core.errors import DataError
from dflash_core.model.draft import DFlashDraft
from dflash_core.model.spec import DraftSpec
from dflash_core.model.weights import CONFIG_FILE, WEIGHTS_FILE
from dflash_core.provenance import read_json, write_atomically, write_json

FORMAT_VERSION = "0.9.0"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
# In published files, and the target's or derived from it: no part of the draft.
NOT_THE_DRAFTS = frozenset({EMBEDDING, HEAD, "verifier_lm_head.weight", "verifier_norm.weight", "t2d", "d2t"})
# Keys of the z-lab format that this one keeps elsewhere or does not have.
_NOT_NESTED = frozenset({"architectures", "num_target_layers", "block_size", "dflash_config"})
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings",
)  # fmt: skip


def write_speculators(
    folder: Path,
    draft: DFlashDraft,
    embedding_VD: Tensor,
    head_VD: Tensor,
    target_name: str,
    target_config: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write `config.json` and `model.safetensors` with all tensors in `dtype`; returns the folder.

    Args:
        embedding_VD, head_VD: the target's rows; for a tied target the same ones.
        target_name: name or folder by which the target can be loaded; vLLM serves it when it is given the draft's folder.
        target_config: the target's `config.json`; its `architectures` are written.

    Raises:
        DataError: embedding or head do not have the draft's shape.
    """
    spec = draft.spec
    tensors = dict(draft.state_dict())
    for name, rows_VD in ((EMBEDDING, embedding_VD), (HEAD, head_VD)):
        if tuple(rows_VD.shape) != (spec.vocab_size, spec.hidden_size):
            expected = f"{spec.vocab_size} x {spec.hidden_size}"
            raise DataError(
                f"{folder}: {name} of the target is {' x '.join(map(str, rows_VD.shape))}, the draft needs {expected}"
            )
        tensors[name] = rows_VD
    # Copies: the file format has no two names for one piece of memory, which a tied head would be.
    written = {name: tensor.detach().to("cpu", dtype, copy=True).contiguous() for name, tensor in tensors.items()}
    write_atomically(folder / WEIGHTS_FILE, save(written, metadata={"format": "pt"}))
    write_json(folder / CONFIG_FILE, speculators_config(spec, target_name, target_config, dtype))
    return folder


def speculators_config(spec: DraftSpec, target_name: str, target_config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The content of `config.json`."""
    number_format = str(dtype).removeprefix("torch.")
    flat = spec.to_hf_config(number_format)
    nested = {key: value for key, value in flat.items() if key not in _NOT_NESTED}
    nested["rope_parameters"] = {"rope_type": "default", "rope_theta": spec.rope_theta}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": FORMAT_VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": spec.block_size - 1,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target_name, "architectures": list(target_config.get("architectures") or [])},
        },
        "transformer_layer_config": nested,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in spec.target_layer_ids],
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        "draft_vocab_size": spec.vocab_size,
        "target_hidden_size": None,
        "sample_from_anchor": False,
        "sliding_window_non_causal": not flat["is_causal"],
        "tie_word_embeddings": False,
        # Not speculators' own: what the format leaves out, so that reading it back gives the same draft.
        "num_target_layers": spec.num_target_layers,
        "dtype": number_format,
    }


def read_speculators(folder: Path, num_target_layers: int | None = None) -> DFlashDraft:
    """Read a draft in this format into fp32, in evaluation mode; embedding and head are left out.

    Args:
        num_target_layers: layers of the target, for files of other writers: the format has no place for it.

    Raises:
        DataError: a file is missing or damaged, tensors do not fit, or the draft is of a kind that is not DFlash as it is
            built here: a draft vocabulary of its own, a slot 0 that predicts, other rotary embeddings, biases.
    """
    where = folder / CONFIG_FILE
    try:
        config = read_json(where)
        tensors = load_file(folder / WEIGHTS_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"{folder}: not a readable draft ({error})") from None
    spec = _read_spec(config, where, num_target_layers)
    draft = DFlashDraft(spec)
    body = {name: tensor.to(torch.float32) for name, tensor in tensors.items() if name not in NOT_THE_DRAFTS}
    try:
        draft.load_state_dict(body)
    except RuntimeError as error:
        first_lines = " ".join(str(error).split())[:300]
        raise DataError(f"{folder / WEIGHTS_FILE}: tensors do not fit the config: {first_lines}") from None
    return draft.eval()


def _read_spec(config: Any, where: Path, num_target_layers: int | None) -> DraftSpec:
    if not isinstance(config, dict) or "speculators_model_type" not in config:
        raise DataError(f"{where}: key speculators_model_type is missing; not a draft in the speculators format")
    if config["speculators_model_type"] != "dflash":
        raise DataError(f"{where}: speculators_model_type is {config['speculators_model_type']!r}; only dflash can be read")
    nested = config.get("transformer_layer_config")
    if not isinstance(nested, dict):
        raise DataError(f"{where}: key transformer_layer_config is missing")
    for key in _SIZES:
        _positive(nested.get(key), f"{where}: transformer_layer_config.{key}")
    theta = _rope_theta(nested, where)
    _refuse_other_kinds(config, nested, where)
    block_size = _positive(config.get("block_size"), f"{where}: block_size")
    layers = _positive(
        config.get("num_target_layers", num_target_layers), f"{where}: num_target_layers, which only the target can tell"
    )
    mask = config.get("mask_token_id")
    if type(mask) is not int or not 0 <= mask < nested["vocab_size"]:
        raise DataError(f"{where}: mask_token_id is {mask!r}, not one of {nested['vocab_size']} rows of the embedding")
    dflash = {"block_size": block_size, "mask_token_id": mask, "target_layer_ids": _tapped(config, layers, where)}
    flat = {"tie_word_embeddings": False, **nested, "rope_theta": theta, "num_target_layers": layers, "dflash_config": dflash}
    return DraftSpec.from_hf_config(flat, str(where))


def _tapped(config: dict[str, Any], num_target_layers: int, where: Path) -> list[int]:
    """Ids of the tapped layers, from 0. Id 0 of this format would be the embedding, which is no layer's output."""
    ids = config.get("aux_hidden_state_layer_ids")
    allowed = range(1, num_target_layers + 1)
    if not isinstance(ids, list) or not ids or any(type(i) is not int or i not in allowed for i in ids):
        raise DataError(f"{where}: aux_hidden_state_layer_ids is {ids!r}, not a list of ids from 1 to {num_target_layers}")
    return [i - 1 for i in ids]


def _rope_theta(nested: dict[str, Any], where: Path) -> float:
    """The rotary base; full rotation without scaling is all there is."""
    rope = nested.get("rope_parameters") or nested.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise DataError(f"{where}: transformer_layer_config.rope_parameters is {rope!r}, not an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", nested.get("partial_rotary_factor")) or 1.0
    if kind != "default" or partial != 1.0 or "mrope_section" in rope:
        raise DataError(f"{where}: transformer_layer_config has other rotary embeddings than the plain ones: {json.dumps(rope)}")
    theta = rope.get("rope_theta", nested.get("rope_theta"))
    if not isinstance(theta, int | float) or isinstance(theta, bool) or theta <= 0:
        raise DataError(f"{where}: transformer_layer_config.rope_parameters.rope_theta is {theta!r}, not a positive number")
    return float(theta)


def _refuse_other_kinds(config: dict[str, Any], nested: dict[str, Any], where: Path) -> None:
    """Raise for a draft that would load, or nearly, and then compute something else than its authors trained."""
    vocabulary = nested["vocab_size"]
    at_top: list[tuple[str, Any, tuple[Any, ...], str]] = [
        ("draft_vocab_size", vocabulary, (vocabulary,), "a draft predicts the target's whole vocabulary here"),
        ("target_hidden_size", None, (None, nested["hidden_size"]), "a draft is as wide as its target here"),
        ("sample_from_anchor", False, (False,), "slot 0 is the anchor and predicts nothing here"),
    ]
    below: list[tuple[str, Any, tuple[Any, ...], str]] = [
        ("hidden_act", "silu", ("silu",), "the MLP is SwiGLU here"),
        ("attention_bias", False, (False,), "no projection has a bias here"),
    ]
    for prefix, values, rules in (("", config, at_top), ("transformer_layer_config.", nested, below)):
        for key, default, allowed, reason in rules:
            value = values.get(key, default)
            if value not in allowed:
                raise DataError(f"{where}: {prefix}{key} is {value!r}; {reason}")
    if "sliding_attention" in (nested.get("layer_types") or []):
        raise DataError(f"{where}: transformer_layer_config.layer_types has sliding layers, which are not built here")


def _positive(value: Any, what: str) -> int:
    if type(value) is not int or value < 1:
        raise DataError(f"{what} is {value!r}, not a whole number above 0")
    return value
