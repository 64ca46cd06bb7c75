"""JSON lines read fast, by Polars, where that certainly gives what the careful ways of `reader` give; else not at all.

Polars takes 0.6 of Arrow's time for rows without lists (with lists as much). It is as strict about numbers and flags, but it
makes text of whatever stands in a column of texts, and leaves out fields that it was not told of. Both show in the number of
colons and quotes of the file: there must be one colon per field, and two quotes per field and text.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa

# Below this much, loading Polars takes longer than it saves.
LEAST_BYTES = 16 * 1024**2
# Counting goes through pieces that stay in the processor's cache.
PIECE_BYTES = 256 * 1024
COUNTED = b':"[\\\n'


def read_fast(data: bytes, schema: pa.Schema) -> pa.Table | None:
    """The rows of `data`, whole lines, as a table of this schema of numbers, flags and texts.

    None where a row has other fields, or values of other types, where a text has an escape, a colon, a quote or a bracket, and
    where a line is blank or not JSON. Fields may be missing or null.
    """
    import polars as pl  # slow to import

    marks = _counts(data)
    if marks["\\"] or marks["["]:
        return None
    try:
        rows = pl.read_ndjson(data, schema=pl.from_arrow(schema.empty_table()).schema)  # type: ignore[union-attr]
        table = rows.to_arrow(compat_level=pl.CompatLevel.oldest()).cast(schema)
    except (pl.exceptions.PolarsError, pa.ArrowInvalid):
        return None
    return table if _is_all(table, data, marks) else None


def _counts(data: bytes) -> Counter[str]:
    """How often each of the characters in `COUNTED` is there."""
    content, found = np.frombuffer(data, dtype=np.uint8), Counter[str]()
    for start in range(0, len(content), PIECE_BYTES):
        piece = content[start : start + PIECE_BYTES]
        for mark in COUNTED:
            found[chr(mark)] += int(np.count_nonzero(piece == mark))
    return found


def _is_all(table: pa.Table, data: bytes, marks: Counter[str]) -> bool:
    """Whether the table holds all fields of all lines, and its texts stand there as such."""
    values = sum(len(table) - column.null_count for column in table.columns)
    if marks[":"] != values:
        values += data.count(b":null") + data.count(b": null")
    texts = sum(len(table) - column.null_count for column in table.columns if pa.types.is_string(column.type))
    return (marks[":"], marks['"'], marks["\n"]) == (values, 2 * (values + texts), len(table))
