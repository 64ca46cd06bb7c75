"""Reads `config.json` of a drafter in the z-lab / Hugging Face format, whoever wrote it.

Published files leave out what their model class has as a default, keep the rotary base where transformers 5 puts it
(`rope_parameters`) or `block_size` in one of its two places only. `complete_config` fills that in. What it cannot fill in is
a drafter that is built otherwise than ours: its tensors may fit and its output would still be another one, so it is refused
with the key that says so. The keys are those that vLLM 0.32 reads for `DFlashDraftModel` (docs/field.md 1, 'Export').
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_core.errors import ConfigError, DataError

CONFIG_FILE = "config.json"
SLIDING = "sliding_attention"
# Defaults of transformers' Qwen3Config, which is what an engine takes where the key is absent.
QWEN3_DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "tie_word_embeddings": False}
# Each key with the only value that our network has, below the top of the config and below `dflash_config`.
ONLY: dict[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "is_neox_style": True,
    "logit_scale": 1.0,
    "add_swa_attention_sink_bias": False,
    "partial_rotary_factor": 1.0,
}
ONLY_DFLASH: dict[str, Any] = {
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "sample_from_anchor": False,
    "use_aux_hidden_state": True,
}


def read_config(folder: Path) -> dict[str, Any]:
    """The content of `config.json`; raises DataError where there is no such file or it is no JSON object."""
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{folder}: not a readable draft ({error})") from None
    if not isinstance(config, dict):
        raise DataError(f"{path}: holds a {type(config).__name__}, not keys and values")
    return config


def complete_config(config: dict[str, Any], where: str) -> dict[str, Any]:
    """A copy of `config` with the keys that we write ourselves; `where` names the file in errors.

    Raises:
        ConfigError: the drafter is in another format, or is built otherwise than ours; the key is named.
    """
    if "speculators_model_type" in config:
        raise ConfigError(f"{where}: key speculators_model_type: a drafter in the speculators format, not in the z-lab format")
    inner = config.get("dflash_config")
    if not isinstance(inner, dict):
        raise ConfigError(f"{where}: key 'dflash_config' is missing; not a DFlash draft in the z-lab format")
    full = {**QWEN3_DEFAULTS, **config}
    _refuse_other_networks(full, inner, where)
    full["rope_theta"] = _rope_theta(config, where)
    heads = full.get("num_attention_heads")
    if full.get("num_key_value_heads") is None and heads is not None:
        full["num_key_value_heads"] = heads
    if full.get("head_dim") is None and heads and full.get("hidden_size"):
        full["head_dim"] = full["hidden_size"] // heads
    full["dflash_config"] = {**inner, "block_size": _block_size(config, inner, where)}
    _complete_attention(full, inner, where)
    return full


def _complete_attention(full: dict[str, Any], inner: dict[str, Any], where: str) -> None:
    """Fill in kind and window of each layer as vLLM 0.32 resolves them, and refuse layers that are causal to it.

    `use_swa` makes all layers sliding where `layer_types` names none. Without a word on causality, sliding layers are causal.
    """
    given = full.get("layer_types") or []
    kinds = given or ["full_attention"] * (full.get("num_hidden_layers") or 0)
    if inner.get("use_swa") and SLIDING not in kinds:
        kinds = [SLIDING] * len(kinds)
    full["layer_types"] = kinds
    # Qwen3 configs name a window though no layer uses it.
    full["sliding_window"] = inner.get("swa_window_size", full.get("sliding_window")) if SLIDING in kinds else None
    causal = full.get("is_causal") if full.get("is_causal") is not None else inner.get("causal")
    if causal or (causal is None and SLIDING in given):
        said = f"is_causal is {causal!r}" if causal is not None else "is_causal is missing, so sliding layers are causal in vLLM"
        raise ConfigError(f"{where}: {said}; a draft's block sees itself in both directions here")
    full["is_causal"] = False


def _refuse_other_networks(config: dict[str, Any], inner: dict[str, Any], where: str) -> None:
    for values, only, prefix in ((config, ONLY, ""), (inner, ONLY_DFLASH, "dflash_config.")):
        for key, ours in only.items():
            value = values.get(key)
            if value is not None and value != ours:
                raise ConfigError(f"{where}: {prefix}{key} is {value!r}; a draft is built with {ours!r} here")
    for key, same_as in (("target_hidden_size", "hidden_size"), ("draft_vocab_size", "vocab_size")):
        if config.get(key) is not None and config[key] != config.get(same_as):
            raise ConfigError(f"{where}: {key} is {config[key]!r}; here it is always {same_as} ({config.get(same_as)!r})")


def _rope_theta(config: dict[str, Any], where: str) -> float:
    """The rotary base: of `rope_parameters` (transformers 5), or at the top. Scaled and partial rotation are refused."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ConfigError(f"{where}: rope_parameters is {rope!r}, not an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0 or "mrope_section" in rope:
        raise ConfigError(f"{where}: rotary embeddings other than plain ones over the whole head: {json.dumps(rope)}")
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if not isinstance(theta, int | float) or isinstance(theta, bool) or not theta > 0:
        found = "is missing" if theta is None else f"is {theta!r}, not a positive number"
        raise ConfigError(f"{where}: key 'rope_theta' {found}; engines would make one up, each its own")
    return float(theta)


def _block_size(config: dict[str, Any], inner: dict[str, Any], where: str) -> int:
    """From either of its two places, which must agree."""
    given = [value for value in (inner.get("block_size"), config.get("block_size")) if value is not None]
    if not given:
        raise ConfigError(f"{where}: key 'block_size' is missing; not a DFlash draft in the z-lab format")
    if type(given[0]) is not int or given[0] < 2 or given[-1] != given[0]:
        raise ConfigError(f"{where}: block_size is {given!r} (in dflash_config, at the top), not one number from 2 on")
    return given[0]
