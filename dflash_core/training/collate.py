"""Turns a planned batch into tensors: tokens, anchors, labels and weights.

A padded batch has one row for each sequence, filled up on the right. A packed batch has a single row that holds its
sequences (documents) one after the other. Anchors, labels and weights are made for each sequence on its own and then put
in place, so that no block and no label reaches beyond its sequence, packed or not.

Anchors depend on (dataset, seed, epoch, sequence) and on nothing else, so neither threads nor the number of cells can
change them.

Shapes: R rows, S row length, A anchors (most of any row), K slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_core.data import Dataset
from dflash_core.model.anchors import Anchors, draw_anchors
from dflash_core.model.documents import Documents
from dflash_core.records import BatchShape, PlannedBatch

# Bytes of a batch besides its features. Tokens take 8 each; ids and positions of documents 8 each; an anchor in a packed
# row takes 24 with its token and its document's start; labels and weights 12 a slot.
TOKEN_BYTES, PACKED_TOKEN_BYTES, PACKED_ANCHOR_BYTES, SLOT_BYTES = 8, 24, 24, 12


def batch_bytes(lengths: NDArray[np.integer], packed: bool, num_anchors: int, num_slots: int, feature_bytes: int) -> int:
    """Most bytes that a batch of these sequences can hold, known before it is loaded; features dominate.

    Args:
        lengths: tokens of each sequence.
        packed: one row of documents, or one row a sequence.
        num_anchors: most anchors of a sequence.
        num_slots: slots of a block.
        feature_bytes: captured states of one position, the last one included where the loss needs it.
    """
    if packed:
        anchors = max(1, int(np.minimum(lengths, num_anchors).sum()))
        tokens = int(lengths.sum())
        return tokens * (feature_bytes + PACKED_TOKEN_BYTES) + anchors * (PACKED_ANCHOR_BYTES + num_slots * SLOT_BYTES)
    longest = int(lengths.max())
    slots = min(num_anchors, longest) * num_slots
    return len(lengths) * (longest * (feature_bytes + TOKEN_BYTES) + slots * SLOT_BYTES)


@dataclass(frozen=True)
class DraftBatch:
    """What targets and drafter read.

    Attributes:
        tokens_RS: tokens, padded on the right where rows differ in length.
        anchors_RA: places of the anchors in the row; rows with fewer anchors are filled with place 0 and weight 0.
        anchor_tokens_RA: the tokens there.
        labels_RAK, weights_RAK: what each slot predicts, and how much it counts (0: nothing to predict).
        documents: where the documents of a packed row stand; None for a padded batch.
    """

    tokens_RS: Tensor
    anchors_RA: Tensor
    anchor_tokens_RA: Tensor
    labels_RAK: Tensor
    weights_RAK: Tensor
    documents: Documents | None = None

    def to(self, device: torch.device) -> DraftBatch:
        """A copy on `device`; from pinned memory the copy does not wait."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> DraftBatch:
        """A copy in page-locked memory."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[Tensor], Tensor]) -> DraftBatch:
        return DraftBatch(
            change(self.tokens_RS),
            change(self.anchors_RA),
            change(self.anchor_tokens_RA),
            change(self.labels_RAK),
            change(self.weights_RAK),
            self.documents and Documents(*map(change, self.documents)),
        )


class Collator:
    """Loads batches of one dataset; safe to call from several threads.

    Args:
        dataset: token store.
        seed: run seed, for the anchors.
        num_anchors: most anchors per sequence.
        weights_K: weight of each slot.
        pad_token_id: fills the rows; its value reaches nothing.
        pin: put the tensors into page-locked memory (for GPUs).
    """

    def __init__(
        self, dataset: Dataset, *, seed: int, num_anchors: int, weights_K: NDArray[np.float32], pad_token_id: int, pin: bool
    ) -> None:
        self._dataset, self._seed, self._num_anchors = dataset, seed, num_anchors
        self._weights_K, self._pad, self._pin = weights_K, pad_token_id, pin

    def __call__(self, planned: PlannedBatch) -> tuple[BatchShape, DraftBatch]:
        self._dataset.check_files(planned.samples)
        # Copies: a mapped file that is cut off later must not be read again.
        rows = [(tokens.copy(), mask) for tokens, mask in map(self._dataset.tokens, planned.samples)]
        drawn = [
            draw_anchors(
                tokens,
                loss_mask,
                num_anchors=self._num_anchors,
                weights_K=self._weights_K,
                generator=np.random.default_rng((self._seed, planned.epoch, sample)),
            )
            for sample, (tokens, loss_mask) in zip(planned.samples, rows, strict=True)
        ]
        sequences = [tokens for tokens, _ in rows]
        batch = _pack(sequences, drawn) if planned.packed else _pad(sequences, drawn, self._pad)
        shape = BatchShape(
            bucket=planned.bucket,
            num_sequences=len(sequences),
            num_tokens=sum(len(tokens) for tokens in sequences),
            num_padded_tokens=batch.tokens_RS.numel(),
            max_seq_len=max(len(tokens) for tokens in sequences),
            num_anchors=sum(len(anchors.positions) for anchors in drawn),
            num_supervised=int((batch.weights_RAK > 0).sum()),
        )
        return shape, batch.pin_memory() if self._pin else batch


def _pad(sequences: list[NDArray[np.int32]], drawn: list[Anchors], pad_token_id: int) -> DraftBatch:
    """One row for each sequence."""
    num_rows, length, slots = len(sequences), max(len(tokens) for tokens in sequences), drawn[0].labels.shape[1]
    num_anchors = max(1, *(len(anchors.positions) for anchors in drawn))
    tokens_RS = np.full((num_rows, length), pad_token_id, dtype=np.int64)
    anchors_RA = np.zeros((num_rows, num_anchors), dtype=np.int64)
    labels_RAK = np.zeros((num_rows, num_anchors, slots), dtype=np.int64)
    weights_RAK = np.zeros((num_rows, num_anchors, slots), dtype=np.float32)
    for r, (tokens, anchors) in enumerate(zip(sequences, drawn, strict=True)):
        count = len(anchors.positions)
        tokens_RS[r, : len(tokens)] = tokens
        anchors_RA[r, :count] = anchors.positions
        labels_RAK[r, :count] = anchors.labels
        weights_RAK[r, :count] = anchors.weights
    anchor_tokens_RA = np.take_along_axis(tokens_RS, anchors_RA, axis=1)
    return DraftBatch(
        torch.from_numpy(tokens_RS),
        torch.from_numpy(anchors_RA),
        torch.from_numpy(anchor_tokens_RA),
        torch.from_numpy(labels_RAK),
        torch.from_numpy(weights_RAK),
    )


def _pack(sequences: list[NDArray[np.int32]], drawn: list[Anchors]) -> DraftBatch:
    """One row of all sequences, in the order in which the plan names them."""
    lengths = np.array([len(tokens) for tokens in sequences])
    starts = np.cumsum(lengths) - lengths
    tokens_S = np.concatenate(sequences).astype(np.int64)
    starts_A = np.repeat(starts, [len(anchors.positions) for anchors in drawn])
    anchors_A = np.concatenate([anchors.positions for anchors in drawn]) + starts_A
    labels_AK = np.concatenate([anchors.labels for anchors in drawn])
    weights_AK = np.concatenate([anchors.weights for anchors in drawn])
    if len(anchors_A) == 0:  # as in a padded batch, where there is at least one column
        anchors_A, starts_A = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        labels_AK, weights_AK = (np.zeros((1, x.shape[1]), dtype=x.dtype) for x in (labels_AK, weights_AK))
    ids_S = np.repeat(np.arange(len(lengths)), lengths)
    positions_S = np.arange(len(tokens_S)) - starts[ids_S]
    documents = Documents(_row(ids_S), _row(positions_S), _row(starts_A))
    tokens_A = tokens_S[anchors_A]
    return DraftBatch(_row(tokens_S), _row(anchors_A), _row(tokens_A), _row(labels_AK), _row(weights_AK), documents)


def _row(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array).unsqueeze(0)
