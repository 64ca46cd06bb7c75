"""The shape of a draft, and its `config.json` in the z-lab / Hugging Face format (docs/field.md 1, 'Export').

vLLM, SGLang and the reference code read these keys. The tapped layer ids are always written and never recomputed. So is
causality: vLLM takes a sliding layer as causal unless the file says otherwise. Reading is in `spec_file.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dflash_core.config import DraftConfig, check_draft_fits
from dflash_core.errors import ConfigError
from dflash_core.model.spec_file import FULL, SLIDING, check_layers, read_fields
from dflash_core.model.target import TargetShape


@dataclass(frozen=True)
class DraftSpec:
    """Everything that fixes the draft network's tensors and its behaviour.

    Attributes:
        num_target_layers: 0 if the file that the draft was read from does not say.
        layer_types: `full_attention` or `sliding_attention` for each layer; empty is taken as all full.
        sliding_window: positions that a sliding layer's query reaches to either side, its own included (`attention.py`).
    """

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
    num_target_layers: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (FULL,) * self.num_layers)

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer; None: it sees everything that the attention rule lets it."""
        return tuple(self.sliding_window if kind == SLIDING else None for kind in self.layer_types)

    @classmethod
    def build(cls, draft: DraftConfig, target: TargetShape, mask_token_id: int) -> DraftSpec:
        """The draft that `draft` asks for on this target; sizes not given are the target's."""
        try:
            layer_ids = check_draft_fits(draft, target.num_layers)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if not 0 <= mask_token_id < target.vocab_size:
            raise ConfigError(f"target.mask_token_id: {mask_token_id} is not a row of an embedding of {target.vocab_size} rows")
        kinds = draft.layer_types or (FULL if draft.sliding_window is None else SLIDING,) * draft.num_layers
        check_layers(kinds, draft.num_layers, draft.sliding_window, "draft.")
        if draft.sliding_window == 1:
            raise ConfigError("draft.sliding_window: 1 leaves each slot itself alone, and no context at all; the least is 2")
        if draft.sliding_window is not None and SLIDING not in kinds:
            raise ConfigError(f"draft.sliding_window: {draft.sliding_window} is given, but draft.layer_types has no {SLIDING}")
        return cls(
            hidden_size=target.hidden_size,
            intermediate_size=draft.intermediate_size or target.intermediate_size,
            num_layers=draft.num_layers,
            num_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads,
            head_dim=target.head_dim,
            vocab_size=target.vocab_size,
            rms_norm_eps=target.rms_norm_eps,
            rope_theta=target.rope_theta,
            max_position_embeddings=target.max_position_embeddings,
            tie_word_embeddings=target.tie_word_embeddings,
            num_target_layers=target.num_layers,
            block_size=draft.block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=layer_ids,
            layer_types=tuple(kinds),
            sliding_window=draft.sliding_window,
        )

    def to_hf_config(self, dtype: str = "float32") -> dict[str, Any]:
        """The content of the exported `config.json`."""
        # Readers without `layer_types` take the layers from `max_window_layers` on as sliding.
        leading_full = next((i for i, kind in enumerate(self.layer_types) if kind == SLIDING), self.num_layers)
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "max_position_embeddings": self.max_position_embeddings,
            "layer_types": list(self.layer_types),
            "sliding_window": self.sliding_window,
            "use_sliding_window": self.sliding_window is not None,
            "max_window_layers": leading_full,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": self.tie_word_embeddings,
            "num_target_layers": self.num_target_layers or None,
            "block_size": self.block_size,
            "is_causal": False,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
                "block_size": self.block_size,
                "causal": False,
            },
            "dtype": dtype,
            "initializer_range": 0.02,
            "use_cache": True,
        }

    @classmethod
    def from_hf_config(cls, config: dict[str, Any], where: str) -> DraftSpec:
        """Read the `config.json` of a draft exported here or published by others; `where` names the file in errors.

        Raises:
            ConfigError: a key is missing or of a wrong kind, or the draft needs what this network does not do.
        """
        return cls(**read_fields(config, where))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
