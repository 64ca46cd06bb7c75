"""The draft's losses over the labelled slots, as a sum with its weights, never as a mean.

The caller divides once, by the weights of the whole optimizer step over all micro-batches and cells (docs/field.md 1,
'Loss'); a mean of means would favour batches with few slots, and with length buckets that bias follows the bucket.

Only labelled slots reach the head, in pieces, so that the logits of a batch never exist at once. The head is frozen, so
that a piece's gradient with respect to its final states needs nothing from the backward pass: it is computed while the
piece's logits are there, and the head is multiplied twice, where logits that are made again cost a third product. Each
slot's loss and gradient are kept apart until all pieces are done, for D-PACE's weights come from whole blocks.

Shapes: R rows, S row length, A anchors, K slots, D hidden, V vocabulary, N labelled slots, L = R * S positions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dflash_core.config import Loss

# Labelled slots whose logits exist at once, by kind of device. On a CPU pieces that fit a cache are faster
# (benchmarks/head_loss.py). A GPU needs so many that the product with the head, [piece, V] x [V, D], has a tile of 128 x 256
# for each of its 100 to 150 processors at D = 4096; more only takes memory: with 152k rows, 0.6 GB for each fp32 copy.
SLOTS_PER_PIECE = {"cpu": 512, "cuda": 1024}
# Losses that compare the draft with the target's own distribution instead of with the labels.
SOFT_LOSSES: tuple[Loss, ...] = ("kl", "total_variation")


class LossParts(NamedTuple):
    """Sums over one batch.

    Attributes:
        loss_sum: weighted loss of the labelled slots, with gradient.
        weight_sum: sum of the weights.
        correct_K, count_K: hits on the label and labelled slots by position in the block (position 0 is always 0).
    """

    loss_sum: Tensor
    weight_sum: Tensor
    correct_K: Tensor
    count_K: Tensor


class TargetStates(NamedTuple):
    """Where the target's own distribution comes from: slot k of anchor a is predicted by the state at a + k - 1.

    Attributes:
        last_RSD: the target's states behind its final norm, what its head is applied to.
        anchors_RA: places of the anchors in the row.
    """

    last_RSD: Tensor
    anchors_RA: Tensor


class _Slots(NamedTuple):
    """Of each labelled slot by itself, without its weight. `gradient_ND` is None where nobody asks for it."""

    loss_N: Tensor
    hits_N: Tensor
    gradient_ND: Tensor | None


def _softmax(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Turn logits into probabilities, in place; returns the largest logit and the logarithm of sum exp(logit - largest)."""
    largest_N1 = logits_NV.amax(dim=1, keepdim=True)
    total_N1 = logits_NV.sub_(largest_N1).exp_().sum(dim=1, keepdim=True)
    logits_NV.div_(total_N1)
    return largest_N1, total_N1.log()


