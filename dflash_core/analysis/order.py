"""The order in which batches were consumed: bucket runs at three levels, and what shuffling would have given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.random import Generator

from dflash_core.analysis.reader import numbers
from dflash_core.analysis.runs import Run, once_per_run
from dflash_core.bucketing import OrderLevels, order_levels, order_statistics, run_lengths, shortest_possible_longest_run

IntArray = np.ndarray[Any, np.dtype[np.int64]]
FloatArray = np.ndarray[Any, np.dtype[np.float64]]

NUM_PERMUTATIONS = 200
# Runs of more batches than these are not shuffled; a formula that is exact for large numbers takes the place.
MAX_SHUFFLED_BATCHES = 2000
# With fewer batches outside a bucket the formula's gaps are not independent.
MIN_OTHERS = 50
NEGLIGIBLE = 1e-12
MIXED = -1


def run_length_rows(run: Run) -> list[dict[str, Any]]:
    """Rows of `run_lengths`: how many bucket runs of a length there are, at three levels.

    `flat`: batches in the order of the plan. `cell`: batches of one cell, which is what one drafter sees; runs of all
    cells together. `step`: consecutive optimizer steps that lean to the same bucket (`leaning_bucket`); a null bucket
    stands for steps that lean to none. `run_length` counts batches (flat, cell) or steps (step).
    """
    bucket = run.buckets()
    cell = numbers(run.batches, "cell", missing=0)
    rows = list(_counted(run.run_id, "flat", [bucket]))
    rows += _counted(run.run_id, "cell", [bucket[cell == one] for one in np.unique(cell)])
    rows += _counted(run.run_id, "step", [leaning_bucket(run)])
    return rows


def _counted(run_id: str, level: str, orders: list[IntArray]) -> Iterator[dict[str, Any]]:
    encoded = [run_lengths(order) for order in orders]
    buckets, lengths = (np.concatenate([pair[part] for pair in encoded]) for part in (0, 1))
    width = int(lengths.max(initial=0)) + 1
    pairs, counts = np.unique((buckets - MIXED) * width + lengths, return_counts=True)  # one number for each pair
    for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
        bucket, length = pair // width + MIXED, pair % width
        yield {
            "run_id": run_id,
            "level": level,
            "bucket": None if bucket == MIXED else bucket,
            "run_length": length,
            "count": count,
        }


@once_per_run
def step_counts(run: Run) -> IntArray:
    """Batches per bucket of each trained step, [steps, buckets]; steps in order, those without batches left out."""
    step, buckets = numbers(run.batches, "step").astype(np.int64), run.num_buckets
    first, last = int(step.min()), int(step.max())
    flat = np.bincount((step - first) * buckets + run.buckets(), minlength=(last - first + 1) * buckets)
    counts = flat.reshape(-1, buckets)
    return np.asarray(counts[counts.any(axis=1)])


@once_per_run
def leaning_bucket(run: Run) -> IntArray:
    """For each step the bucket that it leans to, or `MIXED`.

    A step leans to a bucket when it holds more than one batch above the bucket's quota (batches of the step times the
    bucket's share of the run), or when it has several batches and all are of that bucket. The bucket furthest above its
    quota counts. A step composed as evenly as whole batches allow leans to none.
    """
    counts = step_counts(run)
    size = counts.sum(axis=1)
    excess = counts - np.outer(size, counts.sum(axis=0) / counts.sum())
    most = excess.argmax(axis=1)
    rows = np.arange(len(counts))
    whole = (counts[rows, most] == size) & (size > 1) & (np.count_nonzero(counts.sum(axis=0)) > 1)
    leans = (excess[rows, most] > 1 + 1e-9) | whole
    return np.where(leans, most, MIXED)


def order_summary(run: Run, rng: Generator) -> dict[str, Any]:
    """The order's columns of `runs`.

    `longest_run` is that of all batches in their order. An epoch is planned on its own, and where two meet, runs can join;
    so what is held against a bound is `longest_run_in_epoch`, that of the worst epoch. `shortest_possible_longest_run` is its
    bound: the greatest R* of an epoch's bucket counts. `shuffled_*` is what `longest_run_in_epoch` becomes when each epoch
    is shuffled at random. Epochs of packed or sorted batches differ a little in their counts, so `prefix_deviation` is that
    of the worst epoch, too. `step_quota_deviation` and `cell_cost_spread` are the worst epoch's, `mean_buckets_per_step` and
    `step_efficiency` means over epochs. Meaning of the columns: `bucketing.OrderStatistics`, `bucketing.StepStatistics`.
    """
    levels = order_levels_by_epoch(run)
    steps = [epoch.steps for epoch in levels]
    bucket = run.buckets()
    epochs = np.split(bucket, np.flatnonzero(np.diff(numbers(run.batches, "epoch", missing=0))) + 1)
    found = order_statistics(
        bucket,
        step=numbers(run.batches, "step").astype(np.int64),
        mean_length=numbers(run.batches, "mean_seq_len", missing=0),
        num_buckets=run.num_buckets,
        num_tokens=numbers(run.batches, "num_tokens", missing=0),
        num_padded_tokens=numbers(run.batches, "num_padded_tokens", missing=0),
    ).as_dict()
    low, median, high = shuffled_quantiles(epochs, (0.05, 0.5, 0.95), rng)
    bounds = [shortest_possible_longest_run(np.bincount(epoch, minlength=run.num_buckets)) for epoch in epochs]
    return {
        **{key: value for key, value in found.items() if key != "num_batches"},
        "prefix_deviation": _largest([epoch.flat.prefix_deviation for epoch in levels]),
        "step_quota_deviation": _largest([epoch.quota_deviation for epoch in steps]),
        "cell_cost_spread": _largest([epoch.cell_cost_spread for epoch in steps]),
        "mean_buckets_per_step": _mean([epoch.mean_buckets_per_step for epoch in steps]),
        "step_efficiency": _mean([epoch.step_efficiency for epoch in steps]),
        "longest_run_in_epoch": max(int(run_lengths(epoch)[1].max()) for epoch in epochs),
        "shortest_possible_longest_run": max(bounds),
        "shuffled_longest_run_median": median,
        "shuffled_longest_run_p05": low,
        "shuffled_longest_run_p95": high,
    }


def order_levels_by_epoch(run: Run) -> list[OrderLevels]:
    """The statistics of each epoch's consumed batches at three levels, as `bucketing.plan_levels` has them of a plan."""
    table, bucket = run.batches, run.buckets()
    padded, cost = numbers(table, "num_padded_tokens", missing=0), numbers(table, "cost")
    whole = {
        "step": numbers(table, "step").astype(np.int64),
        "cell": numbers(table, "cell", missing=0).astype(np.int64),
        "mean_length": numbers(table, "mean_seq_len", missing=0),
        "num_sequences": numbers(table, "num_sequences", missing=0).astype(np.int64),
        "num_tokens": numbers(table, "num_tokens", missing=0).astype(np.int64),
        "num_padded_tokens": padded.astype(np.int64),
        # Runs of earlier versions did not record it.
        "cost": np.where(np.isnan(cost), padded, cost).astype(np.int64),
    }
    num_cells = int(whole["cell"].max(initial=0)) + 1
    borders = np.flatnonzero(np.diff(numbers(table, "epoch", missing=0))) + 1
    parts = [slice(start, end) for start, end in pairwise([0, *borders.tolist(), len(bucket)])]
    return [
        order_levels(
            bucket[part], num_buckets=run.num_buckets, num_cells=num_cells, **{key: array[part] for key, array in whole.items()}
        )
        for part in parts
    ]


