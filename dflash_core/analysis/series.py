"""What is done to a series of one value per step: trend, spikes, and intervals that respect autocorrelation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, log10, sqrt
from typing import Any

import numpy as np
import pandas as pd
from numpy.random import Generator

FloatArray = np.ndarray[Any, np.dtype[np.float64]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]

# Wide enough that a burst of spikes does not become the trend, narrow against the schedule of a run.
TREND_STEPS = 61
# The median of this many values is the point of reflection at an end.
END_STEPS = 5
MIN_STEPS_FOR_INTERVAL = 20
NUM_RESAMPLES = 1000
# A resample has no more blocks than this. Longer ones than the autocorrelation asks for bias nothing; how wide an interval is
# then varies by 3 %, as it does with this many resamples.
MAX_BLOCKS = 400


def running_median(values: FloatArray, width: int) -> FloatArray:
    """Median of the `width` values centred on each one; at the ends, of as many as there are. NaN is left out."""
    return np.asarray(pd.Series(values).rolling(width | 1, center=True, min_periods=1).median().to_numpy(dtype=np.float64))


def inner_median(values: FloatArray, width: int) -> FloatArray:
    """Median of every `width` (an odd number of) successive values, [len(values) - width + 1]; finite values only.

    SciPy's filter is five times as fast as a running median that heeds NaN, and gives the same numbers.
    """
    from scipy.ndimage import median_filter  # slow to import

    half = width // 2
    return np.asarray(median_filter(values, width, mode="nearest")[half : len(values) - half])


def detrended(values: FloatArray) -> FloatArray:
    """Values minus their running median over `TREND_STEPS`, or over a third of a short series.

    Beyond its ends the series goes on by point reflection, so that the median follows a slope there too: without it the
    steep start of a training stands above its own median for half a window.
    """
    width = max(3, min(TREND_STEPS, len(values) // 3)) | 1
    half = width // 2
    if len(values) < half + END_STEPS:
        return values - running_median(values, width)
    return values - inner_median(reflected(values, half), width)


def reflected(values: FloatArray, half: int) -> FloatArray:
    """The series with `half` values more at each end, by point reflection at the median of its `END_STEPS` there; it must have
    at least `half + END_STEPS`."""
    # As numpy's median has it, in a tenth of the time.
    first, last = (sorted(part.tolist())[END_STEPS // 2] for part in (values[:END_STEPS], values[-END_STEPS:]))
    left = 2 * first - values[END_STEPS : END_STEPS + half][::-1]
    right = 2 * last - values[len(values) - END_STEPS - half : len(values) - END_STEPS][::-1]
    return np.concatenate((left, values, right))


def spikes(values: FloatArray, num_mads: float) -> tuple[BoolArray, float]:
    """Which values exceed their running median by more than `num_mads` median absolute deviations from it, and the MAD.

    The median runs with the series because a gradient norm falls for the whole of a training: against one global median
    every early step would be a spike. A MAD below a thousandth of the median is taken as that, so that rounding in a
    nearly constant series is no spike. Non-finite values are never spikes.
    """
    residual = np.full(len(values), np.nan)
    finite = np.isfinite(values)
    if not finite.any():
        return np.zeros(len(values), dtype=bool), float("nan")
    residual[finite] = detrended(values[finite])
    mad = float(np.median(np.abs(residual[finite])))
    threshold = num_mads * max(mad, 1e-3 * abs(float(np.median(values[finite]))))
    return np.nan_to_num(residual, nan=-np.inf) > threshold, mad


def block_length(values: FloatArray) -> int:
    """Block length for a circular block bootstrap of a stationary series (Politis and White 2004, corrected 2009).

    About 1 for independent values, longer with autocorrelation, at most a third of the series.
    """
    n = len(values)
    centred = values - values.mean()
    variance = float(centred @ centred) / n
    if n < MIN_STEPS_FOR_INTERVAL or variance == 0:
        return 1
    quiet = max(5, ceil(log10(n)))
    longest = ceil(sqrt(n)) + quiet
    size = 2 ** ceil(np.log2(2 * n))
    covariance = np.fft.irfft(np.abs(np.fft.rfft(centred, size)) ** 2, size)[: longest + 1] / n
    loud = np.abs(covariance[1:] / variance) >= 2 * sqrt(log10(n) / n)
    # The last lag before `quiet` insignificant ones in a row.
    sums = np.convolve(loud, np.ones(quiet), mode="valid")
    silent = np.flatnonzero(sums == 0)
    last = int(silent[0]) if len(silent) else int(np.flatnonzero(loud)[-1]) + 1
    reach = min(2 * max(last, 1), longest)
    lags = np.arange(1, reach + 1)
    weight = np.minimum(1.0, 2 * (1 - lags / reach))
    spread = 2 * float(np.sum(weight * lags * covariance[1 : reach + 1]))
    level = variance + 2 * float(np.sum(weight * covariance[1 : reach + 1]))
    if level <= 0:
        return 1
    best = (2 * spread**2 / (4 / 3 * level**2)) ** (1 / 3) * n ** (1 / 3)
    return int(np.clip(ceil(best), 1, ceil(min(3 * sqrt(n), n / 3))))


@dataclass(frozen=True)
class Resampled:
    """Values that a statistic takes when the series is drawn again, each centred on the statistic itself.

    Args:
        mean: of each resample.
        centred: the series less its mean.
        starts: of the blocks of each resample, [resamples, blocks].
        length: of a block.
        plain: mean of each resample of `centred`.
    """

    mean: FloatArray
    centred: FloatArray
    starts: np.ndarray[Any, np.dtype[np.int32]]
    length: int
    plain: FloatArray

    @cached_property
    def sd(self) -> FloatArray:
        """Standard deviation of each resample; few ask for it, and it takes as long as the mean."""
        second = _drawn_means(self.centred**2, self.starts, self.length)
        sd = np.sqrt(np.maximum(second - self.plain**2, 0))
        return np.asarray(sd - sd.mean() + self.centred.std())


def block_bootstrap(values: FloatArray, rng: Generator, num_resamples: int = NUM_RESAMPLES) -> Resampled | None:
    """Mean and standard deviation of `num_resamples` circular moving-block resamples of a stationary series.

    Blocks keep the autocorrelation that resampling single steps would destroy (intervals would come out far too
    narrow). Both statistics need only sums over blocks, so a resample costs one number per block. None for a series
    shorter than `MIN_STEPS_FOR_INTERVAL`.
    """
    n = len(values)
    if n < MIN_STEPS_FOR_INTERVAL:
        return None
    length = max(block_length(values), ceil(n / MAX_BLOCKS))
    centre = values.mean()
    centred = values - centre
    blocks = ceil(n / length)
    starts = rng.integers(0, n, size=(num_resamples, blocks), dtype=np.int32)
    plain = _drawn_means(centred, starts, length)
    return Resampled(plain - plain.mean() + centre, centred, starts, length, plain)


def _drawn_means(values: FloatArray, starts: np.ndarray[Any, np.dtype[np.int32]], length: int) -> FloatArray:
    """Mean of each resample of blocks that start there, [resamples]."""
    return np.asarray(_block_sums(values, length)[starts].sum(axis=1) / (starts.shape[1] * length))


def _block_sums(values: FloatArray, length: int) -> FloatArray:
    """Sum of the `length` values from each position on, the series closed to a circle."""
    cumulated = np.concatenate(([0.0], np.cumsum(np.concatenate((values, values[: length - 1])))))
    return cumulated[length:] - cumulated[:-length]
