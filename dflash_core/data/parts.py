"""One part: the sequences of one chunk of one source file, as an Arrow IPC file that can be memory-mapped.

A part is written once and never changed. Beside it lies a small text file: a line with counts, then a line for each
rejected row. It is written last and whole, so a part with such a file is finished; everything else is a leftover.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dflash_core.data.store import DIGEST_BYTES, NO_FAULT, PART_SCHEMA, id_digest, sequence_digest
from dflash_core.errors import DataError
from dflash_core.provenance import sync_to_disk, write_atomically

# Bounds the memory of a writer, and keeps the int32 offsets of Arrow lists far from overflow, however long sequences are.
BATCH_TOKENS = 2**22

RejectedRow = tuple[int, str, str]
"""Row, reason and detail; the file's name is not part of a part, for it may change."""


@dataclass(frozen=True, slots=True)
class PartSummary:
    """Counts of a part, and the first row that has something wrong with it."""

    num_rows: int
    num_sequences: int
    num_tokens: int
    num_rejected: int
    first_fault: RejectedRow | None


class PartWriter:
    """Writes the part `name`; as a context manager. Nothing is there under its name before `finish`."""

    def __init__(self, tokens_folder: Path, name: str) -> None:
        self._folder, self._name = tokens_folder, name
        # Of its own: a shard that was given up as lost may still be writing the same part on another node.
        self._temporary = tokens_folder / f".{name}.{uuid4().hex}.tmp"
        self._sequences: list[tuple[str, str, NDArray[np.int32], NDArray[np.bool_], bool, int, bytes]] = []
        self._batch_tokens = 0
        self.num_sequences = self.num_tokens = 0

    def __enter__(self) -> PartWriter:
        self._file = pa.OSFile(str(self._temporary), "wb")
        self._writer = pa.ipc.new_file(self._file, PART_SCHEMA)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def add(
        self,
        row: int,
        row_id: str,
        suffix: str,
        source: str,
        input_ids: NDArray[np.int32],
        loss_mask: NDArray[np.bool_],
        truncated: bool,
    ) -> None:
        """Append a sequence of a row, ids int32 [S] and mask bool [S]; it is called `row_id` + `suffix`."""
        self._sequences.append((row_id + suffix, source, input_ids, loss_mask, truncated, row, id_digest(row_id)))
        self.num_sequences += 1
        self.num_tokens += len(input_ids)
        self._batch_tokens += len(input_ids)
        if self._batch_tokens >= BATCH_TOKENS:
            self._flush()

    def finish(self, num_rows: int, rejected: list[RejectedRow]) -> PartSummary:
        """Put the part and its summary in place; `rejected` must be in the order of rows."""
        self._flush()
        self._writer.close()
        self._file.close()
        sync_to_disk(self._temporary)
        self._temporary.rename(self._folder / f"{self._name}.arrow")
        fault = next((item for item in rejected if item[1] not in NO_FAULT), None)
        summary = PartSummary(num_rows, self.num_sequences, self.num_tokens, len(rejected), fault)
        lines = [json.dumps(item) for item in (asdict(summary), *rejected)]
        write_atomically(self._folder / f"{self._name}.json", "\n".join(lines) + "\n")
        return summary

    def _flush(self) -> None:
        if not self._sequences:
            return
        names, sources, ids, masks, truncated, rows, id_digests = zip(*self._sequences, strict=True)
        lengths = np.array([len(item) for item in ids], dtype=np.int32)
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        digests = [sequence_digest(*item) for item in zip(ids, masks, strict=True)]
        columns = [
            pa.array(names, pa.string()),
            pa.array(sources, pa.string()),
            pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(ids))),
            pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(masks))),
            pa.array(lengths),
            pa.array(np.array([mask.sum() for mask in masks], dtype=np.int32)),
            pa.array(truncated, pa.bool_()),
            pa.array(rows, pa.int64()),
            pa.array(digests, pa.binary(DIGEST_BYTES)),
            pa.array(id_digests, pa.binary(DIGEST_BYTES)),
        ]
        self._writer.write_batch(pa.record_batch(columns, schema=PART_SCHEMA))
        self._sequences, self._batch_tokens = [], 0