def _cross_entropy(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """-log q(label), [N]; the logits become the gradient, q - (1 at the label)."""
    labels_N1 = labels_N.unsqueeze(1)
    label_logits_N1 = logits_NV.gather(1, labels_N1)
    largest_N1, log_total_N1 = _softmax(logits_NV)
    logits_NV.scatter_add_(1, labels_N1, torch.full_like(label_logits_N1, -1.0))
    return (largest_N1 - label_logits_N1 + log_total_N1).squeeze(1)


def _kl(logits_NV: Tensor, target_logits_NV: Tensor) -> Tensor:
    """KL(p || q) = sum p (log p - log q) of the target's p and the draft's q, [N]; the logits become the gradient, q - p.

    The target's logits are used up.
    """
    logits_NV.sub_(logits_NV.amax(dim=1, keepdim=True))
    target_logits_NV.sub_(target_logits_NV.amax(dim=1, keepdim=True))
    p_NV = target_logits_NV.exp()
    p_total_N1 = p_NV.sum(dim=1, keepdim=True)
    p_NV.div_(p_total_N1)
    apart_N = target_logits_NV.sub_(logits_NV).mul_(p_NV).sum(dim=1)
    q_total_N1 = logits_NV.exp_().sum(dim=1, keepdim=True)
    logits_NV.div_(q_total_N1).sub_(p_NV)
    return apart_N + (q_total_N1.log() - p_total_N1.log()).squeeze(1)


def _total_variation(logits_NV: Tensor, target_logits_NV: Tensor) -> Tensor:
    """0.5 sum |q - p|, [N]; the logits become the gradient, q (g - sum q g) with g = sign(q - p) / 2.

    The target's logits are used up.
    """
    _softmax(logits_NV)
    _softmax(target_logits_NV)
    apart_NV = torch.sub(logits_NV, target_logits_NV, out=target_logits_NV)
    variation_N = 0.5 * torch.linalg.vector_norm(apart_NV, ord=1, dim=1)
    half_sign_NV = apart_NV.sign_().mul_(0.5)
    mean_N11 = torch.bmm(logits_NV.unsqueeze(1), half_sign_NV.unsqueeze(2))
    logits_NV.mul_(half_sign_NV.sub_(mean_N11.squeeze(2)))
    return variation_N


def _logits(states_ND: Tensor, head_VD: Tensor) -> Tensor:
    """In fp32, whatever the product is computed in; the caller may overwrite them."""
    return functional.linear(states_ND.to(head_VD.dtype), head_VD).float()


def _each_slot(
    final_ND: Tensor,
    head_VD: Tensor,
    labels_N: Tensor,
    loss: Loss,
    last_LD: Tensor | None,
    places_N: Tensor | None,
    with_gradient: bool,
) -> _Slots:
    """Loss, hit and gradient of every slot, piece by piece. The target's state of a slot is row `places_N` of `last_LD`."""
    count, device = len(labels_N), final_ND.device
    slots = _Slots(
        torch.empty(count, device=device),
        torch.empty(count, dtype=torch.bool, device=device),
        torch.empty_like(final_ND) if with_gradient else None,
    )
    size = SLOTS_PER_PIECE.get(device.type, SLOTS_PER_PIECE["cuda"])
    for start in range(0, count, size):
        piece = slice(start, start + size)
        logits_NV = _logits(final_ND[piece], head_VD)
        slots.hits_N[piece] = logits_NV.argmax(dim=1) == labels_N[piece]
        if last_LD is None or places_N is None:
            slots.loss_N[piece] = _cross_entropy(logits_NV, labels_N[piece])
        else:
            distance = _kl if loss == "kl" else _total_variation
            slots.loss_N[piece] = distance(logits_NV, _logits(last_LD.index_select(0, places_N[piece]), head_VD))
        if slots.gradient_ND is not None:
            slots.gradient_ND[piece] = logits_NV.to(head_VD.dtype) @ head_VD
    return slots


class _WithGradient(torch.autograd.Function):
    """The weighted sum of losses whose gradients with respect to the final states are known already."""

    @staticmethod
    def forward(ctx: Any, final_ND: Tensor, loss_N: Tensor, weights_N: Tensor, gradient_ND: Tensor) -> Tensor:
        ctx.save_for_backward(weights_N, gradient_ND)
        return (loss_N * weights_N).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        weights_N, gradient_ND = ctx.saved_tensors
        # Multiplied in fp32 and rounded once: a weight in bf16 would be off by the same share in every block.
        return torch.mul(gradient_ND, (weights_N * grad).unsqueeze(1), out=torch.empty_like(gradient_ND)), None, None, None


def dpace_weights(likelihood_N: Tensor, index_N: Tensor, labels_shape: torch.Size, alpha: float) -> Tensor:
    """D-PACE's weight of each labelled slot, [N] (arXiv 2605.18810).

    With s_k = (1 - alpha) q_k + alpha and P_k = prod_{i <= k} s_i, slot k weighs W_k = sum_{j >= k} P_j: what it adds to the
    expected length of the accepted prefix. Slots without a label neither multiply nor add.

    Args:
        likelihood_N: q, the draft's probability of the label.
        index_N: where the labelled slots stand among all R * A * K.
        labels_shape: (R, A, K).
    """
    lifted_RAK = likelihood_N.new_ones(labels_shape)
    lifted_RAK.view(-1)[index_N] = (1 - alpha) * likelihood_N + alpha
    labelled_RAK = likelihood_N.new_zeros(labels_shape)
    labelled_RAK.view(-1)[index_N] = 1.0
    reached_RAK = lifted_RAK.cumprod(dim=-1) * labelled_RAK
    return reached_RAK.flip(-1).cumsum(dim=-1).flip(-1).flatten()[index_N]


def block_loss(
    final_RAKD: Tensor,
    head_VD: Tensor,
    labels_RAK: Tensor,
    weights_RAK: Tensor,
    loss: Loss = "cross_entropy",
    dpace_alpha: float = 0.5,
    target: TargetStates | None = None,
) -> LossParts:
    """Loss of a batch from the draft's final states and the target's frozen head.

    Products with the head are computed in its number format and all else in fp32, under autocast, too. Where no gradient is
    recorded, none is computed.

    Args:
        labels_RAK, weights_RAK: what each slot predicts, and its decayed weight; slots of weight 0 have no label. D-PACE's
            own weights take the place of the others.
        loss: which one.
        dpace_alpha: how far D-PACE lifts probabilities towards 1.
        target: for the soft losses, which need it.
    """
    if (target is None) == (loss in SOFT_LOSSES):
        raise ValueError(f"the loss {loss} is computed {'from' if target is None else 'without'} the target's last states")
    block_size, device = labels_RAK.shape[-1], final_RAKD.device
    index_N = (weights_RAK.flatten() > 0).nonzero().squeeze(1)
    final_ND = final_RAKD.flatten(0, 2).index_select(0, index_N)
    labels_N, weights_N = labels_RAK.flatten()[index_N], weights_RAK.flatten()[index_N]
    with_gradient = torch.is_grad_enabled() and final_ND.requires_grad
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        last_LD = places_N = None
        if target is not None:
            last_LD, places_N = target.last_RSD.flatten(0, 1), _places(target, labels_RAK.shape)[index_N]
        slots = _each_slot(final_ND, head_VD, labels_N, loss, last_LD, places_N, with_gradient)
        if loss == "dpace":
            weights_N = dpace_weights(slots.loss_N.neg().exp_(), index_N, labels_RAK.shape, dpace_alpha)
    loss_sum = (slots.loss_N * weights_N).sum()
    if slots.gradient_ND is not None:
        loss_sum = _WithGradient.apply(final_ND, slots.loss_N, weights_N, slots.gradient_ND)
    positions_N, zeros_K = index_N % block_size, torch.zeros(block_size, device=device)
    return LossParts(
        loss_sum=loss_sum,
        weight_sum=weights_N.sum(),
        correct_K=zeros_K.index_add(0, positions_N, slots.hits_N.float()),
        count_K=zeros_K.index_add(0, positions_N, torch.ones_like(weights_N)),
    )


def _places(target: TargetStates, labels_shape: torch.Size) -> Tensor:
    """Which of the R * S positions predicts each of the R * A * K slots. Slots without a label may point anywhere."""
    rows, _, block_size = labels_shape
    first_R = torch.arange(rows, device=target.anchors_RA.device) * target.last_RSD.shape[1]
    slots_K = torch.arange(block_size, device=target.anchors_RA.device)
    return ((first_R.view(-1, 1) + target.anchors_RA).unsqueeze(-1) + slots_K - 1).flatten()


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
