"""Moments at which a curve jumps up and comes back: single steps, and levels that recover.

A jump is measured against the median of the eleven steps before it, so a slow change is none, and in standard deviations of
such differences nearby, which autocorrelated noise widens by itself. What does not come back is no reset but a change for good.

A single step far up is no reset either: where a step is one or a few sequences, a hard one gives it. So a jump that is believed
without a cause has to last, or be beyond what such steps reach. Several moments of which none would be believed alone are
believed together where a filter that is made for decaying jumps finds them, and finds none downwards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dflash_core.analysis.findings.curve_tools import SD_PER_MAD, IntArray, binomial_tail, robust_sd, trend
from dflash_core.analysis.series import TREND_STEPS, FloatArray, inner_median

MIN_STEPS = 40
BEFORE, BEHIND = 11, 3
SCALE_STEPS = 201
# In standard deviations of the difference, for a run of a hundred steps: of the median of three, and of a single step, whose
# noise has the heavier tails. More steps have more extremes: each tenfold adds to both.
LEVEL_SDS, SINGLE_SDS, SDS_PER_TENFOLD = 4.5, 6.0, 0.5
# From here on a jump is clear by itself. One below needs a cause that it comes with: real losses reach those above twice in 150
# steps, single steps of one sequence reach 15, and two such steps close to each other a level of 18.
CLEAR_LEVEL_SDS, CLEAR_SINGLE_SDS, CLEAR_FILTER_SDS = 6.0, 20.0, 4.0
# The filter: steps weighted by exp(-steps / 4), each of them counted with at most so many standard deviations.
FILTER_DECAY, FILTER_STEPS, FILTER_CAP = 4.0, 8, 4.0
# For a hundred steps. Of sound real runs one in fifteen reaches 3.5 once; three times, or 3.8 twice, is no chance.
TOGETHER_SDS, TOGETHER_TIMES, TOGETHER_SDS_OF_TWO = 3.2, 3, 3.8
FILTER_FROM = 0.1
# Locally noise may look small by luck.
SMALLEST_SCALE = 0.7
MIN_DEPTH = 0.05
APART = 5
# Half of the way back within this many steps, or a fifth of a longer run.
RECOVERY_STEPS, RECOVERY_SHARE = 40, 0.2
MIN_STEPS_LEFT = 4
MIN_EVENTS, MAX_RECURRENT_TAIL = 4, 1e-5
MIN_KNOWN = 0.95


@dataclass(frozen=True)
class Jump:
    """One moment: `at` is the index of the first step that is up, `depth` how far, `back_after` the steps until half is made up
    for, `sds` the size in standard deviations of the noise, `level` where it came from, `is_clear` whether that is enough."""

    at: int
    depth: float
    back_after: int
    sds: float
    level: float
    is_clear: bool


def upward_jumps(values: FloatArray, floor: float = 0.0) -> list[Jump]:
    """The moments at which the curve jumps up and comes back, unless it jumps down about as often: then it is noise with heavy
    tails. Non-finite values are left out. A jump counts from `MIN_DEPTH` of the level's distance to `floor` on."""
    at = np.flatnonzero(np.isfinite(values))
    if len(at) < MIN_STEPS:
        return []
    y = values[at]
    z = _scores(y)
    more = SDS_PER_TENFOLD * float(np.log10(len(y) / 100))
    found = _upward_only(y, z, floor, np.array([SINGLE_SDS + more, LEVEL_SDS + more, np.inf]))
    clear = [one for one in found if one.is_clear]
    if len(clear) < 2:
        together = _upward_only(y, z, floor, np.array([np.inf, np.inf, TOGETHER_SDS + more]))
        if len(together) < TOGETHER_TIMES:
            together = [one for one in together if one.sds >= TOGETHER_SDS_OF_TWO + more]
        if len(together) >= 2:
            alone = [one for one in clear if all(abs(one.at - other.at) > APART for other in together)]
            found = sorted([*alone, *(replace(one, is_clear=True) for one in together)], key=lambda one: one.at)
    return [replace(one, at=int(at[one.at])) for one in found]


def _upward_only(y: FloatArray, z: FloatArray, floor: float, least: FloatArray) -> list[Jump]:
    """The jumps up that come back and of which a score is at least `least` [3]; none where there are about as many downwards."""
    up = _returning(y, z, floor, least)
    if not up:
        return []
    covered = np.zeros(len(y), dtype=bool)
    for one in up:  # coming back from a jump is a jump down
        covered[max(0, one.at - 2) : one.at + one.back_after + BEFORE] = True
    down = [one for one in _returning(-y, -z, -floor, least) if not covered[one.at]]
    return [] if down and binomial_tail(len(up), len(up) + len(down), 0.5) > 0.01 else up


def _scores(y: FloatArray) -> FloatArray:
    """[3, steps]: differences to the steps before, of single steps, of medians of three and of the filter, in standard
    deviations."""
    before = _median_before(y)
    second, third = np.append(y[1:], y[-1]), np.append(y[2:], [y[-1], y[-1]])
    behind = np.maximum(np.minimum(y, second), np.minimum(np.maximum(y, second), third))
    return np.stack([_scaled(y - before), _scaled(behind - before), _filtered(y)])


def _filtered(y: FloatArray) -> FloatArray:
    """The filter's score; 0 in the first tenth, where the curve falls faster than any trend follows, and at the last steps."""
    capped = np.clip(_scaled(y), -FILTER_CAP, FILTER_CAP)
    weight = np.exp(-np.arange(FILTER_STEPS) / FILTER_DECAY)
    behind = np.convolve(capped, weight[::-1] / weight.sum(), mode="valid")
    score = behind - _median_before(capped)[: len(behind)]
    first = round(FILTER_FROM * len(y))
    score -= np.median(score[first:])
    scale = robust_sd(score[first:])
    found = np.zeros(len(y))
    if scale > 0:
        found[first : len(score)] = score[first:] / scale
    return found


