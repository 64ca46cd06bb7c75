"""The dataset folder: what its files are called and hold, and the writers that fill it piece by piece (docs/design.md 4).

A shard is one Arrow IPC file with one record batch, uncompressed, so that it can be memory-mapped. Everything here
streams: at most one shard's tokens, one page of rejects and the fine histogram are in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dflash_core.data.rows import Reject

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
TOKENS = "tokens"
LENGTH_BINS = "length_bins.parquet"
LENGTH_HISTOGRAM = "length_histogram.parquet"
REJECTS = "rejects.parquet"

SHARD_SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("source", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("length", pa.int32()),
        ("num_supervised", pa.int32()),
    ]
)
REJECT_SCHEMA = pa.schema([("source_file", pa.string()), ("row", pa.int64()), ("reason", pa.string()), ("detail", pa.string())])

# Offsets of an Arrow list are int32; a shard ends well before they could overflow, however long its sequences are.
MAX_SHARD_TOKENS = 2**27
REJECTS_PER_PAGE = 4096
MAX_LENGTH_BINS = 512


class Fingerprint:
    """SHA-256 over the ordered sequences of ids and masks, and over the tokenizer that gives the ids their meaning.

    Names, folders, shard sizes and times do not enter.
    """

    def __init__(self, tokenizer_sha256: str) -> None:
        self._hash = hashlib.sha256(tokenizer_sha256.encode())

    def add(self, input_ids: NDArray[np.int32], loss_mask: NDArray[np.bool_]) -> None:
        """Take in the next sequence, ids int32 [S] and mask bool [S]."""
        self._hash.update(len(input_ids).to_bytes(8, "little"))
        self._hash.update(input_ids.astype("<i4", copy=False).tobytes())
        self._hash.update(np.packbits(loss_mask).tobytes())

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


class ShardWriter:
    """Writes `tokens/part-*.arrow`, one file per `shard_sequences` sequences (fewer if they are very long)."""

    def __init__(self, folder: Path, shard_sequences: int) -> None:
        self._folder = folder / TOKENS
        self._folder.mkdir(parents=True)
        self._shard_sequences = shard_sequences
        self._num_parts = self._num_tokens = 0
        self._names: list[tuple[str, str]] = []
        self._ids: list[NDArray[np.int32]] = []
        self._masks: list[NDArray[np.bool_]] = []

    def add(self, sample_id: str, source: str, input_ids: NDArray[np.int32], loss_mask: NDArray[np.bool_]) -> None:
        """Append one sequence, ids int32 [S] and mask bool [S]."""
        if self._num_tokens + len(input_ids) > MAX_SHARD_TOKENS:
            self._flush()
        self._names.append((sample_id, source))
        self._ids.append(input_ids)
        self._masks.append(loss_mask)
        self._num_tokens += len(input_ids)
        if len(self._names) == self._shard_sequences:
            self._flush()

    def close(self) -> int:
        """Write what is left; returns the number of shards."""
        self._flush()
        return self._num_parts

    def _flush(self) -> None:
        if not self._names:
            return
        lengths = np.array([len(ids) for ids in self._ids], dtype=np.int32)
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        columns = [
            pa.array([name for name, _ in self._names], pa.string()),
            pa.array([source for _, source in self._names], pa.string()),
            pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(self._ids))),
            pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(self._masks))),
            pa.array(lengths),
            pa.array(np.array([mask.sum() for mask in self._masks], dtype=np.int32)),
        ]
        path = self._folder / f"part-{self._num_parts:05d}.arrow"
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, SHARD_SCHEMA) as writer:
            writer.write_batch(pa.record_batch(columns, schema=SHARD_SCHEMA))
        self._num_parts += 1
        self._num_tokens = 0
        self._names, self._ids, self._masks = [], [], []


class RejectWriter:
    """Writes `rejects.parquet` in pages and counts by reason."""

    def __init__(self, folder: Path) -> None:
        self._writer = pq.ParquetWriter(folder / REJECTS, REJECT_SCHEMA)
        self._page: list[Reject] = []
        self.counts: dict[str, int] = {}
        self.first: Reject | None = None

    def add(self, rejected: Reject) -> None:
        self.first = self.first or rejected
        self.counts[rejected.reason] = self.counts.get(rejected.reason, 0) + 1
        self._page.append(rejected)
        if len(self._page) == REJECTS_PER_PAGE:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        columns = {name: [getattr(item, name) for item in self._page] for name in REJECT_SCHEMA.names}
        self._writer.write_table(pa.table(columns, schema=REJECT_SCHEMA))
        self._page = []


class LengthBins:
    """The fine histogram: counts by length bin (lower, upper] and source. Bins are equally wide, at most 512 of them."""

    def __init__(self, max_length: int) -> None:
        self._width = -(-max_length // MAX_LENGTH_BINS)
        self._counts: dict[tuple[int, str], list[int]] = {}

    def add(self, source: str, length: int, num_supervised: int) -> None:
        counts = self._counts.setdefault(((length - 1) // self._width, source), [0, 0, 0])
        counts[0] += 1
        counts[1] += length
        counts[2] += num_supervised

    def write(self, folder: Path) -> None:
        rows = sorted(self._counts.items())
        sums: Sequence[list[int]] = [counts for _, counts in rows]
        table = pa.table(
            {
                "lower": pa.array([bin * self._width for (bin, _), _ in rows], pa.int64()),
                "upper": pa.array([(bin + 1) * self._width for (bin, _), _ in rows], pa.int64()),
                "source": pa.array([source for (_, source), _ in rows], pa.string()),
                "num_sequences": pa.array([counts[0] for counts in sums], pa.int64()),
                "num_tokens": pa.array([counts[1] for counts in sums], pa.int64()),
                "num_supervised": pa.array([counts[2] for counts in sums], pa.int64()),
            }
        )
        pq.write_table(table, folder / LENGTH_BINS)
