"""What a bucket costs: the objective of `min_padding` boundaries, and the expectation that the planner's batches have.

The planner cuts a random order of a bucket's sequences into batches of sizes that differ by at most one (`batch_sizes`).
So a batch is a draw without replacement, and its cost is its size times the expected cost of the longest of the draw:
the mean over all seeds, not an approximation. To this a batch adds a fixed `BATCH_OVERHEAD`.

The overhead is needed. Without it the best choice is a single bucket whose longest sequence fills the budget: every batch
is then one sequence, and nothing is padded. In truth a batch has costs that do not depend on its tokens (kernel launches,
reads of all weights, queues), and a batch that holds little wastes what it might have held.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dflash_core.bucketing.lengths import FloatArray, Histogram, IntArray
from dflash_core.bucketing.limits import Limits

# Fixed cost of a batch, as a share of the token budget.
BATCH_OVERHEAD = 0.2
# Lower edges whose buckets are computed at once: enough to be quick, few enough to skip most of what lies below them.
LOWER_EDGES_AT_ONCE = 96
# Chance below which it is no longer counted that a batch misses the longest lengths of its bucket.
NEGLIGIBLE = 1e-15


class BucketCosts(NamedTuple):
    """Buckets that share their upper edge; one entry per lower edge.

    Attributes:
        num_batches: batches of an epoch.
        cost: expected modelled cost of them all, in tokens, without the overhead.
    """

    num_batches: IntArray
    cost: FloatArray

    def total(self, limits: Limits) -> FloatArray:
        """The objective: expected modelled cost and the overhead of every batch, in tokens."""
        return self.cost + BATCH_OVERHEAD * limits.token_budget * self.num_batches


class CostModel:
    """Costs of buckets over one histogram of lengths.

    Args:
        histogram: distinct lengths, none above the budget.
        limits: what a batch may hold.
        value: what a sequence of each length counts for when it is the longest of a batch, [num_lengths]; without it
            `limits.cost_of`, and so the modelled cost. With the lengths themselves: padded tokens.
    """

    def __init__(self, histogram: Histogram, limits: Limits, value: IntArray | None = None) -> None:
        self._limits = limits
        self._length = histogram.length
        self._value = (limits.cost_of(histogram.length) if value is None else value).astype(np.float64)
        self._most = limits.most_sequences(histogram.length).tolist()
        self._below = np.concatenate(([0], np.cumsum(histogram.num_sequences)))
        self._value_below = np.concatenate(([0.0], np.cumsum(self._value * histogram.num_sequences)))
        # log n! for every n that occurs.
        self._log_factorial = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, self._below[-1] + 1, dtype=np.float64)))))

    def matrix(self) -> FloatArray:
        """The objective of every bucket, [num_lengths + 1, num_lengths + 1]: entry (i, j) holds lengths i to j - 1.

        Infinite where that is no bucket.
        """
        num = len(self._value)
        matrix = np.full((num + 1, num + 1), np.inf)
        for end in range(1, num + 1):
            for begin in range(0, end, LOWER_EDGES_AT_ONCE):
                stop = min(begin + LOWER_EDGES_AT_ONCE, end)
                matrix[begin:stop, end] = self.buckets(begin, stop, end).total(self._limits)
        return matrix

    def of(self, edges: tuple[int, ...]) -> BucketCosts:
        """Each bucket of a choice of upper edges; buckets without sequences are left out."""
        ends = np.searchsorted(self._length, np.asarray(edges), side="right")
        begins = np.concatenate(([0], ends[:-1]))
        found = [self.buckets(i, i + 1, j) for i, j in zip(begins.tolist(), ends.tolist(), strict=True) if i < j]
        return BucketCosts(np.concatenate([f.num_batches for f in found]), np.concatenate([f.cost for f in found]))

    def total(self, edges: tuple[int, ...]) -> float:
        """The objective of a choice of upper edges, in tokens."""
        return float(self.of(edges).total(self._limits).sum())

    def buckets(self, begin: int, stop: int, end: int) -> BucketCosts:
        """Buckets of the lengths from i to `end` - 1, for i from `begin` to `stop` - 1."""
        first = np.arange(begin, stop)
        num = self._below[end] - self._below[first]
        most = self._most[end - 1]
        num_batches = -(-num // most)
        if most == 1:
            return BucketCosts(num_batches, self._value_below[end] - self._value_below[first])
        small = num // num_batches
        num_large = num - small * num_batches
        # The chance below is at most (m / n)^s; a batch that is the only one holds the longest anyway.
        fewest = small[num_batches > 1].min(initial=most)
        threshold = self._below[begin] + num[0] * NEGLIGIBLE ** (1 / fewest)
        column = max(begin, int(np.searchsorted(self._below[1:end], threshold)))
        # Of a draw of s from n sequences all are among the m that are not longer than x with chance C(m, s) / C(n, s).
        among = self._below[column + 1 : end] - self._below[first][:, None]
        chance = self._chance(among, num[:, None], small[:, None])
        rise = np.diff(self._value[column:end])
        last = self._value[end - 1]
        missing = chance @ rise
        cost = (num_batches - num_large) * small * (last - missing)
        if num_large.any():
            # One sequence more in the draw: the chance times (m - s) / (n - s).
            fewer = np.maximum(num - small, 1)
            missing = ((chance * among) @ rise - small * missing) / fewer
            cost += num_large * (small + 1) * (last - missing)
        return BucketCosts(num_batches, cost)

    def _chance(self, among: IntArray, num: IntArray, size: IntArray) -> FloatArray:
        """C(among, size) / C(num, size), elementwise."""
        log = self._log_factorial
        enough = among >= size
        chance = log[np.maximum(among, 0)]
        chance -= log[np.where(enough, among - size, 0)]
        chance -= log[num] - log[num - size]
        np.exp(chance, out=chance)
        chance[~enough] = 0.0
        return chance
