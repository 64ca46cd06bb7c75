"""The findings of a report: what a person reads first, in both formats, for one run, several and many."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dflash_core.analysis.build_report import build_report
from dflash_core.analysis.compare import ALL_PAIRS_UP_TO, Estimate, comparison_rows
from dflash_core.analysis.findings import KINDS
from dflash_core.analysis.notes import comparisons_note
from dflash_core.analysis.one_run import RunAnalysis
from dflash_core.analysis.plots.training import loss_plot
from dflash_core.analysis.report import PlotGroup, Report, to_html, to_markdown
from dflash_core.analysis.runs import load_metrics
from dflash_core.analysis.summary import state_lines
from dflash_core.analysis.tables import table_of
from dflash_core.analysis.told_findings import finding_lines, told_findings, value_text
from dflash_core.analysis.told_groups import group_lines, group_tables
from tests.fake_runs import FakeRun, write_run
from tests.report_fakes import CONFIG, analysed, content, finding, two_runs, with_everything


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunAnalysis]:
    return two_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def report(runs: list[RunAnalysis]) -> Report:
    return build_report(content(runs))


def with_findings(report: Report, runs: list[RunAnalysis]) -> Report:
    """The report as these runs would have it, without its plots."""
    return replace(report, findings=told_findings(runs), head=[report.head[0], *finding_lines(runs)], plots=[])


def own_part(page: str) -> str:
    """The page without plotly's script and the plots' data."""
    return re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)


class Texts(HTMLParser):
    """The texts of a page by element, and what is nested in closed `details`."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, str, bool]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"{tag} closes another element"

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.found.append((self.open[-1], " ".join(data.split()), "details" in self.open))


def texts(page: str) -> list[tuple[str, str, bool]]:
    parser = Texts()
    parser.feed(own_part(page))
    assert parser.open == []
    return parser.found


def test_without_findings_one_line_says_what_was_looked_for(report: Report) -> None:
    page, markdown = own_part(to_html(report)), to_markdown(report)
    section = unescape(page[page.index('<section id="findings">') : page.index("In figures")])
    assert "Nothing stood out." in section and all(says in section for says in KINDS.values())
    line = next(line for line in markdown.splitlines() if line.startswith("Nothing stood out."))
    assert all(says in line for says in KINDS.values())
    assert not any("strong" in line for line in report.summary)


def test_a_finding_shows_strength_title_text_advice_and_folds_the_evidence(runs: list[RunAnalysis], report: Report) -> None:
    found = (finding(runs[1].run_id), finding(runs[1].run_id, "padding", strength="weak", title="Padding & more", at_steps=()))
    report = with_findings(report, [runs[0], replace(runs[1], findings=found)])
    shown = texts(to_html(report))
    open_texts = [text for _, text, folded in shown if not folded]
    for text in (
        "strong",
        "weak",
        found[0].title,
        found[0].text,
        found[0].advice,
        "Padding & more",
        "Nothing stood out in diverse.",
    ):
        assert text in open_texts
    folded = [text for _, text, folded in shown if folded]
    assert "share of the variance from the mix: 0.71 (95 % interval 0.64 to 0.77); reported from 0.3 on" in folded
    assert "steps where step BETWEEN 20 AND 30" in folded and "sd before" in folded and "0.1, 0.2, 0.4" in folded
    assert KINDS["resets"] in folded and KINDS["padding"] not in folded
    # The heading comes right behind the first lines, and the summary's first lines name the finding.
    titles = [text for tag, text, _ in shown if tag == "h2"]
    assert titles[:3] == ["Summary", "Findings", "In figures"]
    assert report.head[1] == f"shuffle: {found[0].title} (strong); Padding & more (weak)."
    markdown = to_markdown(report)
    assert f"- **strong: {found[0].title}** {found[0].text}" in markdown and "Nothing stood out in diverse." in markdown


def test_the_query_runs_and_finds_the_rows(runs: list[RunAnalysis]) -> None:
    duckdb = pytest.importorskip("duckdb")
    run = runs[0]
    one = finding(run.run_id, rows="step BETWEEN 20 AND 30 AND loss > 0")
    told = told_findings([replace(run, findings=(one,))]).runs[0].findings[0]
    assert sorted(row[0] for row in duckdb.sql(f"SELECT step FROM ({told.query.rstrip(';')})").fetchall()) == list(range(20, 31))
    other = told_findings([replace(run, findings=(finding("it's", table="curves", rows="loss > 1 OR loss < 0"),))])
    assert other.runs[0].findings[0].query == (
        f"SELECT * FROM 'curves.parquet' WHERE run_id = '{run.run_id}' AND (loss > 1 OR loss < 0);"
    )


