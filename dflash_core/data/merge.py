"""From the parts of all source files to one dataset: their order, what is left out, and the counts.

Files are ordered by a digest of their content, so neither their names nor the order in which they were given, read or
added matters. Of rows with the same id the first in that order stays. Parts are looked at one at a time; in memory at
once are a bit more than one byte for each row, and one range of id digests (see `duplicates`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from dflash_core.data.duplicates import find_duplicates
from dflash_core.data.files import TakenFile, read_marker
from dflash_core.data.parts import Batch, RejectedRow, open_part, read_rejected, read_summary
from dflash_core.data.rows import Reject
from dflash_core.data.store import (
    DIGEST_BYTES,
    DUPLICATE_ID,
    EXCLUDED,
    EXCLUDED_SCHEMA,
    TOKENS,
    Fingerprint,
    PageWriter,
    RejectWriter,
)

ID_DIGESTS = ".id_digests"


@dataclass(slots=True)
class _File:
    """A source file whose parts are all there; `first_row` counts the rows of the dataset before it."""

    taken: TakenFile
    parts: list[str]
    digest: bytes = b""
    num_rows: int = 0
    first_row: int = 0


@dataclass(slots=True)
class _Totals:
    num_sequences: int = 0
    num_tokens: int = 0
    num_supervised: int = 0
    num_truncated: int = 0
    num_excluded: int = 0
    longest: int = 0
    parts: list[dict[str, Any]] = field(default_factory=list)
    sequences_of: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Merged:
    """What a merge found: the part of the manifest that it fills; the first rejected row in the order of files, and the
    first with something wrong."""

    counts: dict[str, Any]
    first_reject: Reject | None
    first_fault: Reject | None


def merge_parts(folder: Path, files: Sequence[TakenFile], tokenizer_sha256: str) -> Merged:
    """Write `excluded.parquet` and `rejects.parquet` of a dataset folder whose source files are all done."""
    tokens = folder / TOKENS
    as_given = [_File(taken, [taken.part(n) for n in range(read_marker(tokens, taken) or 0)]) for taken in files]
    in_order = _dataset_order(tokens, as_given)
    duplicate = _find_duplicate_rows(folder, in_order)
    totals, fingerprint = _Totals(), Fingerprint(tokenizer_sha256)
    (folder / EXCLUDED).unlink(missing_ok=True)
    excluded = PageWriter(folder / EXCLUDED, EXCLUDED_SCHEMA) if duplicate.any() else None
    try:
        for file in in_order:
            _count(tokens, file, duplicate, totals, fingerprint, excluded)
    finally:
        if excluded is not None:
            excluded.close()
    rejects, rows_of = _write_rejects(folder, as_given, duplicate)
    source_files = [
        {
            "path": file.taken.url,
            "identity": file.taken.identity,
            "rows": rows_of[file.taken.key],
            "num_sequences": totals.sequences_of[file.taken.key],
        }
        for file in as_given
    ]
    counts = {
        "source_files": source_files,
        "parts": totals.parts,
        "num_parts": len(totals.parts),
        **{key: getattr(totals, key) for key in ("num_sequences", "num_tokens", "num_supervised", "longest")},
        "num_truncated": totals.num_truncated,
        "num_excluded": totals.num_excluded,
        "num_rejected": dict(sorted(rejects.counts.items())),
        "fingerprint": fingerprint.hexdigest(),
    }
    return Merged(counts, rejects.first, rejects.first_fault)


def _dataset_order(tokens: Path, files: list[_File]) -> list[_File]:
    """The files sorted by content: their sequences first; where these are equal, the ids that rows brought along."""
    for file in files:
        content = hashlib.sha256()
        for batches in _parts(tokens, file):
            for batch in batches:
                content.update(batch.digests.tobytes())
            file.num_rows += int(_first_of_row(batches).sum())
        file.digest = content.digest()
    times = Counter(file.digest for file in files)

    def key(file: _File) -> tuple[bytes, bytes, str]:
        return file.digest, _ids_digest(tokens, file) if times[file.digest] > 1 else b"", file.taken.identity

    in_order = sorted(files, key=key)
    first_row = 0
    for file in in_order:
        file.first_row = first_row
        first_row += file.num_rows
    return in_order


def _ids_digest(tokens: Path, file: _File) -> bytes:
    found, own = hashlib.sha256(), f"{file.taken.id_prefix}:"
    for batches in _parts(tokens, file):
        for batch in batches:
            names = ("" if name.startswith(own) else name for name in batch.sample_ids.to_pylist())
            found.update("".join(f"{len(name)}:{name}" for name in names).encode())
    return found.digest()


def _parts(tokens: Path, file: _File) -> Iterator[list[Batch]]:
    return (open_part(tokens, name) for name in file.parts)


def _joined(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)


def _first_of_row(batches: list[Batch]) -> NDArray[np.bool_]:
    """Which sequences of a part are the first of their row, bool [N]; a row may have several."""
    rows = _joined([batch.rows for batch in batches])
    first = np.ones(len(rows), dtype=np.bool_)
    first[1:] = rows[1:] != rows[:-1]
    return first


def _find_duplicate_rows(folder: Path, files: list[_File]) -> NDArray[np.bool_]:
    """Which rows, in the order of the dataset, have the id of an earlier row."""
    path = folder / ID_DIGESTS
    try:
        with path.open("wb") as out:
            for file in files:
                for batches in _parts(folder / TOKENS, file):
                    if batches:
                        digests = np.concatenate([batch.id_digests for batch in batches])
                        out.write(digests[_first_of_row(batches)].tobytes())
        if path.stat().st_size == 0:
            return np.zeros(0, dtype=np.bool_)
        mapped = np.memmap(path, dtype=np.uint8, mode="r").reshape(-1, DIGEST_BYTES)
        return find_duplicates(mapped)
    finally:
        path.unlink(missing_ok=True)


def _count(
    tokens: Path,
    file: _File,
    duplicate: NDArray[np.bool_],
    totals: _Totals,
    fingerprint: Fingerprint,
    excluded: PageWriter | None,
) -> None:
    row, before = file.first_row, totals.num_sequences
    for name, batches in zip(file.parts, _parts(tokens, file), strict=True):
        first = _first_of_row(batches)
        left_out = duplicate[row : row + int(first.sum())][np.cumsum(first) - 1] if len(first) else first
        row += int(first.sum())
        if excluded is not None:
            for index in np.flatnonzero(left_out).tolist():
                excluded.add(len(totals.parts), index)
        totals.num_excluded += int(left_out.sum())
        totals.parts.append({"name": name, "num_sequences": len(first)})
        start = 0
        for batch in batches:
            keep = ~left_out[start : start + len(batch)]
            start += len(batch)
            fingerprint.add(batch.digests[keep])
            lengths = batch.lengths[keep]
            totals.num_sequences += len(lengths)
            totals.num_tokens += int(lengths.sum(dtype=np.int64))
            totals.num_supervised += int(batch.num_supervised[keep].sum(dtype=np.int64))
            totals.num_truncated += pc.sum(batch.truncated.filter(keep)).as_py() or 0
            totals.longest = max(totals.longest, int(lengths.max(initial=0)))
    totals.sequences_of[file.taken.key] = totals.num_sequences - before


def _write_rejects(folder: Path, files: list[_File], duplicate: NDArray[np.bool_]) -> tuple[RejectWriter, dict[str, int]]:
    """Write the rejected rows in the order of files and rows; returns also the number of rows of each file, by key."""
    writer, rows_of = RejectWriter(folder), {}
    try:
        for file in files:
            row, num_rows = file.first_row, 0
            for name in file.parts:
                summary = read_summary(folder / TOKENS, name)
                num_rows += summary.num_rows if summary else 0
                rejected = list(read_rejected(folder / TOKENS, name))
                batches = open_part(folder / TOKENS, name) if duplicate.any() else []
                here = duplicate[row : row + int(_first_of_row(batches).sum())]
                row += len(here)
                if here.any():
                    rejected = sorted([*rejected, *_duplicates_of(batches, here)], key=lambda item: item[0])
                for item in rejected:
                    writer.add(Reject(file.taken.url, *item))
            rows_of[file.taken.key] = num_rows
    finally:
        writer.close()
    return writer, rows_of


def _duplicates_of(batches: list[Batch], duplicate: NDArray[np.bool_]) -> Iterator[RejectedRow]:
    """The rows of a part that are left out; `duplicate` bool [rows of the part]."""
    names = [name for batch in batches for name in batch.sample_ids.to_pylist()]
    rows = _joined([batch.rows for batch in batches])
    for index in np.flatnonzero(_first_of_row(batches))[duplicate].tolist():
        yield int(rows[index]), DUPLICATE_ID, repr(names[index])
