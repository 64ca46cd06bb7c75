"""Whether gradient-norm spikes fall into runs of one bucket, and how the norm goes with the position in such a run.

Two things count as a bucket run: a step that leans to a bucket (`order.leaning_bucket`), and a step that overlaps a flat run of
batches of one bucket which is longer than a step and at least three batches long. Spikes are held against each bucket's runs,
and two things must be beyond chance. Shifted around the circle of all steps, which keeps the clustering of both, the spikes must
not do as well: the best of all buckets is held against the best bucket of each shift, so nothing is gained by looking at many.
And as runs may be periodic, when a shift by a period changes nothing, bursts of spikes must be in the runs more often than a
binomial draw allows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator

from dflash_core.analysis.findings.curve_tools import (
    CONFIDENCE,
    IntArray,
    binomial_tail,
    bucket_name,
    curves_of,
    shifted_overlaps,
    steps_condition,
    steps_with_batches,
    wilson_interval,
)
from dflash_core.analysis.findings.finding import Context, Finding, Strength
from dflash_core.analysis.intervals import trend_degree
from dflash_core.analysis.order import MIXED, leaning_bucket
from dflash_core.analysis.reader import numbers
from dflash_core.analysis.run_tables import SETTLED_AFTER_FRACTION
from dflash_core.analysis.runs import Run, once_per_run
from dflash_core.analysis.series import BoolArray, FloatArray, resampled_means, spikes

MIN_STEPS = 40
MIN_SPIKES = 5
MIN_RUN_BATCHES = 3
# A bucket run that nearly every step is in, or hardly any, says nothing.
MIN_SHARE_IN_RUNS, MAX_SHARE_IN_RUNS = 0.01, 0.7
MIN_RATIO, CHANCE_QUANTILE, MAX_TAIL, MIN_ABOVE = 1.5, 0.975, 1e-4, 3
BURST_STEPS = 3
STRONG_SHARE, MODERATE_SHARE = 0.75, 0.5
MAX_POSITION = 20
POSITION_RESAMPLES = 200


class Runs(NamedTuple):
    """Which steps are in bucket runs of one kind: `level` is `step` (they lean to the bucket) or `batch` (flat runs)."""

    level: str
    bucket: int
    members: BoolArray


class Overlap(NamedTuple):
    """Spikes in bucket runs by how far the spikes are shifted, the mean of that, and how many standard deviations above it they
    are where they are."""

    runs: Runs
    by_shift: FloatArray
    expected: float
    sds: float

    @property
    def observed(self) -> int:
        return int(self.by_shift[0])


@once_per_run
def bucket_runs(run: Run) -> list[Runs]:
    """The bucket runs of each kind and bucket, with one flag per step."""
    step, leaning = curves_of(run).step, step_leaning(run)
    found = [Runs("step", bucket, leaning == bucket) for bucket in _present(leaning)]
    lengths, buckets = _flat_runs(run)
    at = np.searchsorted(step, numbers(run.batches, "step").astype(np.int64))
    long_enough = lengths >= max(MIN_RUN_BATCHES, round(len(run.batches) / len(step)) + 1)
    in_long = np.repeat(long_enough, lengths)
    bucket = np.repeat(buckets, lengths)
    for one in np.flatnonzero(np.bincount(buckets[long_enough])).tolist():
        members = np.zeros(len(step), dtype=bool)
        members[np.minimum(at[in_long & (bucket == one)], len(step) - 1)] = True
        found.append(Runs("batch", one, members))
    return found


@once_per_run
def step_leaning(run: Run) -> IntArray:
    """The bucket that each step leans to, `MIXED` for none and where a step has no batches."""
    step, trained = curves_of(run).step, steps_with_batches(run)
    leaning = np.full(len(step), MIXED)
    place = np.searchsorted(step, trained)
    known = (place < len(step)) & (step[np.minimum(place, len(step) - 1)] == trained)
    leaning[place[known]] = leaning_bucket(run)[known]
    return leaning


def _present(leaning: IntArray) -> list[int]:
    return np.flatnonzero(np.bincount(leaning[leaning != MIXED])).tolist()


def _flat_runs(run: Run) -> tuple[IntArray, IntArray]:
    """Length and bucket of each run of batches of one bucket."""
    bucket = run.buckets()
    starts = np.append(0, np.flatnonzero(np.diff(bucket)) + 1)
    return np.diff(np.append(starts, len(bucket))), bucket[starts]


def find_spikes(run: Run, context: Context) -> list[Finding]:
    """`spikes_in_bucket_runs`: of gradient-norm spikes behind the first tenth of the steps."""
    curves = curves_of(run)
    first = round(SETTLED_AFTER_FRACTION * len(curves))
    is_spike = spikes(curves.norm, context.config.spike_mad)[0]
    spike = is_spike[first:]
    if len(spike) < MIN_STEPS or spike.sum() < MIN_SPIKES:
        return []
    candidates = [Runs(r.level, r.bucket, r.members[first:]) for r in bucket_runs(run)]
    candidates = [r for r in candidates if MIN_SHARE_IN_RUNS <= r.members.mean() <= MAX_SHARE_IN_RUNS]
    best = best_overlap(spike, candidates)
    if best is None:
        return []
    return [_finding(run, context, best, curves.step[first:], spike)]


def best_overlap(spike: BoolArray, candidates: list[Runs]) -> Overlap | None:
    """The runs that hold most spikes above chance, if more than the best of any shift; the plainer kind where two are alike."""
    tried: list[Overlap] = []
    largest = np.full(len(spike), -np.inf)
    bursts = first_of_bursts(spike)
    for runs, counts in zip(candidates, shifted_overlaps(spike, [r.members for r in candidates]), strict=True):
        spread, expected = max(float(counts.std()), 0.3), float(counts.mean())
        largest = np.maximum(largest, (counts - expected) / spread)
        tried.append(Overlap(runs, counts, expected, (counts[0] - expected) / spread))
    if not tried:
        return None
    best = max(tried, key=lambda one: one.sds)
    enough = best.observed >= MIN_RATIO * best.expected and best.observed - best.expected >= MIN_ABOVE
    total = int(spike.sum())
    members = best.runs.members
    tail = binomial_tail(int((bursts & members).sum()), int(bursts.sum()), float(members.mean()))
    clear = best.sds >= float(np.quantile(largest, CHANCE_QUANTILE)) and tail * len(candidates) <= MAX_TAIL
    sure = wilson_interval(best.observed, total)[0] > best.expected / total
    return best if enough and clear and sure else None


def first_of_bursts(spike: BoolArray) -> BoolArray:
    """The spikes without another one in the few steps before."""
    earlier = np.zeros(len(spike), dtype=bool)
    for offset in range(1, BURST_STEPS + 1):
        earlier[offset:] |= spike[:-offset]
    return spike & ~earlier


def _finding(run: Run, context: Context, best: Overlap, step: IntArray, spike: BoolArray) -> Finding:
    total, name = int(spike.sum()), bucket_name(run, best.runs.bucket)
    share = best.observed / total
    low, high = wilson_interval(best.observed, total)
    chance_low, chance_high = (float(end) for end in np.quantile(best.by_shift, CONFIDENCE))
    members = best.runs.members
    rates = (float(spike[members].mean()), float(spike[~members].mean()))
    where = f"steps that lean to {name}" if best.runs.level == "step" else f"runs of at least 3 batches of {name}"
    hit = step[spike & members]
    strength: Strength = "strong" if share >= STRONG_SHARE else "moderate" if share >= MODERATE_SHARE else "weak"
    order = run.setting("bucketing.order")
    mend = "set bucketing.order: diverse" if order != "diverse" else "raise bucketing.batches_per_step"
    return Finding(
        kind="spikes_in_bucket_runs",
        run_id=run.run_id,
        strength=strength,
        title=f"{best.observed} of {total} gradient spikes fall into runs of bucket {best.runs.bucket}",
        text=(
            f"{best.observed} of {total} gradient-norm spikes (more than {context.config.spike_mad:g} MAD above the "
            "running median) fall "
            f"into {where}, which are {members.mean():.0%} of the steps; {best.expected:.1f} would by chance (95 % range "
            f"{chance_low:.0f} to {chance_high:.0f}, from the same spikes shifted in time). There {rates[0]:.1%} of the "
            "steps spike, "
            f"elsewhere {rates[1]:.1%}."
        ),
        advice=(
            f"To mix the buckets within and between steps, {mend}. If single steps spike nevertheless, train.clip_norm bounds "
            "what they do."
        ),
        measure="share of the gradient spikes that fall into runs of one bucket",
        value=share,
        unit="share",
        low=low,
        high=high,
        threshold=chance_high / total,
        table="steps",
        rows=steps_condition(hit),
        evidence={
            "level": best.runs.level,
            "bucket": best.runs.bucket,
            "observed": best.observed,
            "num_spikes": total,
            "expected": best.expected,
            "expected_low": chance_low,
            "expected_high": chance_high,
            "share_of_steps_in_runs": float(members.mean()),
            "spike_rate_in_runs": rates[0],
            "spike_rate_elsewhere": rates[1],
        },
        at_steps=tuple(int(one) for one in hit[:300]),
    )


def norm_by_position(run: Run, rng: Generator) -> list[dict[str, Any]]:
    """Rows of `run_positions`: mean gradient norm and loss by position within a bucket run.

    `level` is `step` for consecutive steps that lean to one bucket, and, where every step is one batch, `batch` for flat runs.
    `position` counts from 1, to at most `MAX_POSITION`; the first tenth of the steps and non-finite values are left out. `_low`
    and `_high` bound the mean (95 %, block bootstrap over the steps of the position); null for fewer than 20 steps,
    or where these are worth too few independent ones.
    """
    curves = curves_of(run)
    first = round(SETTLED_AFTER_FRACTION * len(curves))
    leaning = step_leaning(run)
    levels = {"step": np.where(leaning == MIXED, 0, positions(leaning))}
    if len(run.batches) == len(curves) and (numbers(run.batches, "step") == curves.step).all():
        levels["batch"] = positions(run.buckets())
    rows = []
    for level, position in levels.items():
        for one in range(1, min(MAX_POSITION, int(position.max(initial=0))) + 1):
            at = np.flatnonzero((position == one) & np.isfinite(curves.norm) & np.isfinite(curves.loss))
            at = at[at >= first]
            if len(at):
                norm, loss = (_mean(values[at], rng) for values in (curves.norm, curves.loss))
                rows.append(_position_row(run.run_id, level, one, len(at), norm, loss))
    return rows


Mean = tuple[float, float | None, float | None]


def _position_row(run_id: str, level: str, position: int, num_steps: int, norm: Mean, loss: Mean) -> dict[str, Any]:
    row: dict[str, Any] = {"run_id": run_id, "level": level, "position": position, "num_steps": num_steps}
    for name, values in (("grad_norm", norm), ("loss", loss)):
        row |= dict(zip((f"{name}_mean", f"{name}_low", f"{name}_high"), values, strict=True))
    return row


def _mean(values: FloatArray, rng: Generator) -> Mean:
    drawn = resampled_means(values, rng, POSITION_RESAMPLES, trend_degree(len(values)))
    if drawn is None:
        return float(values.mean()), None, None
    low, high = np.quantile(drawn, CONFIDENCE)
    return float(values.mean()), float(low), float(high)


def positions(values: IntArray) -> IntArray:
    """Of each element its position in the run of equal elements that it is in, from 1."""
    places = np.arange(len(values))
    starts = np.append(True, values[1:] != values[:-1])
    return places - np.maximum.accumulate(np.where(starts, places, 0)) + 1
