"""Content of a report with something for every section and every plot, from fake runs, fake findings and fake rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from dflash_core.analysis.build_report import Content
from dflash_core.analysis.compare import comparison_rows
from dflash_core.analysis.findings.finding import Finding
from dflash_core.analysis.history import history_of
from dflash_core.analysis.one_run import RunAnalysis, analyze_one
from dflash_core.analysis.runs import load_all_facts, load_metrics
from dflash_core.analysis.tables import TABLES, table_of
from dflash_core.config import AnalyzeConfig
from tests.fake_runs import FakeRun, write_run

CONFIG = AnalyzeConfig()
STAGES = ("drafter.forward", "drafter.wait", "drafter.optimizer", "target.forward")


def finding(run_id: str, kind: str = "loss_composition", **changes: Any) -> Finding:
    """A finding of the kind, with a figure, an interval, evidence and steps."""
    base: dict[str, Any] = {
        "kind": kind,
        "run_id": run_id,
        "strength": "strong",
        "title": "The mix of buckets explains 71 % of the loss variance",
        "text": "Of the variance of the loss around its trend, 71 % (64 to 77 %) goes with the bucket shares of the step.",
        "advice": "Set bucketing.order to diverse, which gives every step nearly the same mix.",
        "measure": "share of the variance from the mix",
        "value": 0.71,
        "unit": "1",
        "low": 0.64,
        "high": 0.77,
        "threshold": 0.3,
        "table": "steps",
        "rows": "step BETWEEN 20 AND 30",
        "evidence": {"sd_before": 0.31, "sd_after": 0.17, "by_bucket": [0.1, 0.2, 0.4]},
        "at_steps": (20, 25, 30),
    }
    return Finding(**{**base, **changes})


def analysed(folders: Sequence[Path], bins: pd.DataFrame | None = None) -> list[RunAnalysis]:
    """The runs without what detectors and models find in them: tests put their own in."""
    return [_bare(analyze_one(facts, CONFIG, np.random.default_rng(7), bins)) for facts in load_all_facts(folders)]


def two_runs(root: Path) -> list[RunAnalysis]:
    """A run in diverse and one in shuffled order, of 60 steps each."""
    return analysed([write_run(root / name, FakeRun(name=name, order=name, num_steps=60)) for name in ("diverse", "shuffle")])


def _bare(run: RunAnalysis) -> RunAnalysis:
    curves = run.curves.set_column(run.curves.schema.get_field_index("loss_adjusted"), "loss_adjusted", run.curves["loss"])
    none = {name: table_of(name, []) for name in ("findings", "loss_parts", "run_positions", "waits")}
    return replace(run, findings=(), tables={**run.tables, **none, "curves": curves})


def content(runs: Sequence[RunAnalysis], histogram: pd.DataFrame | None = None, bins: pd.DataFrame | None = None) -> Content:
    """What `analyze_runs` would make the report from, with the runs' histories."""
    comparisons = comparison_rows({run.run_id: run.estimates for run in runs})
    tables = {name: pa.concat_tables([run.tables[name] for run in runs]) for name in runs[0].tables}
    tables["comparisons"] = table_of("comparisons", comparisons)
    tables = {name: table_of(name, []) for name in ("progress", "groups", "group_comparisons")} | tables
    histories = {run.run_id: history_of(load_metrics(run.facts)) for run in runs}
    return Content(runs, comparisons, tables, CONFIG, [], histogram, bins, histories)


def with_everything(
    runs: Sequence[RunAnalysis], histogram: pd.DataFrame | None = None, bins: pd.DataFrame | None = None
) -> Content:
    """Content with findings and rows in every table."""
    full = [_enriched(run, number) for number, run in enumerate(runs)]
    made = content(full, histogram, bins)
    return replace(made, tables={**made.tables, **{name: table_of(name, rows) for name, rows in _group_rows().items()}})


def _enriched(run: RunAnalysis, number: int) -> RunAnalysis:
    curves = run.curves
    step = curves["step"].to_numpy()
    adjusted = 2 + 3 * np.exp(-step / 60) + 0.02 * np.sin(step)
    place = TABLES["curves"].names.index("loss_adjusted")
    tables = {
        **run.tables,
        "curves": curves.set_column(place, "loss_adjusted", pa.array(adjusted)),
        **{name: table_of(name, rows) for name, rows in _rows(run, number).items()},
    }
    spikes = finding(
        run.run_id,
        "spikes_in_bucket_runs",
        strength="moderate",
        title="Gradient spikes fall into runs of the longest bucket",
        at_steps=(40, 41, 42),
    )
    weak = finding(run.run_id, "padding", strength="weak", title="Other boundaries would save 4 % of the padding", at_steps=())
    return replace(run, tables=tables, findings=(finding(run.run_id), spikes, weak)[: 3 - number])


def _rows(run: RunAnalysis, number: int) -> dict[str, list[dict[str, Any]]]:
    base = {"run_id": run.run_id}
    parts = [("composition", 0.5), ("trend", 0.2), ("rest", 0.3)]
    return {
        "loss_parts": [
            {**base, "part": part, "share": share, "low": share - 0.05, "high": share + 0.05, "sd": 0.1} for part, share in parts
        ],
        "run_positions": [
            {
                **base, "level": "flat", "position": i, "num_steps": 50 - i, "grad_norm_mean": 0.5 + 0.1 * i + 0.1 * number,
                "grad_norm_low": 0.45 + 0.1 * i, "grad_norm_high": 0.6 + 0.2 * i, "loss_mean": 2.0, "loss_low": 1.9,
                "loss_high": 2.1,
            }
            for i in range(1, 6)
        ],
        "waits": [
            {**base, "cell": 0, "stage": stage, "seconds": 10.0, "share_of_time": share, "per_batch_s": 0.1}
            for stage, share in zip(STAGES, (0.5, 0.3 - 0.1 * number, 0.05, 0.15 + 0.1 * number), strict=True)
        ],
        "progress": [
            {
                **base, "num_anchors_seen": 1000 * i, "step": 10 * i, "loss": 2 + 3 / i, "loss_low": 1.9 + 3 / i,
                "loss_high": 2.1 + 3 / i,
                "loss_adjusted": 2 + 3 / i, "expected_acceptance_length": 1 + 0.2 * i,
                "acceptance_length": 1 + 0.21 * i if i % 4 == 0 else None,
            }
            for i in range(1, 11)
        ],
    }  # fmt: skip


def _group_rows() -> dict[str, list[dict[str, Any]]]:
    mean = {"metric": "final_loss", "num_runs": 3, "mean": 1.2, "sd": 0.03, "low": 1.15, "high": 1.25, "unit": "nats"}
    return {
        "groups": [{**mean, "group": group} for group in ("diverse", "shuffle")],
        "group_comparisons": [
            {
                "metric": "final_loss", "group_a": "diverse", "group_b": "shuffle", "num_a": 3, "num_b": 3, "paired": True,
                "value_a": 1.2,
                "value_b": 1.3, "difference": 0.1, "ci_low": 0.04, "ci_high": 0.16, "effect_size": 1.5,
                "effect_kind": "standardised difference", "unit": "nats",
            }
        ],
    }  # fmt: skip
