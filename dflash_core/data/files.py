"""The source files of a dataset as a preparation sees them: what each is, and which parts it is to become."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core.data.parts import PartSummary, open_part, read_rejected, read_summary
from dflash_core.data.sources import SourceFile, content_identity, num_bytes
from dflash_core.errors import DataError
from dflash_core.provenance import digest_bytes, digest_json, read_json, write_atomically

logger = logging.getLogger(__name__)

KEY_DIGITS = 20
ID_PREFIX_DIGITS = 12

# Rows of a chunk, in bytes. Small files get small chunks, so that all processes have work to the end.
MOST_CHUNK_BYTES, FEWEST_CHUNK_BYTES, CHUNKS_PER_FILE = 8 * 2**20, 2**20, 64

Stamp = tuple[int, int, int]


class FileChangedError(DataError):
    """A source file is not what it was when the preparation began."""

    def __init__(self, file: TakenFile) -> None:
        self.key = file.key
        super().__init__(f"{file.url}: the file changed while it was read; start again")


@dataclass(frozen=True, slots=True)
class TakenFile:
    """A source file with its identity. `key` names its parts; `num_bytes` is None if unknown."""

    file: SourceFile
    identity: str
    key: str
    stamp: Stamp | None
    num_bytes: int | None

    @property
    def url(self) -> str:
        return self.file.url

    @property
    def id_prefix(self) -> str:
        """Stands in the ids of rows that have none of their own: it depends on the content, not on the name."""
        kind, _, value = self.identity.partition(":")
        return (value if kind == "sha256" else digest_bytes(self.identity.encode()))[:ID_PREFIX_DIGITS]

    @property
    def chunk_bytes(self) -> int:
        return chunk_bytes(self.num_bytes)

    def part(self, number: int) -> str:
        return f"part-{self.key}-{number:05d}"

    def check_unchanged(self, *, thoroughly: bool = False) -> None:
        """Raise `FileChangedError` if the file is another one by now.

        Size and times of a local file tell. A remote file is asked for its identity, which costs a request, if `thoroughly`.
        """
        if self.stamp is not None:
            changed = _stamp(self.url) != self.stamp
        else:
            changed = thoroughly and content_identity(self.file) != self.identity
        if changed:
            raise FileChangedError(self)


def chunk_bytes(file_bytes: int | None) -> int:
    """Bytes of rows in one chunk of a file of so many bytes (None: not known)."""
    if file_bytes is None:
        return MOST_CHUNK_BYTES
    return min(MOST_CHUNK_BYTES, max(FEWEST_CHUNK_BYTES, file_bytes // CHUNKS_PER_FILE))


@dataclass(frozen=True, slots=True)
class RepeatedFile:
    """A file that was given although another one has the same content; as it stands in the manifest."""

    path: str
    same_as: str


def take_files(files: Sequence[SourceFile], settings: dict[str, Any]) -> tuple[list[TakenFile], list[RepeatedFile]]:
    """Identify the files, and leave out those with the content of an earlier one.

    Args:
        settings: everything besides the file that decides what its parts hold.

    Raises:
        DataError: a file cannot be read.
    """
    taken: dict[str, TakenFile] = {}
    repeated = []
    for file in files:
        stamp = _stamp(file.url)
        try:
            identity, size = content_identity(file), num_bytes(file)
        except OSError as error:
            raise DataError(f"{file.url}: cannot be read ({error.strerror or error})") from error
        if identity in taken:
            repeated.append(RepeatedFile(file.url, taken[identity].url))
            logger.warning("%s: left out, its content is that of %s", file.url, taken[identity].url)
            continue
        how = {"format": file.format, "compression": file.compression, "source": file.stem, "chunk_bytes": chunk_bytes(size)}
        key = digest_json({**settings, **how, "identity": identity})[:KEY_DIGITS]
        taken[identity] = TakenFile(file, identity, key, stamp, size)
    return list(taken.values()), repeated


def _stamp(url: str) -> Stamp | None:
    """Size, time of change and number of a local file; None for others."""
    try:
        found = Path(url.removeprefix("file://")).stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


def usable_part(tokens_folder: Path, name: str) -> PartSummary | None:
    """The counts of a part that is finished and can be read, else None."""
    summary = read_summary(tokens_folder, name)
    if summary is None:
        return None
    try:
        num_sequences = sum(len(batch) for batch in open_part(tokens_folder, name))
        num_rejected = sum(1 for _ in read_rejected(tokens_folder, name))
    except DataError as error:
        logger.warning("%s; it is made anew", error)
        return None
    return summary if (num_sequences, num_rejected) == (summary.num_sequences, summary.num_rejected) else None


def write_marker(tokens_folder: Path, file: TakenFile, num_parts: int) -> None:
    """Record that all parts of a file are there."""
    write_atomically(tokens_folder / f"file-{file.key}.json", json.dumps({"num_parts": num_parts}) + "\n")


def read_marker(tokens_folder: Path, file: TakenFile) -> int | None:
    """The number of parts of a file that is done, None if it is not."""
    try:
        found = read_json(tokens_folder / f"file-{file.key}.json")
        return int(found["num_parts"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def done_parts(tokens_folder: Path, file: TakenFile) -> list[PartSummary] | None:
    """The counts of all parts of a file that is done and whole, else None."""
    num_parts = read_marker(tokens_folder, file)
    if num_parts is None:
        return None
    found = [usable_part(tokens_folder, file.part(number)) for number in range(num_parts)]
    whole = [summary for summary in found if summary is not None]
    return whole if len(whole) == num_parts else None


def adopt_parts(finished: Path, building: Path, files: Sequence[TakenFile]) -> None:
    """Take the parts of files that are done in a finished dataset into the one that is being built."""
    for file in files:
        summaries = None if read_marker(building, file) is not None else done_parts(finished, file)
        if summaries is None:
            continue
        for number in range(len(summaries)):
            for ending in ("arrow", "json"):
                _link(finished / f"{file.part(number)}.{ending}", building / f"{file.part(number)}.{ending}")
        write_marker(building, file, len(summaries))


def _link(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def remove_other_parts(tokens_folder: Path, files: Sequence[TakenFile]) -> None:
    """Delete what does not belong to these files under these settings: leftovers of other jobs and of killed ones."""
    keys = {file.key for file in files}
    for path in list(tokens_folder.iterdir()):
        words = path.name.removesuffix(".json").split("-")
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif words[0] not in ("part", "file") or len(words) < 2 or words[1] not in keys:
            path.unlink()


def remove_unfinished(building: Path, tokens_folder: Path) -> None:
    """Delete parts that were not finished, and the whole folder `building` if there are no others."""
    for path in tokens_folder.glob("*.tmp"):
        path.unlink()
    if not any(tokens_folder.glob("*.json")):
        shutil.rmtree(building, ignore_errors=True)
