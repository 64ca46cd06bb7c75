"""What the detectors about curves share: the curves of a run, a fast robust trend, and what chance would give.

All of it is linear in the number of steps: a run of 20,000 steps is read by six detectors, and a report has fifty runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, lgamma, log
from typing import Any

import numpy as np
from numpy.random import Generator

from dflash_core.analysis.intervals import mean_error, rescaled
from dflash_core.analysis.reader import matrix, numbers
from dflash_core.analysis.runs import Run, once_per_run
from dflash_core.analysis.series import END_STEPS, BoolArray, FloatArray, block_length, reflected

IntArray = np.ndarray[Any, np.dtype[np.int64]]

# A normal distribution's standard deviation in median absolute deviations.
SD_PER_MAD = 1.4826
# Places at which a running median is taken; between them it is a line.
TREND_PLACES = 1000
# Blocks drawn in all by one bootstrap.
BOOTSTRAP_DRAWS = 100_000
MAX_BLOCKS = 500
CONFIDENCE = (0.025, 0.975)


@dataclass(frozen=True)
class Curves:
    """Of each step, in order: number, epoch, loss (nats), gradient norm, learning rate, acceptance length expected from the
    accuracy of the slots (+1 included); NaN where a step has none. `skipped` steps changed no weights."""

    step: IntArray
    epoch: FloatArray
    loss: FloatArray
    norm: FloatArray
    lr: FloatArray
    acceptance: FloatArray
    skipped: BoolArray

    def __len__(self) -> int:
        return len(self.step)


@once_per_run
def curves_of(run: Run) -> Curves:
    """The curves of a run. Where steps have no expected acceptance length it is made from the accuracy of the slots."""
    steps = run.steps
    acceptance = numbers(steps, "expected_acceptance_length")
    if not np.isfinite(acceptance).any():
        accuracy = matrix(steps, "accuracy_by_position")
        if accuracy.shape[1]:
            acceptance = 1 + np.cumprod(accuracy, axis=1).sum(axis=1)
    return Curves(
        step=numbers(steps, "step").astype(np.int64),
        epoch=numbers(steps, "epoch", missing=0),
        loss=numbers(steps, "loss"),
        norm=numbers(steps, "grad_norm"),
        lr=numbers(steps, "lr"),
        acceptance=acceptance,
        skipped=numbers(steps, "skipped", missing=0) > 0,
    )


def robust_sd(values: FloatArray) -> float:
    """Standard deviation of the bulk of the values around zero, from their median absolute size; NaN for none."""
    return float(SD_PER_MAD * np.median(np.abs(values))) if len(values) else float("nan")


def trend(values: FloatArray, width: int) -> FloatArray:
    """Running median of finite values over `width` of them, taken at up to `TREND_PLACES` places with lines between.

    Beyond its ends the series goes on by point reflection, as in `series.detrended`.
    """
    width = max(3, min(width, len(values) // 3)) | 1
    half = width // 2
    if len(values) < half + END_STEPS:
        return np.full(len(values), float(np.median(values)))
    every = max(1, min(width // 4, len(values) // TREND_PLACES))
    places = np.arange(0, len(values), every)
    if places[-1] != len(values) - 1:
        places = np.append(places, len(values) - 1)
    windows = np.lib.stride_tricks.sliding_window_view(reflected(values, half), width)[places]
    medians = np.partition(windows, half, axis=1)[:, half]
    return medians if every == 1 else np.interp(np.arange(len(values)), places, medians)


def moving_mean(series: FloatArray, width: int) -> FloatArray:
    """Mean over `width` values around each one, of each of [series, steps]; of as many as there are at the ends."""
    n = series.shape[1]
    half = max(3, min(width, n // 3)) // 2
    sums = np.zeros((len(series), n + 1 + 2 * half))
    np.cumsum(series, axis=1, out=sums[:, half + 1 : half + 1 + n])
    sums[:, half + 1 + n :] = sums[:, half + n : half + n + 1]
    places = np.arange(n)
    count = np.minimum(places + half + 1, n) - np.maximum(places - half, 0)
    return np.asarray((sums[:, 2 * half + 1 :] - sums[:, :n]) / count)


def ratio_interval(above: FloatArray, below: FloatArray, rng: Generator) -> tuple[float, float] | None:
    """95 % interval of sum(above) / sum(below) by a circular block bootstrap as wide as Student's interval of the ratio
    (`intervals.mean_error` of what it varies as, to first order); None for steps that are worth too few independent ones."""
    n, whole = len(above), float(below.sum())
    ratio = float(above.sum()) / whole if whole > 0 else 0.0
    error = mean_error((above - ratio * below) * (n / whole), 0) if whole > 0 else None
    if error is None or not error.is_known:
        return None
    length = max(block_length(above), block_length(below), ceil(n / MAX_BLOCKS))
    blocks = ceil(n / length)
    starts = rng.integers(0, n, size=(max(200, min(1000, BOOTSTRAP_DRAWS // blocks)), blocks))
    sums = [_block_sums(values, length)[starts].sum(axis=1) for values in (above, below)]
    if not (sums[1] > 0).all():
        return None
    low, high = np.quantile(rescaled(sums[0] / sums[1], ratio, error), CONFIDENCE)
    return float(low), float(high)


def _block_sums(values: FloatArray, length: int) -> FloatArray:
    cumulated = np.concatenate(([0.0], np.cumsum(np.concatenate((values, values[: length - 1])))))
    return np.asarray(cumulated[length:] - cumulated[:-length])


def shifted_overlaps(marks: BoolArray, members: Sequence[BoolArray]) -> FloatArray:
    """[sets of members, shifts]: how many marks fall on members when they are shifted by 0, 1, 2, ... steps around the circle.

    Shifting keeps the clustering of both series, which drawing marks anew would lose; so the values are what chance gives.
    """
    size = len(marks)
    spectrum = np.conj(np.fft.rfft(marks.astype(np.float64)))
    return np.asarray([np.round(np.fft.irfft(spectrum * np.fft.rfft(one.astype(np.float64)), size)) for one in members])


def binomial_tail(hits: int, trials: int, share: float) -> float:
    """Probability of at least `hits` successes in `trials` independent ones of probability `share`."""
    if hits <= 0:
        return 1.0
    if share <= 0 or share >= 1:
        return float(share >= 1)
    chances = [
        lgamma(trials + 1) - lgamma(k + 1) - lgamma(trials - k + 1) + k * log(share) + (trials - k) * log(1 - share)
        for k in range(hits, trials + 1)
    ]
    return float(min(1.0, np.exp(chances).sum()))


def binomial_range(trials: int, share: float) -> tuple[int, int]:
    """The 95 % range of the number of successes in `trials` independent ones of probability `share`."""
    low = next((k for k in range(trials + 1) if binomial_tail(k + 1, trials, share) <= 1 - CONFIDENCE[0]), trials)
    high = next((k for k in range(trials + 1) if binomial_tail(k + 1, trials, share) <= CONFIDENCE[0]), trials)
    return low, high


def wilson_interval(hits: float, trials: float, z: float = 1.96) -> tuple[float, float]:
    """95 % interval (at the default z) of a share, after Wilson; 0 to 1 for no trials."""
    if trials <= 0:
        return 0.0, 1.0
    share, extra = hits / trials, z * z / trials
    centre = (share + extra / 2) / (1 + extra)
    half = z * np.sqrt(share * (1 - share) / trials + extra / (4 * trials)) / (1 + extra)
    return min(share, max(0.0, float(centre - half))), max(share, min(1.0, float(centre + half)))


def bucket_name(run: Run, bucket: int) -> str:
    """`bucket 5 (sequences up to 512 tokens)`, the length being the longest among its batches."""
    longest = numbers(run.batches, "max_seq_len")[run.buckets() == bucket]
    longest = longest[np.isfinite(longest)]
    return f"bucket {bucket} (sequences up to {int(longest.max())} tokens)" if len(longest) else f"bucket {bucket}"


@once_per_run
def steps_with_batches(run: Run) -> IntArray:
    """The steps that have batches, ascending, without sorting where the batches are in the order of their steps."""
    step = numbers(run.batches, "step").astype(np.int64)
    change = np.diff(step)
    if len(step) and (change < 0).any():
        return np.unique(step)
    return step[np.append(True, change > 0)] if len(step) else step


def listed(names: list[str], joint: str = "and") -> str:
    """`a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {joint} {names[-1]}" if names else ""


def steps_condition(steps: IntArray | list[int], around: int = 0, most: int = 12) -> str:
    """SQL condition for steps, with `around` steps before and behind each; for more than `most` of them, the first ones."""
    chosen = [int(step) for step in steps[:most]]
    if not around:
        return f"step IN ({', '.join(str(step) for step in chosen)})"
    return " OR ".join(f"step BETWEEN {max(0, step - around)} AND {step + around}" for step in chosen)
