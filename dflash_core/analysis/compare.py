"""Differences between runs, with intervals where a series gives them.

Steps of a training are autocorrelated, so intervals come from a block bootstrap (`series.resampled_means`), none where the steps
are worth too few independent ones, and there is an effect size instead of a p-value. An interval covers the noise between steps
of these runs; it cannot know what another seed would have given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import isfinite, log, sqrt
from typing import Any

import numpy as np
from numpy.random import Generator

from dflash_core.analysis.intervals import CONFIDENCE, mean_error, named_rng, trend_degree, variance_error
from dflash_core.analysis.reader import numbers
from dflash_core.analysis.run_tables import last_part, settled
from dflash_core.analysis.runs import Run
from dflash_core.analysis.series import FloatArray, detrended, resampled_means, resampled_sds

# More runs (or groups) than these are compared with the first one only.
ALL_PAIRS_UP_TO = 12

# Metrics that are one number per run: column of `runs`, unit, whether a ratio of two values makes sense.
SINGLE_VALUES: tuple[tuple[str, str, bool], ...] = (
    ("acceptance_length", "tokens, +1 included", False),
    ("longest_run", "batches", False),
    ("longest_run_in_epoch", "batches", False),
    ("mean_run", "batches", False),
    ("runs_z", "1", False),
    ("lag1_correlation", "1", False),
    ("prefix_deviation", "batches", False),
    ("step_share_sd", "share of a step", False),
    ("padding_efficiency", "share of computed tokens", False),
    ("grad_norm_p95", "1", True),
    ("tokens_per_s", "tokens/s", True),
    ("anchors_per_s", "anchors/s", True),
    ("data_wait_share", "share of step time", False),
    ("target_wait_share", "share of step time", False),
)


@dataclass(frozen=True)
class Estimate:
    """A metric of one run.

    Args:
        resampled: what the value becomes in resamples; None for one number per run, and where there is no interval.
        scale: for a standardised difference.
        independent: how many independent steps would say as much as those of its series do; None where it is no series, or one
            of fewer than 20 steps. Below `intervals.MIN_INDEPENDENT` there is no interval.
    """

    value: float | None
    unit: str
    resampled: FloatArray | None = None
    scale: float | None = None
    is_ratio: bool = False
    independent: float | None = None


def estimates(run: Run, row: Mapping[str, Any], norm_row: Mapping[str, Any], rng: Generator) -> dict[str, Estimate]:
    """All compared metrics of a run, from its row of `runs` and its `all` row of `grad_norms`.

    Series metrics leave out the first tenth of the steps, and `final_loss` all but the last. Each draws from a generator of
    its own name below `rng`. Noise, the scale of an effect, is what remains around the running median.
    """
    found: dict[str, Estimate] = {}
    loss, norm = numbers(run.steps, "loss"), numbers(run.steps, "grad_norm")
    final = last_part(loss)
    found["final_loss"] = mean_estimate(
        final, detrended(loss[np.isfinite(loss)])[-len(final) :], "nats", named_rng(rng, "final_loss")
    )
    found["loss_sd_detrended"] = _sd(settled(loss), "nats", named_rng(rng, "loss_sd_detrended"))
    found["grad_norm_mean"] = mean_estimate(settled(norm), detrended(settled(norm)), "1", named_rng(rng, "grad_norm_mean"))
    found["grad_norm_sd_detrended"] = _sd(settled(norm), "1", named_rng(rng, "grad_norm_sd_detrended"))
    per_thousand = 1000 * norm_row["num_spikes"] / norm_row["num_steps"]
    found["grad_norm_spikes"] = Estimate(per_thousand, "spikes per 1000 steps")
    found["clip_share"] = Estimate(norm_row["clip_share"], "share of steps")
    for name, unit, is_ratio in SINGLE_VALUES:
        found[name] = Estimate(row[name], unit, is_ratio=is_ratio)
    return found


def mean_estimate(values: FloatArray, noise: FloatArray, unit: str, rng: Generator) -> Estimate:
    """The mean of finite values; `noise`, their deviations from their running median, is the scale of a difference.

    For the interval the trend is a polynomial: a running median would take the slow part of the noise for trend.
    """
    if not len(values):
        return Estimate(float("nan"), unit)
    degree = trend_degree(len(values))
    error = mean_error(values, degree)
    drawn = resampled_means(values, rng, degree=degree, error=error)
    return Estimate(
        float(values.mean()), unit, drawn, float(noise.std()), independent=None if error is None else error.independent
    )


def _sd(values: FloatArray, unit: str, rng: Generator) -> Estimate:
    if not len(values):
        return Estimate(float("nan"), unit, is_ratio=True)
    noise = detrended(values)
    error = variance_error(noise)
    return Estimate(
        float(noise.std()),
        unit,
        resampled_sds(noise, rng, error=error),
        is_ratio=True,
        independent=None if error is None else error.independent,
    )


def comparison_rows(found: Mapping[str, Mapping[str, Estimate]]) -> list[dict[str, Any]]:
    """The rows of `comparisons`, for every pair of runs or, of more than `ALL_PAIRS_UP_TO`, for each one with the first.

    Runs are in the order given, and differences are b minus a.

    `ci_low` and `ci_high` bound 95 % of the differences of resamples; null where a metric is one number per run, the series is
    short, or its `independent_steps`, those of the run that has fewer, are too few. `effect_size` is, by `effect_kind`, the
    `standardised difference` (by the step noise of both runs) or the `log ratio` (natural logarithm of b over a); null where
    neither makes sense.
    """
    rows = []
    few = len(found) <= ALL_PAIRS_UP_TO
    first = next(iter(found))
    for run_a, run_b in combinations(found, 2) if few else ((first, other) for other in found if other != first):
        for metric, a in found[run_a].items():
            b = found[run_b][metric]
            low, high = _interval(a, b)
            effect, kind = _effect(a, b)
            known = (a.independent, b.independent)
            rows.append(
                {
                    "metric": metric,
                    "run_a": run_a,
                    "run_b": run_b,
                    "value_a": a.value,
                    "value_b": b.value,
                    "difference": None if a.value is None or b.value is None else b.value - a.value,
                    "ci_low": low,
                    "ci_high": high,
                    "effect_size": effect,
                    "effect_kind": kind,
                    "independent_steps": None if None in known else min(one for one in known if one is not None),
                    "unit": a.unit,
                }
            )
    return rows


def _interval(a: Estimate, b: Estimate) -> tuple[float | None, float | None]:
    if a.resampled is None or b.resampled is None:
        return None, None
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(b.resampled - a.resampled, [tail, 1 - tail])
    return float(low), float(high)


def _effect(a: Estimate, b: Estimate) -> tuple[float | None, str | None]:
    if a.value is None or b.value is None or not (isfinite(a.value) and isfinite(b.value)):
        return None, None
    if a.is_ratio and a.value > 0 and b.value > 0:
        return log(b.value / a.value), "log ratio"
    if a.scale and b.scale:
        return (b.value - a.value) / sqrt((a.scale**2 + b.scale**2) / 2), "standardised difference"
    return None, None


def excludes_zero(row: Mapping[str, Any]) -> bool:
    """Whether the interval of a comparison lies on one side of zero."""
    return row["ci_low"] is not None and (row["ci_low"] > 0 or row["ci_high"] < 0)


def find(rows: Sequence[Mapping[str, Any]], metric: str, run_a: str, run_b: str) -> Mapping[str, Any] | None:
    """The comparison of a metric between two runs."""
    matching = (r for r in rows if (r["metric"], r["run_a"], r["run_b"]) == (metric, run_a, run_b))
    return next(matching, None)
