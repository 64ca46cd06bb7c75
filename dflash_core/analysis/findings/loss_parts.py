"""What the bucket mix of the steps does to the loss.

The loss of a step is a mean over its batches, weighted by the labels. Batches of long sequences have another loss than those of
short ones, so the curve moves when the mix does, with the draft unchanged. The model of a step's loss is

    trend + sum over buckets of (share of the step's loss weight - its mean) x (offset of the bucket) + rest

The trend is a running median. Offsets may grow or shrink while the draft learns: each is a line over the share of the
loss's fall that is done, because an untrained draft is as bad at everything. They are fitted to deviations from local means by
least squares, so a slow change of the mix is not taken for the trend nor the trend for it; large rests are capped.

Against overfitting: neighbouring buckets are joined until there are fifteen steps for each; what as many arbitrary columns
would explain is subtracted (as in adjusted R^2, for as many independent steps as there are); and the explained share is held
against that of permuted steps, after autocorrelation is taken out of both sides (an AR(1) filter), without which permuting would
promise too much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator

from dflash_core.analysis.findings.curve_tools import (
    curves_of,
    moving_mean,
    ratio_interval,
    robust_sd,
    trend,
)
from dflash_core.analysis.reader import matrix, numbers
from dflash_core.analysis.run_tables import SETTLED_AFTER_FRACTION
from dflash_core.analysis.runs import Run, once_per_run
from dflash_core.analysis.series import TREND_STEPS, BoolArray, FloatArray

MIN_STEPS = 40
STEPS_PER_BUCKET = 15
# Rests beyond this many standard deviations of their bulk are capped, so that a few resets do not make the fit.
CAP_SDS = 6.0
SMALLEST_EIGENVALUE = 1e-3
MAX_AUTOCORRELATION = 0.95
MAX_BIAS = 0.9
CHANGED_MIX = 0.01
PERMUTED_STEPS = 400_000
MAX_PERMUTATIONS, MIN_PERMUTATIONS = 200, 20


@dataclass(frozen=True)
class LossParts:
    """The variance of the steps' losses behind the first tenth of the steps, split in three.

    Attributes:
        share_composition, share_low, share_high: what the bucket mix of the step explains, with its 95 % interval (block
            bootstrap). The three shares sum to 1.
        share_trend: the slow change.
        share_rest: neither.
        sd_composition, sd_trend, sd_rest: the same as standard deviations, in nats.
        sd_fluff: of the loss around its trend: composition and rest together.
        of_fluff, of_fluff_low, of_fluff_high: the part of the composition in the variance around the trend, and its interval.
        by_chance: the 95th percentile of `of_fluff` over permuted steps.
        chance_sds: how far outside of the permuted steps the run is, in their standard deviations.
        offsets: by bucket, how many nats a step of this bucket alone lies above the mean step at the end of training.
        num_steps: steps that were looked at.
    """

    share_composition: float
    share_low: float
    share_high: float
    share_trend: float
    share_rest: float
    sd_composition: float
    sd_trend: float
    sd_rest: float
    sd_fluff: float
    of_fluff: float
    of_fluff_low: float
    of_fluff_high: float
    by_chance: float
    chance_sds: float
    offsets: dict[int, float]
    num_steps: int


@dataclass(frozen=True)
class Fit:
    """The model fitted to one curve: `effect` and `used` have one value per step of the run, the other series one per used step.

    `columns` [columns, steps] and `around` (the curve) are deviations from local means.
    """

    effect: FloatArray
    columns: FloatArray
    around: FloatArray
    rest: FloatArray
    trend: FloatArray
    rank: int
    num_changes: int
    used: BoolArray
    offsets: dict[int, float]

    @property
    def independent_steps(self) -> float:
        """As many independent steps would tell as much: where effect and rest both change slowly, steps repeat each other. In a
        sorted order they are no more than the changes of the mix."""
        memory = autocorrelation(self.around - self.rest) * autocorrelation(self.rest)
        return max(1.0, min(self.num_changes, (len(self.rest) - 1) * (1 - memory) / (1 + memory)))

    @property
    def bias(self) -> float:
        """The share of the variance that columns which mean nothing would explain."""
        return min(MAX_BIAS, self.rank / self.independent_steps)

    @property
    def explained(self) -> float:
        """The share of the variance around the trend, without the bias."""
        total = float(self.around @ self.around)
        return unbiased(1 - float(self.rest @ self.rest) / total if total > 0 else 0.0, self.bias)


def autocorrelation(values: FloatArray) -> float:
    """At a lag of one step, of values around zero; at least 0."""
    variance = float(values @ values)
    return float(np.clip(values[1:] @ values[:-1] / variance, 0, MAX_AUTOCORRELATION)) if variance > 0 else 0.0


def unbiased(explained: float, by_chance: float) -> float:
    """Explained share of variance less what chance explains, at least 0."""
    return max(0.0, (explained - by_chance) / (1 - by_chance))


def bucket_shares(run: Run, step: np.ndarray) -> FloatArray:
    """Share of each bucket in the loss weight of each step, [steps, buckets]; NaN for steps of which nothing is known.

    Where weights are missing each batch counts alike.
    """
    buckets, of_batch = run.num_buckets, numbers(run.batches, "step")
    at = np.searchsorted(step, of_batch)
    known = (at < len(step)) & (step[np.minimum(at, len(step) - 1)] == of_batch)
    weight = numbers(run.batches, "weight_sum")
    weight = weight if (np.isfinite(weight) & (weight >= 0)).all() and weight.any() else np.ones(len(weight))
    place = (at * buckets + run.buckets())[known]
    weights = np.bincount(place, weights=weight[known], minlength=len(step) * buckets).reshape(len(step), buckets)
    empty = weights.sum(axis=1) <= 0
    counts = matrix(run.steps, "bucket_counts") if empty.any() else np.zeros((len(step), 0))
    width = min(buckets, counts.shape[1])
    weights[empty, :width] = np.nan_to_num(counts[empty, :width])
    total = weights.sum(axis=1, keepdims=True)
    return np.asarray(np.divide(weights, total, out=np.full_like(weights, np.nan), where=total > 0))


@once_per_run
def step_shares(run: Run) -> FloatArray:
    """`bucket_shares` of all steps of the run."""
    return bucket_shares(run, curves_of(run).step)


def fit_composition(run: Run, values: FloatArray) -> Fit | None:
    """Fit the model to one curve of the run; None where there are too few steps, or every step has the same mix."""
    shares = step_shares(run)
    usable = np.isfinite(values) & np.isfinite(shares[:, 0])
    settled = usable & (np.arange(len(values)) >= round(SETTLED_AFTER_FRACTION * len(values)))
    n = int(settled.sum())
    if n < MIN_STEPS:
        return None
    mean_share = shares[settled].mean(axis=0)
    group = _groups(mean_share, n)
    mixed = np.zeros((int(group.max()) + 1, len(values)))
    for bucket, column in enumerate(group):
        mixed[column] += np.where(usable, shares[:, bucket] - mean_share[bucket], 0.0)
    y = values[settled]
    slow = trend(y, TREND_STEPS)
    whole, at_end = _with_progress(mixed, settled, slow)
    x = whole[:, settled]
    columns = x - moving_mean(x, TREND_STEPS)
    inverse, rank = _inverse(columns)
    if not rank:
        return None
    around, offsets = _capped(y - slow), np.zeros(len(x))
    for _ in range(2):
        offsets = inverse @ (columns @ around)
        plain = y - offsets @ x
        slow = trend(plain, TREND_STEPS)
        around = _capped(plain - slow) + offsets @ columns
    by_group = at_end @ offsets.reshape(-1, len(mixed))
    by_group -= by_group @ np.bincount(group, weights=mean_share)
    return Fit(
        effect=offsets @ whole,
        columns=columns,
        around=around,
        rest=around - offsets @ columns,
        trend=slow,
        rank=rank,
        num_changes=int((np.abs(np.diff(mixed[:, settled], axis=1)).max(axis=0) > CHANGED_MIX).sum()),
        used=settled,
        offsets={bucket: float(by_group[column]) for bucket, column in enumerate(group)},
    )


def _groups(mean_share: FloatArray, num_steps: int) -> np.ndarray:
    """The column of each bucket: its own, or for few steps one that neighbouring buckets share."""
    most = max(2, num_steps // STEPS_PER_BUCKET)
    if len(mean_share) <= most:
        return np.arange(len(mean_share))
    middle = np.cumsum(mean_share) - mean_share / 2
    return np.unique(np.minimum((middle * most).astype(int), most - 1), return_inverse=True)[1]


def _with_progress(mixed: FloatArray, settled: np.ndarray, slow: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The columns of all steps, with a second set that grows with progress where there are steps enough, and the factors of
    the sets at the end. Before the settled part the effects grow from nothing."""
    places, n = np.arange(mixed.shape[1]), len(slow)
    ramp = np.minimum(1.0, (places + 1) / (int(np.argmax(settled)) + 1))
    if n < 2 * STEPS_PER_BUCKET * len(mixed) or np.ptp(slow) == 0:
        return mixed * ramp, np.ones(1)
    progress = np.interp(places, places[settled], np.maximum.accumulate(np.abs(slow - slow[0]) / np.ptp(slow)))
    progress -= progress[settled].mean()
    return np.concatenate((mixed * ramp, mixed * (progress * ramp))), np.array([1.0, float(progress[settled][-1])])


