"""A prepared dataset, memory-mapped: columns are read once, tokens when they are asked for."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dflash_core.data.store import MANIFEST, SCHEMA_VERSION, SHARD_SCHEMA, TOKENS, Fingerprint
from dflash_core.errors import DataError
from dflash_core.provenance import read_json

MANIFEST_KEYS: dict[str, type] = {
    "tokenizer_sha256": str,
    "source_files": list,
    "num_parts": int,
    "num_sequences": int,
    "num_tokens": int,
    "num_supervised": int,
    "fingerprint": str,
}


class _Shard:
    """One mapped Arrow file. The arrays below are views of the file, but for the small columns."""

    def __init__(self, path: Path) -> None:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        if table.schema != SHARD_SCHEMA or table.num_rows == 0:
            raise ValueError("its columns are not those of a token shard")
        ids, masks = (table.column(name).combine_chunks() for name in ("input_ids", "loss_mask"))
        self.sample_ids = table.column("sample_id")
        self.sources: NDArray[np.object_] = table.column("source").dictionary_encode().to_numpy()
        self.lengths: NDArray[np.int32] = table.column("length").to_numpy()
        self.num_supervised: NDArray[np.int32] = table.column("num_supervised").to_numpy()
        self._offsets = ids.offsets.to_numpy()
        self._ids = ids.values.to_numpy()
        # Arrow packs booleans eight to a byte, lowest bit first; numpy cannot view that.
        self._bits = np.frombuffer(masks.values.buffers()[1], dtype=np.uint8)
        self._first_bit = masks.values.offset
        if not np.array_equal(np.diff(self._offsets), self.lengths) or not masks.offsets.equals(ids.offsets):
            raise ValueError("its lengths contradict each other")

    def tokens(self, row: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        start, end = int(self._offsets[row]), int(self._offsets[row + 1])
        first, last = start + self._first_bit, end + self._first_bit
        bits = np.unpackbits(self._bits[first >> 3 : (last + 7) >> 3], bitorder="little")
        return self._ids[start:end], bits[first & 7 : (first & 7) + end - start].view(np.bool_)


class Dataset:
    """Random access to the sequences of a dataset folder. All methods may be called from any thread.

    Attributes:
        manifest: content of `manifest.json`.
        fingerprint: digest of the content, see `store.Fingerprint`.
        lengths: tokens per sequence, int32 [N].
        num_supervised: supervised tokens per sequence, int32 [N].
        sources: source name per sequence, object array of str [N].
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], shards: list[_Shard]) -> None:
        self.folder, self.manifest, self._shards = folder, manifest, shards
        self.fingerprint = str(manifest["fingerprint"])
        self.lengths: NDArray[np.int32] = np.concatenate([shard.lengths for shard in shards])
        self.num_supervised: NDArray[np.int32] = np.concatenate([shard.num_supervised for shard in shards])
        self.sources: NDArray[np.object_] = np.concatenate([shard.sources for shard in shards])
        for array in (self.lengths, self.num_supervised, self.sources):
            array.flags.writeable = False
        self._starts: list[int] = np.concatenate([[0], np.cumsum([len(shard.lengths) for shard in shards])]).tolist()

    @classmethod
    def open(cls, folder: Path) -> Dataset:
        """Map a dataset folder.

        Raises:
            DataError: the folder is no dataset, a file is missing or damaged, or the files hold other counts than the
                manifest says.
        """
        manifest = _read_manifest(folder)
        shards = []
        for number in range(manifest["num_parts"]):
            path = folder / TOKENS / f"part-{number:05d}.arrow"
            try:
                shards.append(_Shard(path))
            except FileNotFoundError as error:
                raise DataError(f"{path}: a part of the dataset is missing") from error
            except (OSError, ValueError, pa.ArrowException) as error:
                raise DataError(f"{path}: damaged ({' '.join(str(error).split())})") from error
        dataset = cls(folder, manifest, shards)
        found = {
            "num_sequences": len(dataset),
            "num_tokens": int(dataset.lengths.sum(dtype=np.int64)),
            "num_supervised": int(dataset.num_supervised.sum(dtype=np.int64)),
        }
        for key, count in found.items():
            if manifest[key] != count:
                raise DataError(f"{folder}: {MANIFEST} says {key} {manifest[key]}, the parts hold {count}")
        return dataset

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Ids int32 [S] and loss mask bool [S] of one sequence. The ids are a read-only view of the mapped file."""
        shard, row = self._locate(index)
        return shard.tokens(row)

    def sample_id(self, index: int) -> str:
        """The `id` that the sequence had in its source file."""
        shard, row = self._locate(index)
        return str(shard.sample_ids[row].as_py())

    def _locate(self, index: int) -> tuple[_Shard, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        shard = bisect_right(self._starts, index) - 1
        return self._shards[shard], index - self._starts[shard]

    def verify(self) -> None:
        """Read everything and compare with the fingerprint; raises `DataError` if a token or a mask differs."""
        fingerprint = Fingerprint(self.manifest["tokenizer_sha256"])
        for index in range(len(self)):
            fingerprint.add(*self.tokens(index))
        if fingerprint.hexdigest() != self.fingerprint:
            raise DataError(f"{self.folder}: the tokens do not fit the fingerprint in {MANIFEST}")


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = read_json(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(f"{folder}: not a dataset ({MANIFEST} is missing)") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: damaged ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("schema_version") != SCHEMA_VERSION:
        raise DataError(f"{path}: schema version {SCHEMA_VERSION} expected; prepare the dataset again")
    bad = [key for key, kind in MANIFEST_KEYS.items() if not isinstance(manifest.get(key), kind)]
    if bad or manifest["num_parts"] < 1:
        raise DataError(f"{path}: damaged ({bad[0] if bad else 'num_parts'})")
    return manifest
