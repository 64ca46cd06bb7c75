"""Where one length bucket ends and the next begins.

`min_padding` is an exact optimum, found by dynamic programming over the distinct lengths.

- With a token budget it minimises the sum over buckets of [expected modelled cost of the planner's random batches] +
  `BATCH_OVERHEAD` * token budget * [number of batches] (`dflash_core.bucketing.batch_cost`). Without `quadratic_length`
  the modelled cost is padded tokens.
- Without one it knows no batches, and charges every sequence as if it were padded to the longest of its bucket: the limit
  of large batches, and an upper bound for every batch.

`equal_tokens` cuts where buckets hold about the same number of tokens; it ignores padding and exists to be compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from dflash_core.bucketing.batch_cost import CostModel
from dflash_core.bucketing.lengths import LARGEST, FloatArray, Histogram, IntArray, check_lengths, count_lengths
from dflash_core.bucketing.limits import Limits
from dflash_core.errors import ConfigError

Strategy = Literal["min_padding", "equal_tokens"]
MAX_FINE_BINS = 512  # the dynamic program takes time and memory in the square of this
MAX_BUCKETS = MAX_FINE_BINS // 2  # so that coarsening always leaves enough bins


def choose_boundaries(
    lengths: ArrayLike,
    num_buckets: int,
    strategy: Strategy = "min_padding",
    token_budget: int | None = None,
    *,
    max_sequences: int | None = None,
    quadratic_length: int | None = None,
) -> tuple[int, ...]:
    """Upper edges of `num_buckets` buckets, in tokens, ascending; the last is the longest length.

    Every edge is a length that occurs, so no bucket is empty. There are fewer buckets where fewer distinct lengths occur;
    and, for `min_padding` with a budget, where another bucket would cost more in batches than it saves in padding, which
    only a handful of sequences comes to. `min_padding` is exact up to 512 distinct lengths. Beyond that it places its
    edges at the ends of at most 512 fine bins and is exact among those; a bin of several lengths holds at most about
    1/256 of the tokens and of the distinct lengths, and counts as if all were of its longest.

    Args:
        lengths: tokens of every sequence, [num_sequences].
        num_buckets: number of buckets.
        strategy: `min_padding` or `equal_tokens`.
        token_budget: most padded tokens of a batch; None for the objective that needs none.
        max_sequences, quadratic_length: as in `plan_epoch`; they count only with a budget.

    Raises:
        ConfigError: `num_buckets` is not in 1..256, `strategy` is not known, or a limit is out of range.
        DataError: there are no sequences, one is empty, or one is longer than the budget.
    """
    check_num_buckets(num_buckets)
    checked = check_lengths(lengths)
    limits = None
    if token_budget is not None:
        limits = Limits(token_budget, max_sequences, quadratic_length)
        limits.check(checked)
    return boundaries_up_to(count_lengths(checked), num_buckets, strategy, limits)[-1]


def check_num_buckets(num_buckets: int) -> None:
    if not 1 <= num_buckets <= MAX_BUCKETS:
        raise ConfigError(f"bucketing.num_buckets: {num_buckets} is not in 1..{MAX_BUCKETS}")


def boundaries_up_to(
    histogram: Histogram, max_buckets: int, strategy: Strategy, limits: Limits | None = None
) -> list[tuple[int, ...]]:
    """`choose_boundaries` for 1, 2, ... buckets, up to `max_buckets` or the number of distinct lengths."""
    max_buckets = min(max_buckets, len(histogram.length))
    if strategy == "equal_tokens":
        return [_equal_tokens(histogram, k) for k in range(1, max_buckets + 1)]
    if strategy != "min_padding":
        raise ConfigError(f"bucketing.boundaries: {strategy!r} is neither min_padding nor equal_tokens nor a list of upper edges")
    fine = _coarsen(histogram)
    if limits is None:
        return _cheapest(fine.length, _padded_to_longest(fine), max_buckets)
    choices = _cheapest(fine.length, CostModel(fine, limits).matrix(), max_buckets)
    model = CostModel(histogram, limits)
    for k in range(1, len(choices)):
        # Fewer buckets, where one more costs more.
        choices[k] = min(choices[k - 1 : k + 1], key=model.total)
    return choices


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
        if edge > LARGEST:
            raise ConfigError(f"{key}: {edge} is above {LARGEST}")
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


def _padded_to_longest(histogram: Histogram) -> FloatArray:
    """Tokens of every bucket when all are padded to its longest; as `CostModel.matrix`."""
    sequences = np.concatenate(([0], np.cumsum(histogram.num_sequences)))
    cost = (sequences[None, :] - sequences[:, None]).astype(np.float64)
    cost[:, 1:] *= histogram.length
    cost[np.tril_indices(len(sequences))] = np.inf
    return cost


def _cheapest(length: IntArray, cost: FloatArray, max_buckets: int) -> list[tuple[int, ...]]:
    """Best edges for every number of buckets up to `max_buckets`.

    best[j] is the least cost of the first j distinct lengths in k buckets; one more bucket, of lengths i to j - 1, costs
    cost[i, j]. `cuts[k][j]` remembers the best i.
    """
    best = cost[0]
    cuts = [np.zeros(len(length) + 1, dtype=np.int64)]
    for _ in range(1, max_buckets):
        totals = best[:, None] + cost
        cuts.append(totals.argmin(axis=0))
        best = np.take_along_axis(totals, cuts[-1][None, :], axis=0)[0]
    return [_trace(length, cuts[: k + 1]) for k in range(max_buckets)]


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