def _largest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def shuffled_quantiles(epochs: Sequence[IntArray], at: Sequence[float], rng: Generator) -> list[float]:
    """Quantiles of the longest bucket run inside an epoch when the batches of each epoch are shuffled at random."""
    few_others = any(0 < len(epoch) - count < MIN_OTHERS for epoch in epochs for count in np.bincount(epoch).tolist())
    if few_others or sum(map(len, epochs)) <= MAX_SHUFFLED_BATCHES:
        return [float(value) for value in np.quantile(shuffled_longest_runs(epochs, rng), at)]
    below = shuffled_distribution(epochs)
    return [float(np.searchsorted(below, one)) for one in at]


def shuffled_longest_runs(epochs: Sequence[IntArray], rng: Generator) -> IntArray:
    """Longest bucket run inside an epoch, for `NUM_PERMUTATIONS` random permutations of the batches of each epoch."""
    longest = np.zeros(NUM_PERMUTATIONS, dtype=np.int64)
    for epoch in epochs:
        small = epoch.astype(np.int16)
        for i in range(NUM_PERMUTATIONS):
            rng.shuffle(small)
            ends = np.flatnonzero(small[1:] != small[:-1])
            longest[i] = max(longest[i], np.diff(ends, prepend=-1, append=len(small) - 1).max())
    return longest


def shuffled_distribution(epochs: Sequence[IntArray]) -> FloatArray:
    """P(longest bucket run <= m) for m = 0, 1, ... up to where it is 1, when the batches of each epoch are shuffled.

    The N - n batches of other buckets leave N - n + 1 gaps for the n of one bucket. A gap holds at least m of them with
    probability p = n! (N - m)! / ((n - m)! N!), and gaps and buckets are taken for independent, which they are in the
    limit: (1 - p)^(N - n + 1), multiplied over buckets and epochs.
    """
    total = np.zeros(1)
    for epoch in epochs:
        size = len(epoch)
        for count in np.bincount(epoch).tolist():
            before = np.arange(count)
            at_least = np.append(np.exp(np.cumsum(np.log((count - before) / (size - before)))), 0.0)  # 1, 2, ..., count + 1
            at_least = at_least[: int(np.count_nonzero(at_least > NEGLIGIBLE)) + 1]
            with np.errstate(divide="ignore"):
                logs = (size - count + 1) * np.log1p(-at_least)
            total = np.append(total, np.zeros(max(0, len(logs) - len(total))))
            total[: len(logs)] += logs
    return np.asarray(np.exp(total))
