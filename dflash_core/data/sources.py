"""Files and their raw rows: JSONL (plain, gzip, zstd), Parquet and Arrow, local or behind any fsspec URL.

Nothing here knows what a row means (that is `rows`). A file is cut into chunks at the same places each time; a chunk
can be sent to another process, which decodes it there. Memory stays bounded whatever the size of a file: text is read
line by line, Parquet in small batches of a row group, Arrow record batch by record batch and through a memory map.
"""

from __future__ import annotations

import glob
import io
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal

import pyarrow as pa

from dflash_core.data.folded import MAX_ROW_BYTES
from dflash_core.data.table_files import table_chunks
from dflash_core.errors import DataError
from dflash_core.provenance import digest_file, digest_json

Format = Literal["jsonl", "parquet", "arrow"]
Compression = Literal["gzip", "zstd"]

FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}
KNOWN_ENDINGS = ".jsonl, .ndjson and .json, each also with .gz or .zst; .parquet; .arrow and .feather"

MAX_LINE_BYTES = MAX_ROW_BYTES
TOO_LONG = b""  # stands for such a line; a blank line is never delivered, so this cannot be one
READ_BYTES = 1 << 20
# An array of objects, or an object that goes on in the next line; a row in one line begins otherwise.
DOCUMENT_START = re.compile(rb"\s*(\[\s*(\{|$)|\{\s*$)")
ONE_DOCUMENT = "is one JSON document, not one row in each line (jq -c '.[]' FILE.json > FILE.jsonl takes an array apart)"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# What remote file systems say about a file's content, where they say it.
REMOTE_IDENTITY = ("size", "etag", "contentmd5", "md5", "md5hash", "checksum", "digest", "lastmodified", "mtime", "generation")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One input file. `url` is the local path as given (posix), or the fsspec URL."""

    url: str
    format: Format
    compression: Compression | None

    @property
    def stem(self) -> str:
        """The name without folder and known endings: the `source` of rows that name none."""
        name = _name_of(self.url)
        name = name.removesuffix(PurePosixPath(name).suffix) if self.compression else name
        return name.removesuffix(PurePosixPath(name).suffix)


@dataclass(frozen=True, slots=True)
class RawChunk:
    """Consecutive rows of one file, not decoded.

    Attributes:
        first_row: number of the first row, counted from 1; in JSONL the number of its line, blank lines counted.
        num_rows: rows in the chunk; blank lines are none.
        data: JSONL lines with their numbers (`TOO_LONG` for a line that was skipped), or an Arrow IPC stream.
        end_byte: how far the raw file has been read, in bytes, for a progress bar.
    """

    first_row: int
    num_rows: int
    format: str
    data: bytes | list[tuple[int, bytes]]
    end_byte: int


def one_line(error: object, limit: int = 160) -> str:
    """The text of an error without line breaks, cut to `limit` characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def expand_files(patterns: Iterable[str]) -> list[SourceFile]:
    """The files that the patterns name: patterns in the given order, the matches of each sorted, no file twice.

    Args:
        patterns: local paths, globs (`**` for any depth), and fsspec URLs with or without globs.

    Raises:
        DataError: a file does not exist or is a folder, a glob matches nothing, an ending is unknown, or the package
            for a protocol is missing.
    """
    files: dict[str, SourceFile] = {}
    for pattern in patterns:
        found = _expand_url(pattern) if _is_url(pattern) else _expand_local(pattern)
        for url in found:
            files.setdefault(url, _source_file(url))
    return list(files.values())


def content_identity(file: SourceFile) -> str:
    """What tells one content of a file from another.

    `sha256:` and the digest of the raw bytes for a local file. A remote file is not downloaded for this: `ukey:` and a
    digest of what its file system says about it (size, ETag, time of change).

    Raises:
        DataError: the file cannot be read.
    """
    with _naming(file):
        path = _local_path(file)
        if path is not None:
            return f"sha256:{digest_file(path)}"
        fs, remote = _file_system(file.url)
        info = {key.lower().replace("-", "").replace("_", ""): str(value) for key, value in fs.info(remote).items()}
        if _is_archive(fs):  # its key names the open file object, another one each time; it knows the checksum, though
            return f"ukey:{digest_json(info)}"
        known = {key: info[key] for key in REMOTE_IDENTITY if key in info}
        return f"ukey:{digest_json([fs.ukey(remote), known])}"


