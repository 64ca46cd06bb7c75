"""Findings as a report tells them: by run, in texts, with the query that shows the rows they rest on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_core.analysis.findings.finding import KINDS, STRENGTHS, Finding
from dflash_core.analysis.notes import reading_notes
from dflash_core.analysis.one_run import RunAnalysis
from dflash_core.analysis.summary import FEW_RUNS, Table, number
from dflash_core.analysis.tables import STREAMS
from dflash_core.analysis.told_many import ToldTogether, lines_of_many, told_together
from dflash_core.analysis.told_suspects import told_suspects

NOTHING = "Nothing stood out."
MAX_TITLES = 3
MAX_ITEMS = 40


@dataclass(frozen=True)
class ToldFinding:
    """A finding in texts. `figure` is what it rests on, `evidence` further figures by name, `query` SQL that DuckDB takes."""

    kind: str
    strength: str
    title: str
    text: str
    advice: str
    figure: str
    rows: str
    query: str
    evidence: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class ToldRun:
    """The findings of one run, strongest first."""

    name: str
    findings: Sequence[ToldFinding]


@dataclass(frozen=True)
class ToldFindings:
    """The section of a report.

    Args:
        runs: those with findings.
        quiet: names of the runs without.
        looked_for: what each kind that was not found in any run says.
        matrix: runs by kinds, of many runs only.
        is_running: a run has not ended, so more may come.
        suspects: what checkpoints and the like do to the loss, a sentence each, by run; of many runs by event.
        together: the findings of all runs by kind, of many runs only.
        reading: how to read the kinds that there are.
    """

    runs: Sequence[ToldRun]
    quiet: Sequence[str]
    looked_for: Sequence[str]
    matrix: Table | None
    is_running: bool
    suspects: Sequence[tuple[str, Sequence[str]]] = ()
    num_runs: int = 1
    together: Sequence[ToldTogether] = ()
    reading: Sequence[str] = ()

    @property
    def is_of_many(self) -> bool:
        return self.num_runs > FEW_RUNS

    @property
    def folded(self) -> bool:
        """Whether the runs' findings are folded behind the matrix."""
        return self.matrix is not None


def told_findings(runs: Sequence[RunAnalysis]) -> ToldFindings:
    """The findings of all runs in words, the runs without any, and how to read the kinds that there are."""
    found = {finding.kind for run in runs for finding in run.findings}
    return ToldFindings(
        runs=[ToldRun(run.name, [told_finding(run, one) for one in run.findings]) for run in runs if run.findings],
        quiet=[run.name for run in runs if not run.findings],
        looked_for=[says for kind, says in KINDS.items() if kind not in found],
        matrix=_matrix(runs, [kind for kind in KINDS if kind in found]) if len(runs) > FEW_RUNS and found else None,
        is_running=any(run.row["state"] == "running" for run in runs),
        suspects=told_suspects(runs),
        num_runs=len(runs),
        together=told_together(runs) if len(runs) > FEW_RUNS else (),
        reading=reading_notes(runs),
    )


def told_finding(run: RunAnalysis, finding: Finding) -> ToldFinding:
    """A finding's figure with unit, interval and threshold in words, and the query for its rows."""
    between = (
        "" if finding.low is None or finding.high is None else f" (95 % interval {number(finding.low)} to {number(finding.high)})"
    )
    unit = "" if finding.unit in ("", "1") else f" {finding.unit}"
    return ToldFinding(
        kind=words(finding.kind),
        strength=finding.strength,
        title=finding.title,
        text=finding.text,
        advice=finding.advice,
        figure=f"{finding.measure}: {number(finding.value)}{unit}{between}; reported from {number(finding.threshold)}{unit} on",
        rows=f"{finding.table} where {finding.rows}",
        query=query(run, finding),
        evidence=[(words(str(key)), value_text(value)) for key, value in finding.evidence.items()],
    )


def query(run: RunAnalysis, finding: Finding) -> str:
    """SQL for DuckDB. Streams lie in the run's folder, as Parquet once it has ended; tables of the report beside the report."""
    if finding.table not in STREAMS:
        condition = f"run_id = {_quoted(run.run_id)} AND ({finding.rows})"
        return _select(f"{finding.table}.parquet", condition)
    folder = run.facts.folder / "metrics"
    compacted = folder / f"{finding.table}.parquet"
    path = compacted if compacted.is_file() else folder / f"{finding.table}.jsonl"
    return _select(str(path), finding.rows)


def _select(path: str, condition: str) -> str:
    # A text for a person to read and to run; nothing here runs it.
    return f"SELECT * FROM {_quoted(path)} WHERE {condition};"  # noqa: S608


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def words(name: str) -> str:
    return name.replace("_", " ")


def value_text(value: Any) -> str:
    """A JSON value for people; long lists are cut."""
    if isinstance(value, Mapping):
        return ", ".join(f"{words(str(key))}: {value_text(item)}" for key, item in list(value.items())[:MAX_ITEMS])
    if isinstance(value, list | tuple):
        more = f" and {len(value) - MAX_ITEMS} more" if len(value) > MAX_ITEMS else ""
        return ", ".join(value_text(item) for item in value[:MAX_ITEMS]) + more
    return number(value)


def finding_lines(runs: Sequence[RunAnalysis]) -> list[str]:
    """For the summary: a line per run while they are few, else one per kind. Runs without findings are named where others have
    some."""
    if len(runs) > FEW_RUNS:
        return lines_of_many(runs)
    lines = [f"{run.name}: {_titles(run.findings)}." for run in runs if run.findings]
    quiet = [run.name for run in runs if not run.findings]
    return [*lines, f"{', '.join(quiet)}: {NOTHING[0].lower()}{NOTHING[1:]}"] if lines and quiet else lines


def _titles(findings: Sequence[Finding]) -> str:
    more = f"; and {len(findings) - MAX_TITLES} more" if len(findings) > MAX_TITLES else ""
    return "; ".join(f"{one.title.rstrip('.')} ({one.strength})" for one in findings[:MAX_TITLES]) + more


def _matrix(runs: Sequence[RunAnalysis], kinds: Sequence[str]) -> Table:
    """Runs by kinds; a cell says how strong the strongest of its findings is."""
    body = []
    for run in runs:
        strongest: dict[str, str] = {}
        for finding in sorted(run.findings, key=lambda one: STRENGTHS.index(one.strength)):
            strongest.setdefault(finding.kind, finding.strength)
        body.append([run.name, *(strongest.get(kind, "–") for kind in kinds)])
    return Table(["run", *(words(kind) for kind in kinds)], body)
