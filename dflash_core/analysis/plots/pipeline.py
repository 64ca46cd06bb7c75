"""Where the time went: waits by stage, queues, and what each target was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dflash_core.analysis.history import History
from dflash_core.analysis.one_run import RunAnalysis
from dflash_core.analysis.plots.figure import Plot, colour, label, lay_out, small, thin, whole
from dflash_core.analysis.series import FloatArray

MAX_QUEUE_PLOTS = 6
MAX_DISPATCH_PLOTS = 6
MAX_AHEAD_IN_TURN = 2.0
# Who has time of its own, and what is no part of it: a share of another stage, or nobody's time.
ACTORS = ("drafter", "target", "loader")
NO_PART = ("target.queued",)
MOST_WITH_ALL_ACTORS = 4


def wait_plot(runs: Sequence[RunAnalysis], waits: pd.DataFrame) -> Plot | None:
    """What the drafter, the targets and the loaders spent their time on (table `waits`), the mean over a run's cells; of many
    runs the drafters only. None where there are no rows."""
    rows = waits.dropna(subset=["share_of_time"])
    rows = rows.assign(actor=rows["stage"].str.split(".").str[0], part=rows["stage"].str.split(".").str[-1])
    rows = rows[rows["actor"].isin(ACTORS) & ~rows["stage"].isin(NO_PART)]
    if not len(rows):
        return None
    actors = ACTORS if len(runs) <= MOST_WITH_ALL_ACTORS else ACTORS[:1]
    bars = {(run.run_id, actor): f"{run.name}: {actor}" if len(runs) > 1 else actor for run in runs for actor in actors}
    shares = rows.groupby(["run_id", "actor", "part"], as_index=False)["share_of_time"].mean()
    columns = (shares[name].tolist() for name in ("run_id", "actor", "part", "share_of_time"))
    known = {((run_id, actor), part): share for run_id, actor, part, share in zip(*columns, strict=True)}
    parts = list(dict.fromkeys(rows.loc[rows["actor"].isin(actors), "part"]))
    figure = _bars(bars, known, parts, "share of its time", what="run" if len(runs) > 1 else "side")
    caption = (
        "What each side of the pipeline spent its time on, mean over its threads and cells. Idle or waiting: another side, or a "
        "shared core, is what holds it up."
    )
    return Plot("waits", "Where the time went", caption, figure)


def loss_parts_plot(runs: Sequence[RunAnalysis], parts: pd.DataFrame) -> Plot | None:
    """The loss variance by cause (table `loss_parts`); None where there are no rows."""
    shares = parts.dropna(subset=["share"])
    if not len(shares):
        return None
    columns = (shares[name].tolist() for name in ("run_id", "part", "share"))
    known = {(run_id, part): share for run_id, part, share in zip(*columns, strict=True)}
    names = {run.run_id: run.name for run in runs}
    figure = _bars(names, known, list(dict.fromkeys(parts["part"])), "share of the loss variance", _intervals(parts))
    caption = (
        "The variance of the loss by cause, behind the first tenth of the steps. Fluff is what the trend is not; where the mix "
        "of buckets is a large part of that, the fluff is not training noise. These shares count the trend in; those of the "
        "findings do not."
    )
    return Plot("loss_parts", "What the loss scatter is made of", caption, figure)


def _intervals(parts: pd.DataFrame) -> dict[tuple[str, str], str]:
    known = parts.dropna(subset=["low", "high"])
    columns = (known[name].tolist() for name in ("run_id", "part", "low", "high"))
    return {(run_id, part): f" (95 %: {low:.1%} to {high:.1%})" for run_id, part, low, high in zip(*columns, strict=True)}


def _bars(
    bars: Mapping[Any, str],
    known: Mapping[tuple[Any, str], float],
    parts: Sequence[str],
    axis: str,
    more: Mapping[tuple[Any, str], str] | None = None,
    what: str = "run",
) -> go.Figure:
    """A stacked bar for each key of `bars`, which names it, the first on top; `known` is by key and part, `what` a bar is."""
    figure = go.Figure()
    shown = {key: label(name) for key, name in bars.items() if any((key, part) in known for part in parts)}
    names = list(shown.values())
    for number, part in enumerate(parts):
        values = np.array([known.get((key, part), np.nan) for key in shown])
        texts = [f"{value:.0%}" if value >= 0.08 else "" for value in values]
        hints = [(more or {}).get((key, part), "") for key in shown]
        figure.add_bar(
            y=names,
            x=small(values),
            orientation="h",
            name=label(part.replace("_", " ")),
            marker={"color": colour(number)},
            text=texts,
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            textfont={"color": "#ffffff"},
            customdata=hints,
            hovertemplate="%{y}: %{x:.1%}%{customdata}<extra>" + label(part) + "</extra>",
        )
    height = 110 + 34 * len(shown) if len(shown) <= 12 else 150 + 20 * len(shown)
    sideways = {"autorange": "reversed", "type": "category"}
    share = {"tickformat": ".0%"}
    in_order = {"traceorder": "normal"}
    lay_out(figure, axis, what, height=height, xaxis=share, yaxis=sideways, legend=in_order, barmode="stack", bargap=0.3)
    return figure


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
            figure.add_scatter(x=whole(x), y=small(y), mode="lines", showlegend=True, **style)
        lay_out(figure, "optimizer step", "batches waiting", height=280, yaxis={"range": [0, top * 1.08 + 0.2]})
        caption = "Batches in the queue of each target. At zero: slow loading, or no byte budget left. At the cap: slow targets."
        plots.append(Plot(f"queue_{number}", f"Queue depths: {run.name}", caption, figure))
    return plots


def batches_ahead(history: History) -> FloatArray:
    """Batches that each target had served by the end of a stretch, minus an equal share, [stretches, targets]."""
    total = history.target_counts.cumsum(axis=0)
    return np.asarray(total - total.mean(axis=1, keepdims=True)) if total.shape[1] else np.zeros(total.shape)


def unequal(ahead: FloatArray) -> bool:
    """Whether targets were ever further apart than taking turns, and which batches are still under way, explain."""
    return bool(ahead.shape[1] > 1 and np.abs(ahead).max() > MAX_AHEAD_IN_TURN)


def dispatch_plots(runs: Sequence[RunAnalysis], histories: Mapping[str, History]) -> list[Plot]:
    """Batches per target against an equal share, one plot per run, of the first few runs whose targets got unequal numbers."""
    known = [(run, histories[run.run_id]) for run in runs if run.run_id in histories]
    drawn = [(run, history, batches_ahead(history)) for run, history in known]
    plots = []
    for number, (run, history, ahead) in enumerate([one for one in drawn if unequal(one[2])][:MAX_DISPATCH_PLOTS]):
        total = history.target_counts.sum(axis=0)
        figure = go.Figure()
        for target, name in enumerate(history.target_names):
            hover = f"step %{{x:.0f}}: %{{y:+.0f}} batches<extra>{name}</extra>"
            line = {"color": colour(target), "width": 2}
            figure.add_scatter(
                x=small(history.steps), y=small(ahead[:, target]), name=name, line=line, hovertemplate=hover, mode="lines"
            )
        lay_out(figure, "optimizer step", "batches above an equal share", height=280)
        given = ", ".join(f"{int(count):,}" for count in total)
        caption = f"Trained batches that each target served, minus an equal share; in all {given}. Lines that drift apart: "
        caption += "unequal dispatch."
        plots.append(Plot(f"dispatch_{number}", f"Batches per target: {run.name}", caption, figure))
    return plots
