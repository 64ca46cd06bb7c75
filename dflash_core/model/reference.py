"""A plain, slow reference of the draft's forward pass and loss: one query at a time, every visible key listed.

It shares the weights with `DFlashDraft` and nothing else: positions, visibility, softmax and loss are written out
again, so that a mistake in the fast path cannot hide in both.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dflash_core.config import Loss
from dflash_core.model.draft import DFlashDraft, DraftLayer, RMSNorm


def _norm(x: Tensor, norm: RMSNorm) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean() + norm.eps) * norm.weight


def _rope(head: Tensor, position: int, theta: float) -> Tensor:
    half = head.shape[0] // 2
    out = head.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / head.shape[0])
        out[i] = head[i] * math.cos(angle) - head[i + half] * math.sin(angle)
        out[i + half] = head[i + half] * math.cos(angle) + head[i] * math.sin(angle)
    return out


def _keys_and_values(layer: DraftLayer, state: Tensor, position: int, theta: float) -> list[tuple[Tensor, Tensor]]:
    attention = layer.self_attn
    keys = attention.k_proj(state).view(attention.num_kv_heads, -1)
    values = attention.v_proj(state).view(attention.num_kv_heads, -1)
    return [(_rope(_norm(k, attention.k_norm), position, theta), v) for k, v in zip(keys, values, strict=True)]


def _attend(layer: DraftLayer, state: Tensor, position: int, seen: list[list[tuple[Tensor, Tensor]]], theta: float) -> Tensor:
    attention = layer.self_attn
    group = attention.num_heads // attention.num_kv_heads
    heads = []
    for n, query in enumerate(attention.q_proj(state).view(attention.num_heads, -1)):
        query = _rope(_norm(query, attention.q_norm), position, theta)
        scores = torch.stack([query @ key_values[n // group][0] for key_values in seen]) / math.sqrt(query.shape[0])
        values = torch.stack([key_values[n // group][1] for key_values in seen])
        heads.append(scores.softmax(0) @ values)
    out: Tensor = attention.o_proj(torch.cat(heads))
    return out


def reference_block(draft: DFlashDraft, features_SF: Tensor, x_KD: Tensor, anchor: int) -> Tensor:
    """Final states [K, D] of one block at `anchor` over one row of features [S, T * D].

    In a sliding layer a query at position p sees what stands nearer to p than the window, before and behind it.
    """
    spec = draft.spec
    context = [_norm(draft.fc(features_SF[s]), draft.hidden_norm) for s in range(anchor)]
    states = list(x_KD)
    for layer, kind in zip(draft.layers, spec.layer_types, strict=True):
        assert isinstance(layer, DraftLayer)
        reach = spec.sliding_window if kind == "sliding_attention" else None
        normed = [_norm(state, layer.input_layernorm) for state in states]
        keys = [(s, _keys_and_values(layer, state, s, spec.rope_theta)) for s, state in enumerate(context)]
        keys += [(anchor + k, _keys_and_values(layer, state, anchor + k, spec.rope_theta)) for k, state in enumerate(normed)]
        updated = []
        for p, state in enumerate(states, start=anchor):
            seen = [key_values for place, key_values in keys if reach is None or abs(p - place) < reach]
            updated.append(state + _attend(layer, normed[p - anchor], p, seen, spec.rope_theta))
        states = [state + layer.mlp(_norm(state, layer.post_attention_layernorm)) for state in updated]
    return torch.stack([_norm(state, draft.norm) for state in states])


def reference_loss(
    final_KD: Tensor,
    head_VD: Tensor,
    tokens: list[int],
    supervised: list[bool],
    anchor: int,
    gamma: float,
    loss: Loss = "cross_entropy",
    alpha: float = 0.5,
    last_SD: Tensor | None = None,
) -> tuple[Tensor, float]:
    """Weighted loss of one block and the sum of its weights.

    Slot k predicts the token at anchor + k with weight exp(-(k - 1) / gamma), as long as every token from the anchor to
    there is supervised (docs/field.md 1, 'Anchors' and 'Loss'). D-PACE has weights of its own. The soft losses compare with
    the distribution that the target's last state at anchor + k - 1 gives.
    """
    losses, likelihoods = [], []
    for k in range(1, final_KD.shape[0]):
        place = anchor + k
        if place >= len(tokens) or not all(supervised[anchor : place + 1]):
            break
        draft = _probabilities(head_VD, final_KD[k])
        likelihoods.append(float(draft[tokens[place]].detach()))
        if last_SD is None:
            losses.append(-draft[tokens[place]].log())
            continue
        target = _probabilities(head_VD, last_SD[place - 1])
        apart = target * (target.log() - draft.log()) if loss == "kl" else (target - draft).abs() / 2
        losses.append(apart.sum())
    weights = [math.exp(-k / gamma) for k in range(len(losses))]
    if loss == "dpace":
        lifted = [(1 - alpha) * likelihood + alpha for likelihood in likelihoods]
        reached = [math.prod(lifted[: k + 1]) for k in range(len(lifted))]
        weights = [sum(reached[k:]) for k in range(len(reached))]
    total = sum((weight * each for weight, each in zip(weights, losses, strict=True)), torch.zeros(()))
    return total, sum(weights)


def _probabilities(head_VD: Tensor, state_D: Tensor) -> Tensor:
    logits = head_VD @ state_D
    exponentials = (logits - logits.max().detach()).exp()
    return exponentials / exponentials.sum()


def reference_row_loss(
    final_AKD: Tensor, head_VD: Tensor, tokens: list[int], supervised: list[bool], anchors: list[int], gamma: float, **how: Any
) -> tuple[Tensor, float]:
    """`reference_loss` added up over the blocks of a row; `how` is passed on."""
    total, weights = torch.zeros(()), 0.0
    for final_KD, anchor in zip(final_AKD, anchors, strict=True):
        loss, weight = reference_loss(final_KD, head_VD, tokens, supervised, anchor, gamma, **how)
        total, weights = total + loss, weights + weight
    return total, weights