def num_bytes(file: SourceFile) -> int | None:
    """Size of the raw file in bytes, or None if its file system does not tell."""
    with _naming(file):
        path = _local_path(file)
        if path is not None:
            return path.stat().st_size
        fs, remote = _file_system(file.url)
        size = fs.info(remote).get("size")
        return None if size is None else int(size)


def read_chunks(file: SourceFile, max_rows: int, max_bytes: int) -> Iterator[RawChunk]:
    """The rows of a file in order. A chunk ends at `max_rows` rows or once it has `max_bytes` bytes.

    Raises:
        DataError: the file cannot be read, is damaged or truncated; the text names it.
    """
    with _naming(file), _opened(file) as raw:
        if file.format == "jsonl":
            yield from _text_chunks(file, raw, max_rows, max_bytes)
        else:
            for first, rows, data, read in table_chunks(raw, _local_path(file), file.format, max_rows, max_bytes):
                yield RawChunk(first, rows, "arrow", data, int(read * (num_bytes(file) or 0)))


# ---- names ----


def _is_url(pattern: str) -> bool:
    return "://" in pattern or "::" in pattern


def _name_of(url: str) -> str:
    path = url.split("::")[0] if "://" in url.split("::")[0] else url.rsplit("::", 1)[-1]
    if path.startswith(("http://", "https://")):
        path = path.split("?")[0].split("#")[0]
    return PurePosixPath(path).name


def _source_file(url: str) -> SourceFile:
    suffixes = [suffix.lower() for suffix in PurePosixPath(_name_of(url)).suffixes[-2:]]
    compression = COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    if compression is not None:
        suffixes.pop()
    known = FORMATS.get(suffixes[-1]) if suffixes else None
    if known is None or (compression is not None and known != "jsonl"):
        raise DataError(f"{url}: unknown kind of file; known endings are {KNOWN_ENDINGS}")
    return SourceFile(url, known, compression)


def _expand_local(pattern: str) -> list[str]:
    if not pattern:
        raise DataError("data.files: an empty name")
    path = Path(pattern)
    if path.is_file():
        return [path.as_posix()]
    if not glob.has_magic(pattern):
        raise DataError(f"{pattern}: {'is a folder, not a file' if path.is_dir() else 'no such file'}")
    # Path.glob takes no absolute patterns in Python 3.11.
    matches = sorted(p.as_posix() for p in map(Path, glob.glob(pattern, recursive=True)) if p.is_file())  # noqa: PTH207
    if not matches:
        raise DataError(f"{pattern}: no file matches")
    return matches


def _expand_url(pattern: str) -> list[str]:
    fs, path = _file_system(pattern)
    is_http = "http" in _first_protocol(pattern)  # there a question mark starts the query
    has_magic = glob.has_magic(path.replace("?", "") if is_http else path)
    try:
        try:
            kind = fs.info(path)["type"]
        except FileNotFoundError:
            if not has_magic:
                raise DataError(f"{pattern}: no such file") from None
            kind = None
        if kind == "file" or (kind is not None and is_http and not has_magic):
            return [pattern]
        if not has_magic:
            raise DataError(f"{pattern}: is a folder, not a file")
        matches = sorted(name for name, info in fs.glob(path, detail=True).items() if info["type"] == "file")
    except DataError:
        raise
    except Exception as error:  # the libraries behind fsspec raise what they like
        raise DataError(f"{pattern}: cannot be listed ({type(error).__name__}: {one_line(error)})") from error
    if not matches:
        raise DataError(f"{pattern}: no file matches")
    return [_url_of_match(pattern, name) for name in matches]


def _first_protocol(pattern: str) -> str:
    return pattern.split("::")[0].split("://")[0]


