"""The console of a training on a terminal: a few lines that stay at the bottom and change, with the log running above them.

Where there is no terminal (a flow, `torchrun`, a file) progress is log lines; `console_sinks` chooses. On a terminal the same
lines still go to the run's log file, but not to the terminal, and what else is logged is written above the display.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO, Any, TextIO, cast

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.live import Live

from dflash_core.metrics.background import BackgroundSink
from dflash_core.metrics.console import PROGRESS_LOGGER, ConsoleSink
from dflash_core.metrics.run_view import RunView
from dflash_core.metrics.screen import live_lines
from dflash_core.metrics.sinks import MetricsSink, OptionalSink, check_stream

logger = logging.getLogger(__name__)
REDRAW_S = 0.5
LAUNCHER_VARIABLES = ("RANK", "TORCHELASTIC_RUN_ID")  # several processes share the terminal then


def console_sinks(name: str, total_steps: int, every_s: float) -> list[MetricsSink]:
    """Progress lines in the log and, on a terminal, the live display in a thread of its own: a terminal may be slow or stopped.

    Args:
        name: shown beside the progress bar.
        total_steps: steps of the whole run.
        every_s: seconds between two progress lines.
    """
    sinks: list[MetricsSink] = [ConsoleSink(total_steps, every_s)]
    if is_live_terminal(sys.stderr):
        try:
            sinks.append(BackgroundSink(LiveSink(name, total_steps)))
        except Exception as error:  # noqa: BLE001 - whatever it is, a run does not need it
            logger.warning("no live display: %s: %s", type(error).__name__, error)
    return sinks


def is_live_terminal(stream: IO[str]) -> bool:
    """Whether a changing display belongs on `stream`: a terminal that can, for this process alone, in its foreground."""
    try:
        if not stream.isatty() or os.environ.get("TERM") in (None, "dumb") or any(v in os.environ for v in LAUNCHER_VARIABLES):
            return False
        return os.tcgetpgrp(stream.fileno()) == os.getpgrp()
    except (OSError, ValueError):  # closed, or no terminal of ours
        return False


class _Terminal(Console):
    """Leaves the cursor visible: a process that is killed could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class LiveSink(OptionalSink):
    """Draws the display at most every `REDRAW_S`, when a row comes. To be closed, which gives the terminal back.

    Args:
        name: shown beside the progress bar.
        total_steps: steps of the whole run.
        file: the terminal, by default standard error.
        clock: seconds, for tests.
    """

    def __init__(
        self, name: str, total_steps: int, file: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name, self._clock, self._drawn_at = name, clock, clock()
        self._view = RunView(total_steps)
        self._file = file or sys.stderr
        console = _Terminal(file=self._file, force_terminal=True if file else None)
        # No thread of rich's: nothing changes without a row. Only a stream that is the terminal is written above the display.
        self._live = Live(
            live_lines(self._view, name),
            console=console,
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=self._file is sys.stderr,
        )
        self._redirected: list[tuple[logging.StreamHandler[Any], Any]] = []
        self._live.start(refresh=True)
        try:
            self._redirect_logs(console)
        except BaseException:
            self.close()
            raise

    def log(self, stream: str, row: Mapping[str, Any]) -> None:
        check_stream(stream)
        self._view.take(stream, row)
        if self._clock() - self._drawn_at >= REDRAW_S:
            self.flush()

    def flush(self) -> None:
        """Draw what is known now."""
        self._drawn_at = self._clock()
        self._live.update(live_lines(self._view, self._name), refresh=True)

    def close(self) -> None:
        """Draw a last time and give the terminal, and its log, back."""
        try:
            if self._live.is_started:
                self._live.update(live_lines(self._view, self._name))
                self._live.stop()
        finally:
            while self._redirected:
                handler, stream = self._redirected.pop()
                handler.setStream(stream)
                handler.removeFilter(_is_no_progress)

    def _redirect_logs(self, console: Console) -> None:
        """Handlers keep the stream that they were made with, so replacing `sys.stderr` does not reach them."""
        known = [known for known in logging.root.manager.loggerDict.values() if isinstance(known, logging.Logger)]
        for owner in (logging.root, *known):
            for handler in owner.handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream is self._file:
                    self._redirected.append((handler, handler.stream))
                    handler.addFilter(_is_no_progress)
                    handler.setStream(cast(TextIO, FileProxy(console, self._file)))


def _is_no_progress(record: logging.LogRecord) -> bool:
    return record.name != PROGRESS_LOGGER