def read_summary(tokens_folder: Path, name: str) -> PartSummary | None:
    """The counts of a part, None if it is not finished or damaged."""
    try:
        with (tokens_folder / f"{name}.json").open(encoding="utf-8") as file:
            found = json.loads(file.readline())
        fault = found["first_fault"]
        if not all(isinstance(value, int) for key, value in found.items() if key != "first_fault"):
            return None
        summary = PartSummary(**{**found, "first_fault": None if fault is None else tuple(fault)})
        return summary if (tokens_folder / f"{name}.arrow").is_file() else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def read_rejected(tokens_folder: Path, name: str) -> Iterator[RejectedRow]:
    """The rejected rows of a finished part, in the order of rows; raises `DataError` if its text file is damaged."""
    path = tokens_folder / f"{name}.json"
    try:
        with path.open(encoding="utf-8") as file:
            next(file)
            for line in file:
                row, reason, detail = json.loads(line)
                yield int(row), str(reason), str(detail)
    except (OSError, ValueError, TypeError, StopIteration) as error:
        raise DataError(f"{path}: damaged ({' '.join(str(error).split())})") from error


class Batch:
    """Some sequences of a part. The arrays are views of the mapped file.

    Attributes:
        lengths, num_supervised: int32 [N], in tokens.
        rows: row in the source file, int64 [N].
        digests, id_digests: uint8 [N, 16], of the content and of the row's id.
        sample_ids, sources, truncated: Arrow arrays [N].
    """

    def __init__(self, batch: pa.RecordBatch) -> None:
        ids, masks = batch.column("input_ids"), batch.column("loss_mask")
        self.sample_ids = batch.column("sample_id")
        self.sources = batch.column("source")
        self.truncated = batch.column("truncated")
        self.lengths: NDArray[np.int32] = _numbers(batch.column("length"), np.int32)
        self.num_supervised: NDArray[np.int32] = _numbers(batch.column("num_supervised"), np.int32)
        self.rows: NDArray[np.int64] = _numbers(batch.column("row"), np.int64)
        self._digests, self._id_digests = batch.column("digest"), batch.column("id_digest")
        self._offsets = _numbers(ids.offsets, np.int32)
        self._ids = _numbers(ids.values, np.int32)
        # Arrow packs booleans eight to a byte, lowest bit first; numpy cannot view that.
        self._bits = np.frombuffer(masks.values.buffers()[1], dtype=np.uint8)
        self._first_bit = masks.values.offset
        if not np.array_equal(np.diff(self._offsets), self.lengths) or not masks.offsets.equals(ids.offsets):
            raise ValueError("its lengths contradict each other")

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def digests(self) -> NDArray[np.uint8]:
        return _fixed_bytes(self._digests)

    @property
    def id_digests(self) -> NDArray[np.uint8]:
        return _fixed_bytes(self._id_digests)

    def tokens(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Ids int32 [S], a read-only view, and loss mask bool [S] of one sequence."""
        start, end = int(self._offsets[index]), int(self._offsets[index + 1])
        first, last = start + self._first_bit, end + self._first_bit
        bits = np.unpackbits(self._bits[first >> 3 : (last + 7) >> 3], bitorder="little")
        return self._ids[start:end], bits[first & 7 : (first & 7) + end - start].view(np.bool_)


def _numbers(column: pa.Array, kind: type[np.integer]) -> NDArray[Any]:
    """A column without nulls as a view. Arrow's own conversion would import pandas, which takes a third of a second."""
    return np.frombuffer(column.buffers()[1], dtype=kind)[column.offset : column.offset + len(column)]


def _fixed_bytes(column: pa.FixedSizeBinaryArray) -> NDArray[np.uint8]:
    values = np.frombuffer(column.buffers()[1], dtype=np.uint8).reshape(-1, DIGEST_BYTES)
    return values[column.offset : column.offset + len(column)]


def open_part(tokens_folder: Path, name: str) -> list[Batch]:
    """Map a part; raises `DataError` if it is missing or damaged."""
    path = tokens_folder / f"{name}.arrow"
    if path.is_symlink():  # parts are written here; a link would let somebody else's file be read as one, and be linked on
        raise DataError(f"{path}: is a symbolic link, not a part of the dataset")
    try:
        # The mapping outlives its file descriptor, of which a process may have no more than about a thousand.
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_file(file)
            if reader.schema != PART_SCHEMA:
                raise ValueError("its columns are not those of a part")
            return [Batch(reader.get_batch(number)) for number in range(reader.num_record_batches)]
    except FileNotFoundError as error:
        raise DataError(f"{path}: a part of the dataset is missing") from error
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{path}: damaged ({' '.join(str(error).split())})") from error
