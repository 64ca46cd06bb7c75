"""What each slot of a block sees, and the attention that every device can run (docs/field.md 1, 'Attention rule').

A query sees two runs of keys: context strictly before its anchor, inside its document and its layer's window, and slots of
its own block. `visible` writes the four bounds down, once for all ways to attend.

Grouped attention takes sorted anchors in groups of neighbours, each with the context up to its last anchor and the group's
own blocks: a fused kernel does the rest, and the cost is about Q x S / 2 for Q block positions and not Q x (S + Q). Context
and block apart, merged by log-sum-exp, would save the group's other blocks; measured, it loses (benchmarks/draft_attention.py,
docs/decisions/0009-anchors-in-groups-instead-of-merging.md).

**Sliding layers.** With a window of W positions a query at position p sees the keys at positions p - W + 1 to p + W - 1, as
far as the attention rule lets it: W context positions less one for slot 0, one fewer for every further slot, and slots of
its block nearer than W. That is what vLLM does with `is_causal: false`: its FlashAttention, Triton and CPU kernels make the
window symmetric when attention is not causal (asked with one-hot values, its CPU kernel shows exactly these keys).

Shapes: R rows, S context positions, A anchors, K slots of a block, Q = A * K queries, N query heads, M key-value heads, E head
dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dflash_core.model.documents import Windows, context_windows

# Neighbouring anchors that share one attention call. On a CPU small groups are fastest (benchmarks/draft_attention.py); on a
# GPU every call costs a launch.
ANCHORS_PER_GROUP = {"cpu": 8, "cuda": 128}


class KeyValue(NamedTuple):
    """Keys (normed and rotated) and values, both [R, M, positions, E]."""

    key: Tensor
    value: Tensor


# Attention of queries [R, N, Q, E] over the keys of the context and of the blocks: [R, N, Q, E].
Attend = Callable[[Tensor, KeyValue, KeyValue], Tensor]


class Visible(NamedTuple):
    """The keys that each query sees: places `context_from` to `context_to` and slots `own_from` to `own_to`, ends excluded.

    Places count along the row, slots along the row of all blocks. A query sees itself, so that none is without a key; its
    context may be empty (`context_from >= context_to`).
    """

    context_from_RQ: Tensor
    context_to_RQ: Tensor
    own_from_Q: Tensor
    own_to_Q: Tensor


def visible(anchors_RA: Tensor, num_slots: int, starts_RA: Tensor | None = None, sliding_window: int | None = None) -> Visible:
    """The attention rule.

    Args:
        starts_RA: where the anchor's document starts; None: every row is one sequence.
        sliding_window: positions that a query reaches to either side, its own included; None: all.
    """
    queries_Q = torch.arange(anchors_RA.shape[1] * num_slots, device=anchors_RA.device)
    slots_Q = queries_Q % num_slots
    own_from_Q, own_to_Q = queries_Q - slots_Q, queries_Q - slots_Q + num_slots
    # Strictly before the anchor: seeing position a itself would leak the next token.
    context_to_RQ = anchors_RA.repeat_interleave(num_slots, dim=1)
    starts_RA = torch.zeros_like(anchors_RA) if starts_RA is None else starts_RA
    context_from_RQ = starts_RA.repeat_interleave(num_slots, dim=1)
    if sliding_window is not None:
        context_from_RQ = context_from_RQ.maximum(context_to_RQ + slots_Q - (sliding_window - 1))
        own_from_Q, own_to_Q = own_from_Q.maximum(queries_Q - (sliding_window - 1)), own_to_Q.minimum(queries_Q + sliding_window)
    return Visible(context_from_RQ, context_to_RQ, own_from_Q, own_to_Q)


class AnchorGroup(NamedTuple):
    """Anchors `first` to `last` of every row, the context they can reach, and what each of their slots sees.

    The context is that from `begin` to `end`. `seen` is [R, 1, Q, end - begin + Q] for the group's Q queries.
    """

    first: int
    last: int
    begin: int
    end: int
    seen: Tensor


def group_size(device: torch.device) -> int:
    """Neighbouring anchors that share one attention call on this kind of device."""
    return ANCHORS_PER_GROUP.get(device.type, 128)


def _windows(anchors_RA: Tensor, starts_RA: Tensor | None, context_length: int, sliding_window: int | None) -> Windows:
    size = group_size(anchors_RA.device)
    if anchors_RA.is_cuda:  # reading the bounds would wait for the device
        return [(0, context_length)] * -(-anchors_RA.shape[1] // size)
    starts = torch.zeros_like(anchors_RA) if starts_RA is None else starts_RA
    return context_windows(anchors_RA, starts, size, sliding_window)


def anchor_groups(
    anchors_RA: Tensor,
    num_slots: int,
    context_length: int,
    starts_RA: Tensor | None = None,
    windows: Windows | None = None,
    sliding_window: int | None = None,
) -> list[AnchorGroup]:
    """Cut the anchors into groups of neighbours. Shared by all layers of a forward pass that have the same window.

    Anchors are sorted, so a group needs the context only from the first start of its documents to its last anchor.

    Args:
        windows: context of each group, where it is known already (`context_windows`); None looks it up on a CPU, and takes
            the whole context on a GPU.
        starts_RA, sliding_window: as in `visible`.
    """
    if windows is None:
        windows = _windows(anchors_RA, starts_RA, context_length, sliding_window)
    sight = visible(anchors_RA, num_slots, starts_RA, sliding_window)
    groups = []
    size = group_size(anchors_RA.device)
    for first, (begin, end) in zip(range(0, anchors_RA.shape[1], size), windows, strict=True):
        last = min(first + size, anchors_RA.shape[1])
        end = min(end, context_length)
        begin = min(begin, end)
        own = slice(first * num_slots, last * num_slots)
        places = torch.arange(begin, end, device=anchors_RA.device)
        slots = torch.arange(own.start, own.stop, device=anchors_RA.device)
        seen = (places < sight.context_to_RQ[:, own].unsqueeze(-1)) & (places >= sight.context_from_RQ[:, own].unsqueeze(-1))
        same = (slots < sight.own_to_Q[own].unsqueeze(-1)) & (slots >= sight.own_from_Q[own].unsqueeze(-1))
        seen = torch.cat([seen, same.expand(len(anchors_RA), -1, -1)], dim=-1)
        groups.append(AnchorGroup(first, last, begin, end, seen.unsqueeze(1)))
    return groups


def grouped_attention(query: Tensor, context: KeyValue, block: KeyValue, groups: list[AnchorGroup], num_slots: int) -> Tensor:
    """Attention of all queries [R, N, Q, E], one group of anchors at a time."""
    gqa = query.shape[1] // block.key.shape[1]
    mixed = []
    for group in groups:
        own, reach = slice(group.first * num_slots, group.last * num_slots), slice(group.begin, group.end)
        key = torch.cat([context.key[:, :, reach], block.key[:, :, own]], dim=2)
        value = torch.cat([context.value[:, :, reach], block.value[:, :, own]], dim=2)
        if key.is_cuda and gqa > 1:  # with grouped heads and a mask, a GPU may fall back to a kernel that keeps all scores
            key, value = key.repeat_interleave(gqa, dim=1), value.repeat_interleave(gqa, dim=1)
        grouped = key.shape[1] != query.shape[1]
        mixed.append(
            functional.scaled_dot_product_attention(query[:, :, own], key, value, attn_mask=group.seen, enable_gqa=grouped)
        )
    return torch.cat(mixed, dim=2)
