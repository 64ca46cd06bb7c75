"""The one place that starts threads, and the one that ends them.

A `Supervisor` owns every thread of a cell. The first failure, in whichever thread, is kept and stops all; the train
loop meets it at its next hand-over. Thread bodies are plain functions that get all they touch as arguments. They run in a
copy of the starter's context, so that log handlers bound to it (Prefect's are) receive their lines.

The supervisor also knows what every thread is doing: work that can take long stands inside `busy(stage, batch)`, and
waits go through `wait_for`. The watchdog (`dflash_core.pipeline.watchdog`) reads both.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from dflash_core.errors import DFlashError, StageError

log = logging.getLogger(__name__)
# A waiter that nobody wakes looks by itself this often: for a stop, and for a notification that was lost.
POLL_S = 0.05
# A timed wait that ends this much too late means that the whole process stood still.
PAUSE_S = 1.0
# Under this name an exception carries the number of the batch at which it was raised.
BATCH_KEY = "_dflash_batch"


class Stopped(Exception):
    """Raised inside a waiting thread when the supervisor stops; ends the thread quietly."""


def start_thread(name: str, body: Callable[..., None], *args: Any) -> threading.Thread:
    """Run `body(*args)` in a new thread, in a copy of the caller's context. Nothing else here starts threads."""
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(body, *args), name=name, daemon=True)
    thread.start()
    return thread


class Activity(NamedTuple):
    """What a thread is at: work on a batch (`working`), or a wait for something. `since` is a time of `Supervisor.now`.

    `patience` stretches the time after which the work counts as stuck: whoever waits for others must outlast them.
    """

    thread: str
    what: str
    batch: int | None
    since: float
    working: bool
    patience: float = 1.0


class Busy:
    """What `Supervisor.busy` gives; a class, because a generator would cost several times as much."""

    __slots__ = ("_batch", "_outer", "_patience", "_stage", "_supervisor")

    def __init__(self, supervisor: Supervisor, stage: str, batch: int | None, patience: float) -> None:
        self._supervisor, self._stage, self._batch, self._patience = supervisor, stage, batch, patience

    def __enter__(self) -> None:
        supervisor = self._supervisor
        now = supervisor.progressed()
        name = threading.current_thread().name
        self._outer = supervisor._enter(Activity(name, self._stage, self._batch, now, True, self._patience))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:  # the innermost work names it, see `guard`
            error.__dict__.setdefault(BATCH_KEY, self._batch)
        self._supervisor._leave(self._outer)