def _median_before(y: FloatArray) -> FloatArray:
    """Median of the `BEFORE` values before each one; of as many as there are at the start, and the first itself."""
    medians = inner_median(y, BEFORE)[:-1]
    ordered = [sorted(y[:i].tolist()) for i in range(1, BEFORE)]
    start = [y[0]] + [(some[(len(some) - 1) // 2] + some[len(some) // 2]) / 2 for some in ordered]
    return np.concatenate((start, medians))


def _scaled(difference: FloatArray) -> FloatArray:
    rest = difference - trend(difference, TREND_STEPS)
    scale = np.maximum(SD_PER_MAD * trend(np.abs(rest), SCALE_STEPS), SMALLEST_SCALE * robust_sd(rest))
    return np.divide(rest, scale, out=np.zeros_like(rest), where=scale > 0)


def _returning(y: FloatArray, z: FloatArray, floor: float, least: FloatArray) -> list[Jump]:
    flagged = np.flatnonzero((z >= least[:, None]).any(axis=0))
    flagged = flagged[flagged >= BEFORE // 2 + 3]
    if not len(flagged):
        return []
    found: list[Jump] = []
    for group in np.split(flagged, np.flatnonzero(np.diff(flagged) > APART) + 1):
        first, last = int(group[0]), min(int(group[-1]) + 1, len(y) - 1)
        if np.isfinite(least[2]):  # the filter is up some steps before the curve is, but at its best there
            first = max(first, first + int(z[2, first : last + 1].argmax()) - 1)
        # A median of three is up one step before the curve is.
        start = first + int(
            np.argmax(y[first : min(first + BEHIND, last + 1)] - y[first - 1 : min(first + BEHIND, last + 1) - 1])
        )
        single, level, lasting = z[:, first : last + 1].max(axis=1).tolist()
        sds = lasting if np.isfinite(least[2]) else max(single, level)
        jump = _measured(y, start, sds, single >= CLEAR_SINGLE_SDS)
        if jump is not None and jump.back_after > 1 and level >= CLEAR_LEVEL_SDS and lasting >= CLEAR_FILTER_SDS:
            jump = replace(jump, is_clear=True)
        if jump is not None and jump.depth >= MIN_DEPTH * abs(jump.level - floor) > 0:
            found.append(jump)
    return found


def _measured(y: FloatArray, start: int, sds: float, is_clear: bool) -> Jump | None:
    """Depth of a jump and how long it lasts; None for one that does not come back, or so near to the end that nobody knows."""
    before = np.sort(y[max(0, start - BEFORE) : start])
    level = float(before[len(before) // 2])
    horizon = max(RECOVERY_STEPS, int(RECOVERY_SHARE * len(y)))
    behind = y[start : start + horizon]
    if len(behind) <= MIN_STEPS_LEFT:
        return None
    depth = float(behind[0]) - level
    # Two steps in a row: one alone may be noise.
    low = behind <= level + depth / 2
    back = np.flatnonzero(low[:-1] & low[1:])
    return Jump(start, depth, int(back[0]), sds, level, is_clear) if len(back) and depth > 0 else None


def recurrent_jumps(values: FloatArray, events: IntArray, floor: float = 0.0) -> list[Jump]:
    """Jumps right behind events that come so often, or are so small, that each alone drowns in what they do to the curve.

    The mean of the three steps from the event on, less that of the three before, is held against the same difference at all
    steps away from events. Were events nothing to the curve, one in twenty would be above the 95th percentile of those. Coming
    back only makes differences negative, so it does not hide the jumps. Nothing where half of the events are not above it,
    or the median rise is below `MIN_DEPTH`.
    """
    n = len(values)
    known = np.flatnonzero(np.isfinite(values))
    events = events[(events >= BEHIND) & (events <= n - BEHIND)]
    if len(events) < MIN_EVENTS or n < MIN_STEPS or len(known) < MIN_KNOWN * n:
        return []
    # Single steps that were skipped are bridged; they neither make a jump nor hide one.
    values = np.interp(np.arange(n), known, values[known])
    sums = np.concatenate(([0.0], np.cumsum(values)))
    places = np.arange(BEHIND, n - BEHIND + 1)
    rises = (sums[places + BEHIND] - 2 * sums[places] + sums[places - BEHIND]) / BEHIND
    away = np.ones(n + 1, dtype=bool)
    for offset in range(-BEHIND, BEHIND + 1):
        away[np.clip(events + offset, 0, n)] = False
    others = rises[away[places]]
    if len(others) < max(MIN_STEPS // 2, n // 4):
        return []
    usual, limit = np.quantile(others, [0.5, 0.95])
    at = events[rises[events - BEHIND] > limit]
    depth = np.median(rises[events - BEHIND]) - usual
    level = float(np.median(values)) - floor
    clear = 2 * len(at) >= len(events) and binomial_tail(len(at), len(events), 0.05) <= MAX_RECURRENT_TAIL
    if not clear or depth < max(MIN_DEPTH * abs(level), limit - usual):
        return []
    sds = float(1.645 * depth / (limit - usual)) if limit > usual else float("inf")
    found = [_measured(values, int(one), sds, True) for one in at]
    return [one for one in found if one is not None]


def merged(one: list[int], other: list[int], within: int = 2) -> IntArray:
    """Moments of both lists; of those at most `within` steps apart, the first."""
    kept: list[int] = []
    for at in sorted([*one, *other]):
        if not kept or at - kept[-1] > within:
            kept.append(at)
    return np.array(kept, dtype=np.int64)
