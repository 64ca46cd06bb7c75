"""What the draft is worth: acceptance by slot, and progress at equal anchors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pyarrow as pa
import pyarrow.compute as pc

from dflash_core.analysis.one_run import RunAnalysis
from dflash_core.analysis.plots.figure import Line, Plot, Style, band, draw_lines, lay_out, styles, whole

BY_SLOT = {
    "prefix_survival": (
        "Accepted up to a slot",
        "Share of blocks whose drafted tokens are accepted up to and including the slot.",
    ),
    "conditional_acceptance": (
        "Acceptance of a slot",
        "Share accepted at the slot, among blocks accepted up to the slot before; a slot at zero has learnt nothing.",
    ),
}
MAX_BANDS = 4
EVAL_COLUMNS = ["kind", "source", "step", "position", "metric", "value"]


def acceptance_plots(runs: Sequence[RunAnalysis]) -> list[Plot]:
    """Acceptance by slot, from the last evaluation of each run; none where no run was evaluated."""
    plots, look, rows = [], styles(runs), eval_rows(runs, tuple(BY_SLOT))
    for metric, (title, caption) in BY_SLOT.items():
        figure = go.Figure()
        for kind, dash in (("trained", "solid"), ("untrained", "dot")):
            of_kind = rows[(rows["kind"] == kind) & (rows["metric"] == metric) & rows["position"].notna()]
            newest = of_kind.groupby("run")["step"].transform("max")
            lines = lines_by_run(runs, look, of_kind[(of_kind["step"] == newest) | newest.isna()], "position")
            style = {"mode": "lines+markers", "line": {"width": 2 if len(runs) <= MAX_BANDS else 1, "dash": dash}}
            draw_lines(figure, lines, "slot %{x}: %{y:.1%}", suffix="" if kind == "trained" else ", untrained", **style)
        if figure.data:
            shares = {"range": [0, 1.03], "tickformat": ".0%"}
            lay_out(figure, "slot of the block", "share", xaxis={"tickformat": "d", "dtick": 1}, yaxis=shares)
            untrained = any(trace.line.dash == "dot" for trace in figure.data)
            plots.append(Plot(metric, title, caption + (" Dotted: before training." if untrained else ""), figure))
    return plots


def eval_rows(runs: Sequence[RunAnalysis], metrics: tuple[str, ...]) -> pd.DataFrame:
    """Rows of the streams `evals` over all sources, of these metrics, of all runs at once; `run` is the number of the run.

    They are sorted by step and position; of one that was made again, the last is kept.
    """
    parts = []
    for number, run in enumerate(runs):
        table = run.evals
        chosen = pc.and_(pc.equal(table["source"], "all"), pc.is_in(table["metric"], value_set=pa.array(metrics)))
        part = table.select(EVAL_COLUMNS).filter(chosen)
        parts.append(part.append_column("run", pa.array(np.full(len(part), number))))
    frame: pd.DataFrame = pa.concat_tables(parts).to_pandas()
    frame = frame.drop_duplicates(["run", "kind", "metric", "step", "position"], keep="last")
    return frame.sort_values(["run", "step", "position"], kind="stable")


def lines_by_run(runs: Sequence[RunAnalysis], look: Sequence[Style], rows: pd.DataFrame, column: str) -> list[Line]:
    """A line of `value` over `column` for each run that has rows (of `eval_rows`)."""
    parts = dict(iter(rows.groupby("run")))
    found = [(number, parts[number]) for number in range(len(runs)) if number in parts]
    return [
        Line(look[number], runs[number].name, whole(part[column].to_numpy(dtype=float)), part["value"].to_numpy(dtype=float))
        for number, part in found
    ]


def progress_plots(runs: Sequence[RunAnalysis], progress: pd.DataFrame) -> list[Plot]:
    """Loss and acceptance length at equal anchors seen (table `progress`); none where it has no rows."""
    loss, length = go.Figure(), go.Figure()
    lines: dict[str, list[Line]] = {"loss": [], "expected_acceptance_length": [], "acceptance_length": []}
    parts = dict(iter(progress.sort_values(["run_id", "num_anchors_seen"]).groupby("run_id")))
    for run, look in zip(runs, styles(runs), strict=True):
        if run.run_id not in parts:
            continue
        part = parts[run.run_id]
        x = part["num_anchors_seen"].to_numpy(dtype=float)
        low, high = (part[f"loss_{end}"].to_numpy(dtype=float) for end in ("low", "high"))
        if len(runs) <= MAX_BANDS and np.isfinite(low).any():
            loss.add_scatter(**band(x, low, high, look.colour, look.group))
        for column, found in lines.items():
            y = part[column].to_numpy(dtype=float)
            known = np.isfinite(y)
            if known.any():
                found.append(Line(look, run.name, x[known], y[known]))
    hover = "%{x:,.0f} anchors: %{y:.4g}"
    draw_lines(loss, lines["loss"], hover, mode="lines", line={"width": 2})
    draw_lines(length, lines["expected_acceptance_length"], hover, mode="lines", line={"width": 2})
    marker = {"size": 8, "symbol": "diamond"}
    draw_lines(length, lines["acceptance_length"], hover, ", measured", mode="markers", marker=marker)
    told = (
        (loss, "progress_loss", "Loss at equal anchors seen", "loss, nats", "The lower curve learns more from as much data."),
        (
            length,
            "progress_acceptance",
            "Acceptance length at equal anchors seen",
            "tokens per target forward",
            "The higher curve learns more from as much data; line: expected in training, diamonds: measured by decoding.",
        ),
    )
    plots = []
    for figure, key, title, axis, caption in told:
        if figure.data:
            lay_out(figure, "anchors seen", axis)
            shaded = " Shaded: 95 % interval." if any(trace.fill == "toself" for trace in figure.data) else ""
            plots.append(Plot(key, title, caption + shaded, figure))
    return plots
