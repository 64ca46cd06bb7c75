"""Caches for rows of different lengths that are decoded together.

Every row is left-aligned: what belongs to position p of a row stands at place p of its buffer. So a row's cache is cut back by
saying that it is shorter. What lies behind a row's length is never looked at (a query sees places up to its own position) and
is written over when the row gets there. Buffers have their full size from the start and are zero at first: a masked value that
is not finite would still spoil a sum.

Shapes: R rows, Q new positions, M key-value heads, E head dimension, C capacity in positions, F features, B block size,
V vocabulary, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from dflash_core.model.draft import DFlashDraft, KeyValue, embed_blocks
from dflash_core.model.target import FrozenTarget

# How far the logits of two rows together may be from those of each row alone, as a share of the largest logit. Rounding stays
# far below, and a model that ignores positions or the mask far above.
ROWS_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1}
PROBE_LENGTHS = (9, 5)


class RowBuffers:
    """Keys and values [R, M, C, E] of every layer, and how long each row is (on the host)."""

    def __init__(self, num_layers: int, num_rows: int, capacity: int, device: torch.device) -> None:
        self.lengths = [0] * num_rows
        self.capacity = capacity
        self._device = device
        self._layers: list[KeyValue | None] = [None] * num_layers

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def ends_R1(self) -> Tensor:
        """The length of each row, which is where its next position goes."""
        return torch.tensor(self.lengths, device=self._device).unsqueeze(1)

    def next_RQ(self, count: int) -> Tensor:
        """The next `count` places of each row."""
        return self.ends_R1() + torch.arange(count, device=self._device)

    def write(self, layer: int, new: KeyValue, places_RQ: Tensor) -> None:
        """Put new keys and values [R, M, Q, E] at places of each row."""
        held = self._layers[layer]
        if held is None:
            rows, heads, _, _ = new.key.shape
            held = KeyValue(*(part.new_zeros(rows, heads, self.capacity, part.shape[-1]) for part in new))
            self._layers[layer] = held
        for whole, part in zip(held, new, strict=True):
            whole.scatter_(2, places_RQ[:, None, :, None].expand_as(part), part)

    def upto(self, layer: int, end: int) -> KeyValue:
        """Views of a layer's places before `end`."""
        held = self._layers[layer]
        assert held is not None
        return KeyValue(held.key[:, :, :end], held.value[:, :, :end])

    def grow(self, counts: list[int]) -> None:
        """The first `counts[r]` of the positions written last stay in row r; the others are as if they had never been."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def keep(self, rows: list[int]) -> None:
        """Only these rows go on; their keys and values are copied."""
        self.lengths = [self.lengths[row] for row in rows]
        index = torch.tensor(rows, device=self._device)
        self._layers = [held and KeyValue(held.key[index], held.value[index]) for held in self._layers]


class TargetRows(Cache):  # type: ignore[misc]  # transformers has no types
    """The target's keys and values of several rows, in the form that transformers' models write to.

    One forward pass: `positions, mask = rows.begin(Q)`, the model, then `rows.buffers.grow(counts)` with what is to stay.
    """

    def __init__(self, target: FrozenTarget, num_rows: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.buffers = RowBuffers(target.shape.num_layers, num_rows, capacity, target.device)
        self._as_float = target.model.dtype if target.model.config._attn_implementation == "eager" else None
        self._positions_RQ: Tensor | None = None
        self._end = 0

    def begin(self, num_new: int) -> tuple[Tensor, Tensor]:
        """Positions [R, Q] of the next tokens, and what each of them sees, [R, 1, Q, places]: everything up to itself.

        The mask is boolean, or for eager attention what is added to the scores.
        """
        positions_RQ, self._end = self.buffers.next_RQ(num_new), self.buffers.longest + num_new
        self._positions_RQ = positions_RQ
        seen = torch.arange(self._end, device=positions_RQ.device) <= positions_RQ.unsqueeze(-1)
        if self._as_float is not None:
            lowest = torch.finfo(self._as_float).min
            return positions_RQ, torch.zeros_like(seen, dtype=self._as_float).masked_fill_(~seen, lowest).unsqueeze(1)
        return positions_RQ, seen.unsqueeze(1)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> KeyValue:
        """Called by the model's layers: takes the new keys and values and gives all that there are."""
        assert self._positions_RQ is not None
        self.buffers.write(layer_idx, KeyValue(key_states, value_states), self._positions_RQ)
        return self.buffers.upto(layer_idx, self._end)


