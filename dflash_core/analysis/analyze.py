"""Run folders in, tables and a report out."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from dflash_core.analysis import plots
from dflash_core.analysis.checkpoints import checkpoint_rows
from dflash_core.analysis.compare import comparison_rows, estimates
from dflash_core.analysis.order import run_length_rows
from dflash_core.analysis.report import Report, to_html, to_markdown
from dflash_core.analysis.run_tables import bucket_rows, grad_norm_rows, run_row
from dflash_core.analysis.runs import Run, incomparable, load_runs
from dflash_core.analysis.summary import (
    MAX_COMPARISON_TABLES,
    bucket_table,
    comparison_tables,
    run_table,
    shortened,
    summary_lines,
)
from dflash_core.analysis.tables import SCHEMA_VERSION, table_of, write_table
from dflash_core.config import AnalyzeConfig
from dflash_core.errors import DataError, UserError
from dflash_core.provenance import write_atomically, write_json

logger = logging.getLogger(__name__)

# Of resamples and permutations. Fixed, so that the same runs always give the same report.
SEED = 20_260_101
SORTED_BY = {
    "runs": ["run_id"],
    "run_lengths": ["run_id", "level", "bucket", "run_length"],
    "bucket_stats": ["run_id", "bucket"],
    "grad_norms": ["run_id", "group"],
    "checkpoints": ["run_id", "step", "attempt"],
    "comparisons": ["metric", "run_a", "run_b"],
}


def analyze_runs(
    run_dirs: Sequence[Path],
    out_dir: Path,
    config: AnalyzeConfig,
    *,
    dataset_dir: Path | None = None,
    allow_different: bool = False,
) -> dict[str, Any]:
    """Compare runs: six Parquet tables, `report.html`, `report.md`, and `manifest.json`, which is written last.

    The first run is the one that the report compares the others with. Metrics of runs that have ended are compacted to
    Parquet in their folders.

    Args:
        run_dirs: run folders (docs/design.md 4), at least one.
        out_dir: folder of the report; files of an earlier report in it are replaced.
        dataset_dir: dataset folder for the length histogram; default: the one that the first run names. Without the
            histogram's files the report says so and lacks the plot.
        allow_different: compare runs of other data, target or step size too; the differences then head the report.

    Returns:
        The manifest, JSON values only: `paths` by name, `num_rows` per table, `comparison` (one dict per run: name, order,
        num_steps, final_loss, acceptance lengths, longest_run, its bounds, gradient norms), `summary` (lines of text),
        `differences` (what makes the runs incomparable).

    Raises:
        UserError: no runs, a folder is not a run, or the runs cannot be compared; names folder, file or key.
        DataError: a file is damaged; names file and row.
    """
    runs = load_runs(run_dirs)
    differences = incomparable(runs)
    if differences and not allow_different:
        raise UserError(f"the runs cannot be compared: {'; '.join(differences)} (comparing them anyway has to be asked for)")
    histogram, bins = _histogram(runs[0], dataset_dir)
    rows = _all_rows(runs, config)
    tables = {name: table_of(name, content) for name, content in rows.items()}
    report = _report(runs, rows, tables, config, differences, histogram, bins)
    (out_dir / "manifest.json").unlink(missing_ok=True)  # what is half replaced must not look finished
    for name, table in tables.items():
        write_table(out_dir / f"{name}.parquet", name, table.sort_by([(key, "ascending") for key in SORTED_BY[name]]))
    write_atomically(out_dir / "report.html", to_html(report))
    write_atomically(out_dir / "report.md", to_markdown(report))
    manifest = _manifest(runs, rows, report, out_dir)
    write_json(out_dir / "manifest.json", manifest)
    logger.info("report on %d runs: %s", len(runs), out_dir / "report.html")
    return manifest


def _all_rows(runs: Sequence[Run], config: AnalyzeConfig) -> dict[str, list[dict[str, Any]]]:
    """The rows of every table; runs in the order given."""
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in SORTED_BY}
    found = {}
    for number, run in enumerate(runs):
        order_rng, series_rng = np.random.default_rng([SEED, number]).spawn(2)
        row, norms = run_row(run, order_rng), grad_norm_rows(run, config.spike_mad)
        rows["runs"].append(row)
        rows["run_lengths"] += run_length_rows(run)
        rows["bucket_stats"] += bucket_rows(run)
        rows["grad_norms"] += norms
        rows["checkpoints"] += checkpoint_rows(run)
        found[run.run_id] = estimates(run, row, norms[0], series_rng)
    rows["comparisons"] = comparison_rows(found)
    return rows


def _histogram(run: Run, dataset_dir: Path | None) -> tuple[pd.DataFrame | None, pd.DataFrame | None]:
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


def _report(
    runs: Sequence[Run],
    rows: Mapping[str, list[dict[str, Any]]],
    tables: Mapping[str, pa.Table],
    config: AnalyzeConfig,
    differences: Sequence[str],
    histogram: pd.DataFrame | None,
    bins: pd.DataFrame | None,
) -> Report:
    notes, shown = [], []
    if histogram is not None and bins is not None:
        shown.append(plots.length_plot(bins, histogram))
    else:
        notes.append("The dataset folder has no length histogram, so that plot is left out.")
    shown.append(plots.run_length_plot(runs, rows["runs"], tables["run_lengths"].to_pandas()))
    shown += [plots.loss_plot(runs, config.smoothing_steps), plots.grad_norm_plot(runs, config.smoothing_steps)]
    queues = plots.queue_plots(runs)
    if len(runs) > len(queues):
        notes.append(f"Queue depths are shown for {len(queues)} of {len(runs)} runs.")
    if len(runs) - 1 > MAX_COMPARISON_TABLES:
        notes.append(f"Shown are the first {MAX_COMPARISON_TABLES} comparisons; comparisons.parquet holds those of all pairs.")
    ranges = {}
    if histogram is not None and "bucket" in histogram:
        edges = zip(*(histogram[name].astype(int).tolist() for name in ("bucket", "lower", "upper")), strict=True)
        ranges = {bucket: f"{lower + 1:,}–{upper:,}" for bucket, lower, upper in edges}
    names = shortened([run.name for run in runs])
    return Report(
        title=f"Runs compared: {names}" if len(runs) > 1 else f"Run: {names}",
        subtitle=f"dataset {rows['runs'][0]['dataset'] or 'unknown'} · target {rows['runs'][0]['target'] or 'unknown'} · "
        f"made {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        summary=summary_lines(runs, rows["runs"], rows["comparisons"], differences),
        differences=differences,
        runs=run_table(rows["runs"]),
        comparisons=comparison_tables(rows["runs"], rows["comparisons"]),
        buckets=bucket_table(rows["runs"], rows["bucket_stats"], ranges),
        plots=[*shown, *queues, *plots.acceptance_plots(runs)],
        notes=notes,
    )


COMPARED_COLUMNS = (
    "run_id", "name", "order", "state", "num_steps", "final_loss", "acceptance_length", "acceptance_length_untrained", "lossless",
    "longest_run", "longest_run_in_epoch", "shortest_possible_longest_run",
    "shuffled_longest_run_median", "grad_norm_median", "grad_norm_p95",
    "padding_efficiency", "anchors_per_s",
)  # fmt: skip


def _manifest(runs: Sequence[Run], rows: Mapping[str, list[dict[str, Any]]], report: Report, out_dir: Path) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "run_ids": [run.run_id for run in runs],
        "run_dirs": [str(run.folder) for run in runs],
        "paths": {
            "report_html": str(out_dir / "report.html"),
            "report_md": str(out_dir / "report.md"),
            **{name: str(out_dir / f"{name}.parquet") for name in rows},
        },
        "num_rows": {name: len(content) for name, content in rows.items()},
        "comparison": [{name: row[name] for name in COMPARED_COLUMNS} for row in rows["runs"]],
        "summary": list(report.summary),
        "differences": list(report.differences),
    }
