"""Packed rows: several whole sequences (documents) one after the other in one row, without padding.

Nothing may pass from one document to the next: the target attends inside a document and counts its positions from the
document's start, and a query of the draft sees its own document's context only (docs/field.md 1, 'Attention rule').

Shapes: R rows, S row length, A anchors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Context windows of the groups of anchors of a row: first position, and the one behind the last.
Windows = list[tuple[int, int]]


class Documents(NamedTuple):
    """Where the documents of packed rows stand.

    Attributes:
        ids_RS: number of the document in its row, ascending from 0.
        positions_RS: position inside the document, from 0.
        starts_RA: place in the row at which the anchor's document starts.
    """

    ids_RS: Tensor
    positions_RS: Tensor
    starts_RA: Tensor


def context_windows(anchors_RA: Tensor, starts_RA: Tensor, group_size: int, sliding_window: int | None = None) -> Windows:
    """For each group of `group_size` neighbouring anchors, the part of the row that holds all they can see.

    It runs from the first start of their documents to their last anchor; with a sliding window only from where its first
    anchor reaches back to (`model/attention.py`). Tensors on a GPU are waited for, so that windows are computed from the
    batch before it is copied there.
    """
    if sliding_window is not None:
        starts_RA = starts_RA.maximum(anchors_RA - (sliding_window - 1))
    groups = (slice(first, first + group_size) for first in range(0, anchors_RA.shape[1], group_size))
    return [(int(starts_RA[:, group].min()), int(anchors_RA[:, group].max())) for group in groups]


def runs_of_documents(ids_1S: Tensor, most_tokens: int) -> list[tuple[int, int, int]]:
    """Cut a packed row into runs of whole documents: where each begins and ends, and its number of documents.

    A run takes neighbouring documents up to `most_tokens`; a longer document is a run of its own.
    """
    runs: list[tuple[int, int, int]] = []
    for length in torch.bincount(ids_1S[0]).tolist():
        begin, end, count = runs[-1] if runs else (0, 0, 0)
        if runs and end - begin + length <= most_tokens:
            runs[-1] = (begin, end + length, count + 1)
        else:
            runs.append((end, end + length, 1))
    return runs
