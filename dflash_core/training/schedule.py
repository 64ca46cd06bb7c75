"""Which batches a run trains, and at which learning rate. Pure functions of config, dataset and step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_core.bucketing import EpochPlan, plan_epoch
from dflash_core.config import BucketingConfig, TrainConfig
from dflash_core.errors import DataError
from dflash_core.records import PlannedBatch


@dataclass(frozen=True, slots=True)
class StepOutline:
    """One optimizer step as one cell sees it: its number of batches, and the longest sequence of all cells'."""

    step: int
    epoch: int
    num_batches: int
    max_seq_len: int


class RunPlan:
    """All epochs of a run, planned one at a time and numbered through.

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
        self._first_steps, self._first_batches = [0], [0]
        for epoch in range(train.num_epochs):
            plan = self.epoch_plan(epoch)
            self._first_steps.append(self._first_steps[-1] + plan.num_steps)
            self._first_batches.append(self._first_batches[-1] + plan.num_batches)
            if train.max_steps is not None and self._first_steps[-1] >= train.max_steps:
                break
        self.num_steps = min(self._first_steps[-1], train.max_steps or self._first_steps[-1])
        if self.num_steps == 0:
            raise DataError("the plan has no step: the dataset is empty")

    def epoch_plan(self, epoch: int) -> EpochPlan:
        """The plan of one epoch (the same arrays every time it is asked for)."""
        return plan_epoch(
            self._lengths,
            self.edges,
            token_budget=self._bucketing.token_budget,
            batches_per_step=self._bucketing.batches_per_step,
            num_cells=self._num_cells,
            order=self._bucketing.order,
            seed=self._train.seed,
            epoch=epoch,
        )

    def batches(self, cell: int, from_step: int = 0) -> Iterator[PlannedBatch]:
        """The cell's batches from `from_step` on; `position` counts the cell's batches from the start of the run."""
        position = 0
        for epoch in range(len(self._first_steps) - 1):
            first_step, first_batch = self._first_steps[epoch], self._first_batches[epoch]
            if first_step >= self.num_steps:
                return
            plan = self.epoch_plan(epoch)
            mine = np.flatnonzero(plan.cell == cell)
            steps = first_step + plan.step[mine]
            for n, (i, step) in enumerate(zip(mine.tolist(), steps.tolist(), strict=True)):
                if step >= self.num_steps:
                    return
                if step >= from_step:
                    last = n + 1 == len(mine) or steps[n + 1] != step
                    samples = tuple(plan.samples(i).tolist())
                    yield PlannedBatch(first_batch + i, position, epoch, step, cell, int(plan.bucket[i]), samples, last)
                position += 1

    def first_position(self, cell: int, from_step: int) -> int:
        """The position of the cell's first batch of `from_step`."""
        position = 0
        for epoch in range(len(self._first_steps) - 1):
            first_step = self._first_steps[epoch]
            if first_step >= from_step:
                break
            plan = self.epoch_plan(epoch)
            position += int(np.sum((plan.cell == cell) & (first_step + plan.step < from_step)))
        return position

    def outlines(self, cell: int, from_step: int) -> Iterator[StepOutline]:
        """Every step from `from_step` on, also those in which the cell has no batch."""
        for epoch in range(len(self._first_steps) - 1):
            first_step = self._first_steps[epoch]
            plan = self.epoch_plan(epoch)
            counts = np.bincount(plan.step[plan.cell == cell], minlength=plan.num_steps)
            longest = np.zeros(plan.num_steps, dtype=np.int64)
            np.maximum.at(longest, plan.step, plan.max_length)
            for s, (count, max_seq_len) in enumerate(zip(counts.tolist(), longest.tolist(), strict=True)):
                if from_step <= first_step + s < self.num_steps:
                    yield StepOutline(first_step + s, epoch, count, max_seq_len)

    def longest_row(self, planned: PlannedBatch) -> int:
        """Tokens of the longest sequence of a batch, before it is loaded."""
        return int(self._lengths[list(planned.samples)].max())


def learning_rate(step: int, num_steps: int, config: TrainConfig) -> float:
    """Linear warm-up over `warmup_fraction` of the steps, then a cosine to `final_lr_fraction` of the peak."""
    warmup = max(1, round(config.warmup_fraction * num_steps))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, num_steps - warmup)
    floor = config.final_lr_fraction
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
