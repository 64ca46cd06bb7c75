"""How far a preparation has come."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class PrepareProgress:
    """A snapshot. Rows, tokens and bytes of files that were taken over from earlier are counted as done.

    `bytes_total` is None if the size of a file is unknown; `bytes_done` are bytes of the files as they are stored.
    """

    num_rows: int
    num_rejected: int
    num_tokens: int
    bytes_done: int
    bytes_total: int | None
    files_done: int
    files_total: int
    reused_files: int


class ProgressCounter:
    """Counts, and shows a snapshot about four times a second at most, and one at the end."""

    def __init__(self, show: Callable[[PrepareProgress], None] | None, files_total: int, bytes_total: int | None) -> None:
        self._show, self._last = show, time.monotonic()
        self._files_total, self._bytes_total = files_total, bytes_total
        self.num_rows = self.num_rejected = self.num_tokens = 0
        self.finished_bytes = self.bytes_in_file = 0
        self.files_done = self.reused_files = 0

    def add(self, num_rows: int, num_rejected: int, num_tokens: int) -> None:
        self.num_rows += num_rows
        self.num_rejected += num_rejected
        self.num_tokens += num_tokens

    def finish_file(self, num_bytes: int, reused: bool) -> None:
        self.finished_bytes += num_bytes
        self.bytes_in_file = 0
        self.files_done += 1
        self.reused_files += reused

    def show(self, *, last: bool = False) -> None:
        """Call the observer if it is time to, or if this is the end."""
        now = time.monotonic()
        if self._show is None or (now - self._last < EVERY_S and not last):
            return
        self._last = now
        self._show(
            PrepareProgress(
                self.num_rows,
                self.num_rejected,
                self.num_tokens,
                self.finished_bytes + self.bytes_in_file,
                self._bytes_total,
                self.files_done,
                self._files_total,
                self.reused_files,
            )
        )
