"""Attention of all blocks in one FlexAttention call with a sparse mask, for CUDA devices (docs/field.md 1, 'Attention rule').

Keys are [context | blocks], each filled up to whole tiles of 128. What a query sees are two runs of keys (`Visible`), so the
mask is two comparisons with bounds of the query, and which tiles hold something follows from the bounds by arithmetic: the
[Q, S + Q] mask never exists, and making the tile lists costs about Q x (S + Q) / 128 comparisons, once per forward pass and
window. Tiles that all their queries see whole skip the mask.

**Decided without a GPU, never run on one.** What could be tried on a CPU was: the mask at every pair, values and gradients of
the uncompiled operator, and how often changing sizes compile anew.
- One compiled function with `dynamic=True`. Everything that changes from batch to batch (lengths, anchors, documents, window)
  reaches it as tensors or as sizes of tensors; the mask function closes over tensors only, for a closed-over number
  would be a guard, and a kernel cannot take it as a symbol. Rows of 1 (packed) and more rows are compiled apart.
- Queries and keys are filled up to tiles, which the kernels run without checks of bounds. Queries that fill up see the keys
  that fill up: no query is without a key.
- `fullgraph=True`: where the compiler gives up it must say so, because what it falls back to keeps all scores.
- A device is tried before it is used (`flex_works`), backward pass included, with the draft's own head sizes and number
  format. Without triton, or with a head the kernels do not take, training goes on in groups of anchors, with one line in the log.

Shapes as in `attention.py`; P padded keys, [context | blocks]; I and J tiles of queries and of keys.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

from dflash_core.model.attention import KeyValue, Visible, visible

log = logging.getLogger(__name__)

TILE = 128
# Fewer queries than a tile (decoding: one block) are served as well by one plain call, without compiling for it.
FEWEST_QUERIES = TILE
# All scores kept: for comparing, and nothing else.
UNCOMPILED_FLEX: Callable[..., Any] = flex_attention


def _whole_tiles(length: int) -> int:
    return -(-length // TILE) * TILE


def _bounds(sight: Visible, context_length: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """From and to, [R, Q] and [1, Q] with Q filled up, of the two runs of keys of each query, as numbers of padded keys."""
    queries = sight.own_from_Q.shape[0]
    filler, offset = _whole_tiles(queries) - queries, _whole_tiles(context_length)
    context = pad(sight.context_from_RQ, (0, filler)), pad(sight.context_to_RQ.clamp(max=context_length), (0, filler))
    own_from = pad(sight.own_from_Q, (0, filler), value=queries) + offset
    own_to = pad(sight.own_to_Q, (0, filler), value=queries + filler) + offset
    return (context[0].int(), context[1].int()), (own_from.int().unsqueeze(0), own_to.int().unsqueeze(0))


def _tiles(run_from_RQ: Tensor, run_to_RQ: Tensor, num_tiles: int) -> tuple[Tensor, Tensor]:
    """Tiles [R, I, J] of which some query sees something, and those of which every query sees all."""
    begin_J = torch.arange(num_tiles, device=run_from_RQ.device, dtype=torch.int32) * TILE
    first, last = run_from_RQ.unsqueeze(-1), run_to_RQ.unsqueeze(-1)
    some = first.maximum(begin_J) < last.minimum(begin_J + TILE)
    whole = (first <= begin_J) & (last >= begin_J + TILE)
    shape = (len(run_from_RQ), -1, TILE, num_tiles)
    return some.view(shape).any(dim=2), whole.view(shape).all(dim=2)


def _listed(tiles_RIJ: Tensor) -> tuple[Tensor, Tensor]:
    """Number [R, 1, I] and list [R, 1, I, J] of the tiles that are on, those first and in order."""
    order = tiles_RIJ.int().argsort(dim=-1, descending=True, stable=True)
    return tiles_RIJ.sum(dim=-1, dtype=torch.int32).unsqueeze(1), order.int().unsqueeze(1)


def sparse_mask(
    anchors_RA: Tensor, num_slots: int, context_length: int, starts_RA: Tensor | None = None, sliding_window: int | None = None
) -> BlockMask:
    """The mask of all queries over [context | blocks], both filled up to tiles. Shared by all layers with this window."""
    (context_from, context_to), (own_from, own_to) = _bounds(
        visible(anchors_RA, num_slots, starts_RA, sliding_window), context_length
    )

    def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_context = (key >= context_from[row, query]) & (key < context_to[row, query])
        return in_context | ((key >= own_from[0, query]) & (key < own_to[0, query]))

    queries = own_from.shape[1]
    keys = _whole_tiles(context_length) + queries
    some, whole = _tiles(context_from, context_to, keys // TILE)
    own_some, own_whole = _tiles(own_from, own_to, keys // TILE)
    # Context and blocks share no tile, so that a tile is whole by one of them or not at all.
    some, whole = some | own_some, whole | own_whole
    partly, wholly = _listed(some & ~whole), _listed(whole)
    return BlockMask.from_kv_blocks(
        *partly, *wholly, BLOCK_SIZE=TILE, mask_mod=sees, seq_lengths=(queries, keys)
    )  # fmt: skip


def _joined(context: Tensor, block: Tensor) -> Tensor:
    """[context | blocks], each filled up to tiles with zeros: [R, M, P, E]."""
    pieces = []
    for part in (context, block):
        rows, heads, length, size = part.shape
        pieces += [part, part.new_zeros(rows, heads, _whole_tiles(length) - length, size)]
    return torch.cat(pieces, dim=2)


def flex_attention_of_blocks(
    query: Tensor, context: KeyValue, block: KeyValue, mask: BlockMask, attend: Callable[..., Any] = UNCOMPILED_FLEX
) -> Tensor:
    """Attention of all queries [R, N, Q, E]. `attend` is FlexAttention, compiled or (slow, all scores kept) not."""
    queries = query.shape[2]
    query = pad(query, (0, 0, 0, _whole_tiles(queries) - queries))
    key, value = _joined(context.key, block.key), _joined(context.value, block.value)
    out: Tensor = attend(query, key, value, block_mask=mask, enable_gqa=query.shape[1] != key.shape[1])
    return out[:, :, :queries]


@cache
def compiled_flex() -> Callable[..., Any]:
    """FlexAttention compiled for sizes that change; compiling itself happens at the first call."""
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    return compiled


@cache
def flex_works(device: torch.device, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether compiled FlexAttention runs here, forward and backward, with such heads; if not, says so in the log, once."""
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            anchors = torch.arange(8, device=device).expand(2, -1)
            query = torch.randn(2, heads, 2 * TILE, head_dim, device=device, dtype=dtype, requires_grad=True)
            context, block = (
                KeyValue(*torch.randn(2, 2, kv_heads, length, head_dim, device=device, dtype=dtype).requires_grad_())
                for length in (9, 2 * TILE)
            )
            mask = sparse_mask(anchors, TILE // 4, 9)
            torch.autograd.backward(flex_attention_of_blocks(query, context, block, mask, compiled_flex()).sum())
        return True
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - what a compiler and its tool chain raise has no class in common
        reason = (str(error).strip().splitlines() or [""])[0]
        log.warning("%s: attention runs in groups of anchors; no FlexAttention (%s: %s)", device, type(error).__name__, reason)
        return False
