"""The sink interface and its plain implementations.

A row is a flat mapping from field name to a JSON value (numbers, strings, booleans, None, and lists of them); a stream is
a table of such rows (docs/design.md 4). Rows of the truth go through `JsonlSink`: unbuffered, one append per row, so that a
process that is killed loses no row whose `log` call had returned. An open Parquet file would lose all of them, which is why
Parquet is written only afterwards, by the analysis.

Every sink here may be called from any thread.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

logger = logging.getLogger(__name__)

STREAMS = ("steps", "batches", "evals", "events", "stats")
FSYNC_INTERVAL_S = 30.0
TAIL_BLOCK_BYTES = 64 * 1024


class MetricsSink(Protocol):
    """What the training loop sees of metrics."""

    def log(self, stream: str, row: Mapping[str, Any]) -> None:
        """Take one finished row of `stream`, one of `STREAMS`. The row is not kept by reference."""

    def flush(self) -> None:
        """Bring all rows taken so far to where the sink keeps them for good."""

    def close(self) -> None:
        """Flush, and release files, threads and processes. A second call does nothing."""


class OptionalSink:
    """Marks a sink that a run can do without: `FanOut` switches it off when it fails, and the run goes on."""


def check_stream(stream: str) -> None:
    """Raise `ValueError` for a stream that does not exist."""
    if stream not in STREAMS:
        raise ValueError(f"no metrics stream {stream!r}; there are {', '.join(STREAMS)}")


class MemorySink:
    """Keeps copies of the rows in `rows[stream]`, for tests."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {stream: [] for stream in STREAMS}
        self.closed = False
        self._lock = threading.Lock()

    def log(self, stream: str, row: Mapping[str, Any]) -> None:
        check_stream(stream)
        with self._lock:
            self.rows[stream].append(dict(row))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def encode_row(row: Mapping[str, Any]) -> bytes:
    """One line of JSON with its newline. NaN and infinities are written as `NaN`, `Infinity`, `-Infinity`.

    Arrays and scalars of numpy and torch are written as lists and numbers.

    Raises:
        TypeError: a value has no JSON form.
    """
    return (json.dumps(row, separators=(",", ":"), default=_plain) + "\n").encode()


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"a metrics row cannot hold a {type(value).__name__}")


class JsonlSink:
    """Appends each stream to `<folder>/<stream>.jsonl`.

    Each row is one `write` to a file opened with `O_APPEND`, so rows of several threads, and of several processes on a
    local disk, never mix. Rows are on the way to the disk at most `fsync_interval_s` after they were logged, as long as
    rows keep coming; `flush` and `close` force them there.

    A killed writer can leave a torn last line. The next one to open the file completes it with its newline when the row
    is whole, and cuts it off when it is not: a file never has a broken line in the middle.

    Raises:
        OSError: from `log`, `flush` or the constructor, when the file cannot be written. A row that the disk took only in
            part is cut off again.
    """

    def __init__(self, folder: Path, fsync_interval_s: float = FSYNC_INTERVAL_S) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._fsync_interval_s = fsync_interval_s
        self._lock = threading.Lock()  # guards the table of files and every write
        self._sync_lock = threading.Lock()  # held while a file is synced or closed; a slow disk then blocks no writer
        self._files: dict[str, int] = {}
        self._synced_at: dict[str, float] = {}
        self._closed = False

    def log(self, stream: str, row: Mapping[str, Any]) -> None:
        """Append one row to the stream's file before returning; raises ValueError for an unknown stream or a closed log."""
        check_stream(stream)
        data = encode_row(row)
        now = time.monotonic()
        with self._lock:
            if self._closed:
                raise ValueError(f"{self.folder}: the metrics log is closed")
            if stream not in self._files:
                self._files[stream] = _open_for_append(self.folder / f"{stream}.jsonl")
                self._synced_at[stream] = now
            _append(self._files[stream], data)
            due = now - self._synced_at[stream] >= self._fsync_interval_s
            if due:
                self._synced_at[stream] = now
        if due:
            self._sync([stream])

    def flush(self) -> None:
        with self._lock:
            streams = list(self._files)
        self._sync(streams)

    def close(self) -> None:
        with self._sync_lock, self._lock:
            self._closed = True
            while self._files:
                _, file = self._files.popitem()
                try:
                    os.fsync(file)
                finally:
                    os.close(file)

    def _sync(self, streams: Sequence[str]) -> None:
        with self._sync_lock:
            for stream in streams:
                file = self._files.get(stream)  # gone when close() came first, which has synced it
                if file is not None:
                    os.fsync(file)


