"""What becomes of the rows of a regeneration while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflash_core.data.regenerate_inputs import InputRow
from dflash_core.data.regenerate_log import AnswerLog
from dflash_core.data.rows import BadRow
from dflash_core.errors import DFlashError

# Rows that fail one after the other, with no answer between them, after which nothing is expected any more: before the first
# answer (something is set wrong), and later.
FAILURES_AT_FIRST, FAILURES_LATER = 20, 500

Check = Callable[[dict[str, Any]], None]
Progress = Callable[[int, int], None]


class ServerError(DFlashError):
    """The server is gone, or answers nothing: the job cannot go on. What is done is kept."""


class Tally:
    """Records what becomes of the rows, and notices when nothing succeeds any more."""

    def __init__(self, log: AnswerLog, check: Check, progress: Progress | None) -> None:
        self._log, self._check, self._progress = log, check, progress
        self.num_answered = self.num_failed = self.num_skipped = 0
        self._in_a_row = 0

    def skip(self, row: InputRow, error: BadRow) -> None:
        """The input row cannot be used."""
        self._log.add(row.key, "S", row.trouble(error))
        self.num_skipped += 1

    def finish(self, row: InputRow) -> None:
        """The row's conversation is complete; raises BadRow if data preparation would not take it."""
        assert not isinstance(row.asked, BadRow)
        value = row.asked.row()
        self._check(value)
        self._log.add(row.key, "A", value)
        self.num_answered, self._in_a_row = self.num_answered + 1, 0
        self._show()

    def fail(self, row: InputRow, error: BadRow, status: int | None = None, *, passing: bool = False) -> None:
        """The row was not answered.

        Raises:
            ServerError: too many in a row.
        """
        self._log.add(row.key, "F", {**row.trouble(error), "status": status, "passing": passing})
        self.num_failed, self._in_a_row = self.num_failed + 1, self._in_a_row + 1
        self._show()
        if self._in_a_row >= (FAILURES_LATER if self.num_answered else FAILURES_AT_FIRST):
            raise ServerError(f"{self._in_a_row} rows in a row have failed, the last: {row.file}: row {row.row}: {error}")

    def _show(self) -> None:
        if self._progress is not None:
            self._progress(self.num_answered, self.num_failed)
