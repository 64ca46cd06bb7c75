"""Run folders in, tables and a report out."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from dflash_core.analysis.build_report import Content, build_report
from dflash_core.analysis.compare import Estimate, comparison_rows
from dflash_core.analysis.equal_anchors import progress_of
from dflash_core.analysis.groups import group_comparison_rows, group_rows, groups_of
from dflash_core.analysis.many_runs import SEED, analyze_each
from dflash_core.analysis.one_run import RunAnalysis
from dflash_core.analysis.report import Report, to_html, to_markdown
from dflash_core.analysis.runs import RunFacts, incomparable, load_all_facts
from dflash_core.analysis.tables import SCHEMA_VERSION, in_order, table_of, write_table
from dflash_core.config import AnalyzeConfig
from dflash_core.errors import DataError, UserError
from dflash_core.provenance import write_atomically, write_json

logger = logging.getLogger(__name__)


def analyze_runs(
    run_dirs: Sequence[Path],
    out_dir: Path,
    config: AnalyzeConfig,
    *,
    dataset_dir: Path | None = None,
) -> dict[str, Any]:
    """Compare runs: Parquet tables, `report.html`, `report.md`, and `manifest.json`, which is written last.

    The first run is the one that the report compares the others with. Metrics of runs that have ended are compacted to
    Parquet in their folders.

    Args:
        run_dirs: run folders (docs/design.md 4), at least one.
        out_dir: folder of the report; files of an earlier report in it are replaced.
        config: with `allow_different`, runs of other data, target, step size or loss are compared, too; the differences then
            head the report.
        dataset_dir: dataset folder for the length histogram; default: the one that the first run names. Without the
            histogram's files the report says so and lacks the plot.

    Returns:
        The manifest, JSON values only: `paths` by name, `num_rows` per table, `comparison` (one dict per run: name, order,
        num_steps, final_loss, acceptance lengths, longest_run, its bounds, gradient norms), `summary` (lines of text),
        `differences` (what makes the runs incomparable).

    Raises:
        UserError: no runs, a folder is not a run, or the runs cannot be compared; names folder, file or key.
        DataError: a file is damaged; names file and row.
    """
    facts = load_all_facts(run_dirs)
    differences = incomparable(facts)
    if differences and not config.allow_different:
        how = "analyze.allow_different: true in the experiment, or dflash analyze --allow-different, compares them anyway"
        raise UserError(f"the runs cannot be compared: {'; '.join(differences)} ({how})")
    histogram, bins = _histogram(facts[0], dataset_dir)
    runs = analyze_each(facts, config, bins)
    progress = progress_of(runs, np.random.default_rng(SEED))
    found = {run.run_id: {**run.estimates, **progress.estimates[run.run_id]} for run in runs}
    comparisons = comparison_rows(found)
    groups, by_run = groups_of(facts), {run.run_id: {**found[run.run_id], **_of_groups(run)} for run in runs}
    tables = {name: pa.concat_tables([run.tables[name] for run in runs]) for name in runs[0].tables}
    tables["progress"] = table_of("progress", [row for rows in progress.rows.values() for row in rows])
    tables["comparisons"] = table_of("comparisons", comparisons)
    tables["groups"] = table_of("groups", group_rows(groups, by_run))
    tables["group_comparisons"] = table_of("group_comparisons", group_comparison_rows(groups, by_run))
    histories = {run.run_id: run.history for run in runs}
    report = build_report(Content(runs, comparisons, tables, config, differences, histogram, bins, histories))
    (out_dir / "manifest.json").unlink(missing_ok=True)  # what is half replaced must not look finished
    for name, table in tables.items():
        write_table(out_dir / f"{name}.parquet", name, _in_order(name, table, runs))
    write_atomically(out_dir / "report.html", to_html(report))
    write_atomically(out_dir / "report.md", to_markdown(report))
    manifest = _manifest(runs, tables, report, out_dir)
    write_json(out_dir / "manifest.json", manifest)
    logger.info("report on %d runs: %s", len(runs), out_dir / "report.html")
    return manifest


def _in_order(name: str, table: pa.Table, runs: Sequence[RunAnalysis]) -> pa.Table:
    """A table sorted; those of single runs are sorted already, and long."""
    if name not in runs[0].tables:
        return in_order(name, table)
    return pa.concat_tables([run.tables[name] for run in sorted(runs, key=lambda run: run.run_id)])


def _of_groups(run: RunAnalysis) -> dict[str, Estimate]:
    """Metrics that only groups are compared by."""
    parts = {row["part"]: row["share"] for row in run.tables["loss_parts"].to_pylist()}
    return {"loss_composition_share": Estimate(parts["composition"], "share of variance")} if "composition" in parts else {}


def _histogram(run: RunFacts, dataset_dir: Path | None) -> tuple[pd.DataFrame | None, pd.DataFrame | None]:
    """`length_histogram` and `length_bins` of the dataset, None where there are none."""
    named = run.manifest.get("dataset")
    folder = dataset_dir or (Path(named) if isinstance(named, str) else None)
    if dataset_dir is not None and not dataset_dir.is_dir():
        raise UserError(f"{dataset_dir}: no such dataset folder")
    if folder is None:
        return None, None
    return _frame(folder / "length_histogram.parquet"), _frame(folder / "length_bins.parquet")


def _frame(path: Path) -> pd.DataFrame | None:
    if not path.is_file():
        return None
    try:
        frame: pd.DataFrame = pq.read_table(path).to_pandas()
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from None
    missing = {"lower", "upper", "num_sequences"} - set(frame.columns)
    if missing:
        raise DataError(f"{path}: lacks the columns {', '.join(sorted(missing))}")
    return frame


COMPARED_COLUMNS = (
    "run_id", "name", "order", "state", "num_steps", "final_loss", "acceptance_length", "acceptance_length_untrained", "lossless",
    "longest_run", "longest_run_in_epoch", "shortest_possible_longest_run",
    "shuffled_longest_run_median", "grad_norm_median", "grad_norm_p95",
    "padding_efficiency", "anchors_per_s",
)  # fmt: skip


def _manifest(runs: Sequence[RunAnalysis], tables: Mapping[str, pa.Table], report: Report, out_dir: Path) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "run_ids": [run.run_id for run in runs],
        "run_dirs": [str(run.facts.folder) for run in runs],
        "paths": {
            "report_html": str(out_dir / "report.html"),
            "report_md": str(out_dir / "report.md"),
            **{name: str(out_dir / f"{name}.parquet") for name in tables},
        },
        "num_rows": {name: len(table) for name, table in tables.items()},
        "comparison": [{name: row[name] for name in COMPARED_COLUMNS} for row in (run.row for run in runs)],
        "summary": list(report.summary),
        "differences": list(report.differences),
    }
