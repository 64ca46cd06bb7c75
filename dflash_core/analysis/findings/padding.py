"""Padding that other bucket boundaries, more buckets or sorted windows would save.

Expected padding is computed as the planner's boundaries do (`bucketing.batch_cost`), over the dataset's length histogram. What is
held against the run is the model's own figure for the run's edges, so that an error of the model cancels.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import pandas as pd

from dflash_core.analysis.findings.finding import Context, Finding, Strength
from dflash_core.analysis.findings.pipeline_rows import column, plain, share_of
from dflash_core.analysis.runs import Run
from dflash_core.analysis.series import FloatArray
from dflash_core.bucketing.batch_cost import CostModel
from dflash_core.bucketing.boundaries import boundaries_up_to
from dflash_core.bucketing.lengths import Histogram, IntArray
from dflash_core.bucketing.limits import Limits
from dflash_core.errors import ConfigError, DataError

# Points of padding efficiency that must be there to be saved; twice that where lengths are only guessed from the batches.
THRESHOLD, THRESHOLD_GUESSED = 0.04, 0.08
# Sorting makes batches less random, so it is not proposed for a few points.
THRESHOLD_SORTED, SORT_WINDOW = 0.08, 4
STRONG, MODERATE = 0.15, 0.08
# What `min_padding` minimises, padded tokens and an overhead for every batch, must fall by this much: tokens that are saved by
# many small batches are no saving.
MIN_COST_SAVING = 0.05
# More buckets are at most so many times those of the run; what stands beside a simpler proposal must save this much more.
TIMES_BUCKETS, OTHERS_MUST_SAVE = 2, 0.02
# Their number is a choice with other sides (every bucket needs batches enough to mix), so more are proposed for more.
THRESHOLD_MORE = 0.06
# Distinct lengths that an edge may have, those that padding is reckoned with, and sequences: some milliseconds.
EDGE_LENGTHS, MOST_LENGTHS, MOST_SEQUENCES = 40, 256, 10_000
MOST_BATCHES_LOOKED_AT, FEWEST_BATCHES = 2_000, 20


@dataclass(frozen=True)
class Choice:
    """A way to make batches and what the model expects of it.

    Args:
        edges: upper edges of the buckets, in tokens.
        efficiency: real tokens per padded token.
        cost: what `min_padding` minimises: padded tokens and an overhead for every batch.
        sort_window: as in the configuration.
    """

    edges: tuple[int, ...]
    efficiency: float
    cost: float
    sort_window: int = 0


def find_padding(run: Run, context: Context) -> list[Finding]:
    """`padding`: other boundaries would give 4 points of efficiency more, more buckets 6, or a `sort_window` 8; it takes 8
    points where the dataset's `length_bins` are not there, so that lengths are guessed from the batches.

    Nothing for packed batches, nor where the token budget or the tokens of batches are not known.
    """
    budget = run.setting("bucketing.token_budget")
    if not isinstance(budget, int) or run.setting("bucketing.strategy") == "packed":
        return []
    tokens, padded = column(run.batches, "num_tokens"), column(run.batches, "num_padded_tokens")
    known = np.isfinite(tokens) & (padded > 0)
    if known.sum() < FEWEST_BATCHES:
        return []
    measured = float(tokens[known].sum() / padded[known].sum())
    threshold = THRESHOLD_GUESSED if context.bins is None else THRESHOLD
    if 1 - measured < threshold:
        return []
    lengths = _lengths_of_batches(run) if context.bins is None else _lengths_of_bins(context.bins)
    edges = _edges(run)
    if lengths is None or not edges:
        return []
    limits = Limits(budget, run.setting("bucketing.max_sequences"), run.setting("bucketing.quadratic_length"))
    try:
        now, same, more, sorted_ = _choices(lengths, edges, limits, run.num_buckets)
    except (ConfigError, DataError):  # lengths above the budget: the bins are not those of this run
        return []
    proposals = [(same, threshold)]
    if more.efficiency >= same.efficiency + OTHERS_MUST_SAVE:
        proposals.append((more, max(threshold, THRESHOLD_MORE)))
    if not run.setting("bucketing.sort_window"):
        proposals.append((sorted_, THRESHOLD_SORTED))
    worth_it = [one for one in proposals if _is_worth_it(one[0], now, measured, one[1])]
    if not worth_it:
        return []
    (chosen, threshold), *rest = worth_it
    others = [one for one, _ in rest if one.efficiency >= chosen.efficiency + OTHERS_MUST_SAVE]
    interval = share_of(tokens[known], padded[known], context.rng)
    error = None if interval is None else interval.high - measured
    return [_finding(run, now, chosen, others, measured, threshold, error)]


def _is_worth_it(choice: Choice, now: Choice, measured: float, threshold: float) -> bool:
    return _saved(choice, now, measured) >= threshold and choice.cost <= (1 - MIN_COST_SAVING) * now.cost


def _saved(choice: Choice, now: Choice, measured: float) -> float:
    """Points that a choice would save: what the model says, at most what is left of the run's own figure."""
    return min(choice.efficiency - now.efficiency, choice.efficiency - measured)