def _open_for_append(path: Path) -> int:
    """Open a log, its torn last line mended.

    The shared lock lives as long as the file is open. Only a process that finds no other writer mends, so that it never
    takes a row that is being written for a torn one.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        if _lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB):  # else another process writes, and mended the file when it opened it
            _mend_tail(file, path)
        _lock(file, fcntl.LOCK_SH)
    except BaseException:
        os.close(file)
        raise
    return file


def _lock(file: int, operation: int) -> bool:
    """Whether the lock was taken. A file system without locks counts as taken: it then has to be the only writer."""
    try:
        fcntl.flock(file, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    return True


def _mend_tail(file: int, path: Path) -> None:
    size = os.fstat(file).st_size
    tail, start = b"", size
    while start > 0 and b"\n" not in tail:
        length = min(TAIL_BLOCK_BYTES, start)
        start -= length
        tail = os.pread(file, length, start) + tail
    torn = tail[tail.rfind(b"\n") + 1 :]
    if not torn:
        return
    try:
        json.loads(torn)
    except ValueError:
        logger.warning("%s: the last row was cut off when its writer ended; %d bytes are dropped", path, len(torn))
        os.ftruncate(file, size - len(torn))
    else:
        _append(file, b"\n")


def _append(file: int, data: bytes) -> None:
    """Write all of `data` at the end of the file, or none of it."""
    written = 0
    try:
        while written < len(data):  # more than one pass only when a disk is nearly full or a signal interrupts
            written += os.write(file, data[written:])
    except OSError:
        end = os.lseek(file, 0, os.SEEK_CUR)
        if written and os.fstat(file).st_size == end:
            os.ftruncate(file, end - written)
        raise


class FanOut:
    """Gives every row to all sinks, required ones first.

    An error of a required sink reaches the caller: its rows are the truth, and a run must not go on without them. An
    `OptionalSink` that fails is switched off for the rest of the run, with a warning in the log.
    """

    def __init__(self, sinks: Sequence[MetricsSink]) -> None:
        self._required = [sink for sink in sinks if not isinstance(sink, OptionalSink)]
        self._optional = [sink for sink in sinks if isinstance(sink, OptionalSink)]
        self._failed: set[int] = set()

    def log(self, stream: str, row: Mapping[str, Any]) -> None:
        for sink in self._required:
            sink.log(stream, row)
        for sink in self._optional:
            self._try(sink, "log", partial(sink.log, stream, row))

    def flush(self) -> None:
        for sink in self._required:
            sink.flush()
        for sink in self._optional:
            self._try(sink, "flush", sink.flush)

    def close(self) -> None:
        """Close all sinks, those that failed before too; raise the first error of a required one at the end."""
        first: Exception | None = None
        for sink in self._required:
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001 - the other sinks must be closed before it is raised
                first = first or error
        for sink in self._optional:
            self._try(sink, "close", sink.close, even_if_failed=True)
        if first is not None:
            raise first

    def _try(self, sink: object, action: str, call: Callable[[], None], even_if_failed: bool = False) -> None:
        if id(sink) in self._failed and not even_if_failed:
            return
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whatever an optional sink raises, the run goes on
            level = logging.DEBUG if id(sink) in self._failed else logging.WARNING  # it is told once
            self._failed.add(id(sink))
            name = getattr(sink, "name", type(sink).__name__)
            logger.log(level, "%s is switched off: %s failed: %s: %s", name, action, type(error).__name__, error)


class RunLog:
    """Puts `run_id`, `attempt` and `time` (UTC, seconds since 1970) on each row. A row's own `time` is kept."""

    def __init__(self, sink: MetricsSink, run_id: str, attempt: int) -> None:
        self._sink, self._run_id, self._attempt = sink, run_id, attempt

    def log(self, stream: str, row: Mapping[str, Any]) -> None:
        self._sink.log(stream, {"run_id": self._run_id, "attempt": self._attempt, "time": time.time(), **row})

    def flush(self) -> None:
        self._sink.flush()

    def close(self) -> None:
        self._sink.close()
