"""Moments that a curve may be explained by: checkpoints, epoch starts, resumes, and the steps that findings name.

Moments are one trace per kind over an axis of their own, so that the legend turns a kind on and off.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go

from dflash_core.analysis.findings.finding import KINDS, Finding
from dflash_core.analysis.history import History
from dflash_core.analysis.one_run import RunAnalysis
from dflash_core.analysis.plots.figure import MAX_RAW_SERIES, MAX_TITLE_LENGTH, NEUTRAL, Style, label, small, whole
from dflash_core.analysis.reader import numbers
from dflash_core.analysis.series import FloatArray

# More lines than these are hidden until the legend is asked for them, or left out.
MAX_SHOWN_LINES = 40
MAX_LINES = 400
MAX_NAMED = 3
# About gradients, not about the loss.
GRADIENT_KINDS = ("spikes_in_bucket_runs", "divergence")
LOSS_KINDS = tuple(kind for kind in KINDS if kind != "spikes_in_bucket_runs")


@dataclass(frozen=True)
class Mark:
    """A kind of moment: the steps, each with the runs that had it."""

    name: str
    dash: str
    steps: Mapping[int, Sequence[str]]


def moments(runs: Sequence[RunAnalysis], histories: Mapping[str, History]) -> list[Mark]:
    """Of a few runs only: those of many would cover the plot."""
    if len(runs) > MAX_RAW_SERIES:
        return []
    kinds: dict[str, dict[int, list[str]]] = {"checkpoints": {}, "epoch starts": {}, "resumes": {}}
    for run in runs:
        history = histories.get(run.run_id)
        found: dict[str, Any] = {"checkpoints": numbers(run.tables["checkpoints"], "step")}
        if history is not None:
            found |= {"epoch starts": history.epoch_starts, "resumes": history.resumes}
        for kind, steps in found.items():
            for step in sorted({int(step) for step in steps}):
                kinds[kind].setdefault(step, []).append(run.name)
    dashes = {"checkpoints": "dot", "epoch starts": "dash", "resumes": "solid"}
    return [Mark(kind, dashes[kind], steps) for kind, steps in kinds.items() if steps and len(steps) <= MAX_LINES]


def draw_moments(figure: go.Figure, marks: Sequence[Mark]) -> None:
    """Vertical lines at the marks' steps, over the whole height; the legend turns each kind off."""
    for mark in marks:
        steps = sorted(mark.steps)
        x = np.repeat(np.array(steps, dtype=np.float32), 3)
        y = np.tile(np.array([0, 1, np.nan], dtype=np.float32), len(steps))
        names = [", ".join(mark.steps[step][:MAX_NAMED]) for step in steps]
        texts = [f"{mark.name}: step {step} ({escape(name)})" for step, name in zip(steps, names, strict=True) for _ in range(3)]
        figure.add_scatter(
            x=x,
            y=y,
            yaxis="y2",
            mode="lines",
            name=mark.name,
            line={"color": NEUTRAL, "width": 1, "dash": mark.dash},
            hovertext=texts,
            hoverinfo="text",
            visible=True if len(steps) <= MAX_SHOWN_LINES else "legendonly",
        )
    if marks:
        hidden = {"overlaying": "y", "range": [0, 1], "fixedrange": True, "visible": False}
        figure.update_layout(yaxis2=hidden)


def moments_sentence(marks: Sequence[Mark]) -> str:
    if not marks:
        return ""
    names = [
        f"{mark.name} ({'dotted' if mark.dash == 'dot' else 'dashed' if mark.dash == 'dash' else 'solid'})" for mark in marks
    ]
    return f" Vertical lines: {', '.join(names)}; the legend turns them on and off."


def draw_findings(
    figure: go.Figure, runs: Sequence[RunAnalysis], style: Sequence[Style], column: str, kinds: Collection[str]
) -> int:
    """Mark the steps that findings of these kinds name, on the curve of `column`; returns how many traces that made."""
    before = len(figure.data)
    if len(runs) > MAX_RAW_SERIES:
        return 0
    for run, look in zip(runs, style, strict=True):
        step, value = numbers(run.curves, "step"), numbers(run.curves, column)
        for finding in run.findings:
            chosen = np.isin(step, np.array(finding.at_steps, dtype=np.float64)) & np.isfinite(value)
            if finding.kind in kinds and chosen.any():
                _draw_points(figure, step[chosen], value[chosen], finding, look.colour)
    return len(figure.data) - before


def draw_spikes(figure: go.Figure, step: FloatArray, value: FloatArray, look: Style) -> None:
    marker = {"symbol": "circle-open", "size": 8, "color": look.colour, "line": {"width": 1.5}}
    name = f"{look.name}: spikes"
    figure.add_scatter(x=whole(step), y=small(value), mode="markers", name=name, marker=marker, hoverinfo="x+y+name")


def _draw_points(figure: go.Figure, step: FloatArray, value: FloatArray, finding: Finding, colour: str) -> None:
    """In the run's colour; the legend names a kind once."""
    name = finding.kind.replace("_", " ")
    figure.add_scatter(
        x=whole(step),
        y=small(value),
        mode="markers",
        name=name,
        legendgroup=name,
        showlegend=not any(trace.name == name for trace in figure.data),
        marker={"symbol": "x", "size": 8, "color": colour, "line": {"width": 1, "color": NEUTRAL}},
        hovertemplate=f"step %{{x}}: %{{y:.4g}}<extra>{label(finding.title, MAX_TITLE_LENGTH)}</extra>",
    )
