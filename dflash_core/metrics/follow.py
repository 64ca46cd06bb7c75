"""Reads JSONL files as they grow, with bounded work for each look, however long they are.

A file that is long when it is first seen, or has grown by much since, is read from near its end; single rows from evenly spaced
places stand for what is passed by. Only whole lines are taken, so the torn last line of a killed writer is looked at again, and
is gone once the next writer has cut it off.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

TAIL_BYTES = 512 * 1024  # most that one look reads in one piece
SAMPLES = 96
SAMPLE_BYTES = 8 * 1024  # must hold a row; a longer one is passed by


class JsonlFollower:
    """The rows of one file, each once, in order.

    `num_bytes_read` counts what was read so far: at most `TAIL_BYTES + SAMPLES * SAMPLE_BYTES` more with each `read`.
    `num_bad` counts whole lines that were no JSON objects.
    """

    def __init__(self, path: Path, tail_bytes: int = TAIL_BYTES) -> None:
        self.path, self.tail_bytes = path, tail_bytes
        self.num_bytes_read = self.num_bad = 0
        self._end = 0  # of the last whole line that was taken

    def read(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Rows that stand for a stretch that was passed by, if any, and the new rows behind it.

        A file that is not there has no rows; one that is shorter than what was read is taken for a new one.

        Raises:
            OSError: the file cannot be read.
        """
        try:
            file = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            self._end = 0
            return [], []
        try:
            size = os.fstat(file).st_size
            if size < self._end:
                self._end = 0
            if size == self._end:
                return [], []
            samples: list[dict[str, Any]] = []
            if size - self._end > self.tail_bytes:
                samples = self._sample(file, self._end, size - self.tail_bytes)
                data = self._pread(file, self.tail_bytes, size - self.tail_bytes)
                start = size - self.tail_bytes + data.find(b"\n") + 1  # the first line is cut
                data = data[data.find(b"\n") + 1 :]
            else:
                start, data = self._end, self._pread(file, size - self._end, self._end)
        finally:
            os.close(file)
        whole = data[: data.rfind(b"\n") + 1]
        self._end = start + len(whole)
        return samples, self._rows(whole)

    def _sample(self, file: int, begin: int, end: int) -> list[dict[str, Any]]:
        rows = []
        step = max(SAMPLE_BYTES, (end - begin) // SAMPLES)
        for offset in range(begin, end - SAMPLE_BYTES, step):
            lines = self._pread(file, SAMPLE_BYTES, offset).split(b"\n")
            whole = lines[0 if offset == begin else 1 : -1]
            rows += self._rows(whole[0] if whole else b"")
        return rows

    def _pread(self, file: int, length: int, offset: int) -> bytes:
        data = os.pread(file, length, offset)
        self.num_bytes_read += len(data)
        return data

    def _rows(self, data: bytes) -> list[dict[str, Any]]:
        rows = []
        for line in data.split(b"\n"):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                rows.append(row)
            else:
                self.num_bad += 1
        return rows
