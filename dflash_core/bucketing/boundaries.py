"""Where one length bucket ends and the next begins.

`min_padding` is an exact optimum, found by dynamic programming over the distinct lengths. Its model of padding: a batch
is a random draw from its bucket, and is charged as if it were padded to the longest sequence of the bucket. That is the
limit of large batches and an upper bound for every batch, and it needs no token budget, so the boundaries of a dataset
can be stored with it. `dflash_core.bucketing.padding` has the expectation for a given budget.

`equal_tokens` cuts where buckets hold about the same number of tokens; it ignores padding and exists to be compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from dflash_core.bucketing.lengths import Histogram, IntArray, check_lengths, count_lengths
from dflash_core.errors import ConfigError

Strategy = Literal["min_padding", "equal_tokens"]
MAX_FINE_BINS = 512  # the dynamic program takes time and memory in the square of this
MAX_BUCKETS = MAX_FINE_BINS // 2  # so that coarsening always leaves enough bins


def choose_boundaries(lengths: ArrayLike, num_buckets: int, strategy: Strategy = "min_padding") -> tuple[int, ...]:
    """Upper edges of `num_buckets` buckets, in tokens, ascending; the last is the longest length.

    Every edge is a length that occurs, so no bucket is empty. Where fewer distinct lengths occur than buckets are asked
    for, there is one bucket per length. `min_padding` is exact up to 512 distinct lengths. Beyond that it places its edges
    at the ends of at most 512 fine bins and is exact among those; a bin of several lengths holds at most about 1/256 of
    the tokens and of the distinct lengths.

    Raises:
        ConfigError: `num_buckets` is not in 1..256, or `strategy` is not known.
        DataError: there are no sequences, or one is empty.
    """
    check_num_buckets(num_buckets)
    return boundaries_up_to(count_lengths(check_lengths(lengths)), num_buckets, strategy)[-1]


def check_num_buckets(num_buckets: int) -> None:
    if not 1 <= num_buckets <= MAX_BUCKETS:
        raise ConfigError(f"bucketing.num_buckets: {num_buckets} is not in 1..{MAX_BUCKETS}")


def boundaries_up_to(histogram: Histogram, max_buckets: int, strategy: Strategy) -> list[tuple[int, ...]]:
    """`choose_boundaries` for 1, 2, ... buckets, up to `max_buckets` or the number of distinct lengths."""
    max_buckets = min(max_buckets, len(histogram.length))
    if strategy == "min_padding":
        return _min_padding(_coarsen(histogram), max_buckets)
    if strategy == "equal_tokens":
        return [_equal_tokens(histogram, k) for k in range(1, max_buckets + 1)]
    raise ConfigError(f"bucketing.boundaries: {strategy!r} is neither min_padding nor equal_tokens nor a list of upper edges")


def validate_boundaries(edges: Sequence[int], lengths: ArrayLike) -> tuple[int, ...]:
    """A user's own upper edges, checked against the sequences they shall hold.

    Edges above the longest length and buckets without sequences are allowed.

    Raises:
        ConfigError: there are no edges or too many, one is not a positive whole number, they do not ascend, or the last
            lies below the longest sequence.
        DataError: there are no sequences, or one is empty.
    """
    longest = int(check_lengths(lengths).max())
    key = "bucketing.boundaries"
    if not 1 <= len(edges) <= MAX_BUCKETS:
        raise ConfigError(f"{key}: {len(edges)} edges given; there must be 1 to {MAX_BUCKETS}")
    for edge in edges:
        if isinstance(edge, bool) or not isinstance(edge, int | np.integer) or edge < 1:
            raise ConfigError(f"{key}: {edge!r} is not a positive whole number of tokens")
    checked = tuple(int(edge) for edge in edges)
    for lower, upper in pairwise(checked):
        if lower >= upper:
            raise ConfigError(f"{key}: edges must ascend, but {upper} follows {lower}")
    if checked[-1] < longest:
        raise ConfigError(f"{key}: the last edge, {checked[-1]}, is below the longest sequence of {longest} tokens")
    return checked


def _coarsen(histogram: Histogram) -> Histogram:
    """At most `MAX_FINE_BINS` bins, each known by its longest length.

    Half of the ends are quantiles of the tokens, so that moving an edge inside a bin concerns few tokens; half are
    quantiles of the distinct lengths, so that the thin tail of long sequences stays resolved.
    """
    num_lengths = len(histogram.length)
    if num_lengths <= MAX_FINE_BINS:
        return histogram
    parts = np.arange(1, MAX_FINE_BINS // 2 + 1) * 2 / MAX_FINE_BINS
    tokens = np.cumsum(histogram.length * histogram.num_sequences)
    by_tokens = np.searchsorted(tokens, tokens[-1] * parts)
    by_lengths = np.ceil(num_lengths * parts).astype(np.int64) - 1
    ends = np.union1d(by_tokens, by_lengths)
    sequences = np.cumsum(histogram.num_sequences)[ends]
    return Histogram(histogram.length[ends], np.diff(sequences, prepend=0))


def _min_padding(histogram: Histogram, max_buckets: int) -> list[tuple[int, ...]]:
    """Best edges for every number of buckets up to `max_buckets`.

    best[j] is the least padded total of the first j distinct lengths in k buckets; one more bucket that begins after the
    first i of them costs (their number up to j) x (length j). `cut[k][j]` remembers the best i.
    """
    num_lengths = len(histogram.length)
    sequences = np.concatenate(([0], np.cumsum(histogram.num_sequences)))
    # cost[i, j]: lengths i..j-1 in one bucket. An empty or negative range is no bucket.
    cost = (sequences[None, :] - sequences[:, None]).astype(np.float64)
    cost[:, 1:] *= histogram.length
    cost[np.tril_indices(num_lengths + 1)] = np.inf
    best = cost[0]
    cuts = [np.zeros(num_lengths + 1, dtype=np.int64)]
    for _ in range(1, max_buckets):
        totals = best[:, None] + cost
        cuts.append(totals.argmin(axis=0))
        best = np.take_along_axis(totals, cuts[-1][None, :], axis=0)[0]
    return [_trace(histogram.length, cuts[: k + 1]) for k in range(max_buckets)]


def _trace(length: IntArray, cuts: list[IntArray]) -> tuple[int, ...]:
    """Follow the remembered cuts from the longest length down."""
    end, edges = len(length), []
    for cut in reversed(cuts):
        edges.append(int(length[end - 1]))
        end = int(cut[end])
    return tuple(reversed(edges))


def _equal_tokens(histogram: Histogram, num_buckets: int) -> tuple[int, ...]:
    """The cuts nearest to each k-th part of the tokens, at least one distinct length apart."""
    tokens = np.cumsum(histogram.length * histogram.num_sequences)
    last, edges = -1, []
    for i in range(1, num_buckets + 1):
        nearest = int(np.abs(tokens - tokens[-1] * i / num_buckets).argmin())
        # Each bucket keeps one length at least, and leaves one to each bucket after it.
        last = max(last + 1, min(nearest, len(tokens) - 1 - (num_buckets - i)))
        edges.append(int(histogram.length[last]))
    return tuple(edges)
