"""Intervals of autocorrelated series hold the truth as often as they say, or are not given."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.signal import lfilter

from dflash_core.analysis.compare import mean_estimate
from dflash_core.analysis.findings.curve_tools import ratio_interval
from dflash_core.analysis.findings.pipeline_rows import share_of
from dflash_core.analysis.intervals import MIN_INDEPENDENT, mean_error, student, trend_degree, variance_error
from dflash_core.analysis.series import detrended, resampled_means, resampled_sds


def ar1(n: int, memory: float, rng: np.random.Generator) -> np.ndarray:
    return np.asarray(lfilter([1.0], [1.0, -memory], rng.normal(size=n + 200))[200:])


def held(n: int, memory: float, repetitions: int, slope: float = 0.0) -> tuple[float, float]:
    """How often an interval is given, and how often such a one holds the mean of trend and noise."""
    rng = np.random.default_rng([n, round(100 * memory)])
    given = covered = 0
    trend = slope * np.linspace(-1, 1, n)
    for _ in range(repetitions):
        values = ar1(n, memory, rng) + trend
        drawn = mean_estimate(values, detrended(values), "nats", rng).resampled
        if drawn is not None:
            low, high = np.quantile(drawn, [0.025, 0.975])
            given, covered = given + 1, covered + int(low <= 0 <= high)
    return given / repetitions, covered / max(given, 1)


@pytest.mark.parametrize(("n", "memory", "slope"), [(100, 0.0, 0.0), (100, 0.8, 0.0), (300, 0.8, 20.0), (1000, 0.8, 0.0)])
def test_nineteen_of_twenty_intervals_hold_the_truth(n: int, memory: float, slope: float) -> None:
    """A block bootstrap of what a running median leaves holds 55, 80 and 69 % with the memory of 0.8, whatever the trend."""
    given, covered = held(n, memory, 100, slope)
    assert covered >= 0.88 and given >= (0.4 if n == 100 and memory else 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [0.0, 0.5, 0.8, 0.95])
def test_coverage_over_lengths(memory: float) -> None:
    for n in (100, 300, 1000, 5000):
        given, covered = held(n, memory, 200)
        if n * (1 - memory) / (1 + memory) > 2 * MIN_INDEPENDENT:
            assert given >= 0.97 and 0.90 <= covered <= 0.995, (n, given, covered)
        elif n * (1 - memory) / (1 + memory) < MIN_INDEPENDENT / 2:
            assert given <= 0.2, (n, given)  # 2.6 independent steps: nobody can say


def test_the_error_is_that_of_an_ar1_process_and_so_are_the_independent_steps() -> None:
    rng = np.random.default_rng(0)
    for memory in (0.0, 0.5, 0.9):
        found = [mean_error(ar1(4000, memory, rng)) for _ in range(40)]
        errors, independent = ([getattr(one, name) for one in found if one] for name in ("error", "independent"))
        assert np.mean(errors) == pytest.approx(1 / (1 - memory) / math.sqrt(4000), rel=0.08)
        # In pieces of two steps they are at most that many.
        assert 0.5 < np.mean(independent) * (1 + memory) / (1 - memory) / 4000 < 1.1


def test_noise_that_cancels_itself_and_no_noise_at_all() -> None:
    rng = np.random.default_rng(1)
    flips = np.tile([1.0, -1.0], 200) + 0.01 * rng.normal(size=400)
    error = mean_error(flips)
    # The mean is known far better than that of independent steps, but an interval is never narrower.
    assert error is not None and error.error < 0.1 * error.white and error.half == pytest.approx(0.098, rel=1e-3)
    constant = mean_error(np.full(50, 0.1))
    assert constant is not None and constant.half == 0 and constant.is_known
    line = mean_error(np.linspace(0, 1, 50), 1)
    assert line is not None and line.half == 0
    assert mean_error(np.ones(19)) is None and variance_error(np.ones(0)) is None
    assert (resampled_means(np.full(50, 2.0), rng, 10) == 2.0).all() and (resampled_sds(np.full(50, 2.0), rng, 10) == 0.0).all()


def test_a_polynomial_is_taken_for_trend_and_not_for_noise() -> None:
    rng = np.random.default_rng(2)
    noise = rng.normal(size=400)
    place = np.linspace(-1, 1, 400)
    degree = trend_degree(400)
    plain, bent = mean_error(noise, degree), mean_error(noise + 9 * place - 5 * place**2, degree)
    assert plain is not None and bent is not None and bent.half == pytest.approx(plain.half)
    unaware = mean_error(noise + 9 * place, 0)
    assert unaware is not None and not unaware.is_known


def test_a_walk_has_no_interval_and_says_how_little_its_steps_are_worth() -> None:
    rng = np.random.default_rng(3)
    for n in (50, 300, 5000):
        walk = np.cumsum(rng.normal(size=n))
        estimate = mean_estimate(walk, detrended(walk), "nats", rng)
        if n == 50:
            assert estimate.independent is not None and estimate.independent < n / 4
        else:
            assert resampled_means(walk, rng) is None
    assert mean_estimate(np.ones(5), np.zeros(5), "nats", rng).independent is None


def test_of_a_standard_deviation_too() -> None:
    rng = np.random.default_rng(4)
    covered = 0
    for _ in range(100):
        drawn = resampled_sds(ar1(300, 0.6, rng), rng, 400)
        assert drawn is not None and (drawn > 0).all()
        low, high = np.quantile(drawn, [0.025, 0.975])
        covered += int(low <= 1.25 <= high)
    assert covered >= 86


def test_of_a_ratio_too() -> None:
    rng = np.random.default_rng(5)
    covered = given = 0
    for _ in range(100):
        below = 3 + ar1(200, 0.7, rng) ** 2
        above = 0.4 * below + 0.3 * ar1(200, 0.7, rng)
        ends = ratio_interval(above, below, rng)
        if ends is not None:
            given, covered = given + 1, covered + int(ends[0] <= 0.4 <= ends[1])
    assert given >= 95 and covered / given >= 0.88
    assert ratio_interval(np.zeros(50), np.zeros(50), rng) is None


def test_student_at_known_degrees_of_freedom() -> None:
    assert student(4) == pytest.approx(2.776, abs=1e-3) and student(math.inf) == pytest.approx(1.96, abs=1e-3)


def test_a_share_of_slow_steps_has_the_range_of_the_steps() -> None:
    """Thirty steps whose waits drift are worth fewer than ten, and yet each of them waited for more than a third of its time."""
    whole = np.linspace(1.0, 2.0, 30)
    part = whole * np.linspace(0.4, 0.7, 30)
    share = share_of(part, whole, np.random.default_rng(0))
    assert share is not None and (share.low, share.high) == (pytest.approx(0.4), pytest.approx(0.7))
    assert share.value == pytest.approx(part.sum() / whole.sum())
    independent = share_of(np.random.default_rng(1).uniform(0.4, 0.7, 30), np.ones(30), np.random.default_rng(0))
    assert independent is not None and 0.45 < independent.low < independent.value < independent.high < 0.65
    assert share_of(part[:10], whole[:10], np.random.default_rng(0)) is None
