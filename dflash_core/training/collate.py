"""Turns a planned batch into tensors: right-padded tokens, anchors, labels and weights.

Anchors depend on (dataset, seed, epoch, sequence) and on nothing else, so neither threads nor the number of cells can
change them.

Shapes: R rows, S padded length, A anchors (most of any row), K slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_core.data import Dataset
from dflash_core.model.anchors import draw_anchors
from dflash_core.records import BatchShape, PlannedBatch


@dataclass(frozen=True)
class DraftBatch:
    """What targets and drafter read.

    Attributes:
        tokens_RS: padded tokens.
        anchors_RA: anchor positions; rows with fewer anchors are filled with position 0 and weight 0.
        anchor_tokens_RA: the tokens there.
        labels_RAK, weights_RAK: what each slot predicts, and how much it counts (0: nothing to predict).
    """

    tokens_RS: Tensor
    anchors_RA: Tensor
    anchor_tokens_RA: Tensor
    labels_RAK: Tensor
    weights_RAK: Tensor

    def to(self, device: torch.device) -> DraftBatch:
        """A copy on `device`; from pinned memory the copy does not wait."""
        moved = (getattr(self, name).to(device, non_blocking=True) for name in self.__dataclass_fields__)
        return DraftBatch(*moved)


class Collator:
    """Loads batches of one dataset; safe to call from several threads.

    Args:
        dataset: token store.
        seed: run seed, for the anchors.
        num_anchors: most anchors per row.
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
        rows = [self._dataset.tokens(sample) for sample in planned.samples]
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
        num_rows, length = len(rows), max(len(tokens) for tokens, _ in rows)
        num_anchors, slots = max(1, *(len(a.positions) for a in drawn)) if drawn else 1, len(self._weights_K)
        tokens_RS = np.full((num_rows, length), self._pad, dtype=np.int64)
        anchors_RA = np.zeros((num_rows, num_anchors), dtype=np.int64)
        labels_RAK = np.zeros((num_rows, num_anchors, slots), dtype=np.int64)
        weights_RAK = np.zeros((num_rows, num_anchors, slots), dtype=np.float32)
        for r, ((tokens, _), anchors) in enumerate(zip(rows, drawn, strict=True)):
            count = len(anchors.positions)
            tokens_RS[r, : len(tokens)] = tokens
            anchors_RA[r, :count] = anchors.positions
            labels_RAK[r, :count] = anchors.labels
            weights_RAK[r, :count] = anchors.weights
        anchor_tokens_RA = np.take_along_axis(tokens_RS, anchors_RA, axis=1)
        shape = BatchShape(
            bucket=planned.bucket,
            num_sequences=num_rows,
            num_tokens=sum(len(tokens) for tokens, _ in rows),
            num_padded_tokens=num_rows * length,
            max_seq_len=length,
            num_anchors=sum(len(a.positions) for a in drawn),
            num_supervised=int((weights_RAK > 0).sum()),
        )
        arrays = (tokens_RS, anchors_RA, anchor_tokens_RA, labels_RAK, weights_RAK)
        tensors = (torch.from_numpy(array) for array in arrays)
        return shape, DraftBatch(*((t.pin_memory() for t in tensors) if self._pin else tensors))
