"""What a target thread makes sure of: the shape of every batch's features, and on its first batch what is in them.

An off-by-one in the tapped layers crashes nothing and costs acceptance; all-zero states have been seen in serving engines
and train without any error (docs/field.md 1 and 3). So the first batch's states are compared, tap by tap, with what the
model itself calls its hidden states, on one sequence of the batch.

Shapes: R rows, S row length, T taps, H hidden size of the target, F = T * H.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dflash_core.model.target import FrozenTarget, HiddenStates
from dflash_core.training.collate import DraftBatch
from dflash_core.training.split_batch import lengths_in_use

# Most tokens of the sequence that is compared: the plain forward pass keeps the states of all layers.
MOST_TOKENS = 256
# How far captured states may be from the model's own, as a share of their norm, mean over tokens. In fp32 only the order of
# sums differs, which leaves about 1e-6; a rounding to bf16 on the way would show as 1e-3. A bf16 model rounds after every
# operation, over many layers, so that its limit finds only what is badly wrong, and a wrong layer is left to `CLOSER`. A
# bf16 copy of fp32 states is one rounding, at most 2^-8 of each number.
MODEL_TOLERANCE = {torch.float32: 3e-4, torch.bfloat16: 1e-1}
CAST_TOLERANCE = {torch.float32: 0.0, torch.bfloat16: 4e-3}
# States that are this much closer to another layer's are that layer's, however close both are. Layers that do nothing are
# equally close.
CLOSER = 0.5


def check_shape(features_RSF: object, tokens_RS: Tensor, width: int) -> Tensor:
    """Refuse what is not a tensor [R, S, width]. Costs nothing, and so is done for every batch."""
    expected = [*tokens_RS.shape, width]
    if not isinstance(features_RSF, Tensor):
        raise ValueError(f"the target gave {type(features_RSF).__name__} instead of captured states {expected}")
    if list(features_RSF.shape) != expected:
        raise ValueError(f"captured states are {list(features_RSF.shape)}, expected {expected}")
    return features_RSF


def check_values(features_RSF: Tensor, layer_ids: tuple[int, ...]) -> list[float]:
    """Refuse states that no training can use: not finite, or all zero in any tap. Returns the root mean square by tap."""
    rms = []
    for layer, states in zip(layer_ids, features_RSF.chunk(len(layer_ids), dim=-1), strict=True):
        norm = float(torch.linalg.vector_norm(states, dtype=torch.float32))
        if not math.isfinite(norm):
            raise ValueError(f"captured states of layer {layer} are not finite")
        if norm == 0.0:
            raise ValueError(f"captured states of layer {layer} are all zero")
        rms.append(norm / math.sqrt(states.numel()))
    return rms


def sequence_to_compare(batch: DraftBatch, pad_token_id: int) -> tuple[int, int]:
    """Where in row 0 a sequence stands: its first place, and the one behind it, at most `MOST_TOKENS` later.

    The first row without its padding, or the longest document of a packed row.
    """
    begin, length = 0, lengths_in_use(batch, pad_token_id)[0]
    if batch.documents is not None:
        lengths = torch.bincount(batch.documents.ids_RS[0])
        longest = int(lengths.argmax())
        begin, length = int(lengths[:longest].sum()), int(lengths[longest])
    return begin, begin + min(length, MOST_TOKENS)


def check_first_batch(target: FrozenTarget, batch: DraftBatch, features_RSF: Tensor) -> dict[str, Any]:
    """Check the first batch's features against the model itself; returns what was found, as fields of an event.

    Costs one plain forward pass over at most `MOST_TOKENS` tokens. The output of the last layer is not among the model's
    hidden states, whose last one is behind the final norm: there the norm is applied to the captured states, too.

    Fields: `dtype`, `taps`, `compared_taps`, `tap_rms` (whole batch), `num_compared_tokens`, and `largest_difference`, the
    largest over taps of the mean distance of a token's states as a share of their norm; None if no tap was compared.

    Raises:
        ValueError: wrong number format, not finite, all zero in a tap, or not the states of the layer they are named by.
    """
    if features_RSF.dtype != target.feature_dtype:
        raise ValueError(f"captured states are {_name(features_RSF.dtype)}, expected {_name(target.feature_dtype)}")
    rms = check_values(features_RSF, target.layer_ids)
    begin, end = sequence_to_compare(batch, target.shape.pad_token_id)
    differences = compare_taps(target, batch.tokens_RS[:1, begin:end], features_RSF[:1, begin:end])
    return {
        "dtype": _name(features_RSF.dtype),
        "taps": list(target.layer_ids),
        "compared_taps": list(differences),
        "tap_rms": rms,
        "num_compared_tokens": end - begin,
        "largest_difference": max(differences.values(), default=None),
    }


@torch.inference_mode()
def compare_taps(target: FrozenTarget, tokens_1S: Tensor, features_1SF: Tensor) -> dict[int, float]:
    """Distance of each tap's states from the model's own, by layer id, as a share of their norm (mean over tokens).

    A tap on a last layer whose norm is not known is left out.

    Raises:
        ValueError: the states of a tap are too far from those of its layer, or are another layer's.
    """
    hidden = target.hidden_states(tokens_1S)
    tolerance = MODEL_TOLERANCE[target.model.dtype] + CAST_TOLERANCE[target.feature_dtype]
    differences = {}
    for layer, states in zip(target.layer_ids, features_1SF.chunk(len(target.layer_ids), dim=-1), strict=True):
        distances = _distances(hidden, layer, states, target.model.dtype)
        if distances is None:
            continue
        own = distances[layer + 1]
        nearest = min(range(len(distances)), key=distances.__getitem__)
        if distances[nearest] < CLOSER * own:
            found = f"the output of layer {nearest - 1}" if nearest else "the embedding"
            raise ValueError(f"captured states of layer {layer} are not its own: {found} is closer ({own:.1e} of their norm off)")
        if not own <= tolerance:  # a NaN is not
            raise ValueError(f"captured states of layer {layer} differ from the model's own by {own:.1e} of their norm")
        differences[layer] = own
    return differences


def _distances(hidden: HiddenStates, layer: int, states: Tensor, dtype: torch.dtype) -> list[float] | None:
    """Distances from all hidden states that can be compared with a tap; number `layer + 1` is its own."""
    last = len(hidden.states) - 1
    if layer + 1 < last:  # the last one may be normed, and is no tap's own here
        return [_distance(states, other) for other in hidden.states[:last]]
    if not hidden.last_is_known:
        return None
    if hidden.final_norm is None:
        return [_distance(states, other) for other in hidden.states]
    norm = hidden.final_norm
    normed = [norm(other) for other in hidden.states[:last]]
    return [_distance(norm(states.to(dtype)), other) for other in (*normed, hidden.states[last])]


def _distance(states_1SH: Tensor, other_1SH: Tensor) -> float:
    """By token: the first tokens of a sequence can be a hundred times as large as all others."""
    error_S = (states_1SH.float() - other_1SH.float()).norm(dim=-1)
    return float((error_S / other_1SH.float().norm(dim=-1).clamp(min=1e-12)).mean())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