def _capped(rest: FloatArray) -> FloatArray:
    limit = CAP_SDS * robust_sd(rest)
    return np.clip(rest, -limit, limit) if limit > 0 else rest


def _inverse(x: FloatArray) -> tuple[FloatArray, int]:
    """Inverse of x x' and its rank, without the directions in which the columns hardly vary: shares sum to one."""
    values, vectors = np.linalg.eigh(x @ x.T)
    if not values[-1] > 1e-9 * x.shape[1]:
        return np.zeros((len(x), len(x))), 0
    keep = values > SMALLEST_EIGENVALUE * values[-1]
    return np.asarray((vectors[:, keep] / values[keep]) @ vectors[:, keep].T), int(keep.sum())


@once_per_run
def fit_loss(run: Run) -> Fit | None:
    """`fit_composition` of the run's loss; None for a run too short to say, or whose steps all have the same mix."""
    return fit_composition(run, curves_of(run).loss)


def parts_of(fit: Fit, rng: Generator) -> LossParts:
    """The shares of a fit, with interval and what chance gives."""
    total = float(fit.around @ fit.around)
    bias, share = fit.bias, fit.explained
    interval = ratio_interval(fit.rest**2, fit.around**2, rng) if total > 0 else None
    high, low = (unbiased(1 - end, bias) for end in interval) if interval is not None else (1.0, 0.0)
    fluff, slow = total / len(fit.around), float(fit.trend.var())
    whole = max(fluff + slow, 1e-300)
    by_chance, sds = _against_permuted(fit, rng)
    return LossParts(
        share_composition=share * fluff / whole,
        share_low=low * fluff / whole,
        share_high=high * fluff / whole,
        share_trend=slow / whole,
        share_rest=(1 - share) * fluff / whole,
        sd_composition=float(np.sqrt(share * fluff)),
        sd_trend=float(np.sqrt(slow)),
        sd_rest=float(np.sqrt((1 - share) * fluff)),
        sd_fluff=float(np.sqrt(fluff)),
        of_fluff=share,
        of_fluff_low=min(low, share),
        of_fluff_high=max(high, share),
        by_chance=by_chance,
        chance_sds=sds,
        offsets=fit.offsets,
        num_steps=len(fit.around),
    )


