"""The one place that starts threads, and the one that ends them.

A `Supervisor` owns every thread of a cell. The first failure, in whichever thread, is kept and stops all; the train
loop meets it at its next wait. Thread bodies are plain functions that get all they touch as arguments. They run in a
copy of the starter's context, so that log handlers bound to it (Prefect's are) receive their lines.

The supervisor also knows what every thread is doing: work that can take long stands inside `busy(stage, batch)`, and
waits go through `wait_for`. The watchdog (`dflash_core.pipeline.watchdog`) reads both.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dflash_core.errors import DFlashError, StageError

log = logging.getLogger(__name__)
POLL_S = 0.05


class Stopped(Exception):
    """Raised inside a waiting thread when the supervisor stops; ends the thread quietly."""


def start_thread(name: str, body: Callable[..., None], *args: Any) -> threading.Thread:
    """Run `body(*args)` in a new thread, in a copy of the caller's context. Nothing else here starts threads."""
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(body, *args), name=name, daemon=True)
    thread.start()
    return thread


@dataclass(frozen=True, slots=True)
class Activity:
    """What a thread is at: work on a batch (`working`), or a wait for something. `since` is a monotonic time.

    `patience` stretches the time after which the work counts as stuck: whoever waits for others must outlast them.
    """

    thread: str
    what: str
    batch: int | None
    since: float
    working: bool
    patience: float = 1.0


class Supervisor:
    """Starts, watches, stops and joins threads.

    Use as a context manager: leaving it stops and joins everything, and a thread that will not end is an error.
    """

    def __init__(self, name: str, join_timeout_s: float = 5.0) -> None:
        self.name = name
        self._join_timeout_s = join_timeout_s
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._failure: DFlashError | None = None
        self._last_progress = time.monotonic()
        self._activities: dict[int, Activity] = {}
        self._join_deadline: float | None = None
        self._threads: list[threading.Thread] = []

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    @property
    def failure(self) -> DFlashError | None:
        """The first failure, or None."""
        return self._failure

    def start(self, stage: str, body: Callable[..., None], *args: Any) -> None:
        """Run `body(*args)` in a new thread; what it raises becomes a `StageError` of `stage`."""
        self._threads.append(start_thread(f"{self.name}/{stage}", self._run, stage, body, args))

    def _run(self, stage: str, body: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            body(*args)
        except Stopped:
            pass
        except DFlashError as error:
            self.fail(error if isinstance(error, StageError) else StageError(stage, None, error))
        except BaseException as error:  # noqa: BLE001 - top of a thread: nothing may vanish here
            self.fail(StageError(stage, None, error))

    def fail(self, error: DFlashError) -> None:
        """Record the first failure and stop everything."""
        with self._lock:
            if self._failure is None:
                self._failure = error
                log.error("%s", error, exc_info=error.__cause__)
        self._stop.set()

    def stop(self) -> None:
        """Ask all threads to end; does not wait."""
        self._stop.set()

    def check(self) -> None:
        """Raise the first failure, or `Stopped` if a stop was asked for."""
        if self._failure is not None:
            raise self._failure
        if self._stop.is_set():
            raise Stopped

    def wait_for(self, condition: threading.Condition, ready: Callable[[], bool], timeout_s: float, what: str) -> float:
        """Wait, with `condition` held, until `ready()`; returns the seconds waited.

        Raises:
            Stopped: a stop was asked for.
            StageError: nothing happened for `timeout_s`; `what` says what was waited for.
        """
        if ready():
            self._last_progress = time.monotonic()  # whoever got what it waited for: the cell is alive
            return 0.0
        started = time.monotonic()
        thread = threading.get_ident()
        outer = self._activities.get(thread)
        self._activities[thread] = Activity(threading.current_thread().name, what, None, started, working=False)
        try:
            while not ready():
                if self._stop.is_set():
                    raise Stopped
                if time.monotonic() - max(started, self._last_progress) > timeout_s:
                    raise StageError(what, None, f"no progress for {timeout_s:.0f} s")
                condition.wait(POLL_S)
        finally:
            if outer is None:
                self._activities.pop(thread, None)
            else:
                self._activities[thread] = outer
        self._last_progress = time.monotonic()
        return self._last_progress - started

    @contextmanager
    def busy(self, stage: str, batch: int | None = None, patience: float = 1.0) -> Iterator[None]:
        """Say that this thread works on something while inside; leaving it counts as progress."""
        thread = threading.get_ident()
        outer = self._activities.get(thread)
        self._activities[thread] = Activity(
            threading.current_thread().name, stage, batch, time.monotonic(), working=True, patience=patience
        )
        try:
            yield
        finally:
            self._last_progress = time.monotonic()
            if outer is None:
                self._activities.pop(thread, None)
            else:
                self._activities[thread] = outer

    def activities(self) -> list[Activity]:
        """What the threads are at now, the longest first."""
        return sorted(self._activities.copy().values(), key=lambda activity: activity.since)

    @property
    def idle_s(self) -> float:
        """Seconds since anything was got or finished anywhere in the cell."""
        return time.monotonic() - self._last_progress

    def sleep(self, seconds: float) -> bool:
        """Sleep, or return True at once when a stop is asked for."""
        return self._stop.wait(seconds)

    def close(self) -> list[str]:
        """Stop and join all threads; returns the names of those that did not end in time."""
        self._stop.set()
        if self._join_deadline is None:  # a second call does not wait a second time
            self._join_deadline = time.monotonic() + self._join_timeout_s
        for thread in self._threads:
            thread.join(max(0.0, self._join_deadline - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        left = self.close()
        if left:
            log.error("threads that did not end: %s", ", ".join(left))
            if error is None and self._failure is None:
                raise StageError(left[0], None, "the thread did not end when asked to")
