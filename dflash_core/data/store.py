"""The dataset folder: what its files are called and hold, and the digests that stand for its content (docs/design.md 4).

    manifest.json                       counts, fingerprint, source files, parts in the order of the dataset
    tokens/part-KEY-NNNNN.arrow         sequences of one chunk of one source file, immutable (see `parts`)
    tokens/part-KEY-NNNNN.json          its counts and rejected rows
    tokens/file-KEY.json                written when all parts of a source file are there
    excluded.parquet                    sequences that are in a part but not in the dataset (only if there are any)
    rejects.parquet, length_bins.parquet, length_histogram.parquet, length_histogram_by_source.parquet

KEY stands for everything that decides what is in a part, so a part that is there never needs to be made again.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dflash_core.data.rows import Reject

SCHEMA_VERSION = 2
MANIFEST = "manifest.json"
TOKENS = "tokens"
EXCLUDED = "excluded.parquet"
LENGTH_BINS = "length_bins.parquet"
LENGTH_HISTOGRAM = "length_histogram.parquet"
LENGTH_HISTOGRAM_BY_SOURCE = "length_histogram_by_source.parquet"
REJECTS = "rejects.parquet"

PART_SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("source", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("length", pa.int32()),
        ("num_supervised", pa.int32()),
        ("truncated", pa.bool_()),
        ("row", pa.int64()),
        ("digest", pa.binary(16)),
        ("id_digest", pa.binary(16)),
    ]
)
REJECT_SCHEMA = pa.schema([("source_file", pa.string()), ("row", pa.int64()), ("reason", pa.string()), ("detail", pa.string())])
EXCLUDED_SCHEMA = pa.schema([("part", pa.int32()), ("index", pa.int32())])

OVER_LONG = "over-long"
NO_PAIR = "no supervised pair"
DUPLICATE_ID = "duplicate id"
# What leaves a row out without being wrong with it; no error even with `on_bad_row: error`.
NO_FAULT = (OVER_LONG, NO_PAIR)

DIGEST_BYTES = 16
ROWS_PER_PAGE = 4096


def sequence_digest(input_ids: NDArray[np.int32], loss_mask: NDArray[np.bool_]) -> bytes:
    """16 bytes that stand for ids int32 [S] and mask bool [S]."""
    found = hashlib.blake2b(len(input_ids).to_bytes(8, "little"), digest_size=DIGEST_BYTES)
    found.update(input_ids.astype("<i4", copy=False).tobytes())
    found.update(np.packbits(loss_mask).tobytes())
    return found.digest()


def id_digest(row_id: str) -> bytes:
    """16 bytes that stand for the id of a row."""
    return hashlib.blake2b(row_id.encode(), digest_size=DIGEST_BYTES).digest()


class Fingerprint:
    """SHA-256 over the digests of all sequences in their order, and over the tokenizer that gives the ids their meaning.

    Names, folders, part sizes, numbers of processes and times do not enter.
    """

    def __init__(self, tokenizer_sha256: str) -> None:
        self._hash = hashlib.sha256(tokenizer_sha256.encode())

    def add(self, digests: NDArray[np.uint8] | bytes) -> None:
        """Take in the digests of the next sequences, uint8 [N, 16]."""
        self._hash.update(digests if isinstance(digests, bytes) else digests.tobytes())

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


class PageWriter:
    """Writes a Parquet file row by row; one page of rows is in memory."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._schema = schema
        self._writer = pq.ParquetWriter(path, schema)
        self._page: list[tuple[object, ...]] = []

    def add(self, *values: object) -> None:
        self._page.append(values)
        if len(self._page) == ROWS_PER_PAGE:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        columns = {name: [row[i] for row in self._page] for i, name in enumerate(self._schema.names)}
        self._writer.write_table(pa.table(columns, schema=self._schema))
        self._page = []


class RejectWriter:
    """Writes `rejects.parquet` and counts by reason."""

    def __init__(self, folder: Path) -> None:
        self._pages = PageWriter(folder / REJECTS, REJECT_SCHEMA)
        self.counts: dict[str, int] = {}
        self.first: Reject | None = None
        self.first_fault: Reject | None = None

    def add(self, rejected: Reject) -> None:
        self.first = self.first or rejected
        if rejected.reason not in NO_FAULT:
            self.first_fault = self.first_fault or rejected
        self.counts[rejected.reason] = self.counts.get(rejected.reason, 0) + 1
        self._pages.add(rejected.source_file, rejected.row, rejected.reason, rejected.detail)

    def close(self) -> None:
        self._pages.close()
