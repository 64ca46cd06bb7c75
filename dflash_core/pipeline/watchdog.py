"""The watchdog: a cell in which nothing moves any more is stopped, with every thread's stack in the log.

Two things count as a stall: no wait was answered and no work ended anywhere in the cell for the limit, or one piece of
work has lasted longer than the limit while others went on around it. A stalled thread may be in code that hears
nothing (a hung kernel, a dead file system); so when the cell has not begun to end some seconds later, the watchdog ends
the process itself, through `give_up`.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dflash_core.errors import DFlashError, StageError
from dflash_core.pipeline.threads import Activity, Supervisor, start_thread

log = logging.getLogger(__name__)
LOOK_SHARE = 0.1  # part of the limit that passes between two looks
GRACE_S = 4.5


def thread_stacks() -> str:
    """The stacks of all threads of this process, as text."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        stack = "".join(traceback.format_stack(frame))
        parts.append(f"thread {names.get(ident, ident)}:\n{stack}")
    return "\n".join(parts)


def find_stall(supervisor: Supervisor, limit_s: float, now: float) -> StageError | None:
    """The stall as an error that names the stage, the batch and how long, or None while things move."""
    activities = supervisor.activities()
    stuck = [a for a in activities if a.working and now - a.since > limit_s * a.patience]
    if not stuck and supervisor.idle_s <= limit_s:
        return None
    if stuck:
        first = stuck[0]
        return StageError(first.what, first.batch, f"no progress for {now - first.since:.0f} s: this work does not end")
    if any(a.patience > 1 and now - a.since <= limit_s * a.patience for a in activities):
        return None  # this cell waits for another, which has the right to find its own stall first
    doing = "; ".join(_words(a, now) for a in activities) or "no thread is working or waiting"
    return StageError("pipeline", None, f"no progress for {supervisor.idle_s:.0f} s ({doing})")


def _words(activity: Activity, now: float) -> str:
    verb = "works at" if activity.working else "waits for"
    batch = "" if activity.batch is None else f" batch {activity.batch}"
    return f"{activity.thread} {verb} {activity.what}{batch} for {now - activity.since:.0f} s"


@contextmanager
def watchdog(supervisor: Supervisor, limit_s: float, give_up: Callable[[DFlashError], None]) -> Iterator[None]:
    """Watch over a cell while inside.

    Args:
        supervisor: the cell's.
        limit_s: time without progress after which the cell is stopped.
        give_up: called when the cell has not ended `GRACE_S` after a failure; ends the process and does not return.
    """
    ended = threading.Event()
    thread = start_thread(f"{supervisor.name}/watchdog", watch_for_stalls, supervisor, limit_s, ended, give_up)
    try:
        yield
    finally:
        ended.set()
        thread.join()


def watch_for_stalls(
    supervisor: Supervisor, limit_s: float, ended: threading.Event, give_up: Callable[[DFlashError], None]
) -> None:
    """Body of the watchdog thread; `ended` is set once the cell is over."""
    while not supervisor.stopping:
        if ended.wait(min(1.0, limit_s * LOOK_SHARE)):
            return
        stall = find_stall(supervisor, limit_s, time.monotonic())
        if stall is not None:
            log.error("%s; stacks of all threads:\n%s", stall, thread_stacks())
            supervisor.fail(stall)
    # A stop without a failure may take its time: it saves the state.
    if ended.wait(GRACE_S) or supervisor.failure is None:
        return
    log.error("the cell does not end by itself; stacks of all threads:\n%s", thread_stacks())
    give_up(supervisor.failure)
