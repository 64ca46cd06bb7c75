"""A file that is digested while it is written, so that many GB are not read again to know what they are."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import TracebackType

# Digested and then written while still in the processor's cache; both let other threads run.
PIECE_BYTES = 4 * 1024 * 1024


class HashedFile:
    """A new file for writing, with its SHA-256. Leaving it without an error brings it to the disk.

    It is what `torch.save` takes for a file. That reports a failed write in words of its own, so what really went wrong is
    kept in `failure`.

    Raises:
        OSError: from the constructor, `write` or on leaving: the file exists, the disk is full, and the like.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._file = path.open("xb", buffering=0)
        self._hash = hashlib.sha256()
        self.num_bytes = 0
        self.failure: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Write all of `data`; returns its length in bytes."""
        if self.failure is not None:
            raise self.failure
        view = memoryview(data)
        if not view.nbytes:
            return 0
        view = view.cast("B")
        try:
            for start in range(0, len(view), PIECE_BYTES):
                piece = view[start : start + PIECE_BYTES]
                self._hash.update(piece)
                while piece:  # more than one pass where a disk is nearly full or a signal interrupts
                    piece = piece[self._file_write(piece) :]
        except OSError as error:
            self.failure = error
            raise
        self.num_bytes += len(view)
        return len(view)

    def _file_write(self, piece: memoryview) -> int:
        """Write what the disk takes of it; returns how much that was."""
        return self._file.write(piece)

    def flush(self) -> None:
        """Nothing is buffered here."""

    @property
    def digest(self) -> str:
        """SHA-256 of what was written so far, as 64 hexadecimal digits."""
        return self._hash.hexdigest()

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                os.fsync(self._file.fileno())
        finally:
            self._file.close()
