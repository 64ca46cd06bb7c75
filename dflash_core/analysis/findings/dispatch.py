"""Targets that did not get their fair part of the batches, or whose queues stay unequally deep.

Three causes are told apart. Unequal counts: round robin gives counts that differ by at most 1, so private counters (or a fault)
were at work. Equal counts and unequal depths: one target is slower, or its batches cost more. Under `least_loaded` counts differ
by design, wherever targets differ in speed or batches in cost; there the queued tokens are judged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil
from typing import Any, get_args

import numpy as np
import pyarrow as pa
from numpy.random import Generator

from dflash_core.analysis.findings.finding import Context, Finding, Strength
from dflash_core.analysis.findings.pipeline_rows import RESAMPLES, column, lists, plain
from dflash_core.analysis.intervals import MIN_STEPS_FOR_INTERVAL
from dflash_core.analysis.runs import Run
from dflash_core.analysis.series import BoolArray, FloatArray, resampled_means
from dflash_core.config import Dispatch
from dflash_core.pipeline.dispatch import PRIVATE

# Counts: the largest less the smallest, of the mean count and in batches. Round robin has at most 1 batch; a handful out of
# thousands harms nobody.
COUNT_SHARE, COUNT_FLOOR = 0.1, 8
# Where private counters are configured, more than what round robin allows is their work: a fact, however small.
FEWEST_BY_PRIVATE = 2
# Mean depths: the largest less the smallest, of the queues' capacity and in batches (half of it in very short queues).
DEPTH_SHARE, DEPTH_FLOOR, DEPTH_FLOOR_SHARE = 0.3, 3.0, 0.5
# Share of the time by which the target of the short queue idles more than that of the deep one. A tenth is what runs differ by.
IDLE_DIFFERENCE = 0.1
# Queued tokens under least_loaded: it evens out to about one batch.
TOKEN_BATCHES = 2.0
# How much slower a target must be, for a token, to be called slow; and its costs for two targets to be called unequal.
SLOWER, DEARER = 1.05, 1.05
FEWEST_BATCHES_PER_TARGET = 8
MOST_SNAPSHOTS = 400
# What the busiest target has beyond an equal part, from which on unequal counts are called so.
MODERATE_BEYOND, STRONG_BEYOND = 0.1, 0.2


@dataclass(frozen=True)
class Queues:
    """The targets of one cell in one attempt.

    Args:
        counts: batches that each target served and the drafter trained on.
        cost: seconds a padded token of each target, NaN where not recorded.
        tokens: padded tokens a batch of each target.
        idle: share of the time that each target waited for batches; NaN where not recorded.
        depths, queued_tokens: snapshots, [rows, targets]; no rows where not recorded.
        steps: of the snapshots.
    """

    attempt: int
    cell: int
    counts: FloatArray
    cost: FloatArray
    tokens: FloatArray
    idle: FloatArray
    depths: FloatArray
    queued_tokens: FloatArray
    steps: FloatArray = field(repr=False)

    @property
    def count_spread(self) -> float:
        """Largest less smallest count, of the mean."""
        return float(np.ptp(self.counts) / self.counts.mean())

    def least_spread(self, policy: str) -> float:
        """The spread of counts from which on they are called unequal, of the mean."""
        return float(FEWEST_BY_PRIVATE / self.counts.mean()) if policy in PRIVATE else self.harmful_spread

    @property
    def harmful_spread(self) -> float:
        """The spread of counts from which on somebody pays for it, of the mean."""
        return max(COUNT_SHARE, float(COUNT_FLOOR / self.counts.mean()))


@dataclass(frozen=True)
class Spread:
    """How far the means of two queues are apart, deepest less shallowest, with its 95 % interval."""

    value: float
    low: float
    high: float
    deepest: int
    shallowest: int


def find_unequal_dispatch(run: Run, context: Context) -> list[Finding]:
    """`unequal_dispatch`: the worst cell and attempt whose counts or queue depths are unequal.

    Judged only where `prefetch.dispatch` is known. Nothing with one target, or with fewer than 8 batches a target.
    """
    policy = run.setting("prefetch.dispatch")
    if policy not in get_args(Dispatch):
        return []
    found: list[Finding] = []
    for queues in _queues(run):
        finding = _judge(run, queues, policy, context.rng)
        if finding is not None:
            found.append(finding)
    return [max(found, key=lambda finding: finding.value / finding.threshold)] if found else []


def _queues(run: Run) -> Iterator[Queues]:
    batches, stats = run.batches, run.stats
    cell, attempt, target = column(batches, "cell", 0.0), column(batches, "attempt", 0.0), column(batches, "target")
    padded, forward = column(batches, "num_padded_tokens"), column(batches, "target_forward_s")
    depths, queued = lists(stats, "prefetch_depths"), lists(stats, "queue_tokens")
    at_cell, at_attempt, at_step = column(stats, "cell", 0.0), column(stats, "attempt", 0.0), column(stats, "step")
    # Depths at the start fill up, and at the end drain: neither is persistent.
    full = _while_dispatching(column(stats, "num_batches"), at_cell, at_attempt)
    newest = attempt.max(initial=0)
    for one in _pairs(attempt, cell):
        own = (attempt == one[0]) & (cell == one[1]) & np.isfinite(target)
        rows = full & (at_attempt == one[0]) & (at_cell == one[1])
        names = target[own].astype(np.int64)
        width = int(np.isfinite(depths[rows]).any(axis=0).sum()) if rows.any() else 0
        configured = run.setting("topology.targets_per_cell") if one[0] == newest else None
        num_targets = max(width, int(names.max(initial=-1)) + 1, configured if isinstance(configured, int) else 0)
        if num_targets < 2 or len(names) < FEWEST_BATCHES_PER_TARGET * num_targets:
            continue
        counts, tokens, seconds = (
            np.bincount(names, weights=weights, minlength=num_targets)
            for weights in (np.ones(len(names)), np.nan_to_num(padded[own]), forward[own])
        )
        with np.errstate(all="ignore"):
            yield Queues(
                attempt=int(one[0]),
                cell=int(one[1]),
                counts=counts.astype(np.float64),
                cost=seconds / tokens,
                tokens=tokens / counts,
                idle=_idle(stats, rows, num_targets),
                depths=depths[rows, :num_targets] if depths.shape[1] >= num_targets else np.empty((0, num_targets)),
                queued_tokens=queued[rows, :num_targets] if queued.shape[1] >= num_targets else np.empty((0, num_targets)),
                steps=at_step[rows],
            )


def _pairs(attempt: FloatArray, cell: FloatArray) -> list[tuple[float, float]]:
    """The attempts and cells that occur."""
    return [(one, other) for one in np.unique(attempt).tolist() for other in np.unique(cell[attempt == one]).tolist()]


def _idle(stats: pa.Table, rows: BoolArray, num_targets: int) -> FloatArray:
    """Share of the time between the first and the last of `rows` in which each target waited for batches."""
    waited, observed, at = lists(stats, "queue_get_wait_s"), column(stats, "observed_s"), np.flatnonzero(rows)
    if len(at) < 2 or waited.shape[1] < num_targets:
        return np.full(num_targets, np.nan)
    return np.asarray((waited[at[-1]] - waited[at[0]])[:num_targets] / (observed[at[-1]] - observed[at[0]]))


def _while_dispatching(num_batches: FloatArray, cell: FloatArray, attempt: FloatArray) -> BoolArray:
    """The snapshots from the second of each cell and attempt on, up to the one at which all batches were dispatched."""
    full = np.ones(len(cell), dtype=bool)
    for one in _pairs(attempt, cell):
        rows = np.flatnonzero((attempt == one[0]) & (cell == one[1]))
        full[rows[:1]] = False
        sent = num_batches[rows]
        if np.isfinite(sent).any():
            full[rows[sent >= np.nanmax(sent)]] = False
    return full


def spread_of(values: FloatArray, rng: Generator) -> Spread | None:
    """The spread of the queues' means, with the interval of a block bootstrap over snapshots.

    Depths wander, so snapshots close to each other say the same; blocks keep that. None for fewer than 20 snapshots, or
    where they are worth too few independent ones.
    """
    values = values[np.isfinite(values).all(axis=1)]
    values = values[:: ceil(max(1, len(values)) / MOST_SNAPSHOTS)]
    if len(values) < MIN_STEPS_FOR_INTERVAL:
        return None
    means = values.mean(axis=0)
    deepest, shallowest = int(means.argmax()), int(means.argmin())
    drawn = resampled_means(values[:, deepest] - values[:, shallowest], rng, RESAMPLES)
    if drawn is None:
        return None
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Spread(float(np.ptp(means)), float(low), float(high), deepest, shallowest)


def _capacity(run: Run, depths: FloatArray) -> float:
    configured = run.setting("prefetch.queue_batches")
    return float(configured) if isinstance(configured, int) else float(np.nanmax(depths, initial=0.0))


def _judge(run: Run, queues: Queues, policy: str, rng: Generator) -> Finding | None:
    capacity = _capacity(run, queues.depths)
    threshold = max(min(DEPTH_FLOOR, DEPTH_FLOOR_SHARE * capacity), DEPTH_SHARE * capacity)
    spread = spread_of(queues.depths, rng)
    deep = spread is not None and spread.value >= threshold and spread.low >= threshold / 2
    if policy == "least_loaded":
        if not deep or spread is None or not _tokens_are_unequal(run, queues, rng):
            return None
        return _by_depths(run, queues, policy, spread, threshold, capacity)
    by_depths = deep and (policy in PRIVATE or (spread is not None and _somebody_pays(queues, spread)))
    # Where depths say more than counts they do so; else every count that is off speaks.
    if queues.count_spread >= (queues.harmful_spread if by_depths else queues.least_spread(policy)):
        return _by_counts(run, queues, policy, spread if deep else None, capacity)
    if not by_depths or spread is None:
        return None
    return _by_depths(run, queues, policy, spread, threshold, capacity)


def _somebody_pays(queues: Queues, spread: Spread) -> bool:
    """Whether targets with a short queue idle while the one with the deep queue does not.

    Under round robin the depths of equally fast targets wander: where all queues are never empty, one of them is full sooner or
    later and stays so, and that costs nothing.
    """
    return bool(queues.idle[spread.shallowest] - queues.idle[spread.deepest] >= IDLE_DIFFERENCE)


def _tokens_are_unequal(run: Run, queues: Queues, rng: Generator) -> bool:
    """Whether one queue holds more tokens than another for good, by more than a batch or two."""
    spread = spread_of(queues.queued_tokens, rng)
    largest = float(np.nan_to_num(column(run.batches, "num_padded_tokens")).max(initial=0.0))
    return spread is not None and spread.value > TOKEN_BATCHES * largest and spread.low > largest


def _by_counts(run: Run, queues: Queues, policy: str, spread: Spread | None, capacity: float) -> Finding:
    counts = queues.counts.astype(int)
    most, fewest = int(counts.argmax()), int(counts.argmin())
    spread_share, beyond = queues.count_spread, float(counts.max() / counts.mean() - 1)
    strength: Strength = "strong" if beyond >= STRONG_BEYOND else "moderate" if beyond >= MODERATE_BEYOND else "weak"
    strength = strength if spread is None else "strong"
    private = policy in PRIVATE
    cause = (
        f"Every loading thread has a counter of its own (prefetch.dispatch: {policy}), so nothing keeps the counts equal; round "
        "robin with one shared counter would give counts that differ by at most 1."
        if private
        else "Round robin with one shared counter would give counts that differ by at most 1."
    )
    return Finding(
        kind="unequal_dispatch",
        run_id=run.run_id,
        strength=strength,
        title=f"Targets got unequal numbers of batches: {counts.min()} to {counts.max()}",
        text=(
            f"{_where(queues)}Target {most} got {counts[most]} batches and target {fewest} {counts[fewest]}, a difference of "
            f"{spread_share:.0%} of the mean. {cause} {_cost_text(beyond, strength, spread is not None)}"
            f"{_depth_text(queues, capacity) if len(queues.depths) else ''}"
        ),
        advice="Set prefetch.dispatch: round_robin, or least_loaded where targets differ in speed or batches in cost."
        if private
        else "Look at how batches were dispatched; prefetch.dispatch: least_loaded would even out queued tokens.",
        measure="largest less smallest number of batches per target, of the mean",
        value=100 * spread_share,
        unit="%",
        low=None,
        high=None,
        threshold=100 * queues.least_spread(policy),
        table="batches",
        rows=_rows(queues),
        evidence=_evidence(queues, policy, cause="private counters" if private else "counts"),
    )


def _cost_text(beyond: float, strength: Strength, holds_up: bool) -> str:
    """What the counts cost, which is what the finding's strength goes by; its cause is a fact."""
    why = f"called {strength}: that is what is lost by it, the cause is certain"
    if holds_up:
        why = "called strong, because the queues are so unequal that one target holds up the others"
    return (
        f"The busiest target has {beyond:.0%} more than an equal part, and where the run waits for targets it takes that much "
        f"longer ({why})."
    )