def _against_permuted(fit: Fit, rng: Generator) -> tuple[float, float]:
    """The 95th percentile of the explained share over permuted steps, and how many of their standard deviations the run is
    above their mean. Both sides go through the AR(1) filter that makes the rest white."""
    rest, n = fit.rest, len(fit.rest)
    variance = float(rest @ rest)
    if variance == 0:
        return 0.0, float("inf") if fit.around.any() else 0.0
    memory = autocorrelation(rest)
    y, x = fit.around[1:] - memory * fit.around[:-1], fit.columns[:, 1:] - memory * fit.columns[:, :-1]
    values, vectors = np.linalg.eigh(x @ x.T)
    keep = values > SMALLEST_EIGENVALUE * values[-1]
    x = (vectors[:, keep] / np.sqrt(values[keep])).T @ x
    total = float(y @ y)
    draws = int(np.clip(PERMUTED_STEPS // n, MIN_PERMUTATIONS, MAX_PERMUTATIONS))
    permuted = np.array([float(((x @ rng.permutation(y)) ** 2).sum()) for _ in range(draws)]) / total
    observed = float(((x @ y) ** 2).sum()) / total
    return (
        unbiased(float(np.quantile(permuted, 0.95)), float(permuted.mean())),
        float((observed - permuted.mean()) / max(permuted.std(), 1e-12)),
    )


def without_mix(values: FloatArray, fit: Fit | None) -> FloatArray:
    """The values of each step, such as its loss, with the effect of its bucket mix, as `fit` has it, taken out.

    It is what a step of the run's mean mix would have had. Where the mix explains nothing, or without a fit, it is the value
    itself; NaN stays NaN.
    """
    return values - composition_effect(fit, len(values))


def composition_effect(fit: Fit | None, num_steps: int) -> FloatArray:
    """What the mix adds to each step, shrunk by the part of it that chance would explain as well."""
    if fit is None:
        return np.zeros(num_steps)
    plain = float(fit.around @ fit.around - fit.rest @ fit.rest)
    return fit.effect * (fit.explained * float(fit.around @ fit.around) / plain if plain > 0 else 0.0)


def loss_part_rows(run_id: str, fit: Fit | None, rng: Generator) -> list[dict[str, Any]]:
    """A run's rows of `loss_parts` from its `fit_loss`; none where nothing can be said. Only the composition has an interval."""
    if fit is None:
        return []
    parts = parts_of(fit, rng)
    rows = (
        ("composition", parts.share_composition, parts.share_low, parts.share_high, parts.sd_composition),
        ("trend", parts.share_trend, None, None, parts.sd_trend),
        ("rest", parts.share_rest, None, None, parts.sd_rest),
    )
    names = ("part", "share", "low", "high", "sd")
    return [{"run_id": run_id, **dict(zip(names, row, strict=True))} for row in rows]
