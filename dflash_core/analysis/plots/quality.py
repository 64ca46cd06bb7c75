"""What the draft is worth: acceptance by slot, and progress at equal anchors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dflash_core.analysis.one_run import RunAnalysis
from dflash_core.analysis.plots.figure import Plot, band, label, lay_out, small, styles, whole
from dflash_core.analysis.run_tables import evals

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


def acceptance_plots(runs: Sequence[RunAnalysis]) -> list[Plot]:
    """Acceptance by slot, from the last evaluation of each run; none where no run was evaluated."""
    plots = []
    for metric, (title, caption) in BY_SLOT.items():
        figure = go.Figure()
        for run, look in zip(runs, styles(runs), strict=True):
            for kind, dash in (("trained", "solid"), ("untrained", "dot")):
                rows = evals(run.evals, kind, metric)
                rows = rows[(rows["source"] == "all") & rows["position"].notna()]
                rows = rows[rows["step"] == rows["step"].max()] if rows["step"].notna().any() else rows
                if len(rows):
                    name = look.name + ("" if kind == "trained" else ", untrained")
                    line = {"color": look.colour, "width": 2, "dash": dash}
                    x, y = whole(rows["position"].to_numpy()), small(rows["value"].to_numpy(dtype=float))
                    hover = f"slot %{{x}}: %{{y:.1%}}<extra>{label(run.name)}</extra>"
                    style = {"mode": "lines+markers", "legendgroup": f"{look.group} {kind}", "showlegend": look.show}
                    figure.add_scatter(x=x, y=y, name=name, line=line, hovertemplate=hover, **style)
        if figure.data:
            lay_out(figure, "slot of the block", "share")
            figure.update_yaxes(range=[0, 1.03], tickformat=".0%")
            figure.update_xaxes(tickformat="d", dtick=1)
            plots.append(Plot(metric, title, caption + " Dotted: before training.", figure))
    return plots


def progress_plots(runs: Sequence[RunAnalysis], progress: pd.DataFrame) -> list[Plot]:
    """Loss and acceptance length at equal anchors seen (table `progress`); none where it has no rows."""
    loss, length = go.Figure(), go.Figure()
    for run, look in zip(runs, styles(runs), strict=True):
        part = progress[progress["run_id"] == run.run_id].sort_values("num_anchors_seen")
        x = part["num_anchors_seen"].to_numpy(dtype=float)
        columns = {name: part[name].to_numpy(dtype=float) for name in part.columns if name != "run_id"}
        line = {"line": {"color": look.colour, "width": 2}, "legendgroup": look.group, "name": look.name, "showlegend": look.show}
        hover = f"%{{x:,.0f}} anchors: %{{y:.4g}}<extra>{label(run.name)}</extra>"
        if np.isfinite(columns["loss"]).any():
            if len(runs) <= MAX_BANDS and np.isfinite(columns["loss_low"]).any():
                loss.add_scatter(**band(x, columns["loss_low"], columns["loss_high"], look.colour, look.group))
            loss.add_scatter(x=x, y=small(columns["loss"]), mode="lines", hovertemplate=hover, **line)
        if np.isfinite(columns["expected_acceptance_length"]).any():
            y = small(columns["expected_acceptance_length"])
            length.add_scatter(x=x, y=y, mode="lines", hovertemplate=hover, **line)
        measured = columns["acceptance_length"]
        known = np.isfinite(measured)
        if known.any():
            marker = {"color": look.colour, "size": 8, "symbol": "diamond"}
            style = {"mode": "markers", "marker": marker, "legendgroup": look.group, "showlegend": False}
            length.add_scatter(x=x[known], y=small(measured[known]), hovertemplate=hover, **style)
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
