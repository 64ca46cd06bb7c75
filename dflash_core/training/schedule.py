"""Which batches a run trains, and at which learning rate. Pure functions of config, dataset and step."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dflash_core.bucketing import EpochPlan, plan_epoch
from dflash_core.config import BucketingConfig, TrainConfig
from dflash_core.errors import DataError
from dflash_core.records import PlannedBatch

# Plans of epochs that are kept: two, as feed thread and train loop are never further apart than neighbouring epochs; of a small
# dataset, whose epochs are over before what is in flight is trained, as many as hold so many sequences together.
PLANS_KEPT, SEQUENCES_KEPT, MOST_PLANS_KEPT = 2, 1_000_000, 16


@dataclass(frozen=True, slots=True)
class StepOutline:
    """One optimizer step as one cell sees it: its number of batches, and the longest sequence of all cells'."""

    step: int
    epoch: int
    num_batches: int
    max_seq_len: int


def plan_configured(
    lengths: NDArray[np.integer],
    edges: tuple[int, ...],
    bucketing: BucketingConfig,
    *,
    num_cells: int,
    seed: int,
    epoch: int = 0,
) -> EpochPlan:
    """`plan_epoch` with everything that the configuration says of batches and their order."""
    return plan_epoch(
        lengths,
        edges,
        token_budget=bucketing.token_budget,
        batches_per_step=bucketing.batches_per_step,
        num_cells=num_cells,
        order=bucketing.order,
        seed=seed,
        epoch=epoch,
        strategy=bucketing.strategy,
        max_sequences=bucketing.max_sequences,
        quadratic_length=bucketing.quadratic_length,
        sort_window=bucketing.sort_window,
        pack_window=bucketing.pack_window,
    )


class RunPlan:
    """All epochs of a run, planned one at a time and numbered through. Safe to read from several threads.

    A plan of millions of sequences takes seconds and hundreds of megabytes. The last ones asked for are kept, and epochs that
    lie before the step asked for are not planned again.

    Args:
        lengths: sequence lengths of the dataset, [num_sequences].
        edges: upper bucket boundaries.
        bucketing, train: what to plan.
        num_cells: cells that share each step.
    """

    def __init__(
        self, lengths: NDArray[np.integer], edges: tuple[int, ...], bucketing: BucketingConfig, train: TrainConfig, num_cells: int
    ) -> None:
        self._lengths, self.edges, self._bucketing, self._train, self._num_cells = lengths, edges, bucketing, train, num_cells
        self._lock = threading.Lock()
        self._recent: dict[int, EpochPlan] = {}
        self._kept = max(PLANS_KEPT, min(MOST_PLANS_KEPT, SEQUENCES_KEPT // max(1, len(lengths))))
        self._cell_batches: dict[int, NDArray[np.int64]] = {}
        self._first_steps, self._first_batches = [0], [0]
        for epoch in range(train.num_epochs):
            # Only here is every epoch planned, to be counted. The first two, with which training begins, are kept.
            plan = self.epoch_plan(epoch) if epoch < self._kept else self._make(epoch)
            self._first_steps.append(self._first_steps[-1] + plan.num_steps)
            self._first_batches.append(self._first_batches[-1] + plan.num_batches)
            if train.max_steps is not None and self._first_steps[-1] >= train.max_steps:
                break
        self.num_steps = min(self._first_steps[-1], train.max_steps or self._first_steps[-1])
        if self.num_steps == 0:
            raise DataError("the plan has no step: the dataset is empty")

    def epoch_plan(self, epoch: int) -> EpochPlan:
        """The plan of one epoch (the same arrays every time it is asked for)."""
        with self._lock:  # held while planning: two threads that ask for one epoch plan it once
            if epoch not in self._recent:
                while len(self._recent) >= self._kept:
                    del self._recent[next(iter(self._recent))]
                self._recent[epoch] = self._make(epoch)
            return self._recent[epoch]

    def _make(self, epoch: int) -> EpochPlan:
        plan = plan_configured(
            self._lengths, self.edges, self._bucketing, num_cells=self._num_cells, seed=self._train.seed, epoch=epoch
        )
        self._cell_batches[epoch] = np.bincount(plan.cell, minlength=self._num_cells)
        return plan

    def _epochs(self, from_step: int) -> Iterator[tuple[int, int]]:
        """The epochs that hold steps from `from_step` on, and the run's first step of each."""
        for epoch, (first, end) in enumerate(pairwise(self._first_steps)):
            if from_step < end and first < self.num_steps:
                yield epoch, first

    def batches(self, cell: int, from_step: int = 0) -> Iterator[PlannedBatch]:
        """The cell's batches from `from_step` on; `position` counts the cell's batches from the start of the run."""
        position = self.first_position(cell, from_step)
        packed = self._bucketing.strategy == "packed"
        for epoch, first_step in self._epochs(from_step):
            plan, first_batch = self.epoch_plan(epoch), self._first_batches[epoch]
            mine = np.flatnonzero(plan.cell == cell)
            steps = first_step + plan.step[mine]
            begin, end = np.searchsorted(steps, (from_step, self.num_steps)).tolist()
            for n in range(begin, end):
                i, step = int(mine[n]), int(steps[n])
                last = n + 1 == len(mine) or steps[n + 1] != step
                samples = tuple(plan.samples(i).tolist())
                bucket, cost = int(plan.bucket[i]), int(plan.cost[i])
                yield PlannedBatch(first_batch + i, position, epoch, step, cell, bucket, samples, last, packed, cost)
                position += 1

    def first_position(self, cell: int, from_step: int) -> int:
        """The position of the cell's first batch of `from_step`."""
        position = 0
        for epoch, (first_step, end) in enumerate(pairwise(self._first_steps)):
            if end <= from_step:
                position += int(self._cell_batches[epoch][cell])
            elif first_step < from_step:
                plan = self.epoch_plan(epoch)
                position += int(np.sum((plan.cell == cell) & (first_step + plan.step < from_step)))
        return position

    def outlines(self, cell: int, from_step: int) -> Iterator[StepOutline]:
        """Every step from `from_step` on, also those in which the cell has no batch."""
        for epoch, first_step in self._epochs(from_step):
            plan = self.epoch_plan(epoch)
            counts = np.bincount(plan.step[plan.cell == cell], minlength=plan.num_steps)
            longest = np.zeros(plan.num_steps, dtype=np.int64)
            np.maximum.at(longest, plan.step, plan.max_length)
            for s, (count, max_seq_len) in enumerate(zip(counts.tolist(), longest.tolist(), strict=True)):
                if from_step <= first_step + s < self.num_steps:
                    yield StepOutline(first_step + s, epoch, count, max_seq_len)

    def step_batches(self, step: int) -> list[int]:
        """`seq_no` of all batches of a step, of all cells."""
        epoch, first_step = max((e, first) for e, first in self._epochs(step) if first <= step)
        first, end = np.searchsorted(self.epoch_plan(epoch).step, (step - first_step, step - first_step + 1)).tolist()
        return [self._first_batches[epoch] + i for i in range(first, end)]

    def lengths_of(self, planned: PlannedBatch) -> NDArray[np.integer]:
        """Tokens of each sequence of a batch, before it is loaded."""
        lengths: NDArray[np.integer] = self._lengths[list(planned.samples)]
        return lengths


def learning_rate(step: int, num_steps: int, config: TrainConfig) -> float:
    """Linear warm-up over `warmup_fraction` of the steps, then a cosine to `final_lr_fraction` of the peak."""
    warmup = max(1, round(config.warmup_fraction * num_steps))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, num_steps - warmup)
    floor = config.final_lr_fraction
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
