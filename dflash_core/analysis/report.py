"""`report.html` and `report.md` from the same content."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from plotly.io import to_json
from plotly.offline import get_plotlyjs

from dflash_core.analysis.page import PAGE, SCRIPT, STYLE
from dflash_core.analysis.plots import Plot
from dflash_core.analysis.summary import Table
from dflash_core.analysis.told_findings import NOTHING, ToldFinding, ToldFindings
from dflash_core.analysis.told_many import ToldTogether

TOGETHER_TITLE = "All runs together"
SUSPECTS, READING_TITLE = "The usual suspects", "How to read these findings"
QUIET_NOTE = "A kind that needs more steps, or rows that were not recorded, says nothing."
# An artifact is read in passing: of each run the strongest, the rest is in the page.
MAX_MARKDOWN_FINDINGS = 6


@dataclass(frozen=True)
class PlotGroup:
    """Plots under a common heading; `notes` stand beneath them."""

    title: str
    plots: Sequence[Plot]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    """What a report shows. All texts are plain; each renderer escapes them for its format.

    Args:
        states: of the runs that have not completed, a line each.
        head: what the report is about and what was found, a few lines.
        figures: the most important figures in words.
        warnings: what must be known before any difference is read.
        group_notes, comparison_notes: how to read these tables; they stand above them.
    """

    title: str
    subtitle: str
    states: Sequence[str]
    head: Sequence[str]
    figures: Sequence[str]
    findings: ToldFindings
    differences: Sequence[str]
    runs: Table
    groups: Sequence[Table]
    comparisons: Sequence[Table]
    buckets: Table
    plots: Sequence[PlotGroup]
    warnings: Sequence[str] = ()
    group_notes: Sequence[str] = ()
    comparison_notes: Sequence[str] = ()

    @property
    def summary(self) -> list[str]:
        return [*self.head, *self.warnings, *self.figures]


def to_html(report: Report) -> str:
    """One self-contained page: plotly's script and all data are inside. About 5 MB, nearly all of it the script."""
    plots = [plot for group in report.plots for plot in group.plots]
    # Inside a script element only "<" can end it or open a comment; JSON may write it as an escape. plotly does so too, today.
    figures = ",".join(f'"{plot.key}":{to_json(plot.figure, validate=False)}' for plot in plots).replace("<", "\\u003c")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    page = environment.from_string(PAGE)
    return page.render(
        report=report,
        sections=list(_sections(report)),
        nothing=NOTHING,
        quiet_note=QUIET_NOTE,
        suspects_title=SUSPECTS,
        together_title=TOGETHER_TITLE,
        reading_title=READING_TITLE,
        style=Markup(STYLE),  # noqa: S704 - our own text
        script=Markup(SCRIPT),  # noqa: S704 - our own text
        figures=Markup("{" + figures + "}"),  # noqa: S704 - JSON without "<", made above
        plotly_js=Markup(get_plotlyjs()),  # noqa: S704 - the library's own script
    )


def _sections(report: Report) -> Iterator[tuple[str, str]]:
    """Anchors and titles of the page's table of contents."""
    yield "findings", "Findings"
    yield "runs", "Runs"
    if report.groups:
        yield "groups", "Groups"
    for number, group in enumerate(report.plots):
        yield f"plots-{number}", group.title
    if report.comparisons:
        yield "comparisons", "Comparisons"
    yield "buckets", "Buckets"


def to_markdown(report: Report) -> str:
    """The summary, the findings and the tables, for a place that shows Markdown."""
    parts = [f"# {_plain(report.title)}", _plain(report.subtitle)]
    parts += [f"**{_plain(line)}**" for line in [*report.states, *report.warnings]]
    if report.differences:
        parts += ["**Not comparable as they are**", _bullets(report.differences)]
    parts += ["## Summary", _bullets(report.head)]
    parts += ["## Findings", *_findings(report.findings)]
    if report.figures:
        parts += ["## In figures", _bullets(report.figures)]
    parts += ["## Runs", *_tables([report.runs])]
    if report.groups:
        parts += ["## Groups of runs", *map(_plain, report.group_notes), *_tables(report.groups)]
    if report.comparisons:
        parts += ["## Comparisons", *_comparisons(report)]
    for group in report.plots:
        if group.notes:
            parts += [f"## {_plain(group.title)}", "The plots are in report.html.", *map(_plain, group.notes)]
    parts += ["## Buckets", *_tables([report.buckets])]
    return "\n\n".join(parts) + "\n"


def _comparisons(report: Report) -> Iterator[str]:
    """Of runs that are in groups, no one reads the single ones against each other in passing."""
    if report.groups and report.findings.is_of_many:
        yield "Single runs against each other are in report.html and comparisons.parquet; groups of runs, above, say more."
    else:
        yield from map(_plain, report.comparison_notes)
        yield from _tables(report.comparisons)


def _tables(tables: Sequence[Table]) -> Iterator[str]:
    for table in tables:
        yield from [f"### {_plain(table.title)}"] if table.title else []
        yield _table(table)
        yield from [_plain(table.note)] if table.note else []


def _findings(told: ToldFindings) -> Iterator[str]:
    """The strongest of each run; of many runs those of a kind together."""
    if not told.runs:
        yield f"{NOTHING} Looked for: {_plain('; '.join(told.looked_for))}. {QUIET_NOTE}"
    elif told.matrix is not None:
        yield _table(told.matrix)
        yield f"### {TOGETHER_TITLE}"
        yield "\n".join(map(_together, told.together))
        yield "Each finding of each run with its evidence is in report.html and findings.parquet."
    else:
        for run in told.runs:
            shown = run.findings[:MAX_MARKDOWN_FINDINGS]
            yield f"### {_plain(run.name)}"
            yield "\n".join(_finding(one) for one in shown)
            if len(run.findings) > len(shown):
                yield f"And {len(run.findings) - len(shown)} more in report.html."
        if told.quiet:
            yield f"{NOTHING[:-1]} in {_plain(', '.join(told.quiet))}."
    if told.suspects:
        yield f"### {SUSPECTS}"
        yield _bullets([f"{name}. {line}" for name, lines in told.suspects for line in lines])
    if told.reading:
        yield f"### {READING_TITLE}"
        yield _bullets(told.reading)


def _together(one: ToldTogether) -> str:
    advice = " ".join(f"*{_plain(line)}*" for line in one.advice)
    told = f"{_plain(one.figure)} Runs: {_plain(one.runs)}. {_plain(one.text)} {advice}"
    return f"- **{_plain(one.strength)}: {_plain(one.title)}** {told}"


def _finding(one: ToldFinding) -> str:
    return f"- **{_plain(one.strength)}: {_plain(one.title)}** {_plain(one.text)} *{_plain(one.advice)}* Rows: {_plain(one.rows)}"


def _plain(text: str) -> str:
    """A text that Markdown shows as it is."""
    shown = " ".join(str(text).split()).replace("&", "&amp;").replace("<", "&lt;")
    for mark in "\\`*_[]|":
        shown = shown.replace(mark, "\\" + mark)
    return shown


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {_plain(line)}" for line in lines)


def _table(table: Table) -> str:
    lines = [_line(table.header), "|" + " --- |" + " ---: |" * (len(table.header) - 1)]
    for number, row in enumerate(table.rows):
        lines.append(_line(row, bold=number in table.bold))
    return "\n".join(lines)


def _line(cells: Sequence[str], bold: bool = False) -> str:
    return "| " + " | ".join(f"**{_plain(cell)}**" if bold and cell else _plain(cell) for cell in cells) + " |"
