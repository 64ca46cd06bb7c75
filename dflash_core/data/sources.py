"""Conversations from JSONL files: every row becomes a `Conversation`, a `Reject`, or ends reading with one line.

A row is one line, counted from 1; a line of nothing but white space is no row. `messages` is a list of
`{"role", "content"}`, both strings; `id`, `source` and `finish_reason` are optional, other keys of the row are the
user's own. A message, however, may have no other key (unless it is null): what a chat template would make of
`reasoning_content` or `tool_calls` must not get lost in silence.
"""

from __future__ import annotations

import glob
import gzip
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow.parquet as pq

from dflash_core.errors import DataError
from dflash_core.provenance import digest_file

ROLES = ("system", "developer", "user", "assistant", "tool")
# Other reasons (aborted, filtered, a stop string) leave open whether the end-of-turn token was the target's own.
FINISH_REASONS = (None, "stop", "length")
UNUSABLE_CHARACTERS = re.compile("[\x00\ud800-\udfff]")

OnBadRow = Literal["error", "reject"]


class BadRow(Exception):
    """A row cannot be used: `reason` is one of a few fixed texts, `detail` says what exactly."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason} ({detail})" if detail else reason)


class Message(NamedTuple):
    """One turn."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """One usable row. `sample_id` is unique over all files read together."""

    sample_id: str
    source: str
    messages: tuple[Message, ...]
    finish_reason: str | None
    source_file: str
    row: int
    text: str | None = None
    tools: Any = None


@dataclass(frozen=True, slots=True)
class Reject:
    """One row that was left out, and why."""

    source_file: str
    row: int
    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.source_file}: row {self.row}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


def reject(where: Conversation, error: BadRow) -> Reject:
    """The reject for a conversation that turned out to be unusable after it was read."""
    return Reject(where.source_file, where.row, error.reason, error.detail)


def _expand_paths(patterns: Iterable[str]) -> list[Path]:
    """The files that the patterns name: patterns in the given order, the matches of each sorted, no file twice.

    Raises:
        DataError: a file does not exist, or a glob matches nothing.
    """
    files: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern)
        if path.is_file():
            files[path] = None
            continue
        if not glob.has_magic(pattern):
            raise DataError(f"{pattern}: {'is a folder, not a file' if path.is_dir() else 'no such file'}")
        # Path.glob takes no absolute patterns in Python 3.11.
        matches = sorted(p for p in map(Path, glob.glob(pattern, recursive=True)) if p.is_file())  # noqa: PTH207
        if not matches:
            raise DataError(f"{pattern}: no file matches")
        files.update(dict.fromkeys(matches))
    return list(files)


def read_conversations(files: Iterable[str], on_bad_row: OnBadRow) -> Iterator[Conversation | Reject]:
    """Read JSONL files or globs in order, one item per row; files are looked for at once, rows are read on demand.

    Args:
        files: paths and globs (see `expand_files`).
        on_bad_row: `error` raises at the first bad row, `reject` yields a `Reject` in its place.

    Raises:
        DataError: a file is missing or unreadable; or, with `error`, a row is bad. The text names file and row.
    """
    return _conversations(_expand_paths(files), on_bad_row)


def _conversations(paths: list[Path], on_bad_row: OnBadRow) -> Iterator[Conversation | Reject]:
    seen: set[str] = set()
    for path in paths:
        for row, line in read_rows(path):
            try:
                conversation = parse_row(line, path, row)
                if conversation.sample_id in seen:
                    raise BadRow("duplicate id", repr(conversation.sample_id))
            except BadRow as error:
                rejected = Reject(path.as_posix(), row, error.reason, error.detail)
                if on_bad_row == "error":
                    raise DataError(str(rejected)) from error
                yield rejected
            else:
                seen.add(conversation.sample_id)
                yield conversation


def read_rows(path: Path) -> Iterator[tuple[int, bytes]]:
    """The rows of a file with their numbers; raises `DataError` if it cannot be read."""
    try:
        with path.open("rb") as file:
            for row, line in enumerate(file, start=1):
                if line.strip():
                    yield row, line
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def parse_row(line: bytes, path: Path, row: int, *, needs_answer: bool = True) -> Conversation:
    """Check one row and return its conversation; raises `BadRow`.

    Without an `id` the row is called by its file and number, without a `source` by the name of its file.
    """
    value = _json_object(line)
    messages = value.get("messages")
    if messages is None:
        raise BadRow("no messages")
    if not isinstance(messages, list):
        raise BadRow("messages is not a list", type(messages).__name__)
    if not messages:
        raise BadRow("empty conversation")
    turns = tuple(_message(message, number) for number, message in enumerate(messages, start=1))
    if needs_answer and not any(turn.role == "assistant" for turn in turns):
        raise BadRow("no assistant turn")
    finish_reason = value.get("finish_reason")
    if finish_reason not in FINISH_REASONS:
        raise BadRow("unknown finish_reason", f"{_short(finish_reason)}; known are stop and length")
    sample_id = value.get("id")
    if isinstance(sample_id, int) and not isinstance(sample_id, bool):
        sample_id = str(sample_id)
    return Conversation(
        sample_id=f"{path.as_posix()}:{row}" if sample_id is None else _name(sample_id, "id"),
        source=path.stem if value.get("source") is None else _name(value["source"], "source"),
        messages=turns,
        finish_reason=finish_reason,
        source_file=path.as_posix(),
        row=row,
    )


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow("invalid UTF-8", f"byte {error.start + 1}") from error
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadRow("not JSON", f"{error.msg}: column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # a number with thousands of digits, brackets nested without end
        raise BadRow("not JSON", type(error).__name__) from error
    if not isinstance(value, dict):
        raise BadRow("not an object", type(value).__name__)
    return value


def _message(message: object, number: int) -> Message:
    where = f"message {number}"
    if not isinstance(message, dict):
        raise BadRow("ill-typed message", f"{where} is not an object")
    unknown = sorted(key for key, value in message.items() if key not in ("role", "content") and value is not None)
    if unknown:
        raise BadRow("unknown message key", f"{where}: {_short(unknown[0])}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise BadRow("ill-typed message", f"{where}: {'content' if isinstance(role, str) else 'role'} is not a string")
    if role not in ROLES:
        raise BadRow("unknown role", f"{where}: {_short(role)}")
    if role == "assistant" and not content.strip():
        raise BadRow("empty assistant content", where)
    _check_characters(content, where)
    return Message(role, content)


def _name(value: object, key: str) -> str:
    if not isinstance(value, str) or not value:
        raise BadRow(f"ill-typed {key}", _short(value))
    _check_characters(value, key)
    return value


def _check_characters(text: str, where: str) -> None:
    found = UNUSABLE_CHARACTERS.search(text)
    if found:
        reason = "NUL character" if found[0] == "\x00" else "lone surrogate"
        raise BadRow(reason, f"{where}, character {found.start() + 1}")


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:59] + "…"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A local file with rows."""

    url: str
    format: Literal["jsonl", "parquet", "arrow"]
    compression: Literal["gzip", "zstd"] | None

    @property
    def stem(self) -> str:
        return Path(self.url).name.split(".")[0]


