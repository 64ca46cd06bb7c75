"""What a row means: every row becomes a `Conversation` or a `BadRow`.

Shapes, by the columns that a row has (a null counts as absent); of several the first in this list is taken, and shapes
that the user's column map names come before all others:

1. `messages`: OpenAI turns `{"role", "content"}`, with tool calls and reasoning
2. `conversations`: ShareGPT turns `{"from", "value"}`, or OpenAI turns under that name
3. `prompt` with `response` or `completion`: each a text or a list of turns
4. `text`: plain text

Turns may come in either form under any name, and a list may be a JSON string. `id`, `source`, `finish_reason` and
`tools` are optional. Other columns are the user's own. Inside a turn, however, a key with a value that is not known is
refused: what a chat template would have made of it must not get lost in silence. How single turns are read is in
`turns`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from dflash_core.data.sources import MAX_LINE_BYTES, TOO_LONG, RawChunk
from dflash_core.data.turns import BadRow, Message, check_characters, parse_tools, parse_turns, short

__all__ = ["BadRow", "Conversation", "Message", "Reject", "parse_row", "reject", "rows_of"]

MAX_LINE_ITEMS = 1 << 24  # `{},` is three bytes and becomes an object that takes twenty times as many
# Other reasons (aborted, filtered, a stop string) leave open whether the end-of-turn token was the target's own.
FINISH_REASONS = (None, "stop", "tool_calls", "length")
# The columns that hold a shape's content, and which of our fields in a column map stand for them.
SHAPES = (("messages", ("messages",)), ("conversations", ()), ("prompt", ("prompt", "response")), ("text", ("text",)))


@dataclass(frozen=True, slots=True)
class Conversation:
    """One usable row: `messages`, or `text` and no messages. `tools` are the row's tool descriptions, if any."""

    sample_id: str
    source: str
    messages: tuple[Message, ...]
    finish_reason: str | None
    source_file: str
    row: int
    text: str | None = None
    tools: tuple[dict[str, Any], ...] | None = None


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


# ---- decoding ----


def rows_of(chunk: RawChunk) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """The rows of a chunk with their numbers; what is no object, not JSON or not UTF-8 comes as a `BadRow`.

    In rows of Parquet and Arrow files nulls inside structs are left out, and a value that cannot be read is a `BadRow`
    in its column: it matters only if the column does.
    """
    if isinstance(chunk.data, bytes):
        yield from _table_rows(chunk.data, chunk.first_row)
        return
    for number, line in chunk.data:
        try:
            yield number, _json_object(line)
        except BadRow as error:
            yield number, error


