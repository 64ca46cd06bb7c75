"""The wish to stop, as a signal brought it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class StopRequest:
    """Set by SIGTERM and SIGINT; the train loop looks at it between batches and after every step."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Handle the two signals while inside; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _frame: object) -> None:
        self.signal_name = signal.Signals(number).name
