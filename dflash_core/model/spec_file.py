"""Reading a draft's `config.json`, ours or a published one, into the fields of `DraftSpec`.

Published files differ in where they keep a value (block size, rope, window), and some describe networks that this one is
not: those are refused by name, because their weights would load and then propose nonsense. Values that a file does not give
are what vLLM and the Hugging Face class of `model_type` qwen3 take for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_core.errors import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"
# Keys of the file or of its `dflash_config`, and the values with which the draft is the network of docs/field.md 1.
ONLY: dict[str, tuple[Any, ...]] = {
    "is_causal": (None, False),
    "dflash_config.causal": (None, False),
    "attention_bias": (None, False),
    "hidden_act": (None, "silu"),
    "partial_rotary_factor": (None, 1),
    "mrope_section": (None,),
    "is_neox_style": (None, True),
    "add_swa_attention_sink_bias": (None, False),
    "dflash_config.attention_sink_bias": (None, False),
    "dflash_config.attention_value_scale": (None, 1),
    "use_aux_hidden_state": (None, True),
    "dflash_config.use_aux_hidden_state": (None, True),
    "dflash_config.sample_from_anchor": (None, False),
    "quantization_config": (None,),
    "logit_scale": (None, 1),
}
ROPE_ONLY: dict[str, tuple[Any, ...]] = {
    "rope_type": (None, "default"),
    "type": (None, "default"),
    "partial_rotary_factor": (None, 1),
    "mrope_section": (None,),
}
# From which layer on layers slide, in a file that has neither `layer_types` nor this key.
DEFAULT_MAX_WINDOW_LAYERS = 28


class _Keys:
    """Typed look-ups in one JSON object; errors name file and key."""

    def __init__(self, content: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.content, self.where, self.prefix = content, where, prefix

    def error(self, key: str, problem: str) -> ConfigError:
        return ConfigError(f"{self.where}: {self.prefix}{key}: {problem}")

    def get(self, key: str) -> Any:
        return self.content.get(key)

    def needed(self, key: str) -> Any:
        if self.content.get(key) is None:
            raise ConfigError(f"{self.where}: key '{self.prefix}{key}' is missing; not a DFlash draft in the z-lab format")
        return self.content[key]

    def number(self, key: str, least: int = 1) -> int:
        value = self.needed(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(key, f"{value!r} is not a whole number of at least {least}")
        return value

    def positive(self, key: str) -> float:
        value = self.needed(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(key, f"{value!r} is not a positive number")
        return float(value)

    def yes(self, key: str, default: bool) -> bool:
        value = self.content.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, f"{value!r} is neither true nor false")
        return default if value is None else value

    def inner(self, key: str) -> _Keys:
        """The object at `key`; an empty one where there is none."""
        value = self.content.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(key, f"{value!r} is not an object")
        return _Keys(value or {}, self.where, f"{self.prefix}{key}.")


def check_layers(kinds: Sequence[Any], num_layers: int, sliding_window: int | None, prefix: str) -> None:
    """Raise a ConfigError, its key behind `prefix`, unless there is one known kind for each layer and a window for sliding."""
    if len(kinds) != num_layers:
        raise ConfigError(f"{prefix}layer_types: {len(kinds)} layers for a draft of {num_layers}")
    unknown = next((kind for kind in kinds if kind not in (FULL, SLIDING)), None)
    if unknown is not None:
        raise ConfigError(f"{prefix}layer_types: {unknown!r} is neither {FULL} nor {SLIDING}")
    if SLIDING in kinds and sliding_window is None:
        raise ConfigError(f"{prefix}sliding_window: no window is given, and layer_types has {SLIDING}")


def _refuse(keys: _Keys, inner: _Keys, only: dict[str, tuple[Any, ...]]) -> None:
    for name, accepted in only.items():
        place, key = (inner, name.removeprefix(inner.prefix)) if name.startswith(inner.prefix) else (keys, name)
        if place.get(key) not in accepted:
            raise place.error(key, f"{place.get(key)!r} is not supported; this draft network knows only {accepted[-1]!r}")


def _same(keys: _Keys, places: Sequence[tuple[_Keys, str]], missing: str) -> tuple[_Keys, str]:
    """The first of the places that holds a value; all that do must hold the same."""
    found = [(place, key) for place, key in places if place.get(key) is not None]
    if not found:
        raise ConfigError(f"{keys.where}: key '{missing}' is missing; not a DFlash draft in the z-lab format")
    (first, key), *others = found
    for place, other in others:
        if place.get(other) != first.get(key):
            raise place.error(other, f"{place.get(other)!r}, but {first.prefix}{key} is {first.get(key)!r}")
    return first, key


def _rope_theta(keys: _Keys) -> float:
    """The base of the rotary angles, from whichever form the file has; scaled or partial rotations are refused."""
    places = [(keys, "rope_theta")]
    for name in ("rope_parameters", "rope_scaling"):
        rope = keys.inner(name)
        kind = next((key for key, value in rope.content.items() if isinstance(value, Mapping)), None)
        if kind is not None:
            raise rope.error(kind, "angles by kind of layer are not supported")
        for key, accepted in ROPE_ONLY.items():
            if rope.get(key) not in accepted:
                raise rope.error(
                    key, f"{rope.get(key)!r} is not supported; draft angles are plain rotary ones over the whole head"
                )
        places.append((rope, "rope_theta"))
    place, key = _same(keys, places, "rope_theta")
    return place.positive(key)


def _layers(keys: _Keys, dflash: _Keys, num_layers: int) -> tuple[tuple[str, ...], int | None]:
    """Kinds of the layers and the sliding window, resolved as vLLM and the Hugging Face class do."""
    top = keys.number("sliding_window") if keys.yes("use_sliding_window", False) and keys.get("sliding_window") else None
    window = dflash.number("swa_window_size") if dflash.get("swa_window_size") is not None else top
    kinds = keys.get("layer_types")
    if kinds is None:
        first = DEFAULT_MAX_WINDOW_LAYERS if keys.get("max_window_layers") is None else keys.number("max_window_layers", 0)
        kinds = [SLIDING if top is not None and i >= first else FULL for i in range(num_layers)]
    if not isinstance(kinds, list):
        raise keys.error("layer_types", f"{kinds!r} is not a list")
    if dflash.yes("use_swa", False) and SLIDING not in kinds:
        kinds = [SLIDING] * num_layers
    if SLIDING in kinds and window is None and keys.get("sliding_window"):
        raise keys.error("use_sliding_window", "false or missing: no reader would use sliding_window, but layers slide")
    check_layers(kinds, num_layers, window, f"{keys.where}: ")
    if SLIDING not in kinds:
        return tuple(kinds), None
    if keys.get("is_causal") is None and dflash.get("causal") is None:
        raise keys.error("is_causal", "missing: sliding layers are causal then, and causal layers are not supported")
    return tuple(kinds), window


def _taps(dflash: _Keys) -> tuple[int, ...]:
    ids = dflash.needed("target_layer_ids")
    if not isinstance(ids, list) or not ids or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise dflash.error("target_layer_ids", f"{ids!r} is not a list of layer numbers")
    return tuple(ids)


def _check_sizes(keys: _Keys, fields: dict[str, Any]) -> None:
    if fields["num_heads"] % fields["num_kv_heads"]:
        raise keys.error("num_key_value_heads", f"{fields['num_kv_heads']} does not divide {fields['num_heads']} heads")
    if fields["head_dim"] % 2:
        raise keys.error("head_dim", f"{fields['head_dim']} is odd, and rotary angles turn pairs")
    if fields["mask_token_id"] >= fields["vocab_size"]:
        raise keys.error("dflash_config.mask_token_id", f"{fields['mask_token_id']} is not below vocab_size")
    for key, ours in (("draft_vocab_size", "vocab_size"), ("target_hidden_size", "hidden_size")):
        if keys.get(key) not in (None, fields[ours]):
            raise keys.error(key, f"{keys.get(key)!r} is not supported; it must be {ours} {fields[ours]}")


def read_fields(config: Any, where: str) -> dict[str, Any]:
    """The fields of `DraftSpec`, from the content of a `config.json`; `where` names the file.

    Raises:
        ConfigError: one line with file and key.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where}: holds no JSON object; not a DFlash draft in the z-lab format")
    keys = _Keys(config, where)
    if config.get("dflash_config") is None:
        raise ConfigError(f"{where}: key 'dflash_config' is missing; not a DFlash draft in the z-lab format")
    dflash = keys.inner("dflash_config")
    architectures = config.get("architectures")
    if architectures is not None and architectures != ["DFlashDraftModel"]:
        raise keys.error("architectures", f"{architectures!r} is not supported; this draft network is ['DFlashDraftModel']")
    _refuse(keys, dflash, ONLY)
    block, block_key = _same(keys, [(dflash, "block_size"), (keys, "block_size")], "block_size")
    mask, mask_key = _same(keys, [(dflash, "mask_token_id"), (keys, "mask_token_id")], "dflash_config.mask_token_id")
    num_layers = keys.number("num_hidden_layers")
    kinds, window = _layers(keys, dflash, num_layers)
    fields = {
        "hidden_size": keys.number("hidden_size"),
        "intermediate_size": keys.number("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": keys.number("num_attention_heads"),
        "num_kv_heads": keys.number("num_key_value_heads"),
        "head_dim": keys.number("head_dim"),
        "vocab_size": keys.number("vocab_size"),
        "rms_norm_eps": keys.positive("rms_norm_eps"),
        "rope_theta": _rope_theta(keys),
        "max_position_embeddings": keys.number("max_position_embeddings"),
        "tie_word_embeddings": keys.yes("tie_word_embeddings", False),
        "num_target_layers": 0 if keys.get("num_target_layers") is None else keys.number("num_target_layers"),
        "block_size": block.number(block_key, 2),
        "mask_token_id": mask.number(mask_key, 0),
        "target_layer_ids": _taps(dflash),
        "layer_types": kinds,
        "sliding_window": window,
    }
    _check_sizes(keys, fields)
    return fields
