"""The report's plots as plotly figures. Colours of paper, text and grid are left to the page, which knows dark from light."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dflash_core.analysis.one_run import RunAnalysis
from dflash_core.analysis.reader import numbers
from dflash_core.analysis.run_tables import evals
from dflash_core.analysis.series import FloatArray, running_median

PALETTE = ("#2f7fd8", "#e2711d", "#2a9d6f", "#c2529b", "#8a6fd1", "#a98600", "#d1495b", "#4a99a8")
MAX_POINTS = 1500
MAX_QUEUE_PLOTS = 6
# The single steps of more runs than these would hide each other.
MAX_RAW_SERIES = 4
MAX_SOURCES = 6
OTHER_SOURCES = "other sources"


@dataclass(frozen=True)
class Plot:
    """A figure with the text around it."""

    key: str
    title: str
    caption: str
    figure: go.Figure


def colour(i: int) -> str:
    return PALETTE[i % len(PALETTE)]


def thin(x: FloatArray, y: FloatArray, max_points: int = MAX_POINTS) -> tuple[FloatArray, FloatArray]:
    """At most `max_points` of a series: of each stretch its lowest and its highest point, so that no spike is lost."""
    if len(x) <= max_points:
        return x, y
    edges = np.linspace(0, len(x), max_points // 2 + 1).astype(int)
    filled_low, filled_high = np.where(np.isfinite(y), y, np.inf), np.where(np.isfinite(y), y, -np.inf)
    low = [a + int(filled_low[a:b].argmin()) for a, b in pairwise(edges.tolist())]
    high = [a + int(filled_high[a:b].argmax()) for a, b in pairwise(edges.tolist())]
    kept = np.unique(np.concatenate([low, high]))
    return x[kept], y[kept]


def _layout(figure: go.Figure, x: str, y: str, *, log_y: bool = False, height: int = 360) -> go.Figure:
    # The legend stands above the plot and takes a line per two names on a narrow page.
    names = sum(trace.showlegend is not False for trace in figure.data)
    figure.update_layout(
        template="none",
        height=height + 9 * max(0, names - 4),
        margin={"l": 56, "r": 12, "t": 12, "b": 48},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "xanchor": "left", "x": 0},
        hovermode="closest",
        font={"size": 12},
    )
    figure.update_xaxes(title={"text": x, "standoff": 8}, zeroline=False, automargin=True)
    figure.update_yaxes(title={"text": y, "standoff": 8}, zeroline=False, automargin=True)
    if log_y:
        ticks = log_ticks([trace.y for trace in figure.data])
        figure.update_yaxes(type="log", tickvals=ticks, ticktext=[f"{tick:,g}" for tick in ticks])
    return figure


def log_ticks(series: Sequence[FloatArray]) -> list[float]:
    """Ticks of a logarithmic axis: powers of ten, and 2 and 5 times them when fewer than three decades are shown."""
    values = np.concatenate([np.asarray(values, dtype=np.float64) for values in series])
    values = values[np.isfinite(values) & (values > 0)]
    if not len(values):
        return [1.0]
    low, high = int(np.floor(np.log10(values.min()))), int(np.ceil(np.log10(values.max())))
    steps = (1.0, 2.0, 5.0) if high - low < 3 else (1.0,)
    return [step * 10.0**power for power in range(low, high + 1) for step in steps]


def _small(values: FloatArray) -> FloatArray:
    """Half the size in the page; a plot shows no more than float32 holds."""
    return np.asarray(values, dtype=np.float32)


def _series_figure(runs: Sequence[RunAnalysis], column: str, width: int) -> go.Figure:
    figure = go.Figure()
    for i, run in enumerate(runs):
        x, y = numbers(run.curves, "step"), numbers(run.curves, column)
        y = np.where(np.isfinite(y), y, np.nan)
        style = {"legendgroup": run.run_id, "line": {"color": colour(i), "width": 1}, "opacity": 0.35, "hoverinfo": "skip"}
        if len(runs) <= MAX_RAW_SERIES:
            thin_x, thin_y = thin(x, y)
            figure.add_scatter(x=thin_x, y=_small(thin_y), mode="lines", showlegend=False, **style)
        stride = max(1, len(x) // MAX_POINTS)
        median = running_median(y, width)[::stride]
        style = {"legendgroup": run.run_id, "line": {"color": colour(i), "width": 2.5}}
        figure.add_scatter(x=x[::stride], y=_small(median), mode="lines", name=escape(run.name), **style)
    return figure


def _series_caption(runs: Sequence[RunAnalysis], width: int) -> str:
    thick = f"unning median over {width} steps."
    return f"Thin: each step. Thick: r{thick}" if len(runs) <= MAX_RAW_SERIES else f"R{thick}"


def loss_plot(runs: Sequence[RunAnalysis], width: int) -> Plot:
    figure = _layout(_series_figure(runs, "loss", width), "optimizer step", "loss, nats")
    caption = f"{_series_caption(runs, width)} Scatter around the median is what mixing changes."
    losses = np.concatenate([numbers(run.curves, "loss") for run in runs])
    losses = losses[np.isfinite(losses)]
    if len(losses):
        # The first steps of an untrained draft are many times what follows and would flatten the rest of the curve.
        usual, highest = float(np.quantile(losses, 0.97)) * 1.15, float(losses.max())
        if highest > 1.5 * usual:
            figure.update_yaxes(range=[0, usual])
            caption += f" The first steps reach {highest:.3g} and leave the plot."
    return Plot("loss", "Loss", caption, figure)


def grad_norm_plot(runs: Sequence[RunAnalysis], width: int) -> Plot:
    figure = _layout(_series_figure(runs, "grad_norm", width), "optimizer step", "gradient norm (log)", log_y=True)
    limits = {run.facts.setting("train.clip_norm") for run in runs}
    caption = f"Norm before clipping. {_series_caption(runs, width)}"
    limit = next(iter(limits))
    if len(limits) == 1 and isinstance(limit, (int, float)) and limit > 0:
        figure.add_hline(y=limit, line={"dash": "dash", "width": 1, "color": "#888888"})
        caption += f" Above the dashed line ({limit:g}) gradients are scaled down."
    return Plot("grad_norm", "Gradient norm", caption, figure)


def run_length_plot(runs: Sequence[RunAnalysis], rows: Sequence[Mapping[str, Any]], lengths: pd.DataFrame) -> Plot:
    """`rows` are those of `runs`, `lengths` the `run_lengths` table."""
    figure = go.Figure()
    flat = lengths[lengths["level"] == "flat"].groupby(["run_id", "run_length"])["count"].sum()
    for i, run in enumerate(runs):
        counts = flat.loc[run.run_id]
        figure.add_bar(x=counts.index.to_numpy(), y=counts.to_numpy(), name=escape(run.name), marker={"color": colour(i)})
    _layout(figure, "length of a bucket run, batches", "number of runs (log)", log_y=True)
    figure.update_layout(bargap=0.15, bargroupgap=0.05)
    figure.update_xaxes(tickformat="d", dtick=1 if lengths["run_length"].max() <= 20 else None)
    for bound in sorted({int(row["shortest_possible_longest_run"]) for row in rows}):
        _mark(figure, bound + 0.5, f"R* = {bound}", "dash", 1.0)
    shuffled = sorted({float(row["shuffled_longest_run_median"]) for row in rows})
    if max(shuffled) > max(int(row["shortest_possible_longest_run"]) for row in rows):
        _mark(figure, shuffled[len(shuffled) // 2], "shuffling", "dot", 0.88)
    caption = (
        "A bucket run is a stretch of consecutive batches from one length bucket, in the order of training. Dashed: R*, the "
        "shortest that the longest run of an epoch can be. Dotted: what shuffling at random gives for it (median)."
    )
    return Plot("run_lengths", "Bucket runs", caption, figure)


def _mark(figure: go.Figure, x: float, text: str, dash: str, height: float) -> None:
    """A vertical line with its name beside the top."""
    figure.add_vline(x=x, line={"dash": dash, "width": 1.5, "color": "#888888"})
    label = {"xref": "x", "yref": "paper", "yanchor": "top", "xanchor": "left", "showarrow": False}
    figure.add_annotation(x=x, y=height, text=f" {escape(text)}", **label)


def length_plot(bins: pd.DataFrame, histogram: pd.DataFrame) -> Plot:
    """Lengths of the dataset by source (`length_bins`), and the bucket boundaries (`length_histogram`)."""
    figure = go.Figure()
    for number, (source, part) in enumerate(_by_source(bins)):
        lower, upper = part["lower"].to_numpy(dtype=float), part["upper"].to_numpy(dtype=float)
        bars = {"x": (lower + upper) / 2, "width": upper - lower, "y": part["num_sequences"].to_numpy()}
        figure.add_bar(**bars, marker={"color": colour(number), "line": {"width": 0}}, name=escape(source))
    _layout(figure, "sequence length, tokens", "sequences")
    figure.update_layout(barmode="stack")
    for edge in histogram["upper"].to_numpy(dtype=float)[:-1]:
        figure.add_vline(x=edge, line={"dash": "dash", "width": 1, "color": "#888888"})
    caption = (
        "Sequences of the dataset by length and source. Dashed: boundaries between the buckets; lengths up to a boundary lie "
        "left of it."
    )
    return Plot("lengths", "Sequence lengths and bucket boundaries", caption, figure)


def _by_source(bins: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Bins of the largest sources, and those of all others together, each with one row per bin."""
    if "source" not in bins.columns:
        bins = bins.assign(source="sequences")
    largest = bins.groupby("source")["num_sequences"].sum().sort_values(ascending=False, kind="stable").index[:MAX_SOURCES]
    shown = bins["source"].where(bins["source"].isin(largest), OTHER_SOURCES)
    sums = bins.assign(source=shown).groupby(["source", "lower", "upper"], as_index=False)["num_sequences"].sum()
    names = [name for name in [*largest, OTHER_SOURCES] if (sums["source"] == name).any()]
    return [(str(name), sums[sums["source"] == name]) for name in names]


