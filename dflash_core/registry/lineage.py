"""`registry.parquet`: one row for each decision about a drafter, in the order in which they were taken.

The table is the truth of a registry. Rows are added and never changed, so it is the whole history; the last row's `current`
is the drafter in use. The file is replaced as a whole, and carries its schema's name and version in its metadata.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from dflash_core.errors import DataError
from dflash_core.provenance import sync_to_disk, write_atomically

Decision = Literal["promoted", "kept", "rejected", "rolled_back"]
SCHEMA_NAME, SCHEMA_VERSION = "dflash.registry", 1
NAME_KEY, VERSION_KEY = b"dflash.schema", b"dflash.schema_version"

_text, _int, _float, _flag = pa.string(), pa.int64(), pa.float64(), pa.bool_()
SCHEMA = pa.schema(
    [
        ("drafter", _text), ("time", pa.timestamp("us", tz="UTC")), ("decision", _text), ("reason", _text),
        ("previous", _text), ("current", _text), ("parent", _text), ("compared_with", _text),
        ("target", _text), ("target_weights", _text), ("experiment", _text), ("run_id", _text), ("checkpoint", _text),
        ("files", pa.map_(_text, _text)), ("block_size", _int),
        ("dataset", _text), ("dataset_fingerprint", _text), ("sources", pa.list_(_text)), ("sources_sha256", _text),
        ("settings_sha256", _text), ("prompts_sha256", _text), ("num_prompts", _int), ("lossless", _flag),
        ("acceptance_length", _float), ("acceptance_low", _float), ("acceptance_high", _float),
        ("old_acceptance_length", _float), ("old_acceptance_low", _float), ("old_acceptance_high", _float),
        ("difference", _float), ("difference_low", _float), ("difference_high", _float),
        ("confidence", _float), ("min_gain", _float), ("approval", _text), ("git_commit", _text),
    ]
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One row. Acceptance lengths are tokens per target forward (+1 included), with the ends of their intervals.

    Attributes:
        drafter: the one decided about: promoted, kept out, rejected, or taken back.
        previous, current: the drafter in use before and after the decision; None: none.
        parent: drafter whose weights its training began with.
        compared_with: drafter that was measured on the same prompts (`old_*`); None: plain decoding, which makes 1 token.
        target_weights: digest of the target that it was trained for and measured with.
        checkpoint: step of the run that was exported.
        files: SHA-256 of each exported file by name.
        sources: identities of the contents of all data files it was trained on (not of its parents' files).
        settings_sha256: digest of the settings behind training and decision.
        prompts_sha256: digest of the held-out prompts.
        difference: acceptance length less that of `compared_with`; the interval is paired, over prompts.
        approval: what a person answered, where one was asked.
    """

    drafter: str
    time: datetime
    decision: Decision
    reason: str
    previous: str | None
    current: str | None
    parent: str | None
    compared_with: str | None
    target: str
    target_weights: str
    experiment: str
    run_id: str
    checkpoint: str
    files: dict[str, str]
    block_size: int
    dataset: str
    dataset_fingerprint: str
    sources: tuple[str, ...]
    sources_sha256: str
    settings_sha256: str
    prompts_sha256: str
    num_prompts: int
    lossless: bool | None
    acceptance_length: float | None
    acceptance_low: float | None
    acceptance_high: float | None
    old_acceptance_length: float | None
    old_acceptance_low: float | None
    old_acceptance_high: float | None
    difference: float | None
    difference_low: float | None
    difference_high: float | None
    confidence: float
    min_gain: float
    approval: str | None
    git_commit: str


def read_entries(path: Path) -> list[Entry]:
    """All rows, the oldest first; none where there is no file yet.

    Raises:
        DataError: the file is damaged, is no lineage, or has another version.
    """
    if not path.exists():
        return []
    try:
        with path.open("rb") as file:
            # `read_table` starts threads of Arrow's, which now and then abort a process that ends at once (`registry show`).
            table = pq.ParquetFile(pa.BufferReader(file.read()), pre_buffer=False).read(use_threads=False)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read ({' '.join(str(error).split())[:160]})") from None
    found = table.schema.metadata or {}
    if found.get(NAME_KEY) != SCHEMA_NAME.encode():
        raise DataError(f"{path}: is not the table of a registry")
    if (version := found.get(VERSION_KEY)) != str(SCHEMA_VERSION).encode():
        was = (version or b"none").decode(errors="replace")
        raise DataError(f"{path}: schema version {was}; this program reads version {SCHEMA_VERSION}")
    if table.schema.remove_metadata() != SCHEMA:
        raise DataError(f"{path}: damaged (its columns are not those of schema version {SCHEMA_VERSION})")
    return [Entry(**{**row, "files": dict(row["files"]), "sources": tuple(row["sources"])}) for row in table.to_pylist()]


def write_entries(path: Path, entries: Sequence[Entry]) -> None:
    """Replace the file by one with these rows; a reader sees the old file or the new one."""
    rows = [{**asdict(entry), "files": list(entry.files.items()), "sources": list(entry.sources)} for entry in entries]
    metadata = {NAME_KEY: SCHEMA_NAME.encode(), VERSION_KEY: str(SCHEMA_VERSION).encode()}
    table = pa.Table.from_pylist(rows, schema=SCHEMA).replace_schema_metadata(metadata)
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    write_atomically(path, buffer.getvalue())
    sync_to_disk(path.parent)
