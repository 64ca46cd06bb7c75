"""Plain records that several floors exchange. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """One batch as the plan decided it, before anything is loaded.

    Attributes:
        seq_no: number of the batch in the whole run, over all epochs and cells, from 0.
        position: number of the batch among those of its cell, over all epochs, from 0.
        epoch: epoch, from 0.
        step: optimizer step, over all epochs, from 0.
        cell: cell that trains it.
        bucket: length bucket.
        samples: indices of its sequences in the dataset.
        ends_step: True on the cell's last batch of the step.
        packed: the sequences stand one after the other in a single row, instead of one to a row with padding.
        cost: modelled cost by which cells are balanced, in tokens.
    """

    seq_no: int
    position: int
    epoch: int
    step: int
    cell: int
    bucket: int
    samples: tuple[int, ...]
    ends_step: bool
    packed: bool = False
    cost: int = 0


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What one loaded batch holds; the source of every batch statistic.

    `num_tokens` counts real tokens, `num_padded_tokens` rows times longest row, which for a packed batch is the length of its
    row; `num_sequences` counts documents there, and `max_seq_len` is the longest one. `num_supervised` counts the draft slots
    that enter the loss.
    """

    bucket: int
    num_sequences: int
    num_tokens: int
    num_padded_tokens: int
    max_seq_len: int
    num_anchors: int
    num_supervised: int

    @property
    def mean_seq_len(self) -> float:
        return self.num_tokens / self.num_sequences if self.num_sequences else 0.0
