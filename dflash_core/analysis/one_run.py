"""Everything that a report takes from one run. The run's own tables are let go of: a report on many runs holds only these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.random import Generator

from dflash_core.analysis.checkpoints import checkpoint_tables
from dflash_core.analysis.compare import Estimate, estimates
from dflash_core.analysis.findings.cleared import Cleared, cleared
from dflash_core.analysis.findings.detect import find_all, finding_rows
from dflash_core.analysis.findings.finding import Context, Finding
from dflash_core.analysis.findings.loss_parts import fit_loss, loss_part_rows, without_mix
from dflash_core.analysis.findings.spikes import norm_by_position
from dflash_core.analysis.findings.waits import waits
from dflash_core.analysis.history import History, history_of
from dflash_core.analysis.intervals import named_rng
from dflash_core.analysis.order import run_length_rows
from dflash_core.analysis.reader import matrix, numbers
from dflash_core.analysis.run_tables import bucket_rows, grad_norm_rows, run_row
from dflash_core.analysis.runs import Run, RunFacts, load_metrics
from dflash_core.analysis.series import FloatArray, detrended
from dflash_core.analysis.tables import TABLES, in_order, table_of
from dflash_core.config import AnalyzeConfig


@dataclass(frozen=True)
class Depths:
    """Queue depths: `step` [snapshots], `depths` [snapshots, targets], in batches."""

    step: FloatArray
    depths: FloatArray


@dataclass(frozen=True)
class RunAnalysis:
    """What is known of a run.

    Args:
        facts: its documents.
        row: its row of `runs`.
        tables: its rows of every table that has a `run_id`, by the table's name.
        estimates: its compared metrics, with resamples where they are series.
        findings: what the detectors found, strongest first.
        cleared: what checkpoints, epoch starts, resumes and changes of the learning rate do to its loss.
        evals: its evaluation rows.
        depths: None where they were not recorded.
        history: moments and mixes over time.
        noise: of each step, what `loss` and `expected_acceptance_length` are above their running median; NaN where not finite.
    """

    facts: RunFacts
    row: Mapping[str, Any]
    tables: Mapping[str, pa.Table]
    estimates: Mapping[str, Estimate]
    findings: tuple[Finding, ...]
    cleared: tuple[Cleared, ...]
    evals: pa.Table
    depths: Depths | None
    history: History
    noise: Mapping[str, FloatArray]

    @property
    def run_id(self) -> str:
        return self.facts.run_id

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def curves(self) -> pa.Table:
        """Rows of the table `curves`, by step."""
        return self.tables["curves"]


def analyze_one(facts: RunFacts, config: AnalyzeConfig, rng: Generator, bins: pd.DataFrame | None) -> RunAnalysis:
    """Read a run's metrics and take from them what a report needs.

    Args:
        rng: the run's own; the same one gives the same result.
        bins: `length_bins` of the dataset, where there are any.

    Raises:
        UserError, DataError: see `runs.load_run`.
    """
    run = load_metrics(facts)
    checkpoints, about_checkpoints = checkpoint_tables(run, named_rng(rng, "checkpoints"))
    row, norms = run_row(run, named_rng(rng, "order"), about_checkpoints), grad_norm_rows(run, config.spike_mad)
    found = find_all(run, Context(config, named_rng(rng, "findings"), bins))
    fit = fit_loss(run)
    adjusted = without_mix(numbers(run.steps, "loss"), fit)
    rows = {
        "runs": [row],
        "run_lengths": run_length_rows(run),
        "bucket_stats": bucket_rows(run),
        "grad_norms": norms,
        "checkpoints": checkpoints,
        "findings": finding_rows(found),
        "loss_parts": loss_part_rows(run.run_id, fit, named_rng(rng, "loss_parts")),
        "run_positions": norm_by_position(run, named_rng(rng, "run_positions")),
        "waits": waits(run),
    }
    tables = {name: in_order(name, table_of(name, content)) for name, content in rows.items()}
    return RunAnalysis(
        facts=facts,
        row=row,
        tables={**tables, "curves": curves(run, adjusted)},
        estimates=estimates(run, row, norms[0], named_rng(rng, "estimates")),
        findings=tuple(found),
        cleared=tuple(cleared(run, adjusted)),
        evals=run.evals,
        depths=_depths(run),
        history=history_of(run),
        noise={name: _noise(numbers(run.steps, name)) for name in ("loss", "expected_acceptance_length")},
    )


def _noise(values: FloatArray) -> FloatArray:
    finite = np.isfinite(values)
    noise = np.full(len(values), np.nan)
    if finite.any():
        noise[finite] = detrended(values[finite])
    return noise


def curves(run: Run, adjusted: FloatArray) -> pa.Table:
    """The run's rows of `curves`, one per step. `num_anchors_seen` counts those of the step too."""
    steps = run.steps
    columns = {name: pc.cast(steps[name], pa.float64()) for name in ("loss", "grad_norm", "expected_acceptance_length")}
    columns["run_id"] = pa.array([run.run_id] * len(steps), pa.string())
    columns["step"] = steps["step"]
    columns["num_anchors_seen"] = pa.array(np.cumsum(numbers(steps, "num_anchors", missing=0)).astype(np.int64))
    columns["loss_adjusted"] = pa.array(adjusted)
    schema = TABLES["curves"]
    return pa.table({name: columns[name] for name in schema.names}, schema=schema)


def _depths(run: Run) -> Depths | None:
    """Of the monitor's snapshots, or of the steps where there are none."""
    for table in (run.stats, run.steps):
        depths = matrix(table, "prefetch_depths")
        step = numbers(table, "step")
        known = np.isfinite(step) & np.isfinite(depths).any(axis=1) if depths.shape[1] else np.zeros(len(depths), dtype=bool)
        if known.any():
            return Depths(step[known], depths[known])
    return None