def _by_depths(run: Run, queues: Queues, policy: str, spread: Spread, threshold: float, capacity: float) -> Finding:
    cause, explanation, advice = _cause(queues, policy, spread)
    blocked = _blocked_share(queues.depths, capacity)
    strength: Strength = "strong" if blocked >= 0.5 else "moderate" if spread.value >= 0.4 * capacity else "weak"
    return Finding(
        kind="unequal_dispatch",
        run_id=run.run_id,
        strength=strength,
        title=f"Target queues stay unequally deep: target {spread.deepest} has {spread.value:.0f} batches more than target "
        f"{spread.shallowest}",
        text=f"{_where(queues)}{explanation}{_depth_text(queues, capacity)}",
        advice=advice,
        measure="mean depth of the deepest queue less that of the shallowest",
        value=spread.value,
        unit="batches",
        low=spread.low,
        high=spread.high,
        threshold=threshold,
        table="stats",
        rows=_rows(queues),
        evidence=_evidence(queues, policy, cause=cause),
    )


def _cause(queues: Queues, policy: str, spread: Spread) -> tuple[str, str, str]:
    """Why depths differ although counts do not: cause, a sentence, and advice."""
    advice = "Set prefetch.dispatch: least_loaded, which evens out queued tokens"
    if policy == "least_loaded":
        text = "least_loaded should keep the queued tokens equal, and they are not."
        return "least_loaded", text, f"Look at the device of target {spread.deepest}: it hardly takes batches."
    same = f"Counts are about equal ({queues.counts.min():.0f} to {queues.counts.max():.0f} batches)"
    others = np.delete(queues.cost, spread.deepest)
    slower = queues.cost[spread.deepest] / np.nanmedian(others) if np.isfinite(others).any() else np.nan
    if slower >= SLOWER:
        text = f"{same}, but target {spread.deepest} takes {slower:.2f} times as long for a token as the others."
        return "slow target", text, f"Look at the device of target {spread.deepest}. {advice}, so that it gets fewer batches."
    dearer = queues.tokens[spread.deepest] / np.nanmean(np.delete(queues.tokens, spread.deepest))
    if dearer >= DEARER:
        text = f"{same}, but the batches of target {spread.deepest} hold {dearer:.2f} times as many padded tokens as the others'."
        return "uneven batches", text, f"{advice}."
    if policy in PRIVATE:
        text = f"{same}, but every loading thread has a counter of its own, so one target gets several batches in a row."
        return "private counters", text, "Set prefetch.dispatch: round_robin or least_loaded."
    return "depths", f"{same}, and so are the targets' speeds and the sizes of their batches, as far as recorded.", f"{advice}."


