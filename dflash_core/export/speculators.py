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

With sliding layers vLLM serves what is trained here (`attention.py` in the model's room). speculators' own forward pass cuts
their window in another way: W context positions before the anchor for all slots alike, and the whole block.

Shapes: V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from dflash_core.errors import ConfigError, DataError
from dflash_core.export.target_rows import TargetRows
from dflash_core.model.draft import DFlashDraft
from dflash_core.model.spec import DraftSpec
from dflash_core.model.spec_file import SLIDING
from dflash_core.model.weight_files import WEIGHTS_FILE
from dflash_core.model.weights import CONFIG_FILE
from dflash_core.provenance import read_json, write_atomically, write_json

FORMAT_VERSION = "0.9.0"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
# In published files, and the target's or derived from it: no part of the draft.
NOT_THE_DRAFTS = frozenset({EMBEDDING, HEAD, "verifier_lm_head.weight", "verifier_norm.weight", "t2d", "d2t"})
# Keys of the z-lab format that this one keeps elsewhere or does not have.
_NOT_NESTED = frozenset({"architectures", "num_target_layers", "block_size", "dflash_config"})
# Keys of this one beside the nested ones that the reader of the z-lab format checks or takes.
_BESIDE = ("block_size", "mask_token_id", "draft_vocab_size", "target_hidden_size", "num_target_layers", "quantization_config")


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
        "num_target_layers": spec.num_target_layers or None,
        "dtype": number_format,
    }


def read_speculators(folder: Path) -> DFlashDraft:
    """Read a draft in this format into fp32, in evaluation mode; embedding and head are left out.

    Files of other writers do not say how many layers the target has: `num_target_layers` is 0 then.

    Raises:
        DataError: a file is missing or damaged, or its tensors do not fit the configuration.
        ConfigError: a key is missing or of a wrong kind, or the draft is of a kind that is not DFlash as it is built here: a
            draft vocabulary of its own, a slot 0 that predicts, causal layers, other rotary embeddings, biases.
    """
    where = folder / CONFIG_FILE
    try:
        config = read_json(where)
        tensors = load_file(folder / WEIGHTS_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"{folder}: not a readable draft ({error})") from None
    draft = DFlashDraft(DraftSpec.from_hf_config(_flat(config, where), str(where)))
    body = {name: tensor.to(torch.float32) for name, tensor in tensors.items() if name not in NOT_THE_DRAFTS}
    try:
        draft.load_state_dict(body)
    except RuntimeError as error:
        first_lines = " ".join(str(error).split())[:300]
        raise DataError(f"{folder / WEIGHTS_FILE}: tensors do not fit the config: {first_lines}") from None
    return draft.eval()


def read_speculators_rows(folder: Path) -> TargetRows:
    """The copies of the target's embedding and head in such a draft; raises DataError where one is missing."""
    try:
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            return TargetRows(file.get_tensor(EMBEDDING), file.get_tensor(HEAD))
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"{folder}: embedding and head cannot be read ({error})") from None


def _flat(config: Any, where: Path) -> dict[str, Any]:
    """The same draft's configuration in the z-lab format, whose reader looks at everything that is not this format's own."""
    if not isinstance(config, dict) or "speculators_model_type" not in config:
        raise ConfigError(f"{where}: key 'speculators_model_type' is missing; not a draft in the speculators format")
    if config["speculators_model_type"] != "dflash":
        raise ConfigError(
            f"{where}: speculators_model_type: {config['speculators_model_type']!r} is not supported; only dflash is"
        )
    nested, ids = config.get("transformer_layer_config"), config.get("aux_hidden_state_layer_ids")
    if not isinstance(nested, dict):
        raise ConfigError(f"{where}: transformer_layer_config: {nested!r} is not an object")
    # Id 0 would be the embedding, which is no layer's output.
    if not isinstance(ids, list) or not ids or any(type(i) is not int or i < 1 for i in ids):
        raise ConfigError(f"{where}: aux_hidden_state_layer_ids: {ids!r} is not a list of whole numbers above 0")
    if config.get("sample_from_anchor"):
        raise ConfigError(f"{where}: sample_from_anchor: true is not supported; slot 0 is the anchor and predicts nothing here")
    kinds = nested.get("layer_types")
    if isinstance(kinds, list) and SLIDING in kinds and config.get("sliding_window_non_causal") is not True:
        raise ConfigError(f"{where}: sliding_window_non_causal: not true; sliding layers are causal then, which is not supported")
    return {
        **{key: value for key, value in nested.items() if key not in _NOT_NESTED},
        **{key: config.get(key) for key in _BESIDE},
        "is_causal": nested.get("is_causal") or False,  # layers of full attention are never causal in speculators
        "dflash_config": {"target_layer_ids": [i - 1 for i in ids]},
    }