@dataclass(frozen=True, slots=True)
class RawChunk:
    """Rows that are not parsed yet; row numbers count from 1."""

    first_row: int
    num_rows: int
    format: str
    data: Any
    end_byte: int


def expand_files(patterns: Iterable[str]) -> list[SourceFile]:
    """The files that the patterns name."""
    return [
        SourceFile(path.as_posix(), "parquet" if path.suffix == ".parquet" else "jsonl", "gzip" if path.suffix == ".gz" else None)
        for path in _expand_paths(patterns)
    ]


def content_identity(file: SourceFile) -> str:
    """SHA-256 of the raw bytes."""
    return "sha256:" + digest_file(Path(file.url))


def num_bytes(file: SourceFile) -> int | None:
    """Size of the raw file."""
    return Path(file.url).stat().st_size


def read_chunks(file: SourceFile, max_rows: int, max_bytes: int) -> Iterator[RawChunk]:
    """Rows in pieces with fixed borders."""
    if file.format == "parquet":
        table = pq.read_table(file.url)
        for start in range(0, table.num_rows, max_rows):
            piece = table.slice(start, max_rows)
            yield RawChunk(start + 1, piece.num_rows, "parquet", piece.to_pylist(), 0)
        return
    with open(file.url, "rb") as raw:  # noqa: PTH123
        first, lines, size = 1, [], 0
        for line in gzip.open(raw) if file.compression else raw:
            lines.append(line)
            size += len(line)
            if len(lines) >= max_rows or size >= max_bytes:
                yield RawChunk(first, len(lines), "jsonl", b"".join(lines), raw.tell())
                first, lines, size = first + len(lines), [], 0
        if lines:
            yield RawChunk(first, len(lines), "jsonl", b"".join(lines), raw.tell())
