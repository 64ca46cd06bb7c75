"""A prepared dataset, memory-mapped: columns are read once, tokens when they are asked for."""

from __future__ import annotations

import logging
import re
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dflash_core.data.parts import Batch, open_part
from dflash_core.data.store import EXCLUDED, EXCLUDED_SCHEMA, MANIFEST, SCHEMA_VERSION, TOKENS, Fingerprint, sequence_digest
from dflash_core.errors import DataError
from dflash_core.provenance import read_json

log = logging.getLogger(__name__)
MANIFEST_KEYS: dict[str, type] = {
    "tokenizer_sha256": str,
    "source_files": list,
    "parts": list,
    "num_parts": int,
    "num_sequences": int,
    "num_tokens": int,
    "num_supervised": int,
    "num_truncated": int,
    "num_excluded": int,
    "num_rejected": dict,
    "fingerprint": str,
}
PART_NAME = re.compile(r"part-[0-9a-f]+-\d+")
OTHER_SOURCES = "other"
# Names beyond so many are not told apart when the largest sources are looked for; in the order of the dataset.
MOST_SOURCES = 2**16


class Dataset:
    """Random access to the sequences of a dataset folder. All methods may be called from any thread.

    Attributes:
        manifest: content of `manifest.json`.
        fingerprint: digest of the content, see `store.Fingerprint`.
        lengths: tokens per sequence, int32 [N].
        num_supervised: supervised tokens per sequence, int32 [N].
    """

    def __init__(
        self,
        folder: Path,
        manifest: dict[str, Any],
        batches: list[Batch],
        kept: list[NDArray[np.int64] | None],
        files: list[tuple[Path, int]],
    ) -> None:
        self.folder, self.manifest, self._batches, self._kept, self._files = folder, manifest, batches, kept, files
        self._missing: set[Path] = set()
        self.fingerprint = str(manifest["fingerprint"])
        pairs = list(zip(batches, kept, strict=True))
        empty = np.empty(0, dtype=np.int32)
        self.lengths: NDArray[np.int32] = np.concatenate([empty, *(_pick(batch.lengths, k) for batch, k in pairs)])
        self.num_supervised: NDArray[np.int32] = np.concatenate([empty, *(_pick(batch.num_supervised, k) for batch, k in pairs)])
        for array in (self.lengths, self.num_supervised):
            array.flags.writeable = False
        sizes = [len(batch) if k is None else len(k) for batch, k in pairs]
        self._starts: list[int] = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64).tolist()

    @classmethod
    def open(cls, folder: Path) -> Dataset:
        """Map a dataset folder.

        Raises:
            DataError: the folder is no dataset, a file is missing or damaged, or the files hold other counts than the
                manifest says.
        """
        manifest = _read_manifest(folder)
        excluded = _read_excluded(folder, manifest) if manifest["num_excluded"] else {}
        batches: list[Batch] = []
        kept: list[NDArray[np.int64] | None] = []
        files: list[tuple[Path, int]] = []
        for number, part in enumerate(manifest["parts"]):
            found = open_part(folder / TOKENS, part["name"])
            count = sum(len(batch) for batch in found)
            if count != part["num_sequences"]:
                path = folder / TOKENS / f"{part['name']}.arrow"
                raise DataError(f"{path}: damaged ({MANIFEST} says {part['num_sequences']} sequences, it holds {count})")
            path = folder / TOKENS / f"{part['name']}.arrow"
            files += [(path, path.stat().st_size)] * len(found)
            batches += found
            kept += _kept(found, excluded.get(number))
        dataset = cls(folder, manifest, batches, kept, files)
        actual = {
            "num_sequences": len(dataset),
            "num_tokens": int(dataset.lengths.sum(dtype=np.int64)),
            "num_supervised": int(dataset.num_supervised.sum(dtype=np.int64)),
        }
        for key, counted in actual.items():
            if manifest[key] != counted:
                raise DataError(f"{folder}: {MANIFEST} says {key} {manifest[key]}, the parts hold {counted}")
        return dataset

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Ids int32 [S] and loss mask bool [S] of one sequence. The ids are a read-only view of the mapped file."""
        batch, row = self._locate(index)
        return batch.tokens(row)

    def check_files(self, indices: Sequence[int]) -> None:
        """Look at the files that hold some sequences before they are read.

        The system ends a process that reads a mapped file where it was cut off, without a word. A file that was deleted
        stays mapped and whole, so reading goes on, with a warning: nobody can open the dataset again.

        Raises:
            DataError: a file is shorter than it was when the dataset was opened.
        """
        for path, size in {self._files[bisect_right(self._starts, index) - 1] for index in indices}:
            try:
                found = path.stat().st_size
            except FileNotFoundError:
                if path not in self._missing:
                    self._missing.add(path)
                    log.warning("%s: deleted while in use; what is mapped is still read, but a resume will not find it", path)
                continue
            if found < size:
                raise DataError(f"{path}: cut off while in use ({found} of {size} bytes are left)")

    def sample_id(self, index: int) -> str:
        """The `id` that the sequence had in its source file, or one made of the file's content and the row."""
        batch, row = self._locate(index)
        return str(batch.sample_ids[row].as_py())

    def _locate(self, index: int) -> tuple[Batch, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        number = bisect_right(self._starts, index) - 1
        row, kept = index - self._starts[number], self._kept[number]
        return self._batches[number], row if kept is None else int(kept[row])

    @cached_property
    def sources(self) -> NDArray[np.object_]:
        """Source name per sequence, object array of str [N]; made when it is first asked for."""
        codes, names = self.source_codes()
        found = np.array(names, dtype=object)[codes]
        found.flags.writeable = False
        return found

    def source_codes(self, largest: int | None = None) -> tuple[NDArray[np.int32], list[str]]:
        """Source per sequence as a number, int32 [N], and the names that the numbers stand for.

        Args:
            largest: only so many sources keep their names, those with the most sequences; the rest is `other`.
        """
        names = {} if largest is None else self._largest_sources(largest)
        other: int | None = None
        codes = np.empty(len(self), dtype=np.int32)
        for number, encoded in enumerate(self._encoded_sources()):
            translation = []
            for name in encoded.dictionary.to_pylist():
                if largest is None or name in names:
                    translation.append(names.setdefault(name, len(names)))
                else:
                    other = names.setdefault(OTHER_SOURCES, len(names)) if other is None else other
                    translation.append(other)
            found = np.array(translation, dtype=np.int32)[encoded.indices.to_numpy()]
            codes[self._starts[number] : self._starts[number + 1]] = found
        return codes, list(names)

    def _encoded_sources(self) -> Any:
        for batch, kept in zip(self._batches, self._kept, strict=True):
            yield (batch.sources if kept is None else batch.sources.take(pa.array(kept))).dictionary_encode()

    def _largest_sources(self, count: int) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for encoded in self._encoded_sources():
            for item in pc.value_counts(encoded.indices).to_pylist():
                name = encoded.dictionary[item["values"]].as_py()
                if name in sizes or len(sizes) < MOST_SOURCES:
                    sizes[name] = sizes.get(name, 0) + item["counts"]
        largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:count]
        return {name: code for code, name in enumerate(largest)}

    def verify(self) -> None:
        """Read everything and compare with the fingerprint; raises `DataError` if a token or a mask differs."""
        fingerprint = Fingerprint(self.manifest["tokenizer_sha256"])
        for index in range(len(self)):
            fingerprint.add(sequence_digest(*self.tokens(index)))
        if fingerprint.hexdigest() != self.fingerprint:
            raise DataError(f"{self.folder}: the tokens do not fit the fingerprint in {MANIFEST}")


