"""Numbers that describe an order of batches: how long the bucket runs are, and how well the epoch is mixed.

They take plain arrays, so they serve for a plan and for the batches that a run has really consumed. How to read them:
`longest_run` above `shortest_possible_longest_run` + 1, `runs_z` below -3 or `lag1_correlation` above 0.1 mean that
buckets cluster; a large positive z only says that the order was made and not drawn (docs/field.md 2).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import sqrt

import numpy as np
from numpy.typing import ArrayLike

from dflash_core.bucketing.diverse import shortest_possible_longest_run
from dflash_core.bucketing.lengths import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class OrderStatistics:
    """Description of an order. `None` stands where a number is undefined; there is never a NaN.

    Attributes:
        num_batches: number of batches.
        longest_run: most consecutive batches of one bucket.
        shortest_possible_longest_run: R*, the least that `longest_run` can be for these bucket counts.
        mean_run: mean length of the bucket runs; None without batches.
        runs_z: z of the runs test for k buckets, negative for clustering; None with one bucket or no variance.
        lag1_correlation: autocorrelation at lag 1 of the batch mean length; None with constant lengths or one batch.
        prefix_deviation: greatest |count - quota| in batches, over all prefixes and buckets; None without batches.
        step_share_sd: standard deviation, over full steps, of the share of the bucket with most batches (the first such
            bucket). A full step has as many batches as the fullest. None with fewer than two full steps.
        padding_efficiency: real tokens per padded token; None where tokens are not given.
    """

    num_batches: int
    longest_run: int
    shortest_possible_longest_run: int
    mean_run: float | None
    runs_z: float | None
    lag1_correlation: float | None
    prefix_deviation: float | None
    step_share_sd: float | None
    padding_efficiency: float | None

    def as_dict(self) -> dict[str, int | float | None]:
        return asdict(self)


def order_statistics(
    bucket: ArrayLike,
    *,
    step: ArrayLike,
    mean_length: ArrayLike,
    num_buckets: int,
    num_tokens: ArrayLike | None = None,
    num_padded_tokens: ArrayLike | None = None,
) -> OrderStatistics:
    """Describe an order of batches.

    Args:
        bucket: bucket of every batch in the order of training, [num_batches].
        step: optimizer step of every batch, [num_batches]; any numbers that tell steps apart.
        mean_length: mean sequence length of every batch, [num_batches].
        num_buckets: number of buckets; some may have no batch.
        num_tokens: real tokens of every batch, [num_batches].
        num_padded_tokens: padded tokens of every batch, [num_batches].

    Raises:
        ValueError: arrays differ in length, or a bucket is not one of `num_buckets`.
    """
    buckets, steps = np.asarray(bucket, dtype=np.int64), np.asarray(step)
    means = np.asarray(mean_length, dtype=np.float64)
    if not (buckets.ndim == 1 and buckets.shape == steps.shape == means.shape):
        raise ValueError(f"bucket, step and mean_length differ in shape: {buckets.shape}, {steps.shape}, {means.shape}")
    if buckets.size and not (buckets.min() >= 0 and buckets.max() < num_buckets):
        raise ValueError(f"buckets from {buckets.min()} to {buckets.max()} in an order of {num_buckets} buckets")
    counts = np.bincount(buckets, minlength=num_buckets)
    _, runs = run_lengths(buckets)
    return OrderStatistics(
        num_batches=len(buckets),
        longest_run=int(runs.max(initial=0)),
        shortest_possible_longest_run=shortest_possible_longest_run(counts),
        mean_run=len(buckets) / len(runs) if len(runs) else None,
        runs_z=_runs_z(counts, len(runs)),
        lag1_correlation=lag1_correlation(means),
        prefix_deviation=_prefix_deviation(buckets, counts),
        step_share_sd=_step_share_sd(buckets, steps, counts),
        padding_efficiency=_padding_efficiency(num_tokens, num_padded_tokens),
    )


def run_lengths(bucket: ArrayLike) -> tuple[IntArray, IntArray]:
    """Run-length encoding: the bucket of every run, and the number of its batches."""
    buckets = np.asarray(bucket, dtype=np.int64)
    starts = np.flatnonzero(np.diff(buckets, prepend=buckets[:1] - 1))
    return buckets[starts], np.diff(starts, append=len(buckets))


def _runs_z(counts: IntArray, num_runs: int) -> float | None:
    """(runs - mean) / sd, under random order of the given counts (docs/field.md 2)."""
    sizes = [int(n) for n in counts if n]  # Python integers: the cubes below leave 64 bits at a few million batches
    total = sum(sizes)
    if len(sizes) < 2:
        return None
    squares, cubes = sum(n**2 for n in sizes), sum(n**3 for n in sizes)
    pairs = total * (total + 1)
    mean = (pairs - squares) / total
    variance = (squares * (squares + pairs) - 2 * total * cubes - total**3) / (total**2 * (total - 1))
    return (num_runs - mean) / sqrt(variance) if variance > 0 else None


def lag1_correlation(values: FloatArray) -> float | None:
    """Autocorrelation at lag 1; None where the values are constant, or fewer than two."""
    if len(values) < 2 or np.ptp(values) == 0:
        return None
    centred = values - values.mean()
    variance = float(centred @ centred)
    return float(centred[:-1] @ centred[1:]) / variance if variance > 0 else None


def _prefix_deviation(buckets: IntArray, counts: IntArray) -> float | None:
    total = len(buckets)
    if total == 0:
        return None
    place = np.arange(1, total + 1)
    # Whole numbers up to the last division, so that a deviation of 0 is 0.
    worst = max(int(np.abs(np.cumsum(buckets == i) * total - place * counts[i]).max()) for i in np.flatnonzero(counts))
    return worst / total


def _step_share_sd(buckets: IntArray, steps: IntArray, counts: IntArray) -> float | None:
    if len(buckets) == 0:
        return None
    _, step_of = np.unique(steps, return_inverse=True)
    size = np.bincount(step_of)
    share = np.bincount(step_of, weights=buckets == counts.argmax()) / size
    full = size == size.max()
    return float(share[full].std()) if full.sum() >= 2 else None


def _padding_efficiency(num_tokens: ArrayLike | None, num_padded_tokens: ArrayLike | None) -> float | None:
    if num_tokens is None or num_padded_tokens is None:
        return None
    padded = int(np.sum(num_padded_tokens))
    return int(np.sum(num_tokens)) / padded if padded else None
