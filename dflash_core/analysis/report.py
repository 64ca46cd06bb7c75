"""`report.html` and `report.md` from the same content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from plotly.io import to_json
from plotly.offline import get_plotlyjs

from dflash_core.analysis.page import PAGE
from dflash_core.analysis.plots import Plot
from dflash_core.analysis.summary import Table

WIDE_PLOTS = ("loss", "grad_norm")


@dataclass(frozen=True)
class Report:
    """What a report shows. All texts are plain; each renderer escapes them for its format."""

    title: str
    subtitle: str
    summary: Sequence[str]
    differences: Sequence[str]
    runs: Table
    comparisons: Sequence[Table]
    buckets: Table
    plots: Sequence[Plot]
    notes: Sequence[str]


def to_html(report: Report) -> str:
    """One self-contained page: plotly's script and all data are inside. About 5 MB, nearly all of it the script."""
    # Inside a script element only "<" can end it or open a comment; JSON may write it as an escape. plotly does so too, today.
    figures = ",".join(f'"{plot.key}":{to_json(plot.figure, validate=False)}' for plot in report.plots).replace("<", "\\u003c")
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(PAGE)
    return page.render(
        title=report.title,
        subtitle=report.subtitle,
        summary=report.summary,
        differences=report.differences,
        runs=report.runs,
        comparisons=report.comparisons,
        buckets=report.buckets,
        plots=report.plots,
        notes=report.notes,
        wide=WIDE_PLOTS,
        figures=Markup("{" + figures + "}"),  # noqa: S704 - JSON without "<", made above
        plotly_js=Markup(get_plotlyjs()),  # noqa: S704 - the library's own script
    )


def to_markdown(report: Report) -> str:
    """The summary and the tables, for a place that shows Markdown."""
    parts = [f"# {_plain(report.title)}", _plain(report.subtitle)]
    if report.differences:
        parts += ["**Not comparable as they are**", _bullets(report.differences)]
    parts += ["## Summary", _bullets(report.summary), "## Runs", _table(report.runs)]
    for table in report.comparisons:
        parts += [f"## {_plain(table.title)}", _table(table), "Bold: the 95 % interval of the difference excludes zero."]
    parts += ["## Buckets", _table(report.buckets)]
    parts += [_plain(note) for note in report.notes]
    return "\n\n".join(parts) + "\n"


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
