"""What an unfinished regeneration has: a log that grows by one line for each row, in the order in which rows end.

A line is the row's key, what it is, and JSON, apart by tabs; the first line says for which job the log is. A line is written
by one call and never changed. A process that is killed leaves at most one torn line, which is cut off when the log is opened
again. Keys grow in the order of the input, so that the finished files are written in that order (`entries`), and keys and
places in the file are all that is kept in memory: 16 bytes for each row.
"""

from __future__ import annotations

import fcntl
import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from dflash_core.errors import DataError

# A: an answered row. S: an input row that cannot be used. F: a row that failed; it is asked again when the job goes on.
Kind = Literal["A", "S", "F"]
ROW_BITS = 40
HEADER = b"job\t"


def row_key(file: int, row: int) -> int:
    """A number that grows with the place in the input: the number of the file, and of the row in it."""
    return (file << ROW_BITS) | row


def as_line(value: Any) -> bytes:
    """JSON in one line without tabs; what cannot be written in UTF-8 becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


class AnswerLog:
    """The log of one job; made if there is none. One process at a time has it.

    Args:
        job: what tells this job from others; it must be what the log was made for.

    Attributes:
        done: keys of the rows that need not be asked again, ascending, int64 [N].

    Raises:
        DataError: the log belongs to another job, the differing keys are named; or another process has it.
    """

    def __init__(self, path: Path, job: dict[str, Any]) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = path.open("ab", buffering=0)
        try:
            self._lock()
            self._keys, self._places, kinds, self._end = _read(path, job)
            os.truncate(path, self._end)  # a torn last line
            self.done: NDArray[np.int64] = _settled(self._keys, kinds)
            if self._end == 0:
                self._append(HEADER + as_line(job) + b"\n")
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> AnswerLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let others have the log."""
        self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"{self.path}: another process writes to it") from error

    @property
    def ended(self) -> NDArray[np.int64]:
        """Keys of the rows that ended in some way, failed ones too, ascending, int64 [N]."""
        return np.unique(np.frombuffer(self._keys, dtype=np.int64)) if self._keys else np.empty(0, dtype=np.int64)

    def _append(self, line: bytes) -> None:
        if self._file.write(line) != len(line):  # a full disk may take a part of a line
            os.truncate(self.path, self._end)
            raise DataError(f"{self.path}: cannot be written to (no space left)")
        self._end += len(line)

    def add(self, key: int, kind: Kind, value: dict[str, Any]) -> None:
        """Append one row's result; it is in the file when this returns."""
        place = self._end
        try:
            self._append(b"%d\t%s\t%s\n" % (key, kind.encode(), as_line(value)))
        except OSError as error:
            raise DataError(f"{self.path}: cannot be written to ({error.strerror or error})") from error
        self._keys.append(key)
        self._places.append(place)

    def take_in(self, other: AnswerLog) -> None:
        """Add what each row became in another log of the same job, on disk when this returns.

        A row that needs not be asked again stays as it is where the other one failed.
        """
        settled = set(self.done.tolist())
        for key, kind, line in other._last_entries():
            if kind != "F" or key not in settled:
                self.add(key, cast(Kind, kind), json.loads(line))
        self.done = np.union1d(self.done, other.done)
        os.fsync(self._file.fileno())

    def entries(self) -> Iterator[tuple[str, bytes]]:
        """What each row became in the end, in the order of the input: the kind, and the JSON with its line end."""
        for _, kind, line in self._last_entries():
            yield kind, line

    def _last_entries(self) -> Iterator[tuple[int, str, bytes]]:
        if not self._keys:
            return
        keys, places = (np.frombuffer(column, dtype=np.int64).copy() for column in (self._keys, self._places))
        order = np.lexsort((places, keys))
        last = np.append(keys[order][1:] != keys[order][:-1], True)
        with self.path.open("rb") as file:
            for place in places[order][last]:
                file.seek(int(place))
                key, kind, value = file.readline().split(b"\t", 2)
                yield int(key), kind.decode(), value


def read_done(path: Path, job: dict[str, Any]) -> NDArray[np.int64]:
    """`AnswerLog.done` of a log that others may read, too, and that nobody writes to; raises DataError if there is none."""
    if not path.exists():
        raise DataError(f"{path}: the job has ended or begun anew since its shards were planned; start again")
    keys, _, kinds, _ = _read(path, job)
    return _settled(keys, kinds)


def _settled(keys: array[int], kinds: array[int]) -> NDArray[np.int64]:
    if not keys:
        return np.empty(0, dtype=np.int64)
    return np.unique(np.frombuffer(keys, dtype=np.int64)[np.frombuffer(kinds, dtype=np.int8) != ord("F")])


def _read(path: Path, job: dict[str, Any]) -> tuple[array[int], array[int], array[int], int]:
    """Keys, places and kinds of the whole lines of a log, and where they end."""
    keys, places, kinds, end = array("q"), array("q"), array("b"), 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            if end == 0:
                _check_job(path, line, job)
            else:
                key, kind, _ = line.split(b"\t", 2)
                keys.append(int(key))
                places.append(end)
                kinds.append(kind[0])
            end += len(line)
    return keys, places, kinds, end


def _check_job(path: Path, line: bytes, job: dict[str, Any]) -> None:
    try:
        found = json.loads(line.removeprefix(HEADER))
    except ValueError:
        raise DataError(f"{path}: damaged; delete it to begin anew") from None
    different = sorted(key for key in {*found, *job} if found.get(key) != job.get(key))
    if different:
        values = ", ".join(f"{key} was {found.get(key)!r} and is {job.get(key)!r}" for key in different)
        raise DataError(f"{path}: answers of another target ({values}); delete it to begin anew")
