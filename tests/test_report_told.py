"""The words of a report: no stronger than what was found, with their warning, their definitions and their place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_core.analysis.build_report import build_report
from dflash_core.analysis.compare import Estimate, comparison_rows
from dflash_core.analysis.findings import KINDS
from dflash_core.analysis.findings.cleared import Cleared
from dflash_core.analysis.findings.finding import STRENGTHS
from dflash_core.analysis.history import History
from dflash_core.analysis.notes import BOLD, ONE_RUN_EACH, comparison_notes, dispatch_notes, group_notes, warnings
from dflash_core.analysis.one_run import RunAnalysis
from dflash_core.analysis.report import Report, to_html, to_markdown
from dflash_core.analysis.summary import OVER_STEPS, Table, bucket_table, comparison_tables
from dflash_core.analysis.told_findings import finding_lines, told_findings
from dflash_core.analysis.told_many import SAID, told_together
from dflash_core.analysis.told_suspects import suspect_lines
from tests.fake_runs import FakeRun, write_run
from tests.report_fakes import analysed, content, finding, two_runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunAnalysis]:
    return two_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def report(runs: list[RunAnalysis]) -> Report:
    return build_report(content(runs))


def many(run: RunAnalysis, *per_run: Sequence[dict[str, Any]]) -> list[RunAnalysis]:
    """Runs r0, r1, ... with these findings."""
    return [
        replace(
            run,
            facts=replace(run.facts, run_id=f"r{i}", name=f"r{i}"),
            findings=tuple(finding(f"r{i}", **one) for one in found),
        )
        for i, found in enumerate(per_run)
    ]


def mix(value: float, strength: str, **more: Any) -> list[dict[str, Any]]:
    return [{"strength": strength, "value": value, "unit": "share", "measure": "share of it", **more}]


def test_every_kind_has_words_for_every_strength_and_weaker_ones_claim_less() -> None:
    assert set(SAID) == set(KINDS) and all(len(said) == len(STRENGTHS) and len(set(said)) == 3 for said in SAID.values())
    assert "for the most part" in SAID["loss_composition"][0] and "in part" in SAID["loss_composition"][2]


def test_the_summary_of_many_runs_is_as_strong_as_the_findings(runs: list[RunAnalysis]) -> None:
    weak = many(runs[0], mix(0.21, "weak"), mix(0.302, "weak"), mix(0.24, "weak"), [], [])
    assert finding_lines(weak) == [
        "In 3 of 5 runs the loss is rough in part because of which buckets a step holds, for the larger part because of "
        "something else: r0, r1, r2 (share of it: 21% to 30%; all weak)."
    ]
    # One strong finding among weak ones makes no strong words; half of them do not either.
    for found in ((mix(0.7, "strong"), mix(0.2, "weak"), mix(0.2, "weak")), (mix(0.7, "strong"), mix(0.2, "weak"), [])):
        (line,) = finding_lines(many(runs[0], *found, [], []))
        assert "in part" in line and "1 strong, " in line and "20% to 70%" in line
    (line,) = finding_lines(many(runs[0], mix(0.7, "strong"), mix(0.8, "strong"), mix(0.2, "weak"), [], []))
    assert "for the most part" in line


def test_findings_of_many_runs_are_told_together_with_evidence_and_advice(runs: list[RunAnalysis], report: Report) -> None:
    made = many(
        runs[0],
        mix(0.3, "weak", text="Evidence of r0.", advice="Do this."),
        mix(0.4, "moderate", text="Evidence of r1.", advice="Do this."),
        mix(0.5, "moderate", text="Evidence of r2.", advice="Do that."),
        [],
        [],
    )
    (block,) = told_together(made)
    assert (block.strength, block.runs, block.text) == ("moderate", "r0, r1, r2", "r2: Evidence of r2.")
    assert block.figure == "Share of it: 30% to 50%; 2 moderate, 1 weak." and block.title.startswith("In 3 of 5 runs the loss")
    assert block.advice == ["Do this. (r0, r1)", "Do that. (r2)"]
    told = replace(report, findings=told_findings(made))
    page, markdown = to_html(told), to_markdown(told)
    for text in (block.title, block.figure, block.text, *block.advice):
        assert text in markdown and text in page
    assert "Evidence of r0" not in markdown and markdown.index("### All runs together") < markdown.index(block.title)
    levels = [int(level) for level in re.findall(r"<h([1-4])", page)]
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_single_runs_are_warned_of_and_groups_of_seeds_are_not(runs: list[RunAnalysis], report: Report) -> None:
    assert report.warnings == [ONE_RUN_EACH] and ONE_RUN_EACH in report.summary
    page, markdown = to_html(report), to_markdown(report)
    assert page.index(ONE_RUN_EACH) < page.index("<h2>Summary") and markdown.index(ONE_RUN_EACH) < markdown.index("## Summary")
    assert "one run each" in page[page.index("<h2>Comparisons") :] and warnings(1, []) == []
    assert warnings(6, [{"num_runs": 1}, {"num_runs": 3}]) == []
    assert build_report(content(runs[:1])).warnings == []


def test_what_has_no_interval_is_never_stressed_and_says_why() -> None:
    same = Estimate(0.0, "1", np.zeros(9), 1.0)
    found = {
        "a": {"final_loss": Estimate(1.0, "nats"), "grad_norm_mean": same,
              "tokens_per_s": Estimate(100.0, "tokens/s"), "acceptance_length": Estimate(2.0, "tokens")},
        "b": {"final_loss": Estimate(9.0, "nats"), "grad_norm_mean": same,
              "tokens_per_s": Estimate(900.0, "tokens/s"), "acceptance_length": Estimate(7.0, "tokens")},
    }  # fmt: skip
    rows = [{"run_id": name, "name": name} for name in found]
    (table,) = comparison_tables(rows, comparison_rows(found))
    assert table.bold == frozenset()
    assert [row[4] for row in table.rows] == ["too few steps", "0 to 0", "one run each", "one run each"]
    assert set(OVER_STEPS) >= {"final_loss"} and not {"tokens_per_s", "acceptance_length"} & set(OVER_STEPS)
    # The legend of bold rows stands where there is one.
    bold = replace(table, bold=frozenset({0}))
    assert BOLD not in comparison_notes([table], 2) and comparison_notes([table, bold], 3).count(BOLD) == 1
    assert BOLD not in group_notes([table]) and BOLD in group_notes([bold]) and group_notes([]) == comparison_notes([], 1) == []


def cleared(key: str, low: float, high: float) -> Cleared:
    return Cleared(key, 20, (low + high) / 2, low, high)


def test_suspects_have_a_heading_and_a_sentence_in_the_summary(runs: list[RunAnalysis], report: Report) -> None:
    fine, off = cleared("checkpoints", -0.2, 0.1), cleared("epoch_starts", 0.1, 0.3)
    both = [replace(runs[0], cleared=(fine,)), replace(runs[1], cleared=(fine, off))]
    assert suspect_lines(both) == [
        "Checkpoints were looked at and are not it: behind them the loss does not measurably differ from what other steps let "
        "expect, in both runs.",
        "Behind epoch starts the loss differs from what other steps let expect (shuffle +0.2 nats, +0.1 to +0.3).",
    ]
    assert build_report(content(both)).head[-2:] == suspect_lines(both)
    markdown = to_markdown(replace(report, findings=told_findings(both)))
    assert markdown.index("### The usual suspects") < markdown.index("- diverse. Checkpoints: the loss of the 3 steps behind one")
    some = suspect_lines([replace(runs[0], cleared=(fine,)), runs[1]])
    assert some[0].endswith("in 1 of 2 runs (the others have too few of them to say).") and suspect_lines(runs) == []


def test_what_a_finding_blames_is_not_cleared(runs: list[RunAnalysis]) -> None:
    fine = cleared("checkpoints", -0.2, 0.1)
    for cause, is_cleared in (("checkpoints", False), ("resumes or checkpoints", False), ("bucket_runs", True), (None, True)):
        blamed = replace(runs[0], cleared=(fine,), findings=(finding("r", "resets", evidence={"cause": cause}),))
        assert bool(suspect_lines([blamed])) == is_cleared


def test_suspects_of_many_runs_are_one_range(runs: list[RunAnalysis]) -> None:
    found = [replace(runs[0], cleared=(cleared("checkpoints", low, 0.3),)) for low in (-0.3, -0.1, -0.2, 0.1, -0.5)]
    assert told_findings(found).suspects == [
        (
            "Checkpoints",
            ["The loss behind one, less what other steps let expect: -0.1 to +0.2 nats over 5 runs; in 4 of them the 95 % "
             "interval holds 0."],
        )
    ]  # fmt: skip
    assert "in 1 of 5 runs" in suspect_lines(found)[0] and "One run in twenty" in suspect_lines(found)[0]


def test_words_are_defined_where_a_finding_uses_them(runs: list[RunAnalysis], report: Report) -> None:
    order = replace(runs[1], findings=(finding("shuffle", "batch_order"), finding("shuffle")))
    told = told_findings([runs[0], order])
    assert len(told.reading) == 2 and told_findings(runs).reading == []
    for text in ("leans to one bucket when it holds more than one batch above", "worst epoch alone", "90 of 100"):
        assert text in told.reading[0] and text in to_markdown(replace(report, findings=told))
    assert "The strength follows what the steps feel and not the length of the run" in told.reading[0]
    assert "behind the first tenth of the steps" in told.reading[1]
    (line,) = (line for line in report.figures if line.startswith("shuffle: inside an epoch"))
    assert "in 90 of 100 shuffles) as the longest of all epochs" in line


def test_missing_lengths_are_explained_beneath_the_buckets(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", FakeRun(name="r", num_steps=30, manifest={"dataset": "/gone/away"}))
    run = analysed([folder])[0]
    report = build_report(content([run]))
    assert "/gone/away, is not there" in report.buckets.note
    assert report.buckets.note in to_html(report) and report.buckets.note.split("_")[0] in to_markdown(report)
    # What the run's own plan says needs no dataset.
    config = {**run.facts.config, "bucketing": {"boundaries": [128, 192, 256, 384, 520, 2900]}}
    known = build_report(content([replace(run, facts=replace(run.facts, config=config))]))
    assert {row[2] for row in known.buckets.rows} == {"1–128", "129–192", "193–256", "257–384", "385–520", "521–2,900"}
    assert known.buckets.note == "" and bucket_table([], [], {}, "why").note == ""


def history(*counts: Sequence[int]) -> History:
    none = np.zeros(0, dtype=np.int64)
    names = tuple(f"target {i}" for i in range(len(counts[0])))
    return History(none, none, np.arange(len(counts), dtype=float), none.reshape(0, 0), np.array(counts), names)


def test_equal_dispatch_is_told_with_how_equal_it_is() -> None:
    runs = [("even", history((3, 3), (3, 3))), ("cured", history((2, 1), (1, 1))), ("odd", history((3, 1), (0, 1)))]
    assert list(dispatch_notes([*runs, ("drift", history((9, 1), (9, 1))), ("one", history((4,), (4,)))])) == [
        "All targets were given equally many batches in even.",
        "Targets were given equally many batches, at most 1 batch apart, in cured.",
        "Targets were given equally many batches, at most 2 batches apart (1 at the end), in odd.",
    ]


def test_markdown_of_groups_leaves_single_runs_to_the_page(runs: list[RunAnalysis], report: Report) -> None:
    five = told_findings(many(runs[0], [], [], [], [], []))
    grouped = replace(report, groups=[Table(["", "a"], [["x", "1"]], "a against b")], findings=five)
    assert "shuffle" in report.comparisons[0].title and report.comparisons[0].title in to_markdown(report)
    assert report.comparisons[0].title not in to_markdown(grouped) and report.comparisons[0].title in to_html(grouped)
    assert report.comparisons[0].title in to_markdown(replace(grouped, groups=[]))
