"""The shape of a draft, and its `config.json` in the z-lab / Hugging Face format (docs/field.md 1, 'Export').

vLLM, SGLang and the reference code read these keys. The tapped layer ids are always written and never recomputed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dflash_core.config import DraftConfig, check_draft_fits
from dflash_core.errors import ConfigError
from dflash_core.model.target import TargetShape


@dataclass(frozen=True)
class DraftSpec:
    """Everything that fixes the draft network's tensors and its behaviour."""

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

    @classmethod
    def build(cls, draft: DraftConfig, target: TargetShape, mask_token_id: int) -> DraftSpec:
        """The draft that `draft` asks for on this target; sizes not given are the target's."""
        try:
            layer_ids = check_draft_fits(draft, target.num_layers)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if not 0 <= mask_token_id < target.vocab_size:
            raise ConfigError(f"target.mask_token_id: {mask_token_id} is not a row of an embedding of {target.vocab_size} rows")
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
        )

    def to_hf_config(self, dtype: str = "float32") -> dict[str, Any]:
        """The content of the exported `config.json`."""
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
            "layer_types": ["full_attention"] * self.num_layers,
            "sliding_window": None,
            "use_sliding_window": False,
            "max_window_layers": self.num_layers,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": self.tie_word_embeddings,
            "num_target_layers": self.num_target_layers,
            "block_size": self.block_size,
            "is_causal": False,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
                "block_size": self.block_size,
            },
            "dtype": dtype,
            "initializer_range": 0.02,
            "use_cache": True,
        }

    @classmethod
    def from_hf_config(cls, config: dict[str, Any], where: str) -> DraftSpec:
        """Read an exported `config.json`; `where` names the file in errors."""
        try:
            dflash = config["dflash_config"]
            return cls(
                hidden_size=config["hidden_size"],
                intermediate_size=config["intermediate_size"],
                num_layers=config["num_hidden_layers"],
                num_heads=config["num_attention_heads"],
                num_kv_heads=config["num_key_value_heads"],
                head_dim=config["head_dim"],
                vocab_size=config["vocab_size"],
                rms_norm_eps=config["rms_norm_eps"],
                rope_theta=config["rope_theta"],
                max_position_embeddings=config["max_position_embeddings"],
                tie_word_embeddings=config["tie_word_embeddings"],
                num_target_layers=config["num_target_layers"],
                block_size=dflash["block_size"],
                mask_token_id=dflash["mask_token_id"],
                target_layer_ids=tuple(dflash["target_layer_ids"]),
            )
        except KeyError as error:
            raise ConfigError(f"{where}: key {error} is missing; not a DFlash draft in the z-lab format") from None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
