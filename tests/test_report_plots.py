"""The plots of a report: each shows what its rows say, stays small, and is not there when there is nothing to show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plotly.io import to_json

from dflash_core.analysis.build_report import Content, build_report
from dflash_core.analysis.history import MAX_STRETCHES, history_of
from dflash_core.analysis.one_run import RunAnalysis
from dflash_core.analysis.plots import Plot
from dflash_core.analysis.plots.figure import MAX_POINTS, label, line_name, median_at, ordered_colour, points_per_trace, styles
from dflash_core.analysis.plots.pipeline import dispatch_plots
from dflash_core.analysis.plots.training import grad_norm_plot, loss_plot
from dflash_core.analysis.report import Report
from dflash_core.analysis.runs import load_run
from dflash_core.analysis.series import running_median, spikes
from tests.fake_runs import FakeRun, write_run
from tests.report_fakes import CONFIG, analysed, content, finding, with_everything

STEPS = 60


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunAnalysis]:
    root = tmp_path_factory.mktemp("runs")

    def resumed(streams: dict[str, list[dict[str, Any]]]) -> None:
        for row in streams["steps"] + streams["batches"]:
            row["attempt"] = int(row["step"] >= 40)
        for number, row in enumerate(streams["batches"]):
            row["target"] = int(number % 4 == 0)

    fakes = (FakeRun(num_steps=STEPS), FakeRun(name="shuffle", order="shuffle", num_steps=STEPS, plants=(resumed,)))
    return analysed([write_run(root / fake.name, fake) for fake in fakes])


@pytest.fixture(scope="module")
def full(runs: list[RunAnalysis]) -> Content:
    return with_everything(runs)


def plots_of(report: Report) -> dict[str, Plot]:
    return {plot.key: plot for group in report.plots for plot in group.plots}


@pytest.fixture(scope="module")
def drawn(full: Content) -> dict[str, Plot]:
    return plots_of(build_report(full))


def traces(plot: Plot, name: str) -> list[Any]:
    return [trace for trace in plot.figure.data if trace.name == name]


def test_every_table_has_its_plot_and_every_plot_says_how_to_read_it(drawn: dict[str, Plot]) -> None:
    assert {"loss", "loss_parts", "grad_norm", "positions_0", "progress_loss", "progress_acceptance", "run_lengths", "shares_0",
            "shares_1", "acceptance_over_training", "waits", "queue_0", "dispatch_0"} <= set(drawn)  # fmt: skip
    for plot in drawn.values():
        layout = plot.figure.layout
        below = layout.xaxis2 if "xaxis2" in layout else layout.xaxis
        assert below.title.text and layout.yaxis.title.text and plot.caption.endswith(".") and layout.height >= 150
        sizes = [len(trace.x) for trace in plot.figure.data if trace.x is not None]
        assert max(sizes) <= 3 * MAX_POINTS


def test_empty_tables_have_no_plot(runs: list[RunAnalysis]) -> None:
    bare = replace(content(runs[:1]), histories={})
    keys = set(plots_of(build_report(bare)))
    assert keys == {"loss", "grad_norm", "run_lengths", "acceptance_over_training", "queue_0", "prefix_survival",
                    "conditional_acceptance"} | ({"run_lengths_step"} & keys)  # fmt: skip


def test_the_adjusted_curve_is_drawn_where_it_differs(runs: list[RunAnalysis], full: Content, drawn: dict[str, Plot]) -> None:
    names = [trace.name for trace in drawn["loss"].figure.data]
    assert "diverse, adjusted" in names and "Adjusted" in drawn["loss"].caption
    # It hides no step: behind the raw curves, in a colour that no run has; and only where the mix made a finding.
    raw = [i for i, trace in enumerate(drawn["loss"].figure.data) if trace.opacity is not None]
    assert len(raw) == 2 and max(names.index(f"{name}, adjusted") for name in ("diverse", "shuffle")) < min(raw)
    looks = [drawn["loss"].figure.data[i].line.color for i in (0, 1, *raw)]
    assert len(set(looks)) == 4 and all(drawn["loss"].figure.data[i].opacity >= 0.7 for i in raw)
    assert [trace.visible for trace in drawn["loss"].figure.data[:2]] == [True, True]
    quiet = loss_plot([replace(run, findings=()) for run in full.runs], {}, CONFIG)
    assert [trace.visible for trace in quiet.figure.data[:2]] == ["legendonly", "legendonly"]
    same = loss_plot(runs, {}, CONFIG)
    assert not any("adjusted" in (trace.name or "") for trace in same.figure.data) and "djusted" not in same.caption


def test_moments_are_marked_and_the_legend_turns_them_off(full: Content, drawn: dict[str, Plot]) -> None:
    for key in ("loss", "grad_norm", "acceptance_over_training"):
        expected = {"checkpoints": [20, 40, 60], "epoch starts": [30], "resumes": [40]}
        for name, steps in expected.items():
            (mark,) = traces(drawn[key], name)
            assert sorted(set(mark.x.tolist())) == steps and mark.yaxis == "y2" and name in drawn[key].caption
        assert drawn[key].figure.layout.yaxis2.overlaying == "y"
    (resumes,) = traces(drawn["loss"], "resumes")
    assert resumes.hovertext[0] == "resumes: step 40 (shuffle)"


def test_steps_of_findings_are_marked_on_the_curve_they_are_about(runs: list[RunAnalysis], drawn: dict[str, Plot]) -> None:
    crosses = traces(drawn["loss"], "loss composition")
    assert [trace.x.tolist() for trace in crosses] == [[20, 25, 30]] * 2 and [trace.showlegend for trace in crosses] == [
        True,
        False,
    ]
    loss = runs[0].curves["loss"].to_numpy()
    np.testing.assert_allclose(crosses[0].y, loss[[20, 25, 30]], rtol=1e-6)
    assert not traces(drawn["loss"], "spikes in bucket runs") and traces(drawn["grad_norm"], "spikes in bucket runs")
    outside = replace(runs[0], findings=(finding(runs[0].run_id, at_steps=(10_000,)),))
    assert "Crosses" not in loss_plot([outside], {}, CONFIG).caption


def test_spikes_are_circled(runs: list[RunAnalysis]) -> None:
    norm = runs[0].curves["grad_norm"].to_numpy().copy()
    norm[33] = 50.0
    curves = runs[0].curves
    place = curves.schema.get_field_index("grad_norm")
    spiky = replace(runs[0], tables={**runs[0].tables, "curves": curves.set_column(place, "grad_norm", pa.array(norm))})
    plot = grad_norm_plot([spiky], {}, CONFIG)
    (circles,) = traces(plot, "diverse: spikes")
    assert circles.x.tolist() == np.flatnonzero(spikes(norm, CONFIG.spike_mad)[0]).tolist() and 33 in circles.x
    assert f"Circles: {len(circles.x)} spikes" in plot.caption


def test_bucket_runs_are_shown_by_length_and_by_bucket(full: Content, drawn: dict[str, Plot]) -> None:
    table = full.tables["run_lengths"].to_pandas()
    flat = table[(table["level"] == "flat") & (table["run_id"] == "shuffle")]
    (bar,) = [trace for trace in traces(drawn["run_lengths"], "shuffle") if trace.type == "bar"]
    assert dict(zip(bar.x.tolist(), bar.y.tolist(), strict=True)) == flat.groupby("run_length")["count"].sum().to_dict()
    (dots,) = [t for t in drawn["run_lengths"].figure.data if t.xaxis == "x2" and t.legendgroup == "shuffle"]
    assert sorted(map(tuple, dots.customdata.tolist())) == sorted(zip(flat["bucket"], flat["count"], strict=True))
    assert "run_lengths_cell" not in drawn  # one cell sees the same order


def test_shares_and_dispatch_come_from_the_trained_batches(full: Content, drawn: dict[str, Plot]) -> None:
    history = full.histories["shuffle"]
    assert len(history.steps) <= MAX_STRETCHES and history.bucket_counts.sum() == STEPS * 4 == history.target_counts.sum()
    top = np.sum([trace.y for trace in drawn["shares_1"].figure.data], axis=0)
    np.testing.assert_allclose(top, 1.0, rtol=1e-5)
    # Three of four batches went to one target: it ends a quarter of all batches above its equal share.
    ends = {trace.name: float(trace.y[-1]) for trace in drawn["dispatch_0"].figure.data}
    assert ends == {"target 0": STEPS, "target 1": -STEPS} and "dispatch_1" not in drawn
    notes = {group.title: group.notes for group in build_report(full).plots}
    assert notes["Time and queues"] == ["All targets were given equally many batches in diverse."]
    assert not any(notes[title] for title in notes if title != "Time and queues")


def test_history_of_several_cells_and_without_targets(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "two", FakeRun(num_steps=100, num_cells=2, num_targets=2)))
    history = history_of(run)
    assert history.target_names == ("cell 0, target 0", "cell 1, target 1") and history.epoch_starts.tolist() == [50]
    assert history.steps[0] == 1 and history.steps[-1] == 99 and len(history.steps) == 34
    without = replace(run, batches=run.batches.set_column(run.batches.schema.get_field_index("target"), "target", [[None] * 400]))
    assert history_of(without).target_names == () and history_of(without).resumes.tolist() == []
    assert dispatch_plots(analysed([tmp_path / "two"]), {"two": history_of(without)}) == []


def test_bars_show_the_rows(drawn: dict[str, Plot]) -> None:
    shares = {trace.name: trace.x.tolist() for trace in drawn["loss_parts"].figure.data}
    assert {name: pytest.approx(x) for name, x in shares.items()} == {
        "composition": [0.5] * 2,
        "trend": [0.2] * 2,
        "rest": [0.3] * 2,
    }
    assert drawn["loss_parts"].figure.data[0].customdata[0] == " (95 %: 45.0% to 55.0%)"
    waits = {trace.name: trace.x.tolist() for trace in drawn["waits"].figure.data}
    bars = list(drawn["waits"].figure.data[0].y)
    assert [waits["wait"][bars.index(f"{name}: drafter")] for name in ("diverse", "shuffle")] == pytest.approx([0.3, 0.2])
    for bar in range(len(bars)):  # the parts of each side make up its time at most
        assert np.nansum([values[bar] for values in waits.values()]) <= 1.0 + 1e-6


def test_many_runs_share_traces_by_order(runs: list[RunAnalysis]) -> None:
    many = [replace(runs[i % 2], facts=replace(runs[i % 2].facts, name=f"run {i}")) for i in range(30)]
    plot = loss_plot(many, {}, CONFIG)
    assert [trace.name for trace in plot.figure.data] == ["order diverse", "order shuffle"]
    line = plot.figure.data[0]
    assert len(line.x) == len(line.y) == len(line.hovertext) == 15 * (STEPS + 1) and np.isnan(line.y[STEPS])
    assert set(line.hovertext) == {f"run {i}" for i in range(0, 30, 2)}
    assert points_per_trace(50) * 50 <= 25_000 and points_per_trace(1) == MAX_POINTS
    assert len(to_json(plot.figure, validate=False)) < 150_000
    assert [look.name for look in styles(many[:3])] == ["run 0", "run 1", "run 2"]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.one_of(st.floats(-100, 100), st.just(float("nan"))), min_size=1, max_size=60),
    st.integers(1, 20),
    st.integers(1, 9),
)
def test_the_thinned_median_is_the_running_median(values: list[float], width: int, stride: int) -> None:
    series = np.array(values)
    np.testing.assert_allclose(median_at(series, width, stride), running_median(series, width)[::stride])


def test_names_and_colours() -> None:
    assert label("<a>") == "&lt;a&gt;" and len(label("x" * 100)) == 24
    assert ordered_colour(0, 3) != ordered_colour(1, 3) != ordered_colour(2, 3) and ordered_colour(0, 1).startswith("#")


def test_one_step_is_a_point_and_what_is_not_drawn_is_not_explained(tmp_path: Path) -> None:
    started = FakeRun(num_steps=1, batches_per_step=2, evals=False, state="running")
    drawn = plots_of(build_report(content(analysed([write_run(tmp_path / "started", started)]))))
    line = next(trace for trace in drawn["loss"].figure.data if trace.showlegend and len(trace.x))
    assert line.mode == "lines+markers"
    shares = {key: plot for key, plot in drawn.items() if key.startswith("shares")}
    assert all("lengths in tokens" not in plot.caption for plot in shares.values())


def test_positions_have_whole_ticks(drawn: dict[str, Plot]) -> None:
    assert drawn["positions_0"].figure.layout.xaxis.dtick == 1


def test_dotted_lines_are_explained_only_where_there_are_some(full: Content) -> None:
    trained = [replace(run, evals=run.evals.filter(pc.not_equal(run.evals["kind"], "untrained"))) for run in full.runs]
    with_both, without = (plots_of(build_report(replace(full, runs=runs))) for runs in (full.runs, trained))
    assert "Dotted" in with_both["prefix_survival"].caption and "Dotted" not in without["prefix_survival"].caption


def test_a_line_near_the_edge_is_named_on_its_left() -> None:
    assert line_name(9, "shuffling", 1, left=True)["xanchor"] == "right" and line_name(9, "x", 1)["xanchor"] == "left"
