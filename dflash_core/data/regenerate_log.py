"""What an unfinished regeneration has: a log that grows by one line for each row, in the order in which rows end.

A line is the row's key, what it is, and JSON, apart by tabs; the first line says for which job the log is. A line is written
by one call and never changed. A process that is killed leaves at most one torn line, which is cut off when the log is opened
again. Keys grow in the order of the input, so that the finished files are written in that order (`entries`), and keys and
places in the file are all that is kept in memory: 16 bytes for each row.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal

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
    """The log of one job; made if there is none.

    Args:
        job: what tells this job from others; it must be what the log was made for.

    Attributes:
        done: keys of the rows that need not be asked again, ascending, int64 [N].

    Raises:
        DataError: the log belongs to another job; the differing keys are named.
    """

    def __init__(self, path: Path, job: dict[str, Any]) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._keys, self._places, kinds = array("q"), array("q"), array("b")
        if path.exists() and path.stat().st_size:
            self._read(job, kinds)
        keys = np.frombuffer(self._keys, dtype=np.int64).copy() if self._keys else np.empty(0, dtype=np.int64)
        settled = np.frombuffer(kinds, dtype=np.int8) != ord("F") if kinds else np.empty(0, dtype=np.bool_)
        self.done: NDArray[np.int64] = np.unique(keys[settled])
        self._file: IO[bytes] = path.open("ab", buffering=0)
        self._end = self._file.tell()
        if self._end == 0:
            self._append(HEADER + as_line(job) + b"\n")

    def __enter__(self) -> AnswerLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read(self, job: dict[str, Any], kinds: array[int]) -> None:
        """Take in what is there; a torn last line is cut off."""
        end = 0
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                if end == 0:
                    self._check_job(line, job)
                else:
                    key, kind, _ = line.split(b"\t", 2)
                    self._keys.append(int(key))
                    self._places.append(end)
                    kinds.append(kind[0])
                end += len(line)
        os.truncate(self.path, end)

    def _check_job(self, line: bytes, job: dict[str, Any]) -> None:
        try:
            found = json.loads(line.removeprefix(HEADER))
        except ValueError:
            raise DataError(f"{self.path}: damaged; delete it to begin anew") from None
        different = sorted(key for key in {*found, *job} if found.get(key) != job.get(key))
        if different:
            values = ", ".join(f"{key} was {found.get(key)!r} and is {job.get(key)!r}" for key in different)
            raise DataError(f"{self.path}: answers of another target ({values}); delete it to begin anew")

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

    def entries(self) -> Iterator[tuple[str, bytes]]:
        """What each row became in the end, in the order of the input: the kind, and the JSON with its line end."""
        if not self._keys:
            return
        keys, places = (np.frombuffer(column, dtype=np.int64).copy() for column in (self._keys, self._places))
        order = np.lexsort((places, keys))
        last = np.append(keys[order][1:] != keys[order][:-1], True)
        with self.path.open("rb") as file:
            for place in places[order][last]:
                file.seek(int(place))
                _, kind, value = file.readline().split(b"\t", 2)
                yield kind.decode(), value
