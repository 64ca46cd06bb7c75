"""Runs where they have seen as many anchors: batches of two runs differ in size, so equal steps are not equal training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.random import Generator

from dflash_core.analysis.compare import Estimate, mean_estimate
from dflash_core.analysis.intervals import mean_error, named_rng, trend_degree
from dflash_core.analysis.one_run import RunAnalysis
from dflash_core.analysis.reader import numbers
from dflash_core.analysis.series import FloatArray

NUM_POINTS = 20
# A value at a point is the mean over this share of the last common point's anchors, before it.
WINDOW_SHARE = 0.1
MEASURED_KINDS = ("training", "trained")


@dataclass(frozen=True)
class Progress:
    """Rows of `progress`, by run, and the metrics at the last point that all runs have."""

    rows: Mapping[str, list[dict[str, Any]]]
    estimates: Mapping[str, Mapping[str, Estimate]]


def progress_of(runs: Sequence[RunAnalysis], rng: Generator) -> Progress:
    """All runs on one grid of anchors seen; no rows at all where a run did not count its anchors.

    The interval of a mean loss is Student's (`intervals.mean_error`); none where its steps are worth too few independent ones.
    """
    least = min(int(numbers(run.curves, "num_anchors_seen")[-1]) for run in runs)
    if least <= 0:
        return Progress({run.run_id: [] for run in runs}, {run.run_id: {} for run in runs})
    grid = [least * number // NUM_POINTS for number in range(1, NUM_POINTS + 1)]
    width = least * WINDOW_SHARE
    return Progress(
        {run.run_id: _rows(run, grid, width) for run in runs},
        {run.run_id: _estimates(run, least, width, named_rng(rng, run.run_id)) for run in runs},
    )


def _rows(run: RunAnalysis, grid: Sequence[int], width: float) -> list[dict[str, Any]]:
    seen, step = numbers(run.curves, "num_anchors_seen"), numbers(run.curves, "step")
    columns = {name: numbers(run.curves, name) for name in ("loss", "loss_adjusted", "expected_acceptance_length")}
    measured_step, measured = _measured(run)
    rows = []
    for point in sorted({*grid, int(seen[-1])}):
        first, end = window(seen, point, width)
        low, high = _interval(columns["loss"][first:end])
        newest = int(np.searchsorted(measured_step, step[end - 1] + 1, side="right")) if end else 0
        rows.append(
            {
                "run_id": run.run_id,
                "num_anchors_seen": point,
                "step": int(step[end - 1]) if end else None,
                **{name: _mean(values[first:end]) for name, values in columns.items()},
                "loss_low": low,
                "loss_high": high,
                "acceptance_length": float(measured[newest - 1]) if newest else None,
            }
        )
    return rows


def window(seen: FloatArray, point: float, width: float) -> tuple[int, int]:
    """First row and end of the steps that end in the `width` anchors up to a point; of long steps, at least the last one."""
    end = int(np.searchsorted(seen, point, side="right"))
    return min(int(np.searchsorted(seen, point - width, side="right")), max(0, end - 1)), end


def _measured(run: RunAnalysis) -> tuple[FloatArray, FloatArray]:
    """Steps trained until a measurement of the acceptance length over all sources, and what it gave."""
    table = run.evals
    wanted = pc.and_(pc.equal(table["metric"], "acceptance_length"), pc.equal(table["source"], "all"))
    wanted = pc.and_(wanted, pc.and_(pc.is_null(table["position"]), pc.is_valid(table["value"])))
    found = table.filter(wanted)
    found = found.filter(np.isin(found["kind"].to_pylist(), MEASURED_KINDS))
    step, value = numbers(found, "step"), numbers(found, "value")
    order = np.argsort(step, kind="stable")
    return step[order], value[order]


def _mean(values: FloatArray) -> float | None:
    """Mean of the finite values; NaN where values were measured and none is."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else float("nan") if len(values) else None


def _interval(values: FloatArray) -> tuple[float | None, float | None]:
    values = values[np.isfinite(values)]
    error = mean_error(values, trend_degree(len(values)))
    if error is None or not error.is_known:
        return None, None
    return float(values.mean()) - error.half, float(values.mean()) + error.half


def _estimates(run: RunAnalysis, point: int, width: float, rng: Generator) -> dict[str, Estimate]:
    seen = numbers(run.curves, "num_anchors_seen")
    first, end = window(seen, point, width)
    found = {}
    for metric, column, unit in (
        ("loss_at_equal_anchors", "loss", "nats"),
        ("expected_acceptance_at_equal_anchors", "expected_acceptance_length", "tokens, +1 included"),
    ):
        values, noise = numbers(run.curves, column)[first:end], run.noise[column][first:end]
        known = np.isfinite(values) & np.isfinite(noise)
        if not known.any():
            found[metric] = Estimate(_mean(values), unit)
            continue
        found[metric] = mean_estimate(values[known], noise[known], unit, named_rng(rng, metric))
    return found
