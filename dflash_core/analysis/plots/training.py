"""Curves over the steps of a training: loss, gradient norm, acceptance length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from dflash_core.analysis.history import History
from dflash_core.analysis.one_run import RunAnalysis
from dflash_core.analysis.plots.figure import (
    MAX_RAW_SERIES,
    NEUTRAL,
    Line,
    Plot,
    Style,
    colour,
    draw_lines,
    horizontal_line,
    label,
    lay_out,
    median_at,
    points_per_trace,
    small,
    styles,
    thin,
    whole,
)
from dflash_core.analysis.plots.marks import (
    GRADIENT_KINDS,
    LOSS_KINDS,
    draw_findings,
    draw_moments,
    draw_spikes,
    moments,
    moments_sentence,
)
from dflash_core.analysis.plots.quality import eval_rows, lines_by_run
from dflash_core.analysis.reader import numbers
from dflash_core.analysis.series import spikes
from dflash_core.config import AnalyzeConfig

Histories = Mapping[str, History]
USUAL_QUANTILE = 0.97
# Of single steps: enough to be seen beside their median and an adjusted curve.
RAW_OPACITY = 0.75


def loss_plot(runs: Sequence[RunAnalysis], histories: Histories, config: AnalyzeConfig) -> Plot:
    """The composition-adjusted curve is drawn where it was computed, which is where it differs from the loss: in a colour
    of its own and behind the raw steps, so that it hides none of them. Of runs whose mix makes no finding the legend has it."""
    width, figure, style = config.smoothing_steps, go.Figure(), styles(runs)
    adjusted = _draw_adjusted(figure, runs)
    _draw_series(figure, runs, style, "loss", width)
    marked = draw_findings(figure, runs, style, "loss", LOSS_KINDS)
    marks = moments(runs, histories)
    draw_moments(figure, marks)
    lay_out(figure, "optimizer step", "loss, nats", xaxis=_whole_training(runs))
    caption = f"{_how(runs, width)} The scatter around the median is the fluff."
    if adjusted:
        caption += (
            " Adjusted, behind them: each step without what its mix of buckets explains; what sticks out of it is what the mix "
            "made. The legend turns curves on and off."
        )
    caption += (" Crosses: steps that a finding names." if marked else "") + moments_sentence(marks)
    losses = np.concatenate([numbers(run.curves, "loss") for run in runs])
    losses = losses[np.isfinite(losses)]
    if len(losses):
        # The first steps of an untrained draft are many times what follows and would flatten the rest of the curve.
        usual, highest = float(np.quantile(losses, USUAL_QUANTILE)) * 1.15, float(losses.max())
        lowest = float(losses.min())
        if highest > 1.5 * usual:
            figure.update_layout(yaxis={"range": [min(0.0, lowest) if lowest < usual / 10 else 0.9 * lowest, usual]})
            caption += f" The highest steps reach {highest:.3g} and leave the plot."
    return Plot("loss", "Loss", caption, figure, wide=True)


def grad_norm_plot(runs: Sequence[RunAnalysis], histories: Histories, config: AnalyzeConfig) -> Plot:
    """The norm before clipping by step, with its spikes, the limit where all runs share one, and the runs' moments."""
    width, figure, style = config.smoothing_steps, go.Figure(), styles(runs)
    _draw_series(figure, runs, style, "grad_norm", width)
    found = _draw_spikes(figure, runs, style, config.spike_mad)
    marked = draw_findings(figure, runs, style, "grad_norm", GRADIENT_KINDS)
    limits = {run.facts.setting("train.clip_norm") for run in runs}
    limit = next(iter(limits)) if len(limits) == 1 else None
    clipped_from = float(limit) if isinstance(limit, (int, float)) and limit > 0 else None
    shapes = [] if clipped_from is None else [horizontal_line(clipped_from)]
    lay_out(figure, "optimizer step", "gradient norm (log)", log_y=True, xaxis=_whole_training(runs), shapes=shapes)
    marks = moments(runs, histories)
    draw_moments(figure, marks)
    caption = f"Norm before clipping. {_how(runs, width)}"
    if found:
        caption += f" Circles: {found} spikes, more than {config.spike_mad:g} median deviations above the median."
    caption += " Crosses: steps that a finding names." if marked else ""
    caption += f" Above the dashed level ({clipped_from:g}) gradients are scaled down." if clipped_from is not None else ""
    return Plot("grad_norm", "Gradient norm", caption + moments_sentence(marks), figure, wide=True)


