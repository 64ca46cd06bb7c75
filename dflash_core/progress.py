"""How the command line shows that preparation is under way: a bar on a terminal, a log line now and then elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dflash_core.data import PrepareProgress

logger = logging.getLogger("dflash_core.prepare")
LOG_EVERY_S = 10.0


def describe(state: PrepareProgress) -> str:
    """One line: how far, how many rows and tokens, and how many rows were left out."""
    share = f"{state.bytes_done / state.bytes_total:.0%}, " if state.bytes_total else ""
    files = f"file {min(state.files_done + 1, state.files_total)} of {state.files_total}"
    return f"{share}{files}: {state.num_rows:,} rows, {state.num_tokens:,} tokens, {state.num_rejected:,} rejected"


class ProgressLog:
    """Logs the state at most every `every_s` seconds, and so nothing for short work."""

    def __init__(self, every_s: float = LOG_EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._clock, self._last = every_s, clock, clock()

    def __call__(self, state: PrepareProgress) -> None:
        if self._clock() - self._last >= self._every_s:
            self._last = self._clock()
            logger.info("prepare: %s", describe(state))


class AnswerLogProgress:
    """Logs how many rows are answered at most every `every_s` seconds."""

    def __init__(self, every_s: float = LOG_EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._clock, self._begin = every_s, clock, clock()
        self._last = self._begin

    def __call__(self, answered: int, failed: int) -> None:
        now = self._clock()
        if now - self._last >= self._every_s:
            self._last = now
            logger.info(
                "regenerate: %s rows answered (%.1f a second), %s failed", f"{answered:,}", answered / (now - self._begin), failed
            )


@contextmanager
def prepare_progress() -> Iterator[Callable[[PrepareProgress], None]]:
    """A function for `experiment.prepare` to call; the bar is taken off the terminal at the end."""
    if not sys.stderr.isatty():
        yield ProgressLog()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        shown = bar.add_task("reading", total=None)
        yield lambda state: bar.update(shown, description=describe(state), completed=state.bytes_done, total=state.bytes_total)
