"""The plan of an epoch: which sequences form a batch, and which step and cell each batch belongs to.

The plan decides and threads only execute, so `plan_epoch` is a pure function of its arguments. It works on lengths alone
and touches no data. What is linear in the number of sequences runs in numpy; only the order of batches is a Python loop.

Batches are formed anew each epoch, from a random order of the sequences (`forming`, `packing`), and independently of the
order of batches: for one seed and epoch, all orders hold the same batches, so comparing them compares nothing else.
The number of random padded batches is the same in every epoch; that of sorted or packed ones varies a little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import get_args

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike

from dflash_core.bucketing import orders
from dflash_core.bucketing.boundaries import validate_boundaries
from dflash_core.bucketing.cells import MOST_CELLS, assign_cells
from dflash_core.bucketing.diverse import diverse
from dflash_core.bucketing.forming import Formed, form_padded
from dflash_core.bucketing.lengths import LARGEST, FloatArray, IntArray, bucket_of, check_lengths
from dflash_core.bucketing.limits import Limits
from dflash_core.bucketing.packing import form_packed
from dflash_core.config import Order, Strategy
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
    strategy: Strategy = "padded"
    max_sequences: int | None = None
    quadratic_length: int | None = None
    sort_window: int = 0
    pack_window: int = 128

    @property
    def limits(self) -> Limits:
        """What one batch may hold; raises `ConfigError` where that makes no sense."""
        return Limits(self.token_budget, self.max_sequences, self.quadratic_length)

    def check(self) -> None:
        """Raise `ConfigError`, naming the key, where a number is out of range or a word is not known."""
        lowest = {"bucketing.batches_per_step": (self.batches_per_step, 1), "topology.cells": (self.num_cells, 1)}
        lowest |= {"train.seed": (self.seed, 0), "epoch": (self.epoch, 0)}
        lowest |= {"bucketing.sort_window": (self.sort_window, 0), "bucketing.pack_window": (self.pack_window, 1)}
        for key, (value, least) in lowest.items():
            if value < least:
                raise ConfigError(f"{key}: {value} is below {least}")
        for key, value, most in (
            ("bucketing.batches_per_step", self.batches_per_step, LARGEST),
            ("topology.cells", self.num_cells, MOST_CELLS),
        ):
            if value > most:
                raise ConfigError(f"{key}: {value} is above {most}")
        for key, word, known in (("order", self.order, get_args(Order)), ("strategy", self.strategy, get_args(Strategy))):
            if word not in known:
                raise ConfigError(f"bucketing.{key}: {word!r} is none of {', '.join(known)}")


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """The batches of one epoch in training order. Arrays are read-only, with one entry per batch unless said otherwise.

    Attributes:
        settings: what the plan was made with.
        bucket: length bucket; of a packed row the bucket of its longest sequence.
        step: optimizer step within the epoch, from 0.
        cell: cell that trains the batch.
        num_tokens: real tokens.
        max_length: longest sequence in tokens.
        cost: modelled cost in tokens, by which cells are balanced: sequences times the cost of the longest
            (`Limits.cost_of`), of a packed row the sum of its sequences' costs.
        sample_index: sequence indices of all batches in a row, one entry per sequence.
        offsets: where each batch begins in `sample_index`, and its end: `num_batches + 1` entries.
    """

    settings: PlanSettings
    bucket: IntArray
    step: IntArray
    cell: IntArray
    num_tokens: IntArray
    max_length: IntArray
    cost: IntArray
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

    def trained_fingerprint(self) -> str:
        """SHA-256 over what is trained in which step, whoever trains it: the same for any number of cells."""
        arrays = {name: digest_bytes(getattr(self, name).astype("<i8").tobytes()) for name in ("step", "sample_index", "offsets")}
        return digest_json(arrays)

    def _arrays(self) -> dict[str, IntArray]:
        names = ("bucket", "step", "cell", "num_tokens", "max_length", "cost", "sample_index", "offsets")
        return {name: getattr(self, name) for name in names}

    @cached_property
    def num_sequences(self) -> IntArray:
        return np.diff(self.offsets)

    @cached_property
    def num_padded_tokens(self) -> IntArray:
        """Sequences times longest sequence; of a packed row just its tokens, as nothing is padded."""
        return self.num_tokens if self.packed else self.num_sequences * self.max_length

    @cached_property
    def mean_length(self) -> FloatArray:
        return self.num_tokens / self.num_sequences

    @property
    def packed(self) -> bool:
        """Whether a batch is one row of whole sequences, one after the other."""
        return self.settings.strategy == "packed"

    @property
    def budget_fill(self) -> float:
        """Real tokens as a share of what the batches might hold, from 0 to 1."""
        return int(self.num_tokens.sum()) / (self.num_batches * self.settings.token_budget)

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
    strategy: Strategy = "padded",
    max_sequences: int | None = None,
    quadratic_length: int | None = None,
    sort_window: int = 0,
    pack_window: int = 128,
) -> EpochPlan:
    """Plan one epoch: every sequence is in exactly one batch.

    Args:
        lengths: tokens of every sequence, [num_sequences].
        edges: upper edges of the buckets in tokens; bucket i holds lengths in (edges[i-1], edges[i]].
        token_budget: most padded tokens of a batch (sequences times longest), or tokens of a packed row.
        batches_per_step: batches of an optimizer step, over all cells; the last step of an epoch has what is left.
        num_cells: cells that share a step.
        order: `diverse` keeps the longest bucket run at R* and every prefix near its quota; `shuffle`, `grouped` (one
            bucket per step where counts allow), `clustered` (stretches of one bucket) and `sorted` (by length) exist to be
            compared with.
        seed: with `epoch` it decides every random choice.
        epoch: number of the epoch.
        strategy: `padded` batches hold sequences of one bucket, padded to the longest; `packed` ones are rows of whole
            sequences from all buckets.
        max_sequences: most sequences of a batch; None for no bound.
        quadratic_length: length at which attention costs as much as all else (`Limits.cost_of`); None for none.
        sort_window: batches whose sequences are drawn at random and then sorted by length (padded); 0 for no sorting.
        pack_window: rows whose sequences are drawn at random and then fitted together (packed).

    Raises:
        ConfigError: an argument is out of range, or the edges are not valid for these lengths.
        DataError: there are no sequences, one is empty, or one is longer than the budget (its index is named).
    """
    checked = check_lengths(lengths)
    upper = validate_boundaries(edges, checked)
    settings = PlanSettings(
        edges=upper,
        token_budget=int(token_budget),
        batches_per_step=int(batches_per_step),
        num_cells=int(num_cells),
        order=order,
        seed=int(seed),
        epoch=int(epoch),
        strategy=strategy,
        max_sequences=None if max_sequences is None else int(max_sequences),
        quadratic_length=None if quadratic_length is None else int(quadratic_length),
        sort_window=int(sort_window),
        pack_window=int(pack_window),
    )
    settings.check()
    limits = settings.limits
    limits.check(checked)
    forming, ordering = (np.random.default_rng(s) for s in np.random.SeedSequence([settings.seed, settings.epoch]).spawn(2))
    if settings.strategy == "packed":
        formed = form_packed(checked, limits, settings.pack_window, forming)
    else:
        formed = form_padded(checked, upper, limits, settings.sort_window, forming)
    return _arrange(formed, checked, settings, ordering)


def _arrange(formed: Formed, lengths: IntArray, settings: PlanSettings, rng: Generator) -> EpochPlan:
    """The formed batches, described and brought into training order."""
    starts = formed.starts
    in_order = lengths[formed.sample_index]
    sizes = np.diff(starts, append=len(in_order))
    num_tokens, max_length = np.add.reduceat(in_order, starts), np.maximum.reduceat(in_order, starts)
    bucket = bucket_of(max_length, settings.edges).astype(np.int64)
    if settings.strategy == "packed":
        cost = np.add.reduceat(settings.limits.cost_of(in_order), starts)
    else:
        cost = sizes * settings.limits.cost_of(max_length)
    order = _order(bucket, num_tokens / sizes, settings, rng)
    offsets = np.concatenate(([0], np.cumsum(sizes[order])))
    # Position j of the new row came from its batch's old start plus j's distance from the batch's new start.
    source = np.arange(offsets[-1]) + np.repeat(starts[order] - offsets[:-1], sizes[order])
    return EpochPlan(
        settings,
        bucket[order],
        step=np.arange(len(order)) // settings.batches_per_step,
        cell=assign_cells(cost[order], settings.batches_per_step, settings.num_cells),
        num_tokens=num_tokens[order],
        max_length=max_length[order],
        cost=cost[order],
        sample_index=formed.sample_index[source],
        offsets=offsets,
    )


def _order(bucket: IntArray, mean_length: FloatArray, settings: PlanSettings, rng: Generator) -> IntArray:
    """The permutation of the batches that `settings.order` asks for."""
    if settings.order == "diverse":
        return diverse(bucket, rng)
    if settings.order == "shuffle":
        return orders.shuffle(len(bucket), rng)
    if settings.order == "grouped":
        return orders.grouped(bucket, settings.batches_per_step, rng)
    if settings.order == "clustered":
        return orders.clustered(bucket, rng)
    return orders.by_length(mean_length)