def _pick(column: NDArray[np.int32], kept: NDArray[np.int64] | None) -> NDArray[np.int32]:
    return column if kept is None else column[kept]


def _kept(batches: list[Batch], excluded: NDArray[np.int32] | None) -> list[NDArray[np.int64] | None]:
    """The rows of each batch of a part that are in the dataset, None for all."""
    if excluded is None:
        return [None] * len(batches)
    keep = np.ones(sum(len(batch) for batch in batches), dtype=np.bool_)
    keep[excluded] = False
    ends = np.cumsum([len(batch) for batch in batches])
    return [np.flatnonzero(keep[end - len(batch) : end]) for batch, end in zip(batches, ends, strict=True)]


def _read_excluded(folder: Path, manifest: dict[str, Any]) -> dict[int, NDArray[np.int32]]:
    """Rows that are left out, by the number of their part."""
    path = folder / EXCLUDED
    try:
        # Without threads of Arrow's, as in histogram.py.
        table = pq.ParquetFile(path, pre_buffer=False).read(use_threads=False).cast(EXCLUDED_SCHEMA)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{path}: damaged ({' '.join(str(error).split())})") from error
    part, index = (table.column(name).to_numpy() for name in EXCLUDED_SCHEMA.names)
    if table.num_rows != manifest["num_excluded"] or not _in_parts(part, index, manifest["parts"]):
        raise DataError(f"{path}: damaged (it does not fit {MANIFEST})")
    borders = np.flatnonzero(np.diff(part)) + 1
    return {int(part[rows[0]]): index[rows] for rows in np.split(np.arange(len(part)), borders) if len(rows)}


def _in_parts(part: NDArray[Any], index: NDArray[Any], parts: list[dict[str, Any]]) -> bool:
    """Whether part numbers and rows in them, [N] each, name rows that exist; a null has made them floats."""
    if not (np.issubdtype(part.dtype, np.integer) and np.issubdtype(index.dtype, np.integer)):
        return False
    sizes = np.array([item["num_sequences"] for item in parts], dtype=np.int64)
    return bool(((part >= 0) & (part < len(sizes))).all() and ((index >= 0) & (index < sizes[part])).all())


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = read_json(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(f"{folder}: not a dataset ({MANIFEST} is missing)") from error
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: damaged ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("schema_version") != SCHEMA_VERSION:
        raise DataError(f"{path}: schema version {SCHEMA_VERSION} expected; prepare the dataset again")
    bad = [key for key, kind in MANIFEST_KEYS.items() if not isinstance(manifest.get(key), kind)]
    if not bad and (manifest["num_parts"] < 1 or manifest["num_parts"] != len(manifest["parts"])):
        bad = ["num_parts"]
    if not bad and not all(_is_part(part) for part in manifest["parts"]):
        bad = ["parts"]
    if not bad and not all(isinstance(item, dict) for item in manifest["source_files"]):
        bad = ["source_files"]
    if bad:
        raise DataError(f"{path}: damaged ({bad[0]})")
    return manifest


def _is_part(part: Any) -> bool:
    if not isinstance(part, dict) or not isinstance(part.get("num_sequences"), int):
        return False
    return isinstance(part.get("name"), str) and PART_NAME.fullmatch(part["name"]) is not None
