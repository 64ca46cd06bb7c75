"""`config.json` of drafts: what is written is read back, published forms are read, and what cannot be served is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.config import DraftConfig
from dflash_core.errors import ConfigError
from dflash_core.model.spec import DraftSpec
from dflash_core.model.target_shape import TargetShape

FULL, SLIDING = "full_attention", "sliding_attention"
TARGET = TargetShape(24, 40, 8, 4, 2, 8, 31, 1e-6, 1e4, 128, True, (1,), 0)
SPEC = DraftSpec(24, 40, 2, 4, 2, 8, 31, 1e-6, 1e4, 128, True, 6, 4, 30, (1, 3))


def published(**changes: Any) -> dict[str, Any]:
    """As published checkpoints are: block size on top, nothing said of causality; None takes a key away."""
    config = {
        "architectures": ["DFlashDraftModel"], "attention_bias": False, "attention_dropout": 0.0, "block_size": 16,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "bos_token_id": 1, "dtype": "bfloat16", "head_dim": 8,
        "dflash_config": {"mask_token_id": 30, "target_layer_ids": [1, 9]}, "hidden_act": "silu", "hidden_size": 24,
        "intermediate_size": 40, "layer_types": [FULL, FULL], "max_position_embeddings": 128, "max_window_layers": 5,
        "model_type": "qwen3", "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "num_target_layers": 36, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
        "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 31,
    }  # fmt: skip
    config.update(changes)
    return {key: value for key, value in config.items() if value is not None}


def read(**changes: Any) -> DraftSpec:
    return DraftSpec.from_hf_config(published(**changes), "a/config.json")


def dflash(**changes: Any) -> dict[str, Any]:
    content = {"mask_token_id": 30, "target_layer_ids": [1, 9], **changes}
    return {key: value for key, value in content.items() if value is not None}


@given(kinds=st.lists(st.sampled_from([FULL, SLIDING]), min_size=1, max_size=6), window=st.integers(1, 5000))
def test_what_is_written_is_read_back(kinds: list[str], window: int) -> None:
    spec = DraftSpec(
        **{**SPEC.as_dict(), "num_layers": len(kinds), "layer_types": tuple(kinds),
           "sliding_window": window if SLIDING in kinds else None}
    )  # fmt: skip
    written = json.loads(json.dumps(spec.to_hf_config()))
    assert DraftSpec.from_hf_config(written, "here") == spec
    assert written["is_causal"] is False and written["dflash_config"]["causal"] is False
    assert written["use_sliding_window"] == (SLIDING in kinds) and written["layer_types"] == kinds
    # Readers that know `max_window_layers` alone agree, where one number can say it.
    if kinds == sorted(kinds):
        assert DraftSpec.from_hf_config({k: v for k, v in written.items() if k != "layer_types"}, "here") == spec


def test_the_class_that_serving_engines_load_it_with_agrees() -> None:
    from transformers import Qwen3Config

    spec = DraftSpec(**{**SPEC.as_dict(), "layer_types": (FULL, SLIDING), "sliding_window": 7})
    config = Qwen3Config(**spec.to_hf_config())
    assert config.layer_types == [FULL, SLIDING] and config.sliding_window == 7 and config.is_causal is False


def test_a_draft_without_kinds_is_all_full() -> None:
    assert SPEC.layer_types == (FULL, FULL) and SPEC.layer_windows == (None, None)
    old = {k: v for k, v in SPEC.to_hf_config().items() if k not in ("layer_types", "sliding_window", "use_sliding_window")}
    assert DraftSpec.from_hf_config(old, "old") == SPEC


@pytest.mark.parametrize(
    ("draft", "kinds", "window"),
    [
        ({}, (FULL, FULL), None),
        ({"sliding_window": 9}, (SLIDING, SLIDING), 9),
        ({"sliding_window": 9, "layer_types": (SLIDING, FULL)}, (SLIDING, FULL), 9),
        ({"layer_types": (FULL, FULL)}, (FULL, FULL), None),
    ],
)
def test_the_draft_that_is_asked_for(draft: dict[str, Any], kinds: tuple[str, ...], window: int | None) -> None:
    spec = DraftSpec.build(DraftConfig(num_layers=2, num_taps=2, block_size=4, **draft), TARGET, 30)
    assert (spec.layer_types, spec.sliding_window) == (kinds, window)
    assert spec.layer_windows == tuple(window if kind == SLIDING else None for kind in kinds)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ({"layer_types": (SLIDING, FULL)}, r"^draft\.sliding_window: no window"),
        ({"layer_types": (FULL,)}, r"^draft\.layer_types: 1 layers for a draft of 2$"),
        ({"layer_types": (FULL, FULL), "sliding_window": 4}, r"^draft\.sliding_window: 4 is given"),
        ({"sliding_window": 1}, r"^draft\.sliding_window: 1 leaves each slot itself alone"),
    ],
)
def test_layers_that_do_not_fit_are_refused(draft: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DraftSpec.build(DraftConfig(num_layers=2, num_taps=2, **draft), TARGET, 30)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block_size": None, "dflash_config": dflash(block_size=16)},
        {"dflash_config": dflash(block_size=16)},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000}},
        {"rope_theta": None, "rope_scaling": {"type": "default", "rope_theta": 1000000.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000, "partial_rotary_factor": 1.0}},
        {"layer_types": None, "max_window_layers": None, "use_sliding_window": True, "sliding_window": 4096},
        {"is_causal": False},
    ],
)
def test_published_forms_are_read(changes: dict[str, Any]) -> None:
    spec = read(**changes)
    assert (spec.block_size, spec.rope_theta, spec.mask_token_id, spec.target_layer_ids) == (16, 1e6, 30, (1, 9))
    assert spec.layer_windows == (None, None) and spec.num_target_layers == 36


def test_a_file_that_does_not_say_how_many_layers_the_target_has_is_read() -> None:
    assert read(num_target_layers=None).num_target_layers == 0


SLIDES = {"layer_types": [SLIDING, FULL], "use_sliding_window": True, "sliding_window": 64, "is_causal": False}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        (SLIDES, (64, None)),
        ({**SLIDES, "is_causal": None, "dflash_config": dflash(causal=False)}, (64, None)),
        ({**SLIDES, "dflash_config": dflash(swa_window_size=32)}, (32, None)),
        ({"dflash_config": dflash(causal=False, use_swa=True, swa_window_size=8)}, (8, 8)),
        ({**SLIDES, "layer_types": None, "max_window_layers": 1}, (None, 64)),
    ],
)
def test_published_windows_are_read(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read(**changes).layer_windows == windows


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"is_causal": True}, "is_causal"),
        ({"dflash_config": dflash(causal=True)}, "dflash_config.causal"),
        ({**SLIDES, "is_causal": None}, "is_causal"),
        ({**SLIDES, "use_sliding_window": False}, "use_sliding_window"),
        ({**SLIDES, "sliding_window": None}, "sliding_window"),
        ({**SLIDES, "sliding_window": "64"}, "sliding_window"),
        ({"layer_types": [FULL]}, "layer_types"),
        ({"layer_types": [FULL, "chunked_attention"]}, "layer_types"),
        ({"layer_types": FULL}, "layer_types"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling.type"),
        ({"rope_parameters": {"mrope_section": [1, 2]}}, "rope_parameters.mrope_section"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "rope_parameters.partial_rotary_factor"),
        ({"rope_parameters": {FULL: {"rope_theta": 1e6}}}, f"rope_parameters.{FULL}"),
        ({"rope_parameters": {"rope_theta": 5}}, "rope_parameters.rope_theta"),
        ({"rope_theta": None}, "rope_theta"),
        ({"rope_theta": "1e6"}, "rope_theta"),
        ({"rope_scaling": 4}, "rope_scaling"),
        ({"attention_bias": True}, "attention_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"architectures": ["DFlash2DraftModel"]}, "architectures"),
        ({"block_size": 8, "dflash_config": dflash(block_size=16)}, "block_size"),
        ({"block_size": None}, "block_size"),
        ({"block_size": 1}, "block_size"),
        ({"dflash_config": [1]}, "dflash_config"),
        ({"dflash_config": None}, "dflash_config"),
        ({"dflash_config": dflash(mask_token_id=31)}, "dflash_config.mask_token_id"),
        ({"dflash_config": dflash(mask_token_id=None)}, "dflash_config.mask_token_id"),
        ({"dflash_config": dflash(target_layer_ids=[])}, "dflash_config.target_layer_ids"),
        ({"dflash_config": dflash(target_layer_ids=3)}, "dflash_config.target_layer_ids"),
        ({"dflash_config": dflash(target_layer_ids=[1, -1])}, "dflash_config.target_layer_ids"),
        ({"dflash_config": dflash(target_layer_ids=None)}, "dflash_config.target_layer_ids"),
        ({"hidden_size": "24"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"draft_vocab_size": 12}, "draft_vocab_size"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_what_is_wrong_is_one_line_with_file_and_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**changes)
    text = str(caught.value)
    assert text.startswith("a/config.json: ") and "\n" not in text
    assert text.startswith(f"a/config.json: {key}: ") or f"key '{key}' is missing" in text, text


@pytest.mark.parametrize("content", [[], None, 3, "text"])
def test_a_file_that_holds_no_object_is_refused(content: Any) -> None:
    with pytest.raises(ConfigError, match="holds no JSON object"):
        DraftSpec.from_hf_config(content, "a/config.json")