class DraftRows:
    """The draft's keys and values of the verified positions of several rows."""

    def __init__(self, draft: DFlashDraft, num_rows: int, capacity: int, device: torch.device) -> None:
        self._draft = draft
        self._dtype = next(draft.parameters()).dtype
        self.buffers = RowBuffers(draft.spec.num_layers, num_rows, capacity, device)

    def append(self, features_RQF: Tensor, counts: list[int]) -> None:
        """Add the target's states of the next positions, of which the first `counts[r]` of row r are verified.

        Those behind are written too, and written over the next time.
        """
        places_RQ = self.buffers.next_RQ(features_RQF.shape[1])
        for layer, new in enumerate(self._draft.context(features_RQF.to(self._dtype), positions_RS=places_RQ)):
            self.buffers.write(layer, new, places_RQ)
        self.buffers.grow(counts)

    def propose(self, anchors_R1: Tensor, embedding_VD: Tensor, head_VD: Tensor) -> Tensor:
        """Greedy proposals for slots 1 .. B - 1 behind an anchor that stands right after the context of its row: [R, B - 1]."""
        context = [self.buffers.upto(layer, self.buffers.longest) for layer in range(self._draft.spec.num_layers)]
        # A block sees the context strictly before its anchor: nothing of what lies behind a row's own length.
        blocks_R1KD = embed_blocks(embedding_VD, anchors_R1, self._draft.spec)
        final_R1KD = self._draft.blocks(blocks_R1KD, context, self.buffers.ends_R1())
        return functional.linear(final_R1KD[:, 0, 1:], head_VD).argmax(-1)


@torch.inference_mode()
def why_not_together(target: FrozenTarget) -> str | None:
    """Why rows of different lengths cannot be decoded together with this target, in a few words; None if they can.

    Its cache must be of plain keys and values of every position (no window, no running state), and its attention must take a
    mask of ours. That it does what it is told is tried out: two short random rows together must give the logits of each alone.
    """
    layers = DynamicCache(config=target.model.config).layers
    kinds = {type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer}
    if kinds or len(layers) != target.shape.num_layers:
        return f"its cache has layers that cannot be cut back row by row ({', '.join(sorted(kinds)) or 'their number'})"
    if (attention := target.model.config._attn_implementation) not in ("sdpa", "eager"):
        return f"attention {attention} takes no mask of ours"
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, target.shape.vocab_size, (2, max(PROBE_LENGTHS) + 1), generator=generator)
    rows = TargetRows(target, 2, tokens.shape[1])
    last = [length - 1 for length in PROBE_LENGTHS]
    try:
        first, _ = target.step_rows(tokens[:, :-1], rows, torch.tensor([last]).T)
        rows.buffers.grow(list(PROBE_LENGTHS))
        # The next token of each row is written over what the shorter row was padded with.
        second, _ = target.step_rows(torch.stack([row[n] for row, n in zip(tokens, PROBE_LENGTHS, strict=True)])[:, None], rows)
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        return f"it cannot be given rows of different lengths ({' '.join(str(error).split())[:200]})"
    together = torch.cat([first, second], dim=1)
    for row, length in enumerate(PROBE_LENGTHS):
        alone = target.step_rows(tokens[row : row + 1, : length + 1], None, torch.tensor([[length - 1, length]]))[0][0].float()
        worst = float((together[row].float() - alone).abs().max() / alone.abs().max())
        if not worst <= ROWS_TOLERANCE[target.model.dtype]:  # a NaN is none
            return f"its rows do not come out alike alone and together (logits differ by {worst:.1e} of the largest)"
    return None
