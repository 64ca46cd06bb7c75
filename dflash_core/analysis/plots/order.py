"""What was trained on and in which order: lengths, bucket runs, shares over time, and the gradient inside a bucket run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dflash_core.analysis.history import History
from dflash_core.analysis.one_run import RunAnalysis
from dflash_core.analysis.plots.figure import (
    MAX_RAW_SERIES,
    Line,
    Plot,
    Style,
    colour,
    draw_lines,
    label,
    lay_out,
    line_name,
    ordered_colour,
    small,
    styles,
    vertical_line,
    whole,
)

MAX_SOURCES = 6
OTHER_SOURCES = "other sources"
MAX_SHARE_PLOTS = 6
# What a bucket run is at each level, its unit, and the title.
LEVELS = {
    "flat": (
        "consecutive batches of one length bucket, in the order of training",
        "batches",
        "Bucket runs in the order of training",
    ),
    "cell": ("consecutive batches of one length bucket, as one drafter sees them", "batches", "Bucket runs as a cell sees them"),
    "step": (
        "consecutive optimizer steps that lean to the same bucket (hold more than one batch above the bucket's quota, or no "
        "other bucket)",
        "steps",
        "Bucket runs of whole steps",
    ),
}


def length_plot(bins: pd.DataFrame, histogram: pd.DataFrame) -> Plot:
    """Lengths of the dataset by source (`length_bins`), and the bucket boundaries (`length_histogram`)."""
    figure = go.Figure()
    for number, (source, part) in enumerate(_by_source(bins)):
        lower, upper = part["lower"].to_numpy(dtype=float), part["upper"].to_numpy(dtype=float)
        bars = {"x": (lower + upper) / 2, "width": upper - lower, "y": part["num_sequences"].to_numpy()}
        figure.add_bar(**bars, marker={"color": colour(number), "line": {"width": 0}}, name=label(source))
    borders = [vertical_line(float(edge)) for edge in histogram["upper"].to_numpy(dtype=float)[:-1]]
    lay_out(figure, "sequence length, tokens", "sequences", barmode="stack", shapes=borders)
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


def run_length_plots(runs: Sequence[RunAnalysis], lengths: pd.DataFrame) -> list[Plot]:
    """One plot per level of the `run_lengths` table; the cell's only where it differs from the flat one."""
    parts = {level: lengths[(lengths["level"] == level) & lengths["bucket"].notna()] for level in LEVELS}
    columns = ["run_id", "bucket", "run_length", "count"]
    same = parts["flat"][columns].reset_index(drop=True).equals(parts["cell"][columns].reset_index(drop=True))
    return [_level_plot(runs, level, part) for level, part in parts.items() if len(part) and not (level == "cell" and same)]


def _level_plot(runs: Sequence[RunAnalysis], level: str, lengths: pd.DataFrame) -> Plot:
    what, unit, title = LEVELS[level]
    by_bucket = len(runs) <= MAX_RAW_SERIES
    style = styles(runs)
    figure = make_subplots(rows=2, shared_xaxes=True, vertical_spacing=0.08, row_heights=[0.5, 0.5]) if by_bucket else go.Figure()
    sums = lengths.groupby(["run_id", "run_length"])["count"].sum()
    known = set(lengths["run_id"])
    found = [(run, look, sums.loc[run.run_id]) for run, look in zip(runs, style, strict=True) if run.run_id in known]
    lines = [Line(look, run.name, whole(counts.index.to_numpy()), counts.to_numpy(dtype=float)) for run, look, counts in found]
    if by_bucket:
        _draw_bars(figure, lines)
    else:
        draw_lines(figure, lines, "length %{x}: %{y:,}", mode="lines+markers", line={"width": 1}, marker={"size": 4})
    longest = int(lengths["run_length"].max())
    shapes, names, sentence, reach = _bounds(runs, longest) if level == "flat" else ([], [], "", 0.0)
    furthest = max(reach, longest) + 0.8
    axis = {**_whole_ticks(furthest), "range": [0.4, furthest]}
    what_x, height = f"length of a bucket run, {unit}", 480 if by_bucket else 340
    lay_out(
        figure, what_x, "bucket runs (log)", log_y=True, height=height, xaxis=axis, bargap=0.15, shapes=shapes, annotations=names
    )
    caption = f"A bucket run: {what}. Above: how many there are of each length." if by_bucket else f"A bucket run: {what}."
    if by_bucket:
        for i, (run, look) in enumerate(zip(runs, style, strict=True)):
            _draw_buckets(figure, lengths[lengths["run_id"] == run.run_id], look, (i - (len(runs) - 1) / 2) * 0.66 / len(runs))
        below = {"title": {"text": what_x, "standoff": 8}, "zeroline": False, "automargin": True, **axis}
        buckets = {"title": {"text": "bucket"}, "dtick": 1, "tickformat": "d", "zeroline": False, "automargin": True}
        figure.update_layout(xaxis={"title": {"text": ""}}, xaxis2=below, yaxis2=buckets)
        caption += " Below: in which buckets, a larger dot for more."
    key = "run_lengths" if level == "flat" else f"run_lengths_{level}"
    return Plot(key, title, caption + sentence, figure)


def _whole_ticks(furthest: float) -> dict[str, Any]:
    """An axis of whole numbers up to this one: plotly would put ticks between the first few."""
    return {"tickformat": "d", "dtick": 1 if furthest <= 10.8 else None}


def _draw_bars(figure: go.Figure, lines: Sequence[Line]) -> None:
    for line in lines:
        common = {"name": line.look.name, "legendgroup": line.look.group, "marker": {"color": line.look.colour}}
        figure.add_bar(x=line.x, y=whole(line.y), hovertemplate="length %{x}: %{y:,}", **common)


