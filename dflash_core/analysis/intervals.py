"""How uncertain the mean of an autocorrelated series is, and random streams that depend on nothing but names.

A block bootstrap alone gives intervals that are too narrow where a series is short against its memory: blocks that are long
enough are too few. And a trend that is taken out by a running median takes the slow part of the noise with it, at any length.
So the scale of an interval comes from here: the long-run variance of what a polynomial leaves, by the equal-weighted cosine
estimator with Student's quantile (Lazarus, Lewis, Stock and Watson 2018, HAR inference: recommendations for practice),
of a series made nearly white by an AR(1) filter (Andrews and Monahan 1992) whose coefficient is corrected for its bias (Kendall
1954). Where what is left is worth too few independent steps, there is no interval: none would hold what it promises.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from math import inf, sqrt
from typing import Any

import numpy as np
from numpy.random import Generator, SeedSequence

FloatArray = np.ndarray[Any, np.dtype[np.float64]]

MIN_STEPS_FOR_INTERVAL = 20
# Below this the uncertainty of the memory itself is as large as what it says: simulated intervals hold 50 to 90 % and not 95.
MIN_INDEPENDENT = 10.0
CONFIDENCE = 0.95
NORMAL_95 = 1.959964
# Lazarus et al. 2018: of n values, this many times n^(2/3) cosines.
COSINES, MIN_COSINES = 0.4, 4
MAX_MEMORY = 0.995
# The means of so many pieces say as much about slow things as a longer series.
MAX_PIECES = 2000
# Trends: a polynomial whose degree grows with the steps, one for each of so many.
STEPS_PER_DEGREE, MAX_DEGREE = 100, 5


@dataclass(frozen=True)
class MeanError:
    """How uncertain a mean is.

    Args:
        error: standard error.
        white: what it would be if the steps were independent.
        free: degrees of freedom that `error` is known with.
        independent: how many independent steps would say as much as the autocorrelated ones do.
    """

    error: float
    white: float
    free: float
    independent: float

    @property
    def is_known(self) -> bool:
        """Whether there are independent steps enough for an interval."""
        return self.independent >= MIN_INDEPENDENT

    @property
    def half(self) -> float:
        """Half the width of the 95 % interval: Student's, and at least that of independent steps, for of a short series the few
        cosines may all be small by luck."""
        return max(student(self.free) * self.error, NORMAL_95 * self.white)


def student(free: float) -> float:
    """Upper quantile of Student's t for a two-sided 95 % interval."""
    from scipy.special import stdtrit  # slow to import

    return NORMAL_95 if free == inf else float(stdtrit(free, 1 - (1 - CONFIDENCE) / 2))


def trend_degree(num_steps: int) -> int:
    """Degree of the polynomial that stands for the trend of a series of so many steps."""
    return int(np.clip(num_steps // STEPS_PER_DEGREE, 1, MAX_DEGREE))


def in_pieces(values: FloatArray) -> FloatArray:
    """Means of pieces of a long series, at least `MAX_PIECES`; of a short one the values. The last few values may be left out."""
    per_piece = max(1, len(values) // MAX_PIECES)
    num_pieces = len(values) // per_piece
    return np.asarray(values[: num_pieces * per_piece].reshape(num_pieces, per_piece).mean(axis=1))


def without_polynomial(values: FloatArray, degree: int) -> FloatArray:
    """The values less the polynomial that fits them best (least squares)."""
    if degree == 0:
        return np.asarray(values - values.mean())
    basis, _ = np.linalg.qr(np.vander(np.linspace(-1, 1, len(values)), degree + 1))
    return np.asarray(values - basis @ (basis.T @ values))


def mean_error(values: FloatArray, degree: int = 0) -> MeanError | None:
    """How uncertain the mean of a series is that is a polynomial trend and stationary noise. Linear in the steps.

    Args:
        values: finite, one a step.
        degree: of the trend; 0 for a stationary series.

    Returns:
        None for fewer than `MIN_STEPS_FOR_INTERVAL` values. `free` counts the cosines and that the AR(1) coefficient r is an
        estimate, too: the variance of log(1 / (1 - r)^2) is about 4 / independent.
    """
    if len(values) < MIN_STEPS_FOR_INTERVAL:
        return None
    means = in_pieces(values)
    num_pieces, per_piece = len(means), len(values) // len(means)
    noise = without_polynomial(means, degree)
    power = float(noise @ noise)
    if power <= 1e-18 * float(values @ values):  # rounding
        return MeanError(0.0, 0.0, inf, float(len(values)))
    memory = _memory(noise, power, degree)
    white = noise[1:] - memory * noise[:-1]
    independent = num_pieces * (1 - memory) / (1 + memory)
    strength = _cosines(white, degree)
    uncertainty = 2 / len(strength) + (4 / independent if memory > 0 else 0.0)
    variance = float(strength @ strength) / len(strength) / (1 - memory) ** 2
    return MeanError(
        error=sqrt(variance / num_pieces),
        white=sqrt(power) / num_pieces,
        free=2 / uncertainty,
        independent=per_piece * independent if memory == 0 else independent,
    )


def variance_error(values: FloatArray) -> MeanError | None:
    """`mean_error` of the squares of a stationary series around its mean.

    If the series is an AR(1) process of coefficient r, its squares remember by r^2. Where that says that they are worth fewer
    independent steps than what they show of it themselves, it is believed: squares scatter too much to show their memory.
    """
    own, squares = mean_error(values), mean_error((values - values.mean()) ** 2) if len(values) else None
    if own is None or squares is None:
        return None
    memory = (len(values) - own.independent) / (len(values) + own.independent)
    most = len(values) * (1 - memory**2) / (1 + memory**2)
    return replace(squares, independent=min(squares.independent, most))


def _memory(noise: FloatArray, power: float, degree: int) -> float:
    """Coefficient of an AR(1) process; what fitting mean and trend takes from it is given back (of order 1 / n)."""
    found = float(noise[1:] @ noise[:-1]) / power
    return min(MAX_MEMORY, max(0.0, found + (1 + degree + (3 + degree) * max(0.0, found)) / len(noise)))


def _cosines(values: FloatArray, degree: int) -> FloatArray:
    """Coefficients of the slowest cosines (an orthonormal DCT-II) behind those that a polynomial of the degree has eaten."""
    n = len(values)
    count = int(np.clip(COSINES * n ** (2 / 3), MIN_COSINES, n - 2 - degree))
    number = np.arange(degree + 1, degree + count + 1)
    mirrored = np.fft.rfft(np.concatenate((values, values[::-1])))[number]
    return np.asarray((mirrored * np.exp(-0.5j * np.pi * number / n)).real / sqrt(2 * n))


def rescaled(drawn: FloatArray, around: float, error: MeanError) -> FloatArray:
    """Resamples of a mean moved to `around` and widened until their normal 95 % range is as wide as the interval."""
    spread = float(drawn.std())
    return np.asarray(around + (drawn - drawn.mean()) * (error.half / (NORMAL_95 * spread) if spread > 0 else 0.0))


def named_rng(rng: Generator, name: str) -> Generator:
    """The generator of this name below `rng`: it depends on what `rng` was seeded with and on the name, and on nothing else -
    not on what was drawn from `rng`, nor on how many others were made, nor in which order."""
    seed = rng.bit_generator.seed_seq
    assert isinstance(seed, SeedSequence), "only generators of numpy's default_rng have named ones below"
    words = np.frombuffer(blake2b(name.encode(), digest_size=16).digest(), dtype="<u4").tolist()
    return np.random.default_rng(SeedSequence(seed.entropy, spawn_key=(*seed.spawn_key, *words)))
