"""What the pages of a Parquet file say about themselves, read without decompressing one.

The footer's sizes are what the writer claims; the reader never compares them with the pages. The header before each page is
what it allocates by. So whoever wants to know what reading costs walks along these headers: a few bytes for each page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

DATA_PAGE, INDEX_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2 = range(4)
DICTIONARY_ENCODINGS = (2, 8)  # PLAIN_DICTIONARY, RLE_DICTIONARY
DELTA_BYTE_ARRAY = 7  # each text is the beginning of the one before it, and the rest
HEADER_BYTES, MOST_HEADER_BYTES = 256, 1 << 24  # the second is the reader's own bound
MOST_MEASURED_BYTES = 1 << 22  # a larger dictionary counts as one text; writers end theirs at 1 MiB
# Thrift's compact protocol.
STOP, TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(13)
MOST_NESTED = 16


class Source(Protocol):
    """What a page is read from."""

    def seek(self, position: int, /) -> int: ...

    def read(self, size: int, /) -> bytes: ...

    def size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Page:
    """A page of data. `num_bytes` is its size with its header once it is decompressed."""

    num_values: int
    num_bytes: int
    encoding: int


@dataclass(frozen=True, slots=True)
class ColumnChunk:
    """A column of a row group.

    Attributes:
        index: number of the leaf column.
        name: its path, with dots.
        is_nested: whether a row may have several values.
        value_bytes: of a value of fixed size; None for texts.
        pages: of data, in order.
        dictionary_bytes: size of the dictionary's page once it is decompressed, 0 without one.
        longest_entry: bytes that a text of the dictionary has at most.
        compressed_bytes: what it takes in the file.
    """

    index: int
    name: str
    is_nested: bool
    value_bytes: int | None
    pages: tuple[Page, ...]
    dictionary_bytes: int
    longest_entry: int
    compressed_bytes: int

    @property
    def num_values(self) -> int:
        return sum(page.num_values for page in self.pages)

    @property
    def num_bytes(self) -> int:
        return self.dictionary_bytes + sum(page.num_bytes for page in self.pages)

    @property
    def largest_page(self) -> int:
        return max([self.dictionary_bytes, *(page.num_bytes for page in self.pages)])


def read_column_chunk(source: Source, metadata: pq.FileMetaData, row_group: int, column: int) -> ColumnChunk:
    """Walk along the pages of a column chunk.

    Raises:
        ValueError: it holds no page where one must be.
    """
    described, schema = metadata.row_group(row_group).column(column), metadata.schema.column(column)
    position = described.data_page_offset
    if described.has_dictionary_page and 0 < described.dictionary_page_offset < position:
        position = described.dictionary_page_offset  # as the reader has it
    end, pages, dictionary, longest, seen = position + described.total_compressed_size, [], 0, 0, 0
    start = position
    while seen < described.num_values and position < end:
        header, size = _page_header(source, position)
        kind, unfolded, stored = (_number(header, key) for key in (1, 2, 3))
        if min(unfolded, stored) < 0:
            raise ValueError(f"column {schema.path}: a page of a negative size")
        body = position + size
        if kind == DICTIONARY_PAGE:
            dictionary = max(dictionary, unfolded + size)
            longest = unfolded
            if schema.physical_type == "BYTE_ARRAY" and unfolded <= MOST_MEASURED_BYTES:
                longest = _longest_text(source, body, stored, unfolded, described.compression)
        elif kind in (DATA_PAGE, DATA_PAGE_V2):
            about = header.get(5 if kind == DATA_PAGE else 8, {})
            count, encoding = _number(about, 1), _number(about, 2 if kind == DATA_PAGE else 4)
            pages.append(Page(max(0, count), unfolded + size, encoding))
            seen += max(0, count)
        position = body + stored
        if position > source.size():
            raise ValueError(f"column {schema.path}: a page that ends behind the file")
    return ColumnChunk(
        index=column,
        name=schema.path,
        is_nested=schema.max_repetition_level > 0,
        value_bytes=_value_bytes(schema),
        pages=tuple(pages),
        dictionary_bytes=dictionary,
        longest_entry=longest,
        compressed_bytes=max(1, position - start),
    )


def _value_bytes(schema: pq.ColumnSchema) -> int | None:
    if schema.physical_type == "BYTE_ARRAY":
        return None
    return max(16, schema.length) if schema.physical_type == "FIXED_LEN_BYTE_ARRAY" else 16


def _longest_text(source: Source, position: int, stored: int, unfolded: int, compression: str) -> int:
    """The longest text of a dictionary, or the whole page's size where that cannot be seen."""
    source.seek(position)
    data = source.read(stored)
    codec = {"LZ4": "lz4_raw"}.get(compression, compression.lower())
    try:
        if codec != "uncompressed":
            data = pa.decompress(data, decompressed_size=unfolded, codec=codec, asbytes=True)
    except (pa.ArrowException, OSError, ValueError):
        return unfolded
    at = longest = 0
    while at + 4 <= len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        longest = max(longest, length)
        at += 4 + length
    return min(longest, unfolded)


