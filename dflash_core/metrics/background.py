"""A sink behind a thread of its own: the train loop hands a row over and goes on.

For sinks that a run can do without and that take milliseconds a row, as W&B's does. Rows wait in a bounded queue; when
the sink hangs or is too slow, the oldest are dropped and counted, for the JSONL files have them all.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from dflash_core.metrics.sinks import MetricsSink, OptionalSink, check_stream
from dflash_core.pipeline.threads import start_thread

logger = logging.getLogger(__name__)
MOST_WAITING = 4096
CLOSE_TIMEOUT_S = 8.0  # a stop by a signal is to be over within 30 s


class BackgroundSink(OptionalSink):
    """Passes rows on to `sink` in its own thread. The first error of `sink` switches it off and is raised by the next call.

    Args:
        sink: what takes the rows; only this object's thread calls it, and closes it.
        most_waiting: rows that may wait; beyond it the oldest is dropped.
        close_timeout_s: how long `close` waits for the thread. A sink that hangs is left behind, with a warning.
    """

    def __init__(self, sink: MetricsSink, most_waiting: int = MOST_WAITING, close_timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        self.name = type(sink).__name__
        self._sink, self._most_waiting, self._close_timeout_s = sink, most_waiting, close_timeout_s
        self._changed = threading.Condition()
        self._rows: deque[tuple[str, dict[str, Any]]] = deque()
        self._busy = self._closing = False
        self._error: Exception | None = None
        self.num_dropped = 0
        self._thread = start_thread(f"metrics/{self.name}", _pass_on, self)

    def log(self, stream: str, row: Mapping[str, Any]) -> None:
        check_stream(stream)
        with self._changed:
            if self._error is not None:
                raise self._error
            if len(self._rows) >= self._most_waiting:
                self._rows.popleft()
                self.num_dropped += 1
            self._rows.append((stream, dict(row)))
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until every row so far has been passed on, at most the time that `close` would wait."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not (self._rows or self._busy), self._close_timeout_s)
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            logger.warning("%s does not end and is left behind", self.name)
        if self.num_dropped:
            logger.warning("%s was too slow: %d rows are missing there", self.name, self.num_dropped)
        if self._error is not None:
            raise self._error


def _pass_on(background: BackgroundSink) -> None:
    """Body of the thread: rows in order, then the close."""
    changed = background._changed
    while True:
        with changed:
            background._busy = False
            changed.notify_all()
            changed.wait_for(lambda: bool(background._rows) or background._closing, timeout=1.0)
            rows = list(background._rows)
            background._rows.clear()
            background._busy = bool(rows)
            closing = background._closing
        try:
            for stream, row in rows:
                background._sink.log(stream, row)
            if closing and not rows:
                background._sink.close()
                return
        except Exception as error:  # noqa: BLE001 - told to the next caller
            _give_up(background, error)
            return


def _give_up(background: BackgroundSink, error: Exception) -> None:
    with background._changed:
        background._error, background._busy = error, False
        background._rows.clear()
        background._changed.notify_all()
    try:
        background._sink.close()
    except Exception as second:  # noqa: BLE001 - the first one is told
        logger.debug("closing it failed too: %s", second)
