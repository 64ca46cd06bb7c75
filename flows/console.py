"""What the user of a flow sees: one line per event with a time, no tracebacks for the user's own mistakes.

Our loggers (`flows`, `dflash_core`) write to the console here and, through Prefect's extra handler, to the run's page.
Prefect's own loggers keep their handlers; a filter takes the traceback off errors that are ours, for the page too, and
keeps what the command line says anyway (the error, the interruption) from being said twice on the console.
"""

from __future__ import annotations

import logging
import sys

from dflash_core.errors import DFlashError

OURS = ("flows", "dflash_core")
PREFECT = ("prefect.flow_runs", "prefect.task_runs")
SENDERS = ("prefect.EventsWorker", "prefect.APILogWorker")
REPEATED = ("Crash detected!", "Finished in state")  # what the command line says in its last line


def set_levels() -> None:
    """Let INFO lines of our loggers pass; without it they reach neither the console nor Prefect's pages."""
    for name in OURS:
        logging.getLogger(name).setLevel(logging.INFO)


def show_our_lines() -> None:
    """Send our loggers' INFO lines to the console. May be called before Prefect is imported."""
    set_levels()
    for name in OURS:
        logger = logging.getLogger(name)
        logger.propagate = False  # Prefect's handler on the root logger would repeat each line
        if not any(isinstance(handler, _Console) for handler in logger.handlers):
            logger.addHandler(_Console())


def one_line_errors() -> None:
    """Take the traceback off errors that are ours, also on the page of a deployment's run. Call after Prefect's import."""
    one_line = _OneLineErrors()
    for name in PREFECT:
        logger = logging.getLogger(name)
        if not any(isinstance(one, _OneLineErrors) for one in logger.filters):
            logger.addFilter(one_line)


def tame_prefect() -> None:
    """Call after Prefect has been imported, which sets its handlers up."""
    one_line_errors()
    for handler in logging.getLogger().handlers:
        if not any(isinstance(one, _SaidElsewhere) for one in handler.filters):
            handler.addFilter(_SaidElsewhere())


class _Console(logging.StreamHandler):  # type: ignore[type-arg]  # generic for the type checker only
    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))


class _OneLineErrors(logging.Filter):
    """Drops the traceback of our own errors; shows that of a defect once, not for the task and again for its flow."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: BaseException | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, DFlashError):
            record.exc_info, record.exc_text = None, None
            record.msg, record.args = "%s", (str(error),)
            record.said_elsewhere = True
        elif error is not None:
            record.said_elsewhere = error is self.shown
            self.shown = error
        elif str(record.msg).startswith(REPEATED):
            record.said_elsewhere = True
        return True


class _SaidElsewhere(logging.Filter):
    """Also keeps back how many items Prefect's senders still hold, which they say whenever they are flushed."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name in SENDERS and record.levelno < logging.ERROR:
            return False
        return not getattr(record, "said_elsewhere", False)
