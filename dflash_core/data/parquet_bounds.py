"""How a row group of a Parquet file can be read in bounded memory, whatever it unfolds to.

A few bytes can stand for gigabytes: a page of one letter, compressed; a text of the dictionary, used a million times; a list of
a million items that are all alike. What the pages say (`parquet_pages`) bounds all of this before anything is decoded. From it
follow how many rows are decoded at once and which columns stay folded, as dictionaries, until `folded` cuts them into slices.
What cannot be read within the bounds is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.parquet as pq

from dflash_core.data.folded import MAX_ROW_BYTES, check_unfolding, mib
from dflash_core.data.parquet_pages import DELTA_BYTE_ARRAY, DICTIONARY_ENCODINGS, ColumnChunk, Source, read_column_chunk

MOST_ROWS = 1024
BATCH_BYTES = 64 << 20  # what a batch of rows that differ in size may unfold to
MAX_VALUES = 1 << 26  # of a page, and of all lists in a row group that takes little room, since one row may hold them all
MAX_LISTS_RATIO = 100  # texts are compressed to a third or a tenth; lists may stand in one row as a whole
ROW_BYTES = 16  # what a value takes beside its text: offsets, levels


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Rows that are decoded at once, and the numbers of the leaf columns that are read as dictionaries."""

    batch_rows: int
    folded_columns: tuple[int, ...]


def plan_row_group(source: Source, metadata: pq.FileMetaData, row_group: int, max_rows: int, max_bytes: int) -> ReadPlan:
    """Plan the reading of a row group in batches of about `max_bytes` and at most `max_rows` rows.

    Raises:
        ValueError: it would take too much memory.
    """
    group = metadata.row_group(row_group)
    chunks = [read_column_chunk(source, metadata, row_group, column) for column in range(metadata.num_columns)]
    _check_pages(row_group, chunks, source.size())
    nested, flat = [chunk for chunk in chunks if chunk.is_nested], [chunk for chunk in chunks if not chunk.is_nested]
    _check_nested(row_group, nested, source.size())
    total = max(group.total_byte_size, sum(chunk.num_bytes for chunk in chunks))
    rows = max(1, min(max_rows, MOST_ROWS, max_bytes * group.num_rows // max(1, total)))
    folded = tuple(chunk.index for chunk in chunks if _unfolds_too_far(chunk, rows))
    for chunk in flat:
        longest = _longest_value(chunk) if chunk.index not in folded else 0
        if rows * longest > BATCH_BYTES:
            rows = max(1, BATCH_BYTES // longest)
    while rows > 1 and _most_bytes(chunks, rows, group.num_rows) > max(BATCH_BYTES, 4 * max_bytes):
        rows //= 2
    return ReadPlan(rows, folded)


def _check_pages(row_group: int, chunks: Sequence[ColumnChunk], file_bytes: int) -> None:
    """Refuse pages that are too large; one of each column is held at once."""
    if chunks:
        worst = max(chunks, key=lambda chunk: chunk.largest_page)
        pages, stored = sum(chunk.largest_page for chunk in chunks), _stored(chunks, file_bytes)
        if (count := max([0, *(page.num_values for chunk in chunks for page in chunk.pages)])) > MAX_VALUES:
            raise ValueError(f"row group {row_group + 1}: a page of {count} values (at most {MAX_VALUES}); write smaller pages")
        check_unfolding(pages, stored, f"row group {row_group + 1}, column {worst.name}: a page")


def _stored(chunks: Sequence[ColumnChunk], file_bytes: int) -> int:
    """What columns take in the file; several may be said to lie in the same place."""
    return min(file_bytes, sum(chunk.compressed_bytes for chunk in chunks))


def _check_nested(row_group: int, chunks: Sequence[ColumnChunk], file_bytes: int) -> None:
    """Refuse lists that one row could not hold; which row holds how many stands only inside the pages."""
    where = f"row group {row_group + 1}"
    unfolded, stored = sum(chunk.num_bytes for chunk in chunks), _stored(chunks, file_bytes)
    # A million rows of token ids beside their text are fine: they take their room in the file.
    most = max(MAX_VALUES, MAX_LISTS_RATIO * stored // ROW_BYTES)
    if (count := sum(chunk.num_values for chunk in chunks)) > most:
        raise ValueError(f"{where}: {count} values in lists (at most {most}); write smaller row groups")
    if unfolded > max(MAX_ROW_BYTES, MAX_LISTS_RATIO * stored):
        raise ValueError(f"{where}: lists of {mib(stored)} unfold to {mib(unfolded)}; write smaller row groups")
    for chunk in chunks:
        if chunk.value_bytes is not None and chunk.num_values * chunk.value_bytes > most * ROW_BYTES:
            raise ValueError(
                f"{where}, column {chunk.name}: values of {chunk.value_bytes} bytes in lists; write smaller row groups"
            )
        longest = max((page.num_bytes for page in chunk.pages if page.encoding == DELTA_BYTE_ARRAY), default=0)
        if chunk.value_bytes is None and chunk.num_values * longest > MAX_ROW_BYTES:
            raise ValueError(
                f"{where}, column {chunk.name}: DELTA_BYTE_ARRAY in lists can unfold to any size; write it otherwise"
            )


def _unfolds_too_far(chunk: ColumnChunk, rows: int) -> bool:
    """Whether so many rows could repeat a text of the dictionary to more than a batch may have."""
    if chunk.value_bytes is not None or not chunk.longest_entry:
        return False
    repeated = sum(page.num_values for page in chunk.pages if page.encoding in DICTIONARY_ENCODINGS)
    return (repeated if chunk.is_nested else min(rows, repeated)) * chunk.longest_entry > BATCH_BYTES


def _longest_value(chunk: ColumnChunk) -> int:
    """What a value of a flat column may have that its share of the page does not show."""
    if chunk.value_bytes is not None:
        return chunk.value_bytes if chunk.dictionary_bytes else 0
    prefixed = max((page.num_bytes for page in chunk.pages if page.encoding == DELTA_BYTE_ARRAY), default=0)
    return max(prefixed, chunk.longest_entry)


def _most_bytes(chunks: Sequence[ColumnChunk], rows: int, num_rows: int) -> float:
    """Bytes of the largest pages' content that so many consecutive rows reach.

    Exact but for what lies in a page that is reached in part; of lists as if every row had as many values as the others.
    """
    most = 0.0
    for chunk in chunks:
        if not chunk.pages:
            continue
        values = np.cumsum([0, *(page.num_values for page in chunk.pages)])
        sizes = np.cumsum([0, *(page.num_bytes for page in chunk.pages)])
        width = rows * max(1.0, chunk.num_values / max(1, num_rows))
        starts = np.concatenate([values, values - width])
        most += float(np.max(np.interp(starts + width, values, sizes) - np.interp(starts, values, sizes)))
    return most