def acceptance_over_training_plot(runs: Sequence[RunAnalysis], histories: Histories, config: AnalyzeConfig) -> Plot | None:
    """The estimate from the training's own accuracies, and what was measured by decoding while it went on."""
    figure, style = go.Figure(), styles(runs)
    known = [bool(np.isfinite(numbers(run.curves, "expected_acceptance_length")).any()) for run in runs]
    rows = eval_rows(runs, ("acceptance_length",))
    measured = rows[(rows["kind"] == "training") & rows["position"].isna()]
    if not any(known) and not len(measured):
        return None
    if any(known):
        _draw_series(figure, runs, style, "expected_acceptance_length", config.smoothing_steps, raw=False)
    lines = lines_by_run(runs, style, measured, "step")
    marker = {"size": 8, "symbol": "diamond", "line": {"width": 1, "color": NEUTRAL}}
    shape = {"mode": "lines+markers", "line": {"width": 1, "dash": "dot"}, "marker": marker}
    draw_lines(figure, lines, "step %{x}: %{y:.4g}", suffix=", measured", **shape)
    lay_out(figure, "optimizer step", "tokens per target forward", xaxis=_whole_training(runs))
    marks = moments(runs, histories)
    draw_moments(figure, marks)
    how = f"running median over {config.smoothing_steps} steps, +1 included"
    caption = f"Line: expected from the accuracy of the training blocks, {how}."
    if lines:
        caption += " Diamonds: measured by decoding."
    return Plot(
        "acceptance_over_training", "Acceptance length over training", caption + moments_sentence(marks), figure, wide=True
    )


def _whole_training(runs: Sequence[RunAnalysis]) -> dict[str, list[float]]:
    """The axis from the first step to the end of the last one: marks at the ends would otherwise add empty room."""
    steps = [numbers(run.curves, "step") for run in runs]
    return {"range": [min(float(one[0]) for one in steps), max(float(one[-1]) for one in steps) + 1]}


def _how(runs: Sequence[RunAnalysis], width: int) -> str:
    thick = f"unning median over {width} steps."
    return f"Thin: each step. Thick: r{thick}" if len(runs) <= MAX_RAW_SERIES else f"R{thick}"


def _draw_series(
    figure: go.Figure, runs: Sequence[RunAnalysis], style: Sequence[Style], column: str, width: int, *, raw: bool = True
) -> None:
    most, lines = points_per_trace(len(runs)), []
    for run, look in zip(runs, style, strict=True):
        x, y = numbers(run.curves, "step"), numbers(run.curves, column)
        y = np.where(np.isfinite(y), y, np.nan)
        if raw and len(runs) <= MAX_RAW_SERIES:
            thin_x, thin_y = thin(x, y, most)
            faint = {"line": {"color": look.colour, "width": 1}, "opacity": RAW_OPACITY, "hoverinfo": "skip", "showlegend": False}
            figure.add_scatter(x=whole(thin_x), y=small(thin_y), mode="lines", legendgroup=look.group, **faint)
        stride = -(-len(x) // most)
        lines.append(Line(look, run.name, whole(x[::stride]), median_at(y, width, stride)))
    thick = 2.5 if len(runs) <= MAX_RAW_SERIES else 1.5
    draw_lines(figure, lines, "step %{x}: %{y:.4g}", mode="lines", line={"width": thick})


def _draw_adjusted(figure: go.Figure, runs: Sequence[RunAnalysis]) -> bool:
    """As single steps while the runs are few, each in a colour that no run has; returns whether there was one."""
    found = False
    if len(runs) > MAX_RAW_SERIES:
        return False
    for number, run in enumerate(runs):
        loss, adjusted = numbers(run.curves, "loss"), numbers(run.curves, "loss_adjusted")
        if np.isfinite(adjusted).any() and not np.array_equal(loss, adjusted, equal_nan=True):
            x, y = thin(numbers(run.curves, "step"), adjusted, points_per_trace(len(runs)))
            line = {"color": colour(len(runs) + number), "width": 1.5}
            name = f"{label(run.name)}, adjusted"
            shown = True if any(one.kind == "loss_composition" for one in run.findings) else "legendonly"
            figure.add_scatter(x=whole(x), y=small(y), mode="lines", name=name, line=line, hoverinfo="skip", visible=shown)
            found = True
    return found


def _draw_spikes(figure: go.Figure, runs: Sequence[RunAnalysis], style: Sequence[Style], num_mads: float) -> int:
    if len(runs) > MAX_RAW_SERIES:
        return 0
    count = 0
    for run, look in zip(runs, style, strict=True):
        norm = numbers(run.curves, "grad_norm")
        is_spike, _ = spikes(norm, num_mads)
        if is_spike.any():
            # Of very many the highest: a plot shows no more.
            places = np.flatnonzero(is_spike)
            places = np.sort(places[np.argsort(-norm[places], kind="stable")[: points_per_trace(len(runs))]])
            draw_spikes(figure, numbers(run.curves, "step")[places], norm[places], look)
            count += int(is_spike.sum())
    return count
