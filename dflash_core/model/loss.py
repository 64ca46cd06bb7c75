"""The draft's loss: weighted cross-entropy of the labelled slots, as a sum with its weights, never as a mean.

The caller divides once, by the weights of the whole optimizer step over all micro-batches and cells (docs/field.md 1,
'Loss'); a mean of means would favour batches with few slots, and with length buckets that bias follows the bucket.
Only labelled slots reach the head, in pieces, so that the logits of a batch never exist at once.

Shapes: R rows, A anchors, K slots, D hidden, V vocabulary, N labelled slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

# 2,048 slots x 152k rows of logits in fp32 are 1.2 GB, the largest piece that ever exists.
SLOTS_PER_PIECE = 2048


class LossParts(NamedTuple):
    """Sums over one batch.

    Attributes:
        loss_sum: weighted cross-entropy, with gradient.
        weight_sum: sum of the weights.
        correct_K, count_K: hits and labelled slots by position in the block (position 0 is always 0).
    """

    loss_sum: Tensor
    weight_sum: Tensor
    correct_K: Tensor
    count_K: Tensor


def _piece(final_ND: Tensor, head_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    logits = functional.linear(final_ND, head_VD).float()
    return functional.cross_entropy(logits, labels_N, reduction="none"), logits.argmax(-1) == labels_N


def block_loss(final_RAKD: Tensor, head_VD: Tensor, labels_RAK: Tensor, weights_RAK: Tensor) -> LossParts:
    """Loss of a batch from the draft's final states and the target's frozen head."""
    block_size = labels_RAK.shape[-1]
    chosen = weights_RAK.flatten() > 0
    index_N = chosen.nonzero().squeeze(1)
    final_ND = final_RAKD.flatten(0, 2).index_select(0, index_N)
    labels_N, weights_N = labels_RAK.flatten()[index_N], weights_RAK.flatten()[index_N]
    losses, hits = [], []
    for start in range(0, len(index_N), SLOTS_PER_PIECE):
        piece = slice(start, start + SLOTS_PER_PIECE)
        if len(index_N) > SLOTS_PER_PIECE:  # recomputed in the backward pass instead of kept
            loss, hit = checkpoint(_piece, final_ND[piece], head_VD, labels_N[piece], use_reentrant=False)
        else:
            loss, hit = _piece(final_ND[piece], head_VD, labels_N[piece])
        losses.append(loss)
        hits.append(hit)
    positions_N = index_N % block_size
    zeros_K = torch.zeros(block_size, device=final_RAKD.device)
    if not losses:
        return LossParts(final_RAKD.sum() * 0.0, weights_RAK.sum(), zeros_K, zeros_K)
    return LossParts(
        loss_sum=(torch.cat(losses) * weights_N).sum(),
        weight_sum=weights_N.sum(),
        correct_K=zeros_K.index_add(0, positions_N, torch.cat(hits).float()),
        count_K=zeros_K.index_add(0, positions_N, torch.ones_like(weights_N)),
    )


def expected_acceptance_length(accuracy_by_position: list[float]) -> float:
    """1 + sum_k prod_{j <= k} acc_j over slots 1 .. B - 1 (+1 included; docs/field.md 1, 'Acceptance length').

    `accuracy_by_position` starts with slot 1. It treats the slots' hits as independent, so it is an estimate; the
    measured figure comes from the draft-verify loop.
    """
    total, survival = 1.0, 1.0
    for accuracy in accuracy_by_position:
        survival *= accuracy
        total += survival
    return total