def _draw_buckets(figure: go.Figure, part: pd.DataFrame, look: Style, shift: float) -> None:
    count, bucket = part["count"].to_numpy(dtype=float), part["bucket"].to_numpy(dtype=float)
    figure.add_scatter(
        x=whole(part["run_length"].to_numpy()),
        y=small(bucket + shift),
        mode="markers",
        marker={"color": look.colour, "size": small(4 + 1.2 * np.log2(1 + count)), "opacity": 0.8, "line": {"width": 0}},
        customdata=np.stack([bucket, count], axis=1).astype(np.int32),
        hovertemplate=f"bucket %{{customdata[0]}}, length %{{x}}: %{{customdata[1]:,}}<extra>{look.name}</extra>",
        legendgroup=look.group,
        showlegend=False,
        xaxis="x2",
        yaxis="y2",
    )


def _bounds(runs: Sequence[RunAnalysis], longest: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str, float]:
    """Lines for R* and for shuffling, their names, the sentence that explains them, and how far they reach."""
    bounds = sorted({int(run.row["shortest_possible_longest_run"]) for run in runs})
    shuffled = sorted(float(run.row["shuffled_longest_run_median"]) for run in runs)
    typical = shuffled[len(shuffled) // 2]
    lines = [vertical_line(bound + 0.5, width=1.5) for bound in bounds[:MAX_RAW_SERIES]]
    names = [line_name(bound + 0.5, f"R* = {bound}", 1.0) for bound in bounds[:MAX_RAW_SERIES]]
    sentence = " Dashed: R*, the shortest that the longest run of an epoch can be."
    if typical > bounds[-1]:
        lines.append(vertical_line(typical, "dot", 1.5))
        names.append(line_name(typical, "shuffling", 0.93, left=typical > 0.6 * longest))
        sentence += " Dotted: what shuffling at random gives for it (median)."
    return lines, names, sentence, max(bounds[-1] + 0.5, typical)


def share_plots(
    runs: Sequence[RunAnalysis], histories: Mapping[str, History], ranges: Mapping[str, Mapping[int, str]]
) -> list[Plot]:
    """Bucket shares over time, one plot per run, of the first few runs whose history is known. `ranges`: lengths by run id."""
    found = [(run, histories[run.run_id]) for run in runs if run.run_id in histories][:MAX_SHARE_PLOTS]
    plots = []
    for number, (run, history) in enumerate(found):
        counts = history.bucket_counts
        if len(counts) < 2 or counts.shape[1] < 2:
            continue
        shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        figure, lengths = go.Figure(), ranges.get(run.run_id, {})
        for bucket in range(counts.shape[1]):
            shade = ordered_colour(bucket, counts.shape[1])
            name = f"{bucket}: {lengths[bucket]}" if bucket in lengths else f"bucket {bucket}"
            hover = f"steps around %{{x:.0f}}: %{{y:.1%}}<extra>{name}</extra>"
            style = {"mode": "lines", "line": {"width": 0.5, "color": shade}, "fillcolor": shade, "stackgroup": "one"}
            figure.add_scatter(x=small(history.steps), y=small(shares[:, bucket]), name=name, hovertemplate=hover, **style)
        shares_axis = {"range": [0, 1], "tickformat": ".0%"}
        in_order = {"traceorder": "normal"}
        lay_out(figure, "optimizer step", "share of the batches", height=300, yaxis=shares_axis, legend=in_order)
        width = history.steps[1] - history.steps[0]
        unit = " (lengths in tokens)" if lengths else ""
        caption = f"Batches of each bucket{unit} among those of {width:.0f} steps; level borders: an even mix."
        plots.append(Plot(f"shares_{number}", f"Bucket shares over time: {run.name}", caption, figure))
    return plots


def position_plots(runs: Sequence[RunAnalysis], positions: pd.DataFrame) -> list[Plot]:
    """Gradient norm by position in a bucket run (table `run_positions`), one plot per level that has rows."""
    plots = []
    for number, level in enumerate(dict.fromkeys(positions["level"])):
        figure = go.Figure()
        of_level = positions[(positions["level"] == level) & positions["grad_norm_mean"].notna()].sort_values("position")
        for run, look in zip(runs, styles(runs), strict=True):
            part = of_level[of_level["run_id"] == run.run_id]
            if len(part):
                line = Line(look, run.name, whole(part["position"].to_numpy()), part["grad_norm_mean"].to_numpy(dtype=float))
                _draw_positions(figure, line, part, bars=len(runs) <= MAX_RAW_SERIES)
        if figure.data:
            lay_out(
                figure,
                f"position in a bucket run ({level})",
                "gradient norm, mean",
                xaxis=_whole_ticks(int(of_level["position"].max())),
            )
            caption = "A line that rises: the gradient grows while batches of one bucket follow each other."
            caption += " Bars: 95 % intervals." if len(runs) <= MAX_RAW_SERIES else ""
            plots.append(Plot(f"positions_{number}", f"Gradient norm inside a bucket run: {level}", caption, figure))
    return plots


def _draw_positions(figure: go.Figure, line: Line, part: pd.DataFrame, *, bars: bool) -> None:
    spread = {}
    if bars:
        low, high = (part[f"grad_norm_{end}"].to_numpy(dtype=float) for end in ("low", "high"))
        ends = {"array": small(np.append(high - line.y, np.nan)), "arrayminus": small(np.append(line.y - low, np.nan))}
        spread = {"error_y": {"type": "data", **ends, "thickness": 1}}
    draw_lines(figure, [line], "position %{x}: %{y:.4g}", "", mode="lines+markers", line={"width": 2}, **spread)
