"""Training that leaves its course for good: values that are not finite, a loss that climbs and stays up, a gradient norm that
grows by orders of magnitude. The first such step is named, and what came before it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_core.analysis.findings.curve_tools import Curves, curves_of, moving_mean, robust_sd, trend
from dflash_core.analysis.findings.finding import Context, Finding, Strength
from dflash_core.analysis.findings.loss_parts import fit_loss, step_shares, without_mix
from dflash_core.analysis.reader import numbers
from dflash_core.analysis.runs import Run
from dflash_core.analysis.series import BoolArray, FloatArray, spikes

MIN_STEPS = 30
# Of the running median that the loss is judged by, and how many steps at the end must have stayed up.
LEVEL_STEPS = 15
MIN_STEPS_UP = 10
# The rise above the best level, as a share of that level and in standard deviations of single losses around the level.
MIN_RISE, MIN_RISE_SDS = 0.15, 3.0
STRONG_RISE = 0.5
# Steps whose surroundings of so many batches differ by no more than this share of the weight have the same mix of buckets.
MIX_BATCHES, SAME_MIX = 60, 0.25
# A gradient norm above this many times the median of the steps before it is an explosion, where norms do not scatter that
# widely anyway: on a log scale it must lie this many standard deviations above the median.
EXPLOSION, EXPLOSION_SDS = 100.0, 8.0
STEPS_BEFORE = 30
MIN_STEPS_BEFORE = 8
LOOK_BACK = 5
PEAK_SHARE = 0.95
EXTREME_SDS = 10.0


@dataclass(frozen=True)
class Signs:
    """What speaks for a divergence; indices into the steps. `climb` is where the loss left its best level for good."""

    broken: BoolArray
    exploded: BoolArray
    climb: int | None
    rise: float
    best: float

    @property
    def first(self) -> int | None:
        """The first sign of all."""
        marks = [np.flatnonzero(flags)[:1] for flags in (self.broken, self.exploded)]
        firsts = [int(one[0]) for one in marks if len(one)] + ([self.climb] if self.climb is not None else [])
        return min(firsts, default=None)


def signs_of(run: Run, curves: Curves) -> Signs:
    """Look for all three. A null was not measured and is no sign; NaN was."""
    broken = curves.skipped.copy()
    for column, values in (("loss", curves.loss), ("grad_norm", curves.norm)):
        broken |= ~np.isfinite(values) & np.asarray(run.steps[column].is_valid().to_numpy())
    climb, rise, best = _climb(curves.loss)
    if climb is not None and _is_of_the_mix(run, curves, rise >= STRONG_RISE * abs(best)):
        climb = None
    return Signs(broken, explosions(curves.norm), climb, rise, best)


def explosions(norm: FloatArray) -> BoolArray:
    """Steps whose gradient norm is orders of magnitude above those of the `STEPS_BEFORE` steps before them."""
    flags = np.zeros(len(norm), dtype=bool)
    at = np.flatnonzero(np.isfinite(norm) & (norm > 0))
    if len(at) <= MIN_STEPS_BEFORE:
        return flags
    logs = np.log(norm[at])
    # Only what stands far above the bulk can be one; the medians of the steps before are needed for those alone.
    width = robust_sd(logs - np.median(logs))
    for place in np.flatnonzero(logs > logs.min() + math.log(EXPLOSION)).tolist():
        if place < MIN_STEPS_BEFORE or logs[place] < np.median(logs) + math.log(EXPLOSION) / 2:
            continue
        before = logs[max(0, place - STEPS_BEFORE) : place]
        level = float(np.median(before))
        spread = max(robust_sd(before - level), min(width, 1.0) if np.isfinite(width) else 0.0)
        flags[at[place]] = logs[place] > level + max(math.log(EXPLOSION), EXPLOSION_SDS * spread)
    return flags


def _climb(loss: FloatArray) -> tuple[int | None, float, float]:
    """Index from which the loss stays above its best level for good, the rise at the end, and the best level, in nats."""
    at = np.flatnonzero(np.isfinite(loss))
    if len(at) < MIN_STEPS:
        return None, 0.0, float("nan")
    values = loss[at]
    level = trend(values, LEVEL_STEPS)
    noise = robust_sd(values - level)
    lowest = int(np.argmin(level))
    best = float(level[lowest])
    rise = float(np.median(values[-MIN_STEPS_UP:])) - best
    needed = max(MIN_RISE * abs(best), MIN_RISE_SDS * noise)
    if not rise > needed:
        return None, rise, best
    down = np.flatnonzero(level <= best + needed / 2)
    start = int(down[-1]) + 1
    stays = len(values) - start >= MIN_STEPS_UP
    return (int(at[start]), rise, best) if stays else (None, rise, best)


def _is_of_the_mix(run: Run, curves: Curves, is_strong: bool) -> bool:
    """Whether the loss ends high because the run ends with buckets that lose more: without their effect, or against steps of
    the same buckets, it has not climbed. Where such steps are too few to say, only a strong rise counts as one."""
    shares = step_shares(run)
    if _climb(without_mix(curves.loss, fit_loss(run)))[0] is None:
        return True
    width = max(LEVEL_STEPS, math.ceil(MIX_BATCHES * len(curves) / len(run.batches)))
    around = moving_mean(np.nan_to_num(shares).T, width)
    alike = np.abs(around - around[:, -MIN_STEPS_UP:].mean(axis=1, keepdims=True)).sum(axis=0) / 2 <= SAME_MIX
    alike[-MIN_STEPS_UP:] = True
    same = np.where(alike, curves.loss, np.nan)
    return _climb(same)[0] is None and not (is_strong and np.isfinite(same).sum() < MIN_STEPS)


def find_divergence(run: Run, context: Context) -> list[Finding]:
    """`divergence`: one finding, about the first sign and all that there are."""
    curves = curves_of(run)
    signs = signs_of(run, curves)
    first = signs.first
    if first is None:
        return []
    num_broken, num_exploded = int(signs.broken.sum()), int(signs.exploded.sum())
    before = _what_preceded(run, curves, signs, first, context.config.spike_mad)
    at = np.flatnonzero(signs.broken | signs.exploded)
    step = int(curves.step[first])
    value, unit, measure, threshold = _figure(curves, signs)
    return [
        Finding(
            kind="divergence",
            run_id=run.run_id,
            strength=_strength(signs, len(curves)),
            title=_title(curves, signs, step),
            text=" ".join([*_sentences(curves, signs), before]),
            advice=(
                f"Look at the batches of the steps before {step}. Lower train.lr or raise train.warmup_fraction, keep "
                "train.clip_norm at "
                "1.0 or below, and go on from a checkpoint before that step."
            ),
            measure=measure,
            value=value,
            unit=unit,
            low=None,
            high=None,
            threshold=threshold,
            table="steps",
            rows=f"step BETWEEN {max(0, step - LOOK_BACK)} AND {step + LOOK_BACK}",
            evidence={
                "first_step": step,
                "num_not_finite_or_skipped": num_broken,
                "num_exploded": num_exploded,
                "loss_best_level": signs.best if math.isfinite(signs.best) else None,
                "loss_rise": signs.rise if signs.climb is not None else 0.0,
                "num_steps": len(curves),
            },
            at_steps=tuple(curves.step[np.unique(np.append(at, first))][:300].tolist()),
        )
    ]


def _strength(signs: Signs, num_steps: int) -> Strength:
    """Strong where the run is lost, weak where a single step was skipped."""
    broken = int(signs.broken.sum())
    lost = broken > max(5, num_steps // 20) or (broken > 0 and bool(signs.broken[-1]))
    if lost or (signs.climb is not None and signs.rise >= STRONG_RISE * abs(signs.best)):
        return "strong"
    return "moderate" if signs.climb is not None or signs.exploded.any() or broken > 1 else "weak"


def _figure(curves: Curves, signs: Signs) -> tuple[float, str, str, float]:
    """Value, unit, measure and threshold, of the gravest sign."""
    if signs.broken.any():
        return float(signs.broken.sum()), "steps", "steps with a value that is not finite, or skipped", 1.0
    if signs.climb is not None:
        return signs.rise / abs(signs.best), "share of the best level", "rise of the loss above its best level", MIN_RISE
    return float(_times(curves, signs)), "times the norm before", "gradient norm over that of the steps before", EXPLOSION


def _times(curves: Curves, signs: Signs) -> float:
    """The largest exploded norm as a multiple of the median of the steps before the first one."""
    first = int(np.flatnonzero(signs.exploded)[0])
    before = curves.norm[max(0, first - STEPS_BEFORE) : first]
    return float(curves.norm[signs.exploded].max() / np.median(before[np.isfinite(before)]))


def _title(curves: Curves, signs: Signs, step: int) -> str:
    if signs.broken.any():
        here = int(curves.step[np.flatnonzero(signs.broken)[0]])
        return f"Loss or gradient stops being finite at step {here} ({int(signs.broken.sum())} of {len(curves)} steps)"
    if signs.climb is not None:
        return f"The loss climbs from step {step} on and stays {signs.rise:.2g} nats above its best level"
    return f"The gradient norm explodes at step {step}: {_times(curves, signs):,.0f} times that of the steps before"


def _sentences(curves: Curves, signs: Signs) -> list[str]:
    lines = []
    if signs.broken.any():
        here = np.flatnonzero(signs.broken)
        skipped = int(curves.skipped.sum())
        last = "to the end" if here[-1] == len(curves) - 1 and len(here) > 1 else f"the last one is step {curves.step[here[-1]]}"
        many = f"{len(here)} steps have a loss or gradient norm that is not finite, or were skipped for it ({skipped} skipped)"
        lines.append(f"{many}; the first is step {curves.step[here[0]]}, {last}.")
    if signs.exploded.any():
        here = np.flatnonzero(signs.exploded)
        lines.append(
            f"The gradient norm grows to {_times(curves, signs):,.0f} times the median of the {STEPS_BEFORE} steps "
            "before, first at step "
            f"{curves.step[here[0]]} ({len(here)} such steps)."
        )
    if signs.climb is not None:
        lines.append(
            f"The loss leaves its best level of {signs.best:.3g} nats at step {curves.step[signs.climb]} and ends "
            f"{signs.rise:.2g} nats "
            "above it."
        )
    return lines


def _what_preceded(run: Run, curves: Curves, signs: Signs, first: int, spike_mad: float) -> str:
    """One sentence: learning rate, spikes, extreme batches before the first sign."""
    step, found = int(curves.step[first]), []
    lr, peak = curves.lr[first], np.nanmax(curves.lr) if np.isfinite(curves.lr).any() else float("nan")
    if np.isfinite(lr) and peak > 0 and lr >= PEAK_SHARE * peak:
        found.append(f"the learning rate was at its peak ({lr:.2g})")
    before = slice(max(0, first - LOOK_BACK), first)
    spiked = curves.step[before][spikes(curves.norm, spike_mad)[0][before] | signs.exploded[before]]
    if len(spiked):
        found.append(f"the gradient norm spiked at step {spiked[-1]}")
    batch = _extreme_batch(run, step)
    if batch is not None:
        found.append(batch)
    if found:
        return f"What came before: {'; '.join(found)}."
    rate = f", and the learning rate was at {lr / peak:.0%} of its peak" if np.isfinite(lr) and peak > 0 else ""
    return f"In the {LOOK_BACK} steps before there is no gradient spike and no extreme batch{rate}."


def _extreme_batch(run: Run, step: int) -> str | None:
    """The batch of the last steps up to `step` whose mean loss is not finite or far outside of all others of these steps."""
    at = numbers(run.batches, "step")
    weight, total = numbers(run.batches, "weight_sum"), numbers(run.batches, "loss_sum")
    near = np.flatnonzero((at >= step - 10 * LOOK_BACK) & (at <= step) & np.isfinite(weight) & (weight > 0))
    late = near[at[near] >= step - LOOK_BACK]
    if not len(late):
        return None
    mean = total / np.where(weight > 0, weight, 1.0)
    known = near[np.isfinite(mean[near])]
    distance: dict[int, Any] = {int(i): float("inf") for i in late if not np.isfinite(mean[i])}
    if len(known) >= 10:
        centre = float(np.median(mean[known]))
        spread = robust_sd(mean[known] - centre)
        distance |= {int(i): abs(mean[i] - centre) / spread for i in late if np.isfinite(mean[i]) and spread > 0}
    worst = max(distance, key=lambda i: (distance[i], -at[i]), default=None)
    if worst is None or distance[worst] < EXTREME_SDS:
        return None
    number, bucket = int(numbers(run.batches, "seq_no")[worst]), int(run.buckets()[worst])
    loss = f"{mean[worst]:.3g} nats" if np.isfinite(mean[worst]) else "no finite loss"
    return f"batch {number} of step {int(at[worst])} (bucket {bucket}) has {loss}"
