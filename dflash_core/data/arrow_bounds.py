"""What the compressed batches of an Arrow file unfold to, read without decompressing one.

Before each buffer stands its size once it is decompressed, and by this the reader allocates. Batches that are not compressed
take no more than their file. Where the buffers are stands in the messages, which are flatbuffers: tables with a list of where
their fields are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from dflash_core.data.folded import check_unfolding
from dflash_core.data.parquet_pages import Source

CONTINUED = 0xFFFFFFFF  # before the size of a message, but for those of old writers
DICTIONARY_BATCH, RECORD_BATCH = 2, 3
OLD_COMPRESSION = b"ARROW:experimental_compression"
FILE_HEAD, FILE_TAIL = 8, 10
MAX_MESSAGE_BYTES = 1 << 28


def check_arrow(source: Source, num_bytes: int, is_file: bool) -> None:
    """Check every batch of an Arrow file, or of a stream; the source is at its beginning afterwards.

    Raises:
        ValueError: a batch, or all dictionaries together, would take too much memory; a message cannot be read.
    """
    dictionaries = stored = 0
    try:
        for message in _messages_of_file(source, num_bytes) if is_file else _messages_of_stream(source, num_bytes):
            unfolded = _unfolded(source, message)
            check_unfolding(unfolded, message.body_bytes, "a compressed batch")
            if message.kind == DICTIONARY_BATCH:
                dictionaries, stored = dictionaries + unfolded, stored + message.body_bytes
                check_unfolding(dictionaries, stored, "the compressed dictionaries")
    except (struct.error, IndexError):
        raise ValueError("a message that is no Arrow message") from None
    source.seek(0)


@dataclass(frozen=True, slots=True)
class _Message:
    kind: int
    header: _Table
    body: int
    body_bytes: int
    data: bytes


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of a flatbuffer; fields are known by their numbers."""

    data: bytes
    position: int

    def find(self, field: int) -> int | None:
        """Where a field is; None if it is not there."""
        fields = self.position - _unpack("<i", self.data, self.position)
        if 4 + 2 * field >= _unpack("<H", self.data, fields):
            return None
        offset = _unpack("<H", self.data, fields + 4 + 2 * field)
        return self.position + offset if offset else None

    def number(self, field: int, form: str) -> int:
        """A number, 0 if it is not there."""
        place = self.find(field)
        return 0 if place is None else _unpack(form, self.data, place)

    def table(self, field: int) -> _Table | None:
        """A table in this one."""
        place = self.find(field)
        return None if place is None else _Table(self.data, place + _unpack("<I", self.data, place))

    def structs(self, field: int, form: str) -> list[tuple[int, ...]]:
        """A vector of structs."""
        place = self.find(field)
        if place is None:
            return []
        start = place + _unpack("<I", self.data, place)
        count, size = _unpack("<I", self.data, start), struct.calcsize(form)
        if start + 4 + count * size > len(self.data):
            raise IndexError
        return [struct.unpack_from(form, self.data, start + 4 + size * number) for number in range(count)]


def _unpack(form: str, data: bytes, position: int) -> int:
    if position < 0:
        raise IndexError
    value: int = struct.unpack_from(form, data, position)[0]
    return value


def _root(data: bytes) -> _Table:
    return _Table(data, _unpack("<I", data, 0))


def _messages_of_file(source: Source, num_bytes: int) -> Iterator[_Message]:
    size = _unpack("<i", _bytes_at(source, num_bytes - FILE_TAIL, 4), 0)
    footer = _root(_bytes_at(source, num_bytes - FILE_TAIL - size, size))
    for field in (2, 3):  # dictionaries, batches
        for offset, metadata_bytes, _ in footer.structs(field, "<qi4xq"):
            message = _message(source, offset, metadata_bytes)
            if message is not None:
                yield message


def _messages_of_stream(source: Source, num_bytes: int) -> Iterator[_Message]:
    position = 0
    while position < num_bytes:
        message = _message(source, position)
        if message is None:
            return
        yield message
        position = message.body + message.body_bytes


def _message(source: Source, position: int, metadata_bytes: int | None = None) -> _Message | None:
    """The message at a position; None at the end of a stream."""
    head = _bytes_at(source, position, 8)
    first = _unpack("<I", head, 0)
    size, start = (_unpack("<I", head, 4), position + 8) if first == CONTINUED else (first, position + 4)
    if not size:
        return None
    data = _bytes_at(source, start, size)
    table = _root(data)
    header = table.table(2)
    if header is None:
        raise IndexError
    body, body_bytes = start + size if metadata_bytes is None else position + metadata_bytes, table.number(3, "<q")
    if body_bytes < 0 or body + body_bytes > source.size():
        raise ValueError("a batch that ends behind the file")
    return _Message(kind=table.number(1, "<B"), header=header, body=body, body_bytes=body_bytes, data=data)


def _bytes_at(source: Source, position: int, size: int) -> bytes:
    if position < 0 or not 0 <= size <= MAX_MESSAGE_BYTES:
        raise IndexError
    source.seek(position)
    data = source.read(size)
    if len(data) < min(size, 4):
        raise IndexError
    return data


def _unfolded(source: Source, message: _Message) -> int:
    """Bytes that the buffers of a batch take once they are decompressed; 0 if they are not compressed."""
    batch = message.header.table(1) if message.kind == DICTIONARY_BATCH else message.header
    if message.kind not in (DICTIONARY_BATCH, RECORD_BATCH) or batch is None:
        return 0
    if batch.find(3) is None and OLD_COMPRESSION not in message.data:
        return 0
    total = 0
    for offset, size in batch.structs(2, "<qq"):
        if size >= 8:
            unfolded = _unpack("<q", _bytes_at(source, message.body + offset, 8), 0)
            total += max(unfolded, 0)  # -1: this one is not compressed
    return total
