"""The plan of an epoch: which sequences form a batch, and which step and cell each batch belongs to.

The plan decides and threads only execute, so `plan_epoch` is a pure function of its arguments. It works on lengths alone
and touches no data. What is linear in the number of sequences runs in numpy; only the order of batches is a Python loop.

Batches are formed anew each epoch, from a random order of each bucket's sequences, and independently of the order of
batches: for one seed and epoch, all four orders hold the same batches, so comparing them compares nothing else. The
number of batches does not depend on seed or epoch, so a learning-rate schedule can count the steps of one plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike

from dflash_core.bucketing import orders
from dflash_core.bucketing.boundaries import validate_boundaries
from dflash_core.bucketing.cells import assign_cells
from dflash_core.bucketing.lengths import FloatArray, IntArray, bucket_of, check_lengths
from dflash_core.bucketing.padding import batch_sizes, check_budget
from dflash_core.config import Order
from dflash_core.errors import ConfigError
from dflash_core.provenance import digest_bytes, digest_json


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What a plan was made with, besides the lengths. `edges` and `token_budget` are in tokens."""

    edges: tuple[int, ...]
    token_budget: int
    batches_per_step: int
    num_cells: int
    order: Order
    seed: int
    epoch: int


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """The batches of one epoch in training order. Arrays are read-only, with one entry per batch unless said otherwise.

    Attributes:
        settings: what the plan was made with.
        bucket: length bucket.
        step: optimizer step within the epoch, from 0.
        cell: cell that trains the batch.
        num_tokens: real tokens.
        max_length: longest sequence in tokens.
        sample_index: sequence indices of all batches in a row, one entry per sequence.
        offsets: where each batch begins in `sample_index`, and its end: `num_batches + 1` entries.
    """

    settings: PlanSettings
    bucket: IntArray
    step: IntArray
    cell: IntArray
    num_tokens: IntArray
    max_length: IntArray
    sample_index: IntArray
    offsets: IntArray

    def __post_init__(self) -> None:
        for array in self._arrays().values():
            array.setflags(write=False)

    def samples(self, i: int) -> IntArray:
        """Sequence indices of batch `i`, counted in training order; raises `IndexError` past the last."""
        if not 0 <= i < self.num_batches:
            raise IndexError(f"batch {i} of a plan of {self.num_batches} batches")
        return self.sample_index[self.offsets[i] : self.offsets[i + 1]]

    def fingerprint(self) -> str:
        """SHA-256 over settings and content: equal exactly for equal plans, on every machine."""
        arrays = {name: digest_bytes(array.astype("<i8").tobytes()) for name, array in self._arrays().items()}
        return digest_json({"settings": asdict(self.settings), "arrays": arrays})

    def _arrays(self) -> dict[str, IntArray]:
        names = ("bucket", "step", "cell", "num_tokens", "max_length", "sample_index", "offsets")
        return {name: getattr(self, name) for name in names}

    @cached_property
    def num_sequences(self) -> IntArray:
        return np.diff(self.offsets)

    @cached_property
    def num_padded_tokens(self) -> IntArray:
        """Sequences times longest sequence; also the modelled cost of a batch."""
        return self.num_sequences * self.max_length

    @cached_property
    def mean_length(self) -> FloatArray:
        return self.num_tokens / self.num_sequences

    @property
    def num_batches(self) -> int:
        return len(self.bucket)

    @property
    def num_steps(self) -> int:
        return int(self.step[-1]) + 1

    @property
    def num_buckets(self) -> int:
        """Buckets that the edges define, whether or not any sequence fell into them."""
        return len(self.settings.edges)

    @property
    def edges(self) -> tuple[int, ...]:
        return self.settings.edges

    @property
    def order(self) -> Order:
        return self.settings.order

    @property
    def seed(self) -> int:
        return self.settings.seed

    @property
    def epoch(self) -> int:
        return self.settings.epoch


