"""How many tokens padding costs: the expectation that the planner's batches have, without making a plan.

The planner cuts a random order of a bucket's sequences into batches of sizes that differ by at most one
(`batch_sizes`). A batch is then a draw without replacement, and its padded size is its count times the expected longest
of the draw. So this is the mean over all seeds, not an approximation.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import lgamma

import numpy as np
from numpy.typing import ArrayLike

from dflash_core.bucketing.boundaries import Strategy, boundaries_up_to, check_num_buckets
from dflash_core.bucketing.lengths import FloatArray, Histogram, IntArray, bucket_of, check_lengths, count_lengths
from dflash_core.bucketing.limits import Limits
from dflash_core.bucketing.forming import batch_sizes


@dataclass(frozen=True, slots=True)
class BucketingEfficiency:
    """One row of `padding_efficiency_table`.

    Attributes:
        num_buckets: number of buckets asked for.
        edges: upper edges in tokens; fewer than `num_buckets` where fewer distinct lengths occur.
        padding_efficiency: expected real tokens per padded token, from 0 to 1.
        num_batches: batches per epoch.
    """

    num_buckets: int
    edges: tuple[int, ...]
    padding_efficiency: float
    num_batches: int

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def padding_efficiency_table(
    lengths: ArrayLike, token_budget: int, strategy: Strategy = "min_padding", max_buckets: int = 16
) -> tuple[BucketingEfficiency, ...]:
    """Modelled padding efficiency for 1, 2, ... `max_buckets` buckets, to choose their number by.

    Read it next to `num_batches`: the longest sequence of a bucket limits its batches, so a single wide bucket pads little
    only because its batches are small and many.

    Raises:
        ConfigError: the budget or `max_buckets` is out of range, or the strategy is not known.
        DataError: there are no sequences, one is empty, or one is longer than the budget.
    """
    checked = check_lengths(lengths)
    limits = Limits(token_budget)
    limits.check(checked)
    check_num_buckets(max_buckets)
    histogram = count_lengths(checked)
    choices = boundaries_up_to(histogram, max_buckets, strategy)
    rows = []
    for k in range(1, max_buckets + 1):
        edges = choices[min(k, len(choices)) - 1]
        padded, num_batches = expected_padding(histogram, edges, token_budget)
        rows.append(BucketingEfficiency(k, edges, histogram.num_tokens / padded, num_batches))
    return tuple(rows)


def expected_padding(histogram: Histogram, edges: tuple[int, ...], token_budget: int) -> tuple[float, int]:
    """Expected padded tokens of an epoch, and its number of batches."""
    buckets = bucket_of(histogram.length, edges)
    padded, num_batches = 0.0, 0
    for i in np.unique(buckets):
        length, count = histogram.length[buckets == i], histogram.num_sequences[buckets == i]
        sizes, times = np.unique(batch_sizes(int(count.sum()), token_budget // int(length[-1])), return_counts=True)
        for size, repeats in zip(sizes.tolist(), times.tolist(), strict=True):
            padded += repeats * size * _expected_longest(length, count, size)
            num_batches += repeats
    return padded, num_batches


def _expected_longest(length: IntArray, count: IntArray, size: int) -> float:
    """Mean of the longest of `size` sequences drawn without replacement.

    P(longest <= x) = C(m, size) / C(n, size), where m of the n sequences are no longer than x.
    """
    at_most = np.cumsum(count)
    log_ways: FloatArray = np.array(
        [lgamma(m + 1) - lgamma(m - size + 1) if m >= size else -np.inf for m in at_most.tolist()], dtype=np.float64
    )
    probability = np.exp(log_ways - log_ways[-1])
    return float(length @ np.diff(probability, prepend=0.0))
