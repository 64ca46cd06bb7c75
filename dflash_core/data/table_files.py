"""Parquet and Arrow files as small Arrow IPC streams, in bounded memory.

Parquet is decoded in small batches of one row group at a time, as `parquet_bounds` plans it. Of an Arrow file a memory map
shows one piece at a time and is opened anew now and then: the pages that were read would otherwise all count as this process's
memory. Only a record batch of an Arrow *stream* is loaded whole, for a stream cannot be entered in the middle.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

from dflash_core.data.arrow_bounds import check_arrow
from dflash_core.data.folded import check_row, unfolded
from dflash_core.data.parquet_bounds import plan_row_group

READ_BYTES = 1 << 20
MAPPED_BYTES = 64 << 20
FILE_MAGIC = b"ARROW1"

Pieces = Iterator[tuple[pa.RecordBatch, float]]  # rows, and which share of the file has been read with them


def table_chunks(
    raw: IO[bytes], path: Path | None, format: str, max_rows: int, max_bytes: int
) -> Iterator[tuple[int, int, bytes, float]]:
    """Number of the first row (from 1), number of rows, Arrow IPC stream, and share of the file read, chunk by chunk.

    Args:
        raw: the open file; `path` is where it lies on this machine, if it does.
        format: `parquet` or `arrow`.
    """
    is_file = format == "arrow" and raw.read(len(FILE_MAGIC)) == FILE_MAGIC
    raw.seek(0)
    if is_file and path is not None:
        pieces = _mapped_pieces(path, max_bytes)
    else:
        source = pa.PythonFile(raw, mode="r") if path is None else pa.OSFile(str(path))
        if format == "parquet":
            pieces = _parquet_pieces(source, max_rows, max_bytes)
        else:
            pieces = _file_pieces(source) if is_file else _stream_pieces(source)
    yield from _chunks(pieces, max_rows, max_bytes)


def _parquet_pieces(source: pa.NativeFile, max_rows: int, max_bytes: int) -> Pieces:
    with source, contextlib.ExitStack() as opened:
        parquet = opened.enter_context(_open_parquet(source))
        done, folded = 0, set[int]()
        for index in range(parquet.num_row_groups):
            group = parquet.metadata.row_group(index)
            if not group.num_rows:
                continue
            plan = plan_row_group(source, parquet.metadata, index, max_rows, max_bytes)
            if not folded.issuperset(plan.folded_columns):
                folded.update(plan.folded_columns)
                parquet = opened.enter_context(_open_parquet(source, parquet.metadata, folded))
            for batch in parquet.iter_batches(batch_size=plan.batch_rows, row_groups=[index]):
                done += batch.num_rows
                yield batch, done / parquet.metadata.num_rows


def _open_parquet(source: pa.NativeFile, metadata: pq.FileMetaData | None = None, folded: Iterable[int] = ()) -> pq.ParquetFile:
    # With a buffer size column chunks are streamed instead of being loaded whole.
    return pq.ParquetFile(source, buffer_size=READ_BYTES, pre_buffer=False, metadata=metadata, read_dictionary=sorted(folded))


def _mapped_pieces(path: Path, max_bytes: int) -> Pieces:
    with pa.OSFile(str(path)) as source:
        check_arrow(source, source.size(), is_file=True)
    index = start = 0
    while True:
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
            seen, count = 0, reader.num_record_batches
            while seen < MAPPED_BYTES:
                if index == count:
                    return
                batch = reader.get_batch(index)
                if start < batch.num_rows:
                    piece = _checked(_first_rows(batch.slice(start), max_bytes))
                    start += piece.num_rows
                    seen += piece.nbytes
                    yield piece, (index + start / batch.num_rows) / count
                if start == batch.num_rows:
                    index, start = index + 1, 0


def _file_pieces(source: pa.NativeFile) -> Pieces:
    with source:
        check_arrow(source, source.size(), is_file=True)
        with pa.ipc.open_file(source) as reader:
            for index in range(reader.num_record_batches):
                yield _checked(reader.get_batch(index)), (index + 1) / reader.num_record_batches


def _stream_pieces(source: pa.NativeFile) -> Pieces:
    with source:
        size = max(1, source.size())
        check_arrow(source, size, is_file=False)
        with pa.ipc.open_stream(source) as reader:
            for batch in reader:
                yield _checked(batch), source.tell() / size


def _checked(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch whose offsets stay inside its buffers; text that is not UTF-8 is a matter of its row."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise
    return batch


def _first_rows(batch: pa.RecordBatch, max_bytes: int) -> pa.RecordBatch:
    """The first rows of a batch, halved until they are at most `max_bytes` bytes or one row."""
    while batch.num_rows > 1 and batch.nbytes > max_bytes:
        batch = batch.slice(0, batch.num_rows // 2)
    return batch


def _chunks(pieces: Pieces, max_rows: int, max_bytes: int) -> Iterator[tuple[int, int, bytes, float]]:
    waiting: list[pa.RecordBatch] = []
    first, rows, size, read = 1, 0, 0, 0.0
    for whole, share in ((part, share) for batch, share in pieces for part in unfolded(batch, max_bytes)):
        read, start = share, 0
        while start < whole.num_rows:
            piece = _first_rows(whole.slice(start, max_rows - rows), max_bytes)
            if piece.num_rows == 1 and piece.nbytes > max_bytes:
                check_row(piece)
            start += piece.num_rows
            waiting.append(piece)
            rows, size = rows + piece.num_rows, size + piece.nbytes
            if rows >= max_rows or size >= max_bytes:
                yield first, rows, _ipc_stream(waiting), read
                first, waiting, rows, size = first + rows, [], 0, 0
    if waiting:
        yield first, rows, _ipc_stream(waiting), read


def _ipc_stream(batches: list[pa.RecordBatch]) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data
