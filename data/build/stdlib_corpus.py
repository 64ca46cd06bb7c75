"""Cuts the Python standard library's own sources into header / body pairs.

A pair is one function or class: the header (decorators, signature, docstring) is what a user asks, the rest of the
body is the answer. Everything is dedented, so that a method reads like a function. The test suite of the standard
library is left out: it is most of the bytes and little of the variety.
"""

from __future__ import annotations

import ast
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SKIPPED_FOLDERS = {"test", "tests", "site-packages", "__pycache__", "idlelib", "lib2to3", "ensurepip", "pydoc_data"}


@dataclass(frozen=True)
class Pair:
    """One header with its body; `where` is `module:line`, stable for one version of Python."""

    where: str
    header: str
    body: str


def standard_library_files(root: Path) -> list[Path]:
    """The sources of the running interpreter's standard library, without its tests, sorted by name."""
    files = (p for p in root.rglob("*.py") if not SKIPPED_FOLDERS & set(p.relative_to(root).parts))
    return sorted(files, key=lambda p: p.relative_to(root).as_posix())


def held_out_files(root: Path) -> list[Path]:
    """Files that no training has seen: the top level of the standard library's own test suite."""
    return sorted((root / "test").glob("test_*.py"))


def pairs_of_file(path: Path, root: Path) -> Iterator[Pair]:
    """Yield the pairs of one file; a file that does not parse yields nothing."""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
        has_docstring = ast.get_docstring(node) is not None
        body_index = 1 if has_docstring else 0
        if body_index >= len(node.body) or node.end_lineno is None:
            continue
        # The line after the header ends, not the line of the first statement: comments between them are body.
        header_end = node.body[0].end_lineno if has_docstring else node.body[0].lineno - 1
        if header_end is None or header_end <= first:
            continue
        dedented = textwrap.dedent("\n".join(lines[first : node.end_lineno])).splitlines()
        split = header_end - first
        header, body = "\n".join(dedented[:split]), "\n".join(dedented[split:]).strip("\n")
        if header.strip() and body.strip():
            yield Pair(f"{path.relative_to(root).as_posix()}:{first + 1}", header, body)


def standard_library_pairs(held_out: bool = False) -> list[Pair]:
    """All pairs, in the order of file and line; `held_out` gives those of the test suite instead."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = held_out_files(root) if held_out else standard_library_files(root)
    return [pair for path in files for pair in pairs_of_file(path, root)]
