"""What all plots share. Colours of paper, text and grid are left to the page, which knows dark from light; so is the room that a
legend takes, which depends on the width of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.lib.stride_tricks import sliding_window_view

from dflash_core.analysis.one_run import RunAnalysis
from dflash_core.analysis.series import FloatArray

IntArray = np.ndarray[Any, np.dtype[np.int32]]

PALETTE = ("#2f7fd8", "#e2711d", "#2a9d6f", "#c2529b", "#8a6fd1", "#a98600", "#d1495b", "#4a99a8")
# From short to long, for what has an order: readable on white and on black.
ORDERED = ((86, 194, 182), (47, 127, 216), (138, 99, 196), (209, 73, 91))
NEUTRAL = "#888888"
MAX_POINTS = 1500
MIN_POINTS = 200
# Points of one plot: what a browser draws without a pause.
MAX_PLOT_POINTS = 24_000
# More runs than these are told apart by their order only.
MAX_NAMED_RUNS = 8
# The single steps of more runs than these would hide each other.
MAX_RAW_SERIES = 4
MAX_NAME_LENGTH = 24
MAX_TITLE_LENGTH = 80


@dataclass(frozen=True)
class Plot:
    """A figure with the text around it. The figure's height does not count the legend."""

    key: str
    title: str
    caption: str
    figure: go.Figure
    wide: bool = False


@dataclass(frozen=True)
class Style:
    """How a run is drawn: `name` is what the legend says, `show` whether it says it for this run."""

    colour: str
    group: str
    name: str
    show: bool


def colour(i: int) -> str:
    return PALETTE[i % len(PALETTE)]


def ordered_colour(i: int, count: int) -> str:
    """The i-th of `count` colours along a scale."""
    place = (len(ORDERED) - 1) * i / max(1, count - 1)
    low = min(int(place), len(ORDERED) - 2)
    mixed = [round(a + (b - a) * (place - low)) for a, b in zip(ORDERED[low], ORDERED[low + 1], strict=True)]
    return "#" + "".join(f"{value:02x}" for value in mixed)


def label(name: str, most: int = MAX_NAME_LENGTH) -> str:
    """A name as plotly, which reads HTML, shows it: not longer than a narrow page has room for."""
    return escape(name if len(name) <= most else f"{name[: most - 9]}…{name[-8:]}")


def styles(runs: Sequence[RunAnalysis]) -> list[Style]:
    """A colour and a name per run while they are few; of many runs a colour and a name per batch order."""
    if len(runs) <= MAX_NAMED_RUNS:
        return [Style(colour(i), run.run_id, label(run.name), True) for i, run in enumerate(runs)]
    orders = list(dict.fromkeys(str(run.row["order"]) for run in runs))
    found, seen = [], set()
    for run in runs:
        order = str(run.row["order"])
        found.append(Style(colour(orders.index(order)), order, f"order {label(order)}", order not in seen))
        seen.add(order)
    return found


@dataclass(frozen=True)
class Line:
    """One run's line: x and y of equal length."""

    look: Style
    run_name: str
    x: FloatArray | IntArray
    y: FloatArray


def draw_lines(figure: go.Figure, lines: Sequence[Line], hover: str, suffix: str = "", **trace: Any) -> None:
    """Draw lines; those of runs that share a look become one trace with gaps, as many traces make a browser slow.

    Args:
        hover: what a point says, a plotly template; the run's name follows.
        suffix: of the names in the legend.
        trace: further properties of the traces; `line`, `marker` and `showlegend` are completed by the run's look.
    """
    groups: dict[str, list[Line]] = {}
    for number, line in enumerate(lines):
        groups.setdefault(line.look.group if len(lines) > MAX_NAMED_RUNS else str(number), []).append(line)
    for group in groups.values():
        look = group[0].look
        own = dict(trace)
        for name in ("line", "marker"):
            if name in own or name == "line":
                own[name] = {**own.get(name, {}), "color": look.colour}
        if len(group) > 1:
            own["hovertext"] = np.repeat([label(line.run_name) for line in group], [len(line.x) + 1 for line in group]).astype(
                object
            )
        said = "%{hovertext}" if len(group) > 1 else label(group[0].run_name)
        if own.get("mode") == "lines" and max(len(line.x) for line in group) == 1:
            own["mode"] = "lines+markers"  # a line through one point is nothing to see
        shown = own.pop("showlegend", any(line.look.show for line in group))
        figure.add_scatter(
            x=np.concatenate([np.append(line.x, line.x[-1:]) for line in group]),
            y=small(np.concatenate([np.append(line.y, [np.nan] * len(line.y[-1:])) for line in group])),
            name=look.name + suffix,
            legendgroup=look.group + suffix,
            showlegend=shown,
            hovertemplate=f"{hover}<extra>{said}</extra>",
            **own,
        )