def queue_plots(runs: Sequence[RunAnalysis]) -> list[Plot]:
    """One plot per run, of the first few runs that recorded depths; all with the same scale."""
    found = [(run, run.depths.step, run.depths.depths) for run in runs if run.depths is not None][:MAX_QUEUE_PLOTS]
    top = max((float(np.nanmax(depths)) for _, _, depths in found), default=0.0)
    plots = []
    for number, (run, step, depths) in enumerate(found):
        figure = go.Figure()
        for target in range(depths.shape[1]):
            x, y = thin(step, depths[:, target])
            style = {"line": {"color": colour(target), "width": 1.5, "shape": "hv"}, "name": f"target {target}"}
            figure.add_scatter(x=x, y=_small(y), mode="lines", showlegend=True, **style)
        _layout(figure, "optimizer step", "batches waiting", height=280)
        figure.update_yaxes(range=[0, top * 1.08 + 0.2])
        caption = "Batches in the queue of each target. At zero: slow loading, or no byte budget left. At the cap: slow targets."
        plots.append(Plot(f"queue_{number}", f"Queue depths: {run.name}", caption, figure))
    return plots


def acceptance_plots(runs: Sequence[RunAnalysis]) -> list[Plot]:
    """Acceptance by slot, from the last evaluation of each run; none where no run was evaluated."""
    plots = []
    for metric, title, caption in (
        (
            "prefix_survival",
            "Accepted up to a slot",
            "Share of blocks whose drafted tokens are accepted up to and including the slot.",
        ),
        (
            "conditional_acceptance",
            "Acceptance of a slot",
            "Share accepted at the slot, among blocks accepted up to the slot before.",
        ),
    ):
        figure = go.Figure()
        for i, run in enumerate(runs):
            for kind, dash in (("trained", "solid"), ("untrained", "dot")):
                rows = evals(run.evals, kind, metric)
                rows = rows[(rows["source"] == "all") & rows["position"].notna()]
                rows = rows[rows["step"] == rows["step"].max()] if rows["step"].notna().any() else rows
                if len(rows):
                    name = escape(run.name) + ("" if kind == "trained" else ", untrained")
                    line = {"color": colour(i), "width": 2, "dash": dash}
                    x, y = rows["position"].to_numpy(dtype=float), rows["value"].to_numpy(dtype=float)
                    figure.add_scatter(x=x, y=_small(y), mode="lines+markers", name=name, line=line)
        if figure.data:
            _layout(figure, "slot of the block", "share")
            figure.update_yaxes(range=[0, 1.03], tickformat=".0%")
            figure.update_xaxes(tickformat="d")
            plots.append(Plot(metric, title, caption + " Dotted: before training.", figure))
    return plots