def test_a_running_run_is_queried_in_its_jsonl(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    run = analysed([write_run(tmp_path / "it's", FakeRun(num_steps=30, state="running"))])[0]
    query = told_findings([replace(run, findings=(finding(run.run_id),))]).runs[0].findings[0].query
    assert "steps.jsonl" in query and len(duckdb.sql(f"SELECT step FROM ({query.rstrip(';')})").fetchall()) == 10


def test_many_runs_have_a_matrix_and_their_details_folded(runs: list[RunAnalysis], report: Report) -> None:
    many = [
        replace(
            runs[i % 2],
            facts=replace(runs[i % 2].facts, run_id=f"r{i}", name=f"r{i}"),
            findings=(finding(f"r{i}", "padding", strength="weak"), finding(f"r{i}", "padding", title=f"Title r{i}")),
        )
        for i in range(50)
    ]
    many = [run if i % 5 == 0 else replace(run, findings=()) for i, run in enumerate(many)]
    told = told_findings(many)
    assert told.matrix is not None and told.matrix.header == ["run", "padding"] and len(told.matrix.rows) == 50
    assert told.matrix.rows[0] == ["r0", "strong"] and told.matrix.rows[1] == ["r1", "–"]
    assert finding_lines(many) == [
        "In 10 of 50 runs other bucket boundaries would save a little padding: r0, r5, r10, r15, r20, r25, r30, r35 and 2 more "
        "(share of the variance from the mix: 0.71; 10 strong, 10 weak)."
    ]
    report = with_findings(report, many)
    shown = texts(to_html(report))
    titles = [folded for _, text, folded in shown if text.startswith("Title r")]
    assert len(titles) == 10 and all(titles) and ("td", "strong", False) in shown
    markdown = to_markdown(report)
    assert "| run | padding |" in markdown and "Title r" not in markdown


def test_texts_of_a_finding_stay_text(runs: list[RunAnalysis], report: Report) -> None:
    evil = "</p><script>alert(1)</script><b>*x*|`y`"
    one = finding(
        runs[0].run_id, title=evil, text=evil, advice=evil, measure=evil, rows=evil, evidence={evil: [evil], "d": {evil: 1}}
    )
    plotted = loss_plot([replace(runs[0], findings=(replace(one, at_steps=(5,)),))], {}, CONFIG)
    report = replace(with_findings(report, [replace(runs[0], findings=(one,))]), plots=[PlotGroup("Plots", [plotted])])
    page = to_html(report)
    assert "<script>alert" not in page and "<b>" not in own_part(page)
    data = re.search(r"const figures = (.*);", page)
    assert data and "<" not in data[1]
    hovers = [trace.get("hovertemplate", "") for trace in json.loads(data[1])["loss"]["data"]]
    assert any("&lt;/p&gt;" in hover for hover in hovers)  # plotly reads texts as HTML
    assert next(text for tag, text, _ in texts(page) if tag == "h4") == "</p><script>alert(1)</script><b>*x*|`y`"
    assert "<script>" not in to_markdown(report) and r"\*x\*" in to_markdown(report)


def test_values_for_people() -> None:
    assert value_text({"a_b": [1, 0.5], "c": None}) == "a b: 1, 0.5, c: –"
    assert value_text(list(range(100))).endswith("39 and 60 more")


def test_the_same_input_gives_the_same_report_besides_its_time(runs: list[RunAnalysis]) -> None:
    made = with_everything(runs)
    pages = [to_html(build_report(made)) for _ in range(2)]
    assert re.sub("made [0-9: -]+ UTC", "", pages[0]) == re.sub("made [0-9: -]+ UTC", "", pages[1])


def test_a_run_that_is_still_running_says_how_far_it_is(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "live",
        FakeRun(
            name="live", num_steps=40, state="running", evals=False, stats=False,
            manifest={"num_planned_steps": 600, "updated": "2026-01-02T03:04:05+00:00", "num_steps": 0},
        ),
    )  # fmt: skip
    with (folder / "metrics" / "steps.jsonl").open("a") as file:
        file.write('{"run_id": "live", "attempt": 0, "ste')
    run = analysed([folder])[0]
    report = build_report(content([run]))
    assert report.states == [
        "live: running, step 40 of 600, as of 2026-01-02 03:04 UTC. What follows is about the steps so far; "
        "analyse again for more."
    ]
    page = own_part(to_html(report))
    assert '<p class="state" role="status">live: running, step 40 of 600' in page and "So far." in page
    assert to_markdown(report).splitlines()[4].startswith("**live: running, step 40 of 600")
    assert not (folder / "metrics" / "steps.parquet").exists() and len(load_metrics(run.facts).steps) == 40


@pytest.mark.parametrize(
    ("state", "manifest", "said"),
    [
        ("completed", {}, []),
        ("failed", {"error": "CUDA died\nat once."}, ["diverse: failed, step 60. It ended with: CUDA died at once."]),
        ("stopped", {"num_planned_steps": 80, "error": None}, ["diverse: stopped, step 60 of 80."]),
        (None, {"num_planned_steps": True}, ["diverse: unknown state, step 60."]),
    ],
)
def test_the_head_says_how_a_run_ended(
    runs: list[RunAnalysis], state: str | None, manifest: dict[str, object], said: list[str]
) -> None:
    assert state_lines([replace(runs[0].facts, manifest=manifest)], [{**runs[0].row, "state": state}]) == said


def test_many_unfinished_runs_are_counted(runs: list[RunAnalysis]) -> None:
    states = state_lines([runs[0].facts] * 13, [{**runs[0].row, "state": "stopped"}] * 13)
    assert len(states) == 9 and states[-1] == "And 5 more that have not completed."


def group(name: str, metric: str, mean: float, num_runs: int = 3) -> dict[str, object]:
    sd = 0.1 if num_runs > 1 else None
    return {"group": name, "metric": metric, "num_runs": num_runs, "mean": mean, "sd": sd, "low": None, "high": None, "unit": "1"}


def against(a: str, b: str, metric: str, difference: float, low: float, high: float) -> dict[str, object]:
    ends = {"difference": difference, "ci_low": low, "ci_high": high, "effect_size": None, "unit": "1", "paired": True}
    return {"group_a": a, "group_b": b, "metric": metric, "value_a": 0.0, "value_b": 0.0, "num_a": 3, "num_b": 3, **ends}


GROUPS = [group(*one) for one in (("b", "acceptance_length", 3.84), ("a", "acceptance_length", 3.07), ("b", "runs_z", 1.0))]
AGAINST = [against("b", "a", "acceptance_length", -0.77, -1.8, 0.25)]


def test_the_first_lines_tell_groups_of_seeds_apart(runs: list[RunAnalysis]) -> None:
    assert group_lines(GROUPS, AGAINST) == [
        "Acceptance length: b 3.84, a 3.07 (3 runs each). Against b: a -0.77 (95 % interval -1.8 to 0.25: other seeds alone "
        "could do that)."
    ]
    sure, other = [against("b", "a", "acceptance_length", -0.77, -1.0, -0.5)], [GROUPS[0], {**GROUPS[1], "num_runs": 2}]
    assert group_lines(other, sure) == [
        "Acceptance length: b 3.84 (3 runs), a 3.07 (2 runs). Against b: a -0.77 (95 % interval -1 to -0.5)."
    ]
    equal = [against("b", "a", "acceptance_length", 0.0, 0.0, 0.0)]
    assert group_lines(GROUPS, equal)[0].endswith("Against b: a the same.")  # and not what other seeds could do to it
    many = [GROUPS[0], *(group(f"g{i}", "acceptance_length", 3.0) for i in range(5))]
    assert "and 2 more groups (3 runs each)" in group_lines(many, [])[0]
    # In a report they come right behind what it is about.
    made = content(runs)
    tables = {"groups": table_of("groups", GROUPS), "group_comparisons": table_of("group_comparisons", [])}
    assert build_report(replace(made, tables={**made.tables, **tables})).head[1].startswith("Acceptance length: b 3.84")


def test_single_runs_are_no_groups() -> None:
    alone = [group(name, "final_loss", 1.0, num_runs=1) for name in ("a", "b")]
    assert group_lines(alone, []) == [] and group_tables(alone, []) == []
    assert group_lines([*alone, group("c", "final_loss", 2.0)], []) == []


def test_groups_stand_side_by_side_in_the_order_of_the_runs() -> None:
    missing = [*GROUPS, group("c", "acceptance_length", 2.0, num_runs=1)]
    side_by_side, pair = group_tables(missing, AGAINST)
    assert side_by_side.header == ["", "b (3 runs)", "a (3 runs)", "c (1 run)"]
    assert side_by_side.rows == [
        ["acceptance length", "3.84 ± 0.1", "3.07 ± 0.1", "2"],
        [side_by_side.rows[1][0], "1 ± 0.1", "–", "–"],
    ]
    assert pair.title == "b against a, seed by seed" and pair.rows[0][3:5] == ["-0.77", "-1.8 to +0.25"] and not pair.bold


def test_the_note_says_which_comparisons_there_are() -> None:
    for num_runs, which in ((ALL_PAIRS_UP_TO, "of all pairs."), (ALL_PAIRS_UP_TO + 1, "of all runs with the first.")):
        assert comparisons_note(num_runs).endswith(which)
        rows = comparison_rows({str(i): {"final_loss": Estimate(1.0, "nats")} for i in range(num_runs)})
        assert len(rows) == (num_runs * (num_runs - 1) // 2 if "pairs" in which else num_runs - 1)
