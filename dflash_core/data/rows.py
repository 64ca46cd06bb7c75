"""Stand-in for the rows of any format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_core.data import sources
from dflash_core.data.sources import BadRow, Conversation, Message, RawChunk, Reject, reject

__all__ = ["BadRow", "Conversation", "Message", "Reject", "parse_row", "reject", "rows_of"]


def rows_of(chunk: RawChunk) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """The rows of a chunk, numbered."""
    if chunk.format == "parquet":
        yield from enumerate(chunk.data, chunk.first_row)
        return
    for row, line in enumerate(chunk.data.split(b"\n"), chunk.first_row):
        if line.strip():
            try:
                yield row, sources._json_object(line)
            except BadRow as error:
                yield row, error


def parse_row(
    value: Any,
    *,
    source_file: str,
    row: int,
    default_id: str,
    default_source: str,
    columns: Mapping[str, str] = {},  # noqa: B006
    needs_answer: bool = True,
) -> Conversation:
    """A checked conversation."""
    renamed = {**value, **{ours: value.get(theirs) for ours, theirs in columns.items()}}
    found = sources.parse_row(json.dumps(renamed).encode(), Path(source_file), row, needs_answer=needs_answer)
    return replace(
        found,
        sample_id=default_id if renamed.get("id") is None else found.sample_id,
        source=default_source if renamed.get("source") is None else found.source,
    )