def _json_object(line: bytes) -> dict[str, Any]:
    if line == TOO_LONG:
        raise BadRow("over-long line", f"more than {MAX_LINE_BYTES} bytes")
    if len(line) > MAX_LINE_ITEMS and line.count(b",") > MAX_LINE_ITEMS:
        raise BadRow("over-long line", f"more than {MAX_LINE_ITEMS} commas")
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow("invalid UTF-8", f"byte {error.start + 1}") from error
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadRow("not JSON", f"{error.msg}: column {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:  # a number with thousands of digits, brackets nested without end
        raise BadRow("not JSON", type(error).__name__) from error
    if not isinstance(value, dict):
        raise BadRow("not an object", type(value).__name__)
    return value


def _table_rows(data: bytes, first_row: int) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    number = first_row
    with pa.ipc.open_stream(data) as reader:
        for batch in reader:
            names = batch.schema.names
            columns = [_values(name, column) for name, column in zip(names, batch.columns, strict=True)]
            for row in zip(*columns, strict=True) if columns else [()] * batch.num_rows:
                yield number, {name: value for name, value in zip(names, row, strict=True) if value is not None}
                number += 1


def _values(name: str, column: pa.Array) -> list[Any]:
    """A column as Python values; all at once, and value by value where one of them cannot be read."""
    try:
        values = column.to_pylist()
    except (ValueError, OverflowError, ImportError, pa.ArrowException):
        return [_value(name, column.slice(index, 1)) for index in range(len(column))]
    return [_without_nulls(value) for value in values] if pa.types.is_nested(column.type) else values


def _value(name: str, single: pa.Array) -> Any:
    try:
        return _without_nulls(single.to_pylist()[0])
    except UnicodeDecodeError:
        return BadRow("invalid UTF-8", f"column {short(name)}")
    except (ValueError, OverflowError, ImportError, pa.ArrowException) as error:
        return BadRow("unreadable value", f"column {short(name)}: {type(error).__name__}")


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


# ---- meaning ----


class _Row:
    """Access to a row's fields through the column map."""

    def __init__(self, value: dict[str, Any], columns: Mapping[str, str]) -> None:
        self._value, self._columns = value, columns

    def get(self, field: str) -> Any:
        """The value of the mapped column, else of the column of that name; None if there is none."""
        column = self._columns.get(field)
        found = None if column is None else self._value.get(column)
        found = self._value.get(field) if found is None else found
        if isinstance(found, BadRow):
            raise found
        return found

    def has_mapped(self, field: str) -> bool:
        """Whether the user named a column for the field and the row has it."""
        return field in self._columns and self._value.get(self._columns[field]) is not None


def parse_row(
    value: dict[str, Any],
    *,
    source_file: str,
    row: int,
    default_id: str,
    default_source: str,
    columns: Mapping[str, str] = {},
    needs_answer: bool = True,
) -> Conversation:
    """Check one row and return its conversation.

    Args:
        default_id: what the row is called if it has no `id`; `default_source` likewise.
        columns: our field name -> the rows' column, for fields that are called otherwise there. A row without that
            column is read as if nothing was mapped.
        needs_answer: whether a conversation without an assistant turn is refused; a `prompt` alone is then, too.

    Raises:
        BadRow: the row cannot be used.
    """
    fields = _Row(value, columns)
    messages, text = _content(fields, needs_answer)
    finish_reason = fields.get("finish_reason")
    if finish_reason not in FINISH_REASONS:
        raise BadRow("unknown finish_reason", f"{short(finish_reason)}; known are stop, tool_calls and length")
    sample_id, source = fields.get("id"), fields.get("source")
    if isinstance(sample_id, int) and not isinstance(sample_id, bool):
        sample_id = str(sample_id)
    return Conversation(
        sample_id=default_id if sample_id is None else _name(sample_id, "id"),
        source=default_source if source is None else _name(source, "source"),
        messages=messages,
        finish_reason=finish_reason,
        source_file=source_file,
        row=row,
        text=text,
        tools=parse_tools(fields.get("tools")),
    )


def _content(fields: _Row, needs_answer: bool) -> tuple[tuple[Message, ...], str | None]:
    shape = _shape(fields)
    if shape == "text":
        text = fields.get("text")
        if not isinstance(text, str):
            raise BadRow("ill-typed text", type(text).__name__)
        if not text.strip():
            raise BadRow("empty text")
        check_characters(text, "text")
        return (), text
    turns = _prompt_and_response(fields, needs_answer) if shape == "prompt" else parse_turns(fields.get(shape), shape)
    if needs_answer and not any(turn.role == "assistant" for turn in turns):
        raise BadRow("no assistant turn")
    return turns, None


def _shape(fields: _Row) -> str:
    mapped = [name for name, names in SHAPES if any(fields.has_mapped(field) for field in names)]
    present = [name for name, _ in SHAPES if fields.get(name) is not None]
    if not mapped and present[:1] == ["prompt"] and "text" in present and _response(fields) is None:
        return "text"
    if not mapped and not present:
        raise BadRow("no messages", "nor conversations, prompt or text")
    return (mapped or present)[0]


def _response(fields: _Row) -> Any:
    response = fields.get("response")
    return fields.get("completion") if response is None else response


def _prompt_and_response(fields: _Row, needs_answer: bool) -> tuple[Message, ...]:
    turns: list[Any] = []
    for role, field, value in (("user", "prompt", fields.get("prompt")), ("assistant", "response", _response(fields))):
        if value is None:
            if needs_answer or role == "user":
                raise BadRow(f"no {field}")
        elif isinstance(value, str):
            turns.append({"role": role, "content": value})
        elif isinstance(value, list):
            turns.extend(value)
        else:
            raise BadRow(f"ill-typed {field}", type(value).__name__)
    return parse_turns(turns, "prompt")


def _name(value: object, key: str) -> str:
    if not isinstance(value, str) or not value:
        raise BadRow(f"ill-typed {key}", short(value))
    check_characters(value, key)
    return value