def _lengths_of_bins(bins: pd.DataFrame | None) -> Histogram | None:
    """Distinct lengths and counts from `length_bins`: every bin at its mean length."""
    if bins is None or not {"num_sequences", "num_tokens"} <= set(bins.columns):
        return None
    count, tokens = bins["num_sequences"].to_numpy(np.float64), bins["num_tokens"].to_numpy(np.float64)
    some = count > 0  # bins of several sources stand side by side
    return _histogram(tokens[some] / count[some], count[some]) if some.any() else None


def _lengths_of_batches(run: Run) -> Histogram | None:
    """Lengths as the batches show them: sequences of a batch spread evenly around its mean up to its longest."""
    every = ceil(len(run.batches) / MOST_BATCHES_LOOKED_AT)
    names = ("num_sequences", "mean_seq_len", "max_seq_len")
    count, mean, longest = (column(run.batches, name)[::every] for name in names)
    known = np.isfinite(count) & np.isfinite(mean) & np.isfinite(longest) & (count >= 1)
    if not known.any():
        return None
    size, mean, longest = count[known].astype(np.int64), mean[known], longest[known]
    batch = np.repeat(np.arange(len(size)), size)
    place = np.arange(len(batch)) - np.repeat(np.cumsum(size) - size, size)
    part = np.where(size[batch] > 1, place / np.maximum(size[batch] - 1, 1), 1.0)
    shortest = np.maximum(1.0, 2 * mean - longest)[batch]
    return _histogram(shortest + part * (longest[batch] - shortest), np.ones(len(batch)))


def _histogram(length: FloatArray, count: FloatArray) -> Histogram:
    """Whole lengths, at most `MOST_LENGTHS` of about equal tokens, and at most `MOST_SEQUENCES` sequences, in proportion."""
    piece = _pieces(length, count, MOST_LENGTHS)
    total, sums = np.bincount(piece, weights=count), np.bincount(piece, weights=length * count)
    mean = np.rint(sums[total > 0] / total[total > 0]).astype(np.int64)
    scale = min(1.0, MOST_SEQUENCES / count.sum())
    sequences = np.maximum(1, np.rint(total[total > 0] * scale)).astype(np.int64)
    whole, place = np.unique(np.maximum(1, mean), return_inverse=True)
    return Histogram(whole, np.bincount(place, weights=sequences).astype(np.int64))


def _pieces(length: FloatArray, count: FloatArray, most: int) -> IntArray:
    """The number of the piece of each length, where `most` pieces hold about equally many tokens."""
    order = np.argsort(length, kind="stable")
    tokens = (length * count)[order]
    middle = np.cumsum(tokens) - tokens / 2
    piece = np.empty(len(length), dtype=np.int64)
    piece[order] = np.minimum(middle / tokens.sum() * most, most - 1)
    return piece


def _for_edges(fine: Histogram) -> Histogram:
    """At most `EDGE_LENGTHS` lengths, each standing for itself and the shorter ones down to the next."""
    piece = _pieces(fine.length.astype(np.float64), fine.num_sequences.astype(np.float64), EDGE_LENGTHS)
    ends = np.flatnonzero(np.append(np.diff(piece) > 0, True))
    return Histogram(fine.length[ends], np.diff(np.cumsum(fine.num_sequences)[ends], prepend=0))


def _edges(run: Run) -> tuple[int, ...]:
    """The run's upper edges: those of its identity, or of its configuration, or the longest sequence of each bucket."""
    known = run.manifest.get("identity")
    for edges in (known.get("edges") if isinstance(known, dict) else None, run.setting("bucketing.boundaries")):
        if isinstance(edges, (list, tuple)) and edges and all(isinstance(edge, int) for edge in edges):
            return tuple(edges)
    longest = column(run.batches, "max_seq_len")
    if not np.isfinite(longest).all():
        return ()
    bucket = run.buckets()
    edges = np.zeros(run.num_buckets, dtype=np.int64)
    np.maximum.at(edges, bucket, longest.astype(np.int64))
    return tuple(np.unique(edges[edges > 0]).tolist())


