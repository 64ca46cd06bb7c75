"""The figures of a target that a draft is built from, read from its `config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core.errors import ConfigError


@dataclass(frozen=True)
class TargetShape:
    """The target's figures that a draft is built from (`head_dim` and sizes as in the Hugging Face config)."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    pad_token_id: int


def read_target_shape(folder: Path) -> TargetShape:
    """Read the shape from `config.json` without loading weights.

    Raises:
        ConfigError: the folder has no config, or the model has parts that a DFlash draft cannot follow.
    """
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: no config.json; target.path must name a Hugging Face model folder")
    try:
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # damaged, or a model that needs code of its own
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"target.path: {folder}: its config.json cannot be used ({reason})") from None
    config = config.get_text_config(decoder=True)
    if getattr(config, "final_logit_softcapping", None):
        raise ConfigError(f"{folder}: the target caps its final logits (final_logit_softcapping); not supported")
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    return TargetShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta", getattr(config, "rope_theta", 10_000.0))),
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        eos_token_ids=_end_tokens(folder, config.eos_token_id),
        pad_token_id=int(config.pad_token_id or 0),
    )


def _end_tokens(folder: Path, from_config: Any) -> tuple[int, ...]:
    """Tokens that end an answer, as serving engines take them: those of the config and those of `generation_config.json`.

    Raises:
        ConfigError: the second file is there and cannot be read.
    """
    file = folder / "generation_config.json"
    more = None
    if file.is_file():
        try:
            more = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"{file}: cannot be read ({error})") from None
    found: list[int] = []
    for ids in (from_config, more):
        found += ids if isinstance(ids, list | tuple) else [] if ids is None else [ids]
    return tuple(dict.fromkeys(int(token) for token in found))