def _url_of_match(pattern: str, name: str) -> str:
    """A matched path as a URL; of a chain such as `zip://*.jsonl::s3://b/x.zip` the other links stay as they are."""
    links = pattern.split("::")
    position = next(number for number, link in enumerate(links) if "://" in link)
    protocol = links[position].split("://")[0]
    if not name.startswith(f"{protocol}://"):
        links[position] = f"{protocol}://{name}"
    else:
        links[position] = name
    return "::".join(links)


def _file_system(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    try:
        fs, path = url_to_fs(url)
    except Exception as error:  # a missing package, an unknown protocol, or whatever a file system says of its options
        raise DataError(f"{url}: cannot be opened ({one_line(error)})") from error
    return fs, str(path)


def _is_archive(fs: Any) -> bool:
    from fsspec.archive import AbstractArchiveFileSystem  # type: ignore[import-untyped]

    return isinstance(fs, AbstractArchiveFileSystem)


def _local_path(file: SourceFile) -> Path | None:
    """Where the file lies on this machine, if it does."""
    if not _is_url(file.url):
        return Path(file.url)
    if file.url.startswith(("file://", "local://")) and "::" not in file.url:
        return Path(_file_system(file.url)[1])
    return None


# ---- reading ----


@contextmanager
def _naming(file: SourceFile) -> Iterator[None]:
    """Whatever goes wrong while a file is read becomes one line that names it."""
    try:
        yield
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{file.url}: cannot be read ({error.strerror or one_line(error)})") from error
    except Exception as error:  # pyarrow, codecs, and the libraries behind fsspec raise what they like
        raise DataError(f"{file.url}: cannot be read ({one_line(error) or type(error).__name__})") from error


@contextmanager
def _opened(file: SourceFile) -> Iterator[IO[bytes]]:
    path = _local_path(file)
    if path is not None:
        with path.open("rb") as raw:
            yield raw
        return
    fs, remote = _file_system(file.url)
    with fs.open(remote, "rb") as raw:
        yield raw


def _text_chunks(file: SourceFile, raw: IO[bytes], max_rows: int, max_bytes: int) -> Iterator[RawChunk]:
    stream: IO[bytes] = raw
    if file.compression is not None:
        # A NativeFile has all that BufferedReader asks of a raw stream.
        stream = io.BufferedReader(pa.CompressedInputStream(raw, file.compression), READ_BYTES)
    lines: list[tuple[int, bytes]] = []
    size = 0
    for number, line in _rows_by_line(file, stream):
        lines.append((number, line))
        size += len(line)
        if len(lines) >= max_rows or size >= max_bytes:
            yield RawChunk(lines[0][0], len(lines), "jsonl", lines, raw.tell())
            lines, size = [], 0
    if lines:
        yield RawChunk(lines[0][0], len(lines), "jsonl", lines, raw.tell())


def _rows_by_line(file: SourceFile, stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank; raises `DataError` if the file is one JSON document instead of one row for each line.

    Taken line by line such a file would be rejected bit by bit, or all but its last row.
    """
    numbered = ((number, line) for number, line in _numbered_lines(file, stream) if line == TOO_LONG or line.strip())
    first = next(numbered, None)
    if first is None:
        return
    second = next(numbered, None)
    if DOCUMENT_START.match(first[1]) and _goes_on(first[1], second[1] if second else None):
        raise DataError(f"{file.url}: {ONE_DOCUMENT}")
    yield first
    if second is not None:
        yield second
        yield from numbered


def _goes_on(first: bytes, second: bytes | None) -> bool:
    """Whether a line that begins like a document is not just a bad row."""
    if second is None:
        return first.lstrip().startswith(b"[")
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return second.lstrip().startswith((b'"', b"{") if first.lstrip().startswith(b"[") else b'"')
    return False


def _numbered_lines(file: SourceFile, stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK) or b"\n"
        if len(line) <= MAX_LINE_BYTES:
            yield number, line
            continue
        if number == 1 and DOCUMENT_START.match(line):
            raise DataError(f"{file.url}: {ONE_DOCUMENT}")
        while line and not line.endswith(b"\n"):
            line = stream.readline(READ_BYTES)
        yield number, TOO_LONG
