"""The paired bootstrap: how much more one drafter accepts than another on the same prompts.

A hard prompt is hard for both drafters. Resampling prompts, and taking both drafters' rounds of the prompts drawn, lets that
cancel: the interval of the difference is narrower than what two separate intervals would suggest. Each resampling takes the
difference of the ratios of sums, total tokens over total rounds, as acceptance lengths are computed. The interval lies between
percentiles (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, section 13.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SEED = 0
DRAWS_AT_ONCE = 1 << 20
Counts = tuple[float, float]
"""Tokens and rounds of one prompt."""


@dataclass(frozen=True)
class Estimate:
    """A value with the ends of its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Compared:
    """Tokens per round of two drafters on the same prompts, and their difference (new less old)."""

    new: Estimate
    old: Estimate
    difference: Estimate


def compare_paired(new: Sequence[Counts], old: Sequence[Counts], confidence: float, num_samples: int) -> Compared | None:
    """Compare two drafters, prompt by prompt.

    Args:
        new, old: tokens and rounds of each prompt, in the same order. A prompt on which either had no round (an answer of one
            token) says nothing about it and is left out.
        num_samples: resamplings; the same counts always give the same interval.

    Returns:
        None with fewer than two prompts that count.
    """
    pairs = np.asarray([[*n, *o] for n, o in zip(new, old, strict=True)], dtype=np.float64).reshape(-1, 4)
    counted = pairs[(pairs[:, 1] > 0) & (pairs[:, 3] > 0)]
    count = len(counted)
    if count < 2:
        return None
    generator = np.random.default_rng(SEED)
    resampled: list[NDArray[np.float64]] = []
    rows = max(1, DRAWS_AT_ONCE // count)
    for first in range(0, num_samples, rows):
        drawn = generator.integers(count, size=(min(rows, num_samples - first), count))
        resampled.append(counted[drawn].sum(axis=1))
    sums, whole = np.concatenate(resampled), counted.sum(axis=0)
    ratios = {"new": sums[:, 0] / sums[:, 1], "old": sums[:, 2] / sums[:, 3]}
    values = {"new": float(whole[0] / whole[1]), "old": float(whole[2] / whole[3])}

    def estimate(value: float, drawn: NDArray[np.float64]) -> Estimate:
        tail = (1 - confidence) / 2
        low, high = np.quantile(drawn, [tail, 1 - tail])
        return Estimate(value, float(low), float(high))

    return Compared(
        estimate(values["new"], ratios["new"]),
        estimate(values["old"], ratios["old"]),
        estimate(values["new"] - values["old"], ratios["new"] - ratios["old"]),
    )