def _blocked_share(depths: FloatArray, capacity: float) -> float:
    """Part of the snapshots in which one queue was full and another at most half full."""
    return float(((depths >= capacity).any(axis=1) & (depths <= capacity / 2).any(axis=1)).mean()) if len(depths) else 0.0


def _depth_text(queues: Queues, capacity: float) -> str:
    means = ", ".join(f"{depth:.0f}" for depth in np.nanmean(queues.depths, axis=0))
    text = f" Mean depths of the queues: {means} of at most {capacity:.0f} batches."
    blocked = _blocked_share(queues.depths, capacity)
    idle = queues.idle
    if np.isfinite(idle).all() and np.ptp(idle) >= IDLE_DIFFERENCE:
        text += f" Target {idle.argmax()} idles for {idle.max():.0%} of the time, target {idle.argmin()} for {idle.min():.0%}."
    if blocked < 0.1:
        return text
    return (
        f"{text} In {blocked:.0%} of the snapshots one queue was full beside another that was half empty or worse: batches are "
        "handed out in order, so the full queue holds up the batches of all others (head-of-line blocking)."
    )


def _where(queues: Queues) -> str:
    attempt = f", attempt {queues.attempt}" if queues.attempt else ""
    return f"In cell {queues.cell}{attempt}: " if queues.cell or queues.attempt else ""


def _rows(queues: Queues) -> str:
    return f"cell = {queues.cell} AND attempt = {queues.attempt}"


def _evidence(queues: Queues, policy: str, cause: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "cause": cause,
        "dispatch": policy,
        "cell": queues.cell,
        "attempt": queues.attempt,
        "batches_per_target": queues.counts.astype(int),
        "idle_shares": queues.idle,
        "mean_depths": queues.depths.mean(axis=0) if len(queues.depths) else [],
        "seconds_per_million_tokens": 1e6 * queues.cost,
        "padded_tokens_per_batch": queues.tokens,
    }
    return dict(plain(found))