def _choices(lengths: Histogram, edges: tuple[int, ...], limits: Limits, num_buckets: int) -> tuple[Choice, ...]:
    """The run's edges, the best of as many buckets, the best of more, and the run's edges with a `sort_window`."""
    limits.check(lengths.length)
    cost = CostModel(lengths, limits)
    padding = cost if limits.quadratic_length is None else CostModel(lengths, limits, lengths.length)

    def choice(some: tuple[int, ...], cuts: tuple[int, ...] = (), sort_window: int = 0) -> Choice:
        inner = {edge for edge in (*some, *cuts) if edge < lengths.length[-1]}
        reaching = (*sorted(inner), int(lengths.length[-1]))
        costs = cost.of(reaching)
        padded = costs if padding is cost else padding.of(reaching)
        return Choice(some, lengths.num_tokens / float(padded.cost.sum()), float(costs.total(limits).sum()), sort_window)

    found = boundaries_up_to(_for_edges(lengths), TIMES_BUCKETS * num_buckets, "min_padding", limits)
    # The longest sequence is the run's own to know: a length here stands for several.
    same, more = ((*found[min(k, len(found)) - 1][:-1], edges[-1]) for k in (num_buckets, TIMES_BUCKETS * num_buckets))
    return choice(edges), choice(same), choice(more), choice(edges, _window_cuts(lengths, edges), SORT_WINDOW)


def _window_cuts(lengths: Histogram, edges: tuple[int, ...]) -> tuple[int, ...]:
    """Lengths that part the sequences of every bucket in `SORT_WINDOW` equal parts.

    The batches of a sorted window hold one such part each, about: within 0.5 points of the padding of real plans with windows
    of 4 batches (lognormal lengths, and those of the demo).
    """
    sequences = np.concatenate(([0], np.cumsum(lengths.num_sequences)))
    ends = np.searchsorted(lengths.length, np.asarray(edges), side="right")
    begins = np.concatenate(([0], ends[:-1]))
    parts = np.arange(1, SORT_WINDOW) / SORT_WINDOW
    wanted = sequences[begins][:, None] + (sequences[ends] - sequences[begins])[:, None] * parts
    at = np.searchsorted(sequences, wanted.ravel())
    return tuple(np.unique(lengths.length[np.clip(at, 1, len(lengths.length)) - 1]).tolist())


def _words(choice: Choice, now: Choice, configured: Any) -> tuple[str, str]:
    """What a choice is, and the keys that make it."""
    ends = ", ".join(map(str, choice.edges))
    if choice.sort_window:
        return f"batches sorted in windows of {choice.sort_window}", f"bucketing.sort_window: {choice.sort_window}"
    if len(choice.edges) <= len(now.edges):
        keys = (
            f"bucketing.boundaries: [{ends}]"
            if configured == "min_padding"
            else f"bucketing.boundaries: min_padding (about {ends})"
        )
        return f"{len(choice.edges)} buckets that end at {ends} tokens", keys
    keys = f"bucketing.num_buckets: {len(choice.edges)}"
    if configured != "min_padding":
        keys += f", bucketing.boundaries: min_padding (about {ends})"
    return f"{len(choice.edges)} buckets that end at {ends} tokens", keys


def _finding(
    run: Run, now: Choice, chosen: Choice, others: list[Choice], measured: float, threshold: float, error: float | None
) -> Finding:
    saved = _saved(chosen, now, measured)
    strength: Strength = "strong" if saved >= STRONG else "moderate" if saved >= MODERATE else "weak"
    words, keys = _words(chosen, now, run.setting("bucketing.boundaries"))
    advice = f"Set {keys}"
    for other in others:
        then = measured + _saved(other, now, measured)
        advice += f"; {_words(other, now, run.setting('bucketing.boundaries'))[1]} instead would reach {then:.0%}"
    return Finding(
        kind="padding",
        run_id=run.run_id,
        strength=strength,
        title=f"{1 - measured:.0%} of the padded tokens are padding; {1 - measured - saved:.0%} would be possible",
        text=(
            f"Of 100 computed tokens {100 * measured:.0f} are real and {100 * (1 - measured):.0f} padding. With {words}, "
            f"{100 * (measured + saved):.0f} would be real: {1 - measured / (measured + saved):.0%} of the computed tokens less. "
            f"{_worst_bucket(run)}"
        ),
        advice=f"{advice}. This makes another plan, so it is for new runs.",
        measure="points of padding efficiency to be had",
        value=100 * saved,
        unit="points",
        low=None if error is None else 100 * (saved - error),
        high=None if error is None else 100 * (saved + error),
        threshold=100 * threshold,
        table="batches",
        rows="num_tokens < num_padded_tokens",
        evidence=dict(
            plain(
                {
                    "padding_efficiency": measured,
                    "modelled_now": now.efficiency,
                    "modelled_then": chosen.efficiency,
                    "edges": now.edges,
                    "better_edges": chosen.edges,
                    "sort_window": chosen.sort_window,
                    "modelled_cost_saved": 1 - chosen.cost / now.cost,
                }
            )
        ),
    )


def _worst_bucket(run: Run) -> str:
    """Which bucket wastes most tokens."""
    wasted = np.nan_to_num(column(run.batches, "num_padded_tokens") - column(run.batches, "num_tokens"))
    by_bucket = np.bincount(run.buckets(), weights=wasted)
    worst = int(by_bucket.argmax())
    return f"Bucket {worst} wastes most: {by_bucket[worst] / max(1.0, by_bucket.sum()):.0%} of all padding."