def _page_header(source: Source, position: int) -> tuple[dict[int, Any], int]:
    """The fields of the header at a position, by their numbers, and its size."""
    wanted = HEADER_BYTES
    while True:
        source.seek(position)
        data = source.read(wanted)
        try:
            reader = _Compact(data)
            return reader.struct(), reader.position
        except IndexError:
            if len(data) < wanted or wanted >= MOST_HEADER_BYTES:  # texts of statistics make a header long
                raise ValueError(f"no page header at byte {position}") from None
            wanted *= 16


def _number(fields: Any, key: int) -> int:
    value = fields.get(key) if isinstance(fields, dict) else None
    return value if isinstance(value, int) else -1


class _Compact:
    """Structs in Thrift's compact protocol; IndexError at the end of the data."""

    def __init__(self, data: bytes) -> None:
        self._data, self.position = data, 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """The fields of a struct by their numbers: integers, and structs; others are passed over."""
        if depth > MOST_NESTED:
            raise ValueError("a page header nested too deep")
        fields: dict[int, Any] = {}
        key = 0
        while (first := self._byte()) != STOP:
            key = key + (first >> 4) if first >> 4 else self._signed()
            kind = first & 15
            value = {} if kind in (TRUE, FALSE) else self._value(kind, depth)  # a field's flag is its kind itself
            fields[key] = {**fields.get(key, {}), **value} if isinstance(value, dict) else value
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind == STRUCT:
            return self.struct(depth + 1)
        if kind in (I16, I32, I64):
            return self._signed()
        if kind in (TRUE, FALSE, BYTE, DOUBLE, BINARY):
            self._skip({DOUBLE: 8}.get(kind, 1) if kind != BINARY else self._unsigned())
        elif kind in (LIST, SET, MAP):
            self._skip_items(kind, depth)
        else:
            raise ValueError("a page header with a field of no known kind")
        return None

    def _skip_items(self, kind: int, depth: int) -> None:
        if depth > MOST_NESTED:
            raise ValueError("a page header nested too deep")
        kinds: tuple[int, ...]
        if kind == MAP:
            count = self._unsigned()
            kinds = divmod(self._byte(), 16) if count else ()
        else:
            first = self._byte()
            count, kinds = (first >> 4 if first >> 4 < 15 else self._unsigned()), (first & 15,)
        for _ in range(count):
            for one in kinds:
                self._value(one, depth + 1)

    def _byte(self) -> int:
        value = self._data[self.position]
        self.position += 1
        return value

    def _skip(self, count: int) -> None:
        self.position += count
        if self.position > len(self._data):
            raise IndexError

    def _unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a page header with a number that is too long")

    def _signed(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)
