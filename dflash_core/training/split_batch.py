"""A target's forward pass over a batch, in two parts, and those in two again, where the memory does not suffice.

A padded batch is split between rows, and each part is only as long as its own rows need; a packed row is split between
documents. What comes back has the shape that the whole batch's features have.

Split batches are the one exception to bit-identical losses: a matrix product of another shape may sum in another order, so
that features agree with those of the whole batch up to rounding only. Behind the end of a part's longest row, where
there is nothing but padding and nobody reads, they are 0.

Shapes: R rows, S row length, F feature width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dflash_core.errors import TrainingError
from dflash_core.model.documents import Documents
from dflash_core.training.collate import DraftBatch

log = logging.getLogger(__name__)
# Beside torch's own exception: what allocators and libraries say in a plain RuntimeError.
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


class Forward(Protocol):
    """`FrozenTarget.features`, or what stands in for it."""

    def __call__(self, tokens: Tensor, should_stop: Callable[[], bool] | None, documents: Documents | None, /) -> Tensor: ...


@dataclass(frozen=True)
class Split:
    """A piece of a batch that did not fit and was split; `num_tokens` counts padding."""

    num_rows: int
    num_documents: int
    num_tokens: int
    num_parts: int


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was short, on a GPU or a CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)


def lengths_in_use(batch: DraftBatch, pad_token_id: int) -> list[int]:
    """Length of each row without the padding at its end; tokens before its last anchor are never padding.

    Real tokens can be the pad token, so that those at a row's end may be left out; behind the last anchor no query reads.
    """
    places = torch.arange(1, batch.tokens_RS.shape[1] + 1)
    filled = ((batch.tokens_RS != pad_token_id) * places).amax(dim=1)
    lengths: list[int] = torch.maximum(filled, batch.anchors_RA.amax(dim=1)).clamp(min=1).tolist()
    return lengths


@dataclass(frozen=True)
class _DidNotFit:
    """What the allocator said. A class of its own, for a forward pass that goes wrong can return anything."""

    said: str


@dataclass(frozen=True)
class _Piece:
    """Rows `top` to `bottom` of a padded batch up to place `end`, or documents from `begin` to `end` of a packed row."""

    top: int
    bottom: int
    begin: int
    end: int

    def tokens(self, batch: DraftBatch) -> Tensor:
        return batch.tokens_RS[self.top : self.bottom, self.begin : self.end]

    def documents(self, batch: DraftBatch) -> Documents | None:
        """The piece's documents, numbered from 0. It has no anchors: a target does not look at them."""
        if batch.documents is None:
            return None
        ids, positions, starts = batch.documents
        own = ids[:, self.begin : self.end]
        return Documents(own - own[:, :1], positions[:, self.begin : self.end], starts[:, :0])

    def halves(self, batch: DraftBatch, pad_token_id: int) -> list[_Piece]:
        """Two pieces of about the same size; none where there is but one row or document."""
        if batch.documents is None:
            middle = (self.top + self.bottom) // 2
            lengths = lengths_in_use(batch, pad_token_id)
            bounds = ((self.top, middle), (middle, self.bottom))
            return [] if middle == self.top else [_Piece(a, b, 0, max(lengths[a:b])) for a, b in bounds]
        positions = batch.documents.positions_RS[0, self.begin : self.end]
        starts = (torch.nonzero(positions == 0).flatten() + self.begin).tolist()[1:]
        if not starts:
            return []
        middle = min(starts, key=lambda start: abs(2 * start - self.begin - self.end))
        return [_Piece(0, 1, self.begin, middle), _Piece(0, 1, middle, self.end)]


def features_in_parts(
    forward: Forward,
    batch: DraftBatch,
    should_stop: Callable[[], bool] | None,
    device: torch.device,
    pad_token_id: int,
    on_split: Callable[[Split], None],
) -> Tensor:
    """Features [R, S, F] of a batch; where memory is short, in as many parts as it takes. `on_split` hears of each split.

    Raises:
        TrainingError: a single sequence does not fit, or the features themselves do not.
    """
    num_rows, length = batch.tokens_RS.shape
    whole = _Piece(0, num_rows, 0, length)
    features_RSF: Tensor | None = None
    pieces = [whole]
    while pieces:
        piece = pieces.pop()
        part = _attempt(forward, batch, piece, should_stop, device)
        if isinstance(part, _DidNotFit):
            halves = piece.halves(batch, pad_token_id)
            if not halves:
                raise TrainingError(_does_not_fit(batch, piece, device, part.said))
            tokens, documents = piece.tokens(batch), piece.documents(batch)
            count = tokens.shape[0] if documents is None else int(documents.ids_RS.max()) + 1
            on_split(Split(tokens.shape[0], count, tokens.numel(), len(halves)))
            pieces += reversed(halves)
        elif piece == whole:
            return part
        else:
            features_RSF = _room_for(batch, part, device) if features_RSF is None else features_RSF
            features_RSF[piece.top : piece.bottom, piece.begin : piece.end] = part
    assert features_RSF is not None
    return features_RSF


def _attempt(
    forward: Forward, batch: DraftBatch, piece: _Piece, should_stop: Callable[[], bool] | None, device: torch.device
) -> Tensor | _DidNotFit:
    try:
        return forward(piece.tokens(batch), should_stop, piece.documents(batch))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        said = " ".join(str(error).split())[:200]
    if device.type == "cuda":  # not before here: until its traceback was gone, the error held the layers' states
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
    return _DidNotFit(said)


def _room_for(batch: DraftBatch, part: Tensor, device: torch.device) -> Tensor:
    try:
        return part.new_zeros(*batch.tokens_RS.shape, part.shape[-1])
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise TrainingError(
            f"the captured states of its {batch.tokens_RS.numel()} tokens do not fit on {device}; lower bucketing.token_budget"
            f" or prefetch.max_bytes, or take target.feature_dtype: bfloat16"
        ) from None


def _does_not_fit(batch: DraftBatch, piece: _Piece, device: torch.device, said: str) -> str:
    what = "sequence" if batch.documents is None else "document"
    return (
        f"out of memory on {device}: a single {what} of {piece.end - piece.begin} tokens, from a batch of"
        f" {batch.tokens_RS.numel()}, does not fit; lower data.max_length or bucketing.token_budget ({said})"
    )