def plan_epoch(
    lengths: ArrayLike,
    edges: Sequence[int],
    *,
    token_budget: int,
    batches_per_step: int,
    num_cells: int = 1,
    order: Order = "diverse",
    seed: int = 0,
    epoch: int = 0,
) -> EpochPlan:
    """Plan one epoch: every sequence is in exactly one batch, and no batch mixes buckets.

    Args:
        lengths: tokens of every sequence, [num_sequences].
        edges: upper edges of the buckets in tokens; bucket i holds lengths in (edges[i-1], edges[i]].
        token_budget: most padded tokens of a batch (sequences times longest).
        batches_per_step: batches of an optimizer step, over all cells; the last step of an epoch has what is left.
        num_cells: cells that share a step.
        order: `diverse` keeps the longest bucket run at R* and every prefix near its quota; `shuffle`, `grouped` (one
            bucket per step where counts allow) and `sorted` (by length) exist to be compared with.
        seed: seed of the run.
        epoch: epoch, from 0.

    Raises:
        ConfigError: an argument or an edge is out of range; the key is named.
        DataError: there are no sequences, one is empty, or one is longer than the budget; its index is named.
    """
    checked = check_lengths(lengths)
    upper = validate_boundaries(edges, checked)
    settings = PlanSettings(upper, int(token_budget), int(batches_per_step), int(num_cells), order, int(seed), int(epoch))
    _check_settings(settings)
    check_budget(checked, settings.token_budget)
    forming, ordering = (np.random.default_rng(s) for s in np.random.SeedSequence([settings.seed, settings.epoch]).spawn(2))
    formed = _form_batches(checked, settings, forming)
    return _arrange(formed, _ordered(formed, ordering))


def _check_settings(settings: PlanSettings) -> None:
    lowest = {"bucketing.batches_per_step": (settings.batches_per_step, 1), "topology.cells": (settings.num_cells, 1)}
    lowest |= {"train.seed": (settings.seed, 0), "epoch": (settings.epoch, 0)}
    for key, (value, least) in lowest.items():
        if value < least:
            raise ConfigError(f"{key}: {value} is below {least}")
    if settings.order not in ("diverse", "shuffle", "grouped", "sorted"):
        raise ConfigError(f"bucketing.order: {settings.order!r} is none of diverse, shuffle, grouped, sorted")


def _form_batches(lengths: IntArray, settings: PlanSettings, rng: Generator) -> EpochPlan:
    """Random batches of every bucket, bucket by bucket; step and cell are still 0."""
    shuffled = rng.permutation(len(lengths))
    bucket = bucket_of(lengths, settings.edges)
    sample_index = shuffled[np.argsort(bucket[shuffled], kind="stable")]
    in_bucket = np.bincount(bucket, minlength=len(settings.edges))
    sizes: list[IntArray] = []
    start = 0
    for count in in_bucket.tolist():
        longest = int(lengths[sample_index[start : start + count]].max(initial=1))
        sizes.append(batch_sizes(count, longest, settings.token_budget))
        start += count
    offsets = np.concatenate(([0], np.cumsum(np.concatenate(sizes))))
    in_order = lengths[sample_index]
    batch_bucket = np.repeat(np.arange(len(sizes)), [len(s) for s in sizes])
    unset = np.zeros(len(batch_bucket), dtype=np.int64)
    return EpochPlan(
        settings,
        batch_bucket,
        step=unset,
        cell=unset,
        num_tokens=np.add.reduceat(in_order, offsets[:-1]),
        max_length=np.maximum.reduceat(in_order, offsets[:-1]),
        sample_index=sample_index,
        offsets=offsets,
    )


def _ordered(formed: EpochPlan, rng: Generator) -> IntArray:
    """The permutation of the formed batches that `settings.order` asks for."""
    settings = formed.settings
    if settings.order == "diverse":
        return orders.diverse(formed.bucket, rng)
    if settings.order == "shuffle":
        return orders.shuffle(formed.num_batches, rng)
    if settings.order == "grouped":
        return orders.grouped(formed.bucket, settings.batches_per_step, rng)
    return orders.by_length(formed.mean_length)


def _arrange(formed: EpochPlan, order: IntArray) -> EpochPlan:
    """The formed batches in training order, with step and cell."""
    settings = formed.settings
    sizes = formed.num_sequences[order]
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    # Position j of the new row came from its batch's old start plus j's distance from the batch's new start.
    source = np.arange(offsets[-1]) + np.repeat(formed.offsets[order] - offsets[:-1], sizes)
    return EpochPlan(
        settings,
        formed.bucket[order],
        step=np.arange(len(order)) // settings.batches_per_step,
        cell=assign_cells(formed.num_padded_tokens[order], settings.batches_per_step, settings.num_cells),
        num_tokens=formed.num_tokens[order],
        max_length=formed.max_length[order],
        sample_index=formed.sample_index[source],
        offsets=offsets,
    )
