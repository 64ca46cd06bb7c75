"""Anchors of a sequence, and what the slots behind them are to predict. Numpy only.

Shapes: S sequence, A anchors, K slots of a block.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Published decay of the slot weights by block size (docs/field.md 1, 'Loss').
GAMMA_BY_BLOCK_SIZE = {16: 7.0, 10: 5.0, 8: 4.0}


class Anchors(NamedTuple):
    """Positions [A] (ascending), labels [A, K] and weights [A, K]; a slot without a label has weight 0 and label 0."""

    positions: NDArray[np.int64]
    labels: NDArray[np.int64]
    weights: NDArray[np.float32]


def default_gamma(block_size: int) -> float:
    """The published decay for the block size, else the line through the published ones: (B - 1) * 7 / 15."""
    return GAMMA_BY_BLOCK_SIZE.get(block_size, (block_size - 1) * 7 / 15)


def slot_weights(block_size: int, gamma: float) -> NDArray[np.float32]:
    """w_k = exp(-(k - 1) / gamma) for k >= 1, and 0 for the anchor's own slot: [K]."""
    k = np.arange(block_size)
    return np.where(k == 0, 0.0, np.exp(-(k - 1) / gamma)).astype(np.float32)


def anchor_positions(loss_mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """All positions that may be anchors: the token there and the next one are supervised."""
    return np.flatnonzero(loss_mask[:-1] & loss_mask[1:])


def draw_anchors(
    tokens: NDArray[np.int32],
    loss_mask: NDArray[np.bool_],
    *,
    num_anchors: int,
    weights_K: NDArray[np.float32],
    generator: np.random.Generator,
) -> Anchors:
    """Draw at most `num_anchors` anchors without replacement, sorted.

    Only the unbroken run of supervised tokens behind an anchor is labelled: where a block reaches beyond the answer
    into the next turn or past the end, all later slots are off.
    """
    candidates = anchor_positions(loss_mask)
    if len(candidates) > num_anchors:
        candidates = np.sort(generator.choice(candidates, num_anchors, replace=False))
    block_size, length = len(weights_K), len(tokens)
    places = candidates[:, None] + np.arange(block_size)
    inside = places < length
    places = np.minimum(places, length - 1)
    reached = np.logical_and.accumulate(inside & loss_mask[places], axis=1)
    reached[:, 0] = False
    labels = np.where(reached, tokens[places], 0).astype(np.int64)
    return Anchors(candidates.astype(np.int64), labels, np.where(reached, weights_K, np.float32(0)))
