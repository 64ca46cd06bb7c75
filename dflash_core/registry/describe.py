"""A registry as lines for a reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from dflash_core.registry.lineage import Entry

HEADS = ("", "drafter", "when (UTC)", "decision", "tokens per forward", "against", "difference", "lossless", "parent", "run")
NONE = "-"


def describe_list(name: str, entries: Sequence[Entry]) -> list[str]:
    """One line for each decision, the newest first; the drafter in use has a star at its promotion."""
    current = entries[-1].current if entries else None
    promoted = [number for number, entry in enumerate(entries) if (entry.drafter, entry.decision) == (current, "promoted")]
    rows = [HEADS]
    for number, entry in reversed(list(enumerate(entries))):
        rows.append(
            (
                "*" if promoted and number == promoted[-1] else "",
                entry.drafter,
                f"{entry.time:%Y-%m-%d %H:%M}",
                entry.decision if entry.decision != "rolled_back" else f"rolled back to {entry.current}",
                _interval(entry.acceptance_length, entry.acceptance_low, entry.acceptance_high),
                entry.compared_with or "no drafter",
                _interval(entry.difference, entry.difference_low, entry.difference_high, "+"),
                _words(entry.lossless),
                entry.parent or NONE,
                entry.run_id,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [f"{name}: {f'{current} is in use' if current else 'no drafter is in use'}", *lines]


def describe_entry(entry: Entry, where: str, problem: str | None = None) -> list[str]:
    """All fields of a row.

    Args:
        where: folder of the drafter's files.
        problem: what is wrong with them.
    """
    values = {field.name: getattr(entry, field.name) for field in fields(Entry)}
    values["time"] = f"{entry.time:%Y-%m-%d %H:%M:%S} UTC"
    values["sources"] = f"{len(entry.sources)} files"
    values["files"] = ", ".join(f"{name} {digest[:12]}" for name, digest in entry.files.items())
    values["lossless"] = _words(entry.lossless)
    lines = [f"{name:22} {_text(value)}" for name, value in values.items()]
    return [*lines, f"{'folder':22} {problem or where}"]


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return NONE if value is None else str(value)


def _words(value: bool | None) -> str:
    return NONE if value is None else "yes" if value else "NO"


def _interval(value: float | None, low: float | None, high: float | None, sign: str = "") -> str:
    return NONE if value is None or low is None or high is None else f"{value:{sign}.3f} ({low:{sign}.3f} to {high:{sign}.3f})"