class Supervisor:
    """Starts, watches, stops and joins threads.

    Use as a context manager: leaving it stops and joins everything, and a thread that will not end is an error.
    """

    def __init__(self, name: str, join_timeout_s: float = 5.0) -> None:
        self.name = name
        self.owner = threading.current_thread()
        self._join_timeout_s = join_timeout_s
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._failure: DFlashError | None = None
        self._failed_at: float | None = None
        self._stopped_at: float | None = None
        self.forgive_stragglers = False  # set once the state is saved: a thread that will not end then ends with the process
        self._paused_s, self._paused_until = 0.0, 0.0
        self._last_progress = self.now()
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

    @property
    def failed_at(self) -> float | None:
        """When the first failure came, as `now`."""
        return self._failed_at

    @property
    def stopped_at(self) -> float | None:
        """When the stop began, as `now`."""
        return self._stopped_at

    def now(self) -> float:
        """Monotonic seconds, without those in which the whole process stood still (SIGSTOP, a frozen machine)."""
        return time.monotonic() - self._paused_s

    def notice_pause(self, before: float, expected_s: float) -> None:
        """Called after a timed wait of `expected_s` that began at the monotonic time `before`: was it far too long?

        Time in which nobody ran is nobody's stall. Many threads see the same pause; it is counted once.
        """
        after = time.monotonic()
        if after - before - expected_s < PAUSE_S:
            return
        with self._lock:
            began = max(before + expected_s, self._paused_until)
            if after > began:
                self._paused_s += after - began
                self._paused_until = after

    def start(self, stage: str, body: Callable[..., None], *args: Any, done: Callable[[], bool] | None = None) -> None:
        """Run `body(*args)` in a new thread; what it raises becomes a `StageError` of `stage`.

        `done` is asked when the body returns before a stop: if it says no, the stage has ended without doing its work, which
        is a failure too. Without `done` the stage may end when it likes.
        """
        self._threads.append(start_thread(f"{self.name}/{stage}", self.guard, stage, body, args, done))

    def guard(self, stage: str, body: Callable[..., None], args: tuple[Any, ...], done: Callable[[], bool] | None = None) -> None:
        """Run `body(*args)` here as the top of a thread: nothing that it raises gets lost, SystemExit included."""
        try:
            body(*args)
            if not self.stopping and done is not None and not done():
                self.fail(StageError(stage, None, "it ended before its work was done"))
        except Stopped:
            if not self.stopping:
                self.fail(StageError(stage, None, "it ended although nobody asked it to stop"))
        except StageError as error:
            self.fail(error)
        except BaseException as error:  # noqa: BLE001 - top of a thread: nothing may vanish here
            self.fail(StageError(stage, error.__dict__.get(BATCH_KEY), error))

    def fail(self, error: DFlashError) -> None:
        """Keep the first failure, stop everything, and log it."""
        if self.keep_failure(error):
            log.error("%s", error, exc_info=error.__cause__)

    def keep_failure(self, error: DFlashError) -> bool:
        """As `fail`, without writing the first failure to the log; returns whether it was the first."""
        with self._lock:
            first = self._failure is None
            if first:
                self._failure, self._failed_at = error, self.now()
        self.stop()
        if not first:
            log.debug("after the first failure: %s", error, exc_info=error.__cause__)
        return first

    def stop(self) -> None:
        """Ask all threads to end; does not wait."""
        if self._stopped_at is None:
            self._stopped_at = self.now()
        self._stop.set()

    def check(self) -> None:
        """Raise the first failure, or `Stopped` if a stop was asked for."""
        if self._failure is not None:
            raise self._failure
        if self._stop.is_set():
            raise Stopped

    def wait_for(
        self, condition: threading.Condition, ready: Callable[[], bool], timeout_s: float, what: str, batch: int | None = None
    ) -> float:
        """Wait, with `condition` held, until `ready()`; returns the seconds waited.

        A stop comes before everything else: after the first failure no stage takes up new work.

        Raises:
            Stopped: a stop was asked for.
            StageError: nothing happened in the whole cell for `timeout_s`; `what` (and `batch`) say what was waited for.
        """
        if self._stop.is_set():
            raise Stopped
        if ready():
            self.pass_by()
            return 0.0
        started = self.now()
        outer = self._enter(Activity(threading.current_thread().name, what, batch, started, working=False))
        try:
            while not ready():
                if self._stop.is_set():
                    raise Stopped
                if self.now() - max(started, self._last_progress) > timeout_s:
                    raise StageError(what, batch, f"no progress for {timeout_s:.1f} s")
                before = time.monotonic()
                condition.wait(POLL_S)
                self.notice_pause(before, POLL_S)
        finally:
            self._leave(outer)
        return self._last_progress - started

    def busy(self, stage: str, batch: int | None = None, patience: float = 1.0) -> Busy:
        """Say that this thread works on something while inside. Beginning and ending it both count as progress."""
        return Busy(self, stage, batch, patience)

    def _enter(self, activity: Activity) -> Activity | None:
        """Replace what this thread is at; returns what it was."""
        thread = threading.get_ident()
        outer = self._activities.get(thread)
        self._activities[thread] = activity
        return outer

    def _leave(self, outer: Activity | None) -> None:
        now, thread = self.progressed(), threading.get_ident()
        if outer is None:
            self._activities.pop(thread, None)
        else:  # what was inside has moved, so what is around it has too
            self._activities[thread] = outer._replace(since=now)

    def progressed(self) -> float:
        """Say that something moved; returns `now`."""
        self._last_progress = now = self.now()
        return now

    def pass_by(self) -> None:
        """What a wait does that has what it waits for: it counts as progress, and a stop comes first."""
        if self._stop.is_set():
            raise Stopped
        self._last_progress = self.now()

    def activities(self) -> list[Activity]:
        """What the threads are at now, the longest first."""
        return sorted(self._activities.copy().values(), key=lambda activity: activity.since)

    def unaccounted(self) -> list[threading.Thread]:
        """Living threads of the cell that say neither what they work at nor what they wait for, the owner first."""
        return [t for t in (self.owner, *self._threads) if t.is_alive() and t.ident not in self._activities]

    @property
    def idle_s(self) -> float:
        """Seconds since anything was got, begun or finished anywhere in the cell."""
        return self.now() - self._last_progress

    def sleep(self, seconds: float) -> bool:
        """Sleep, or return True at once when a stop is asked for."""
        return self._stop.wait(seconds)

    def close(self) -> list[str]:
        """Stop and join all threads; returns the names of those that did not end in time."""
        self.stop()
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
            if error is None and self._failure is None and not self.forgive_stragglers:
                raise StageError(", ".join(left), None, "it did not end when asked to")