def points_per_trace(num_traces: int) -> int:
    return int(np.clip(MAX_PLOT_POINTS // max(1, num_traces), MIN_POINTS, MAX_POINTS))


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


def median_at(values: FloatArray, width: int, stride: int) -> FloatArray:
    """Every `stride`-th value of the running median (`series.running_median`), without computing those between."""
    half = (width | 1) // 2
    windows = np.sort(sliding_window_view(np.pad(values, half, constant_values=np.nan), 2 * half + 1)[::stride], axis=1)
    count = np.isfinite(windows).sum(axis=1)  # what is not a number is sorted to the end
    rows, last = np.arange(len(windows)), np.maximum(count - 1, 0)
    return np.asarray((windows[rows, last // 2] + windows[rows, np.minimum(count // 2, last)]) / 2)


def small(values: FloatArray) -> FloatArray:
    """Half the size in the page; a plot shows no more than float32 holds. What is not finite is a gap."""
    values = np.asarray(values, dtype=np.float32)
    return np.where(np.isfinite(values), values, np.float32("nan"))


def whole(values: FloatArray) -> IntArray:
    """Steps, positions and counts as they stand in the page."""
    return np.asarray(values, dtype=np.int32)


def lay_out(
    figure: go.Figure,
    x: str,
    y: str,
    *,
    log_y: bool = False,
    height: int = 340,
    xaxis: Mapping[str, Any] | None = None,
    yaxis: Mapping[str, Any] | None = None,
    legend: Mapping[str, Any] | None = None,
    **more: Any,
) -> go.Figure:
    """Titles and looks that all plots share; `xaxis`, `yaxis` and `legend` complete these, `more` the layout."""
    # One call: each costs milliseconds, and a report has dozens of plots.
    ticks = log_ticks([trace.y for trace in figure.data]) if log_y else []
    scale = {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:,g}" for tick in ticks]} if log_y else {}
    common = {"zeroline": False, "automargin": True}
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 52, "r": 12, "t": 10, "b": 46},
        legend={
            "orientation": "h",
            "yanchor": "bottom",
            "y": 1.02,
            "xanchor": "left",
            "x": 0,
            "tracegroupgap": 0,
            **(legend or {}),
        },
        hovermode="closest",
        font={"size": 12},
        xaxis={"title": {"text": x, "standoff": 8}, **common, **(xaxis or {})},
        yaxis={"title": {"text": y, "standoff": 8}, **common, **scale, **(yaxis or {})},
        **more,
    )
    return figure


def vertical_line(x: float, dash: str = "dash", width: float = 1) -> dict[str, Any]:
    """A vertical line over the whole height, a shape of the layout."""
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "xref": "x", "yref": "paper", "line": _neutral(dash, width)}


def horizontal_line(y: float) -> dict[str, Any]:
    """A horizontal line over the whole width, a shape of the layout."""
    return {"type": "line", "x0": 0, "x1": 1, "y0": y, "y1": y, "xref": "paper", "yref": "y", "line": _neutral("dash", 1)}


def _neutral(dash: str, width: float) -> dict[str, Any]:
    return {"dash": dash, "width": width, "color": NEUTRAL}


def line_name(x: float, text: str, height: float, *, left: bool = False) -> dict[str, Any]:
    """A text beside a vertical line, an annotation of the layout; `left` of a line near the right edge."""
    place = {"xref": "x", "yref": "paper", "yanchor": "top", "xanchor": "right" if left else "left", "showarrow": False}
    return {"x": x, "y": height, "text": f"{escape(text)} " if left else f" {escape(text)}", **place}


def log_ticks(series: Sequence[FloatArray]) -> list[float]:
    """Ticks of a logarithmic axis: powers of ten, and 2 and 5 times them when fewer than three decades are shown."""
    values = np.concatenate([np.asarray(values, dtype=np.float64) for values in series])
    values = values[np.isfinite(values) & (values > 0)]
    if not len(values):
        return [1.0]
    low, high = int(np.floor(np.log10(values.min()))), int(np.ceil(np.log10(values.max())))
    steps = (1.0, 2.0, 5.0) if high - low < 3 else (1.0,)
    return [step * 10.0**power for power in range(low, high + 1) for step in steps]


def band(x: FloatArray, low: FloatArray, high: FloatArray, shade: str, group: str, *, show: bool | str = True) -> dict[str, Any]:
    """A shaded interval as one closed trace that belongs to the line of `group`; points without an interval are left out."""
    known = np.isfinite(low) & np.isfinite(high)
    x, low, high = x[known], low[known], high[known]
    return {
        "x": np.concatenate([x, x[::-1]]),
        "y": small(np.concatenate([high, low[::-1]])),
        "mode": "lines",
        "fill": "toself",
        "fillcolor": shade,
        "line": {"width": 0, "color": shade},
        "opacity": 0.2,
        "hoverinfo": "skip",
        "legendgroup": group,
        "showlegend": False,
        "visible": show,
    }
