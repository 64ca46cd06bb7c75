"""The wish to stop, as a signal brought it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class StoppedWhileBuilding(BaseException):
    """A signal came before anything was trained. No `Exception`, so that no library on the way takes it for its own."""


class StopRequest:
    """Set by SIGTERM and SIGINT; the train loop looks at it between batches, while waiting, and after every step."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._raises = False

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

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Inside, a signal raises `StoppedWhileBuilding`, at once: loading a target can take minutes, and nothing is lost.

        Compiled code can swallow what a handler raises and go on, or raise an error of its own for it (`torch.asarray` does
        while weights are read); whichever way the inside ends after a signal, it was stopped.
        """
        self._raises = True
        try:
            if self.signal_name is None:
                yield
        except Exception:
            if self.signal_name is None:
                raise
            raise StoppedWhileBuilding from None
        finally:
            self._raises = False
        if self.signal_name is not None:
            raise StoppedWhileBuilding

    def _handle(self, number: int, _frame: object) -> None:
        self.signal_name = signal.Signals(number).name
        if self._raises:
            self._raises = False
            raise StoppedWhileBuilding
