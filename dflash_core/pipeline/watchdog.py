"""The watchdog: a cell in which nothing moves any more is stopped, with every thread's stack in the log.

Two things count as a stall:

- one piece of work (inside `Supervisor.busy`) has lasted longer than the limit, whatever goes on around it;
- nothing was got, begun or finished anywhere in the cell for the limit, and no thread is at a piece of work that is within
  its own limit. Then every thread waits, or is in code that says nothing; the message tells of each what it is at.

What is not a stall: work that is slow but within the limit, and the waits of others for it; a piece of work with more
patience, which waits for other cells; a time in which the whole process stood still (`Supervisor.now`).

A stalled thread may be in code that hears nothing (a hung kernel, a dead file system); so when the cell has not ended some
seconds after a failure, the watchdog ends the process itself, through `give_up`. The one thing that it cannot see is C code
that never lets go of the interpreter lock: then no Python thread runs, this one neither, and other cells find out by their
own limits.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePath

from dflash_core.errors import DFlashError, StageError
from dflash_core.pipeline.threads import Activity, Supervisor, start_thread

log = logging.getLogger(__name__)
LOOK_SHARE = 0.1  # part of the limit that passes between two looks
LOOK_S = 1.0  # but no more than this
GRACE_S = 4.5
LOG_S = 1.0  # the log may be what hangs; no longer than this is waited for it


def thread_stacks() -> str:
    """The stacks of all threads of this process, as text."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        stack = "".join(traceback.format_stack(frame))
        parts.append(f"thread {names.get(ident, ident)}:\n{stack}")
    return "\n".join(parts)


def find_stall(supervisor: Supervisor, limit_s: float) -> StageError | None:
    """The stall as an error that names the stage, the batch and how long, or None while things move."""
    now, activities, idle_s = supervisor.now(), supervisor.activities(), supervisor.idle_s  # what moves meanwhile shortens it
    working = [a for a in activities if a.working]
    stuck = [a for a in working if now - a.since > limit_s * a.patience]
    if stuck:
        first = stuck[0]
        return StageError(first.what, first.batch, f"no progress for {now - first.since:.1f} s: this work does not end")
    if working or idle_s <= limit_s:
        return None
    silent = [(thread.name, _place(thread)) for thread in supervisor.unaccounted()]
    doing = [f"{name} is in {place}" for name, place in silent] + [_words(a, now) for a in activities]
    # The owner hands batches on between its pieces of work; if it neither works nor waits, it is what all others wait for.
    stage = supervisor.owner.name if silent and silent[0][0] == supervisor.owner.name else "pipeline"
    return StageError(stage, None, f"no progress for {idle_s:.1f} s ({'; '.join(doing)})")


def find_end_without_end(supervisor: Supervisor, limit_s: float) -> StageError | None:
    """A stop without a failure takes its time, to save the state and to close the metrics, but not for ever."""
    if supervisor.stopped_at is None or supervisor.now() - supervisor.stopped_at <= limit_s:
        return None
    return StageError("end of the run", None, f"it has not ended {limit_s:.1f} s after it was to stop")


def _place(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "nothing any more"
    return f"{frame.f_code.co_name} ({PurePath(frame.f_code.co_filename).name}:{frame.f_lineno})"


def _words(activity: Activity, now: float) -> str:
    batch = "" if activity.batch is None else f" with batch {activity.batch}"
    return f"{activity.thread} waits for {activity.what}{batch} for {now - activity.since:.1f} s"


@contextmanager
def watchdog(
    supervisor: Supervisor, limit_s: float, give_up: Callable[[DFlashError], None], grace_s: float = GRACE_S
) -> Iterator[None]:
    """Watch over a cell while inside.

    Args:
        supervisor: the cell's.
        limit_s: time without progress after which the cell is stopped.
        give_up: called once when the cell has not ended `grace_s` after a failure; ends the process and does not return.
        grace_s: time for the cell to end by itself after a failure.
    """
    ended = threading.Event()
    supervisor.progressed()  # building the cell took as long as it took
    name, args = f"{supervisor.name}/watchdog", (supervisor, limit_s, ended, give_up, grace_s)
    thread = start_thread(name, supervisor.guard, "watchdog", watch_for_stalls, args)
    try:
        yield
    finally:
        ended.set()
        thread.join(GRACE_S)


def watch_for_stalls(
    supervisor: Supervisor,
    limit_s: float,
    ended: threading.Event,
    give_up: Callable[[DFlashError], None],
    grace_s: float = GRACE_S,
) -> None:
    """Body of the watchdog thread; `ended` is set once the cell is over."""
    look_s = min(LOOK_S, limit_s * LOOK_SHARE)
    while True:
        failed_at = supervisor.failed_at
        pause_s = look_s if failed_at is None else max(0.0, failed_at + grace_s - supervisor.now())
        before = time.monotonic()
        if ended.wait(pause_s):
            return
        supervisor.notice_pause(before, pause_s)
        if failed_at is None:
            stall = find_end_without_end(supervisor, limit_s) if supervisor.stopping else find_stall(supervisor, limit_s)
            if stall is not None:
                _stop_with(supervisor, stall)
        elif supervisor.now() - failed_at >= grace_s:
            break
    _say("the cell does not end by itself; stacks of all threads:\n%s", thread_stacks())
    if not ended.is_set() and supervisor.failure is not None:
        give_up(supervisor.failure)


def _stop_with(supervisor: Supervisor, stall: StageError) -> None:
    stacks = thread_stacks()  # before the threads hear of it and leave the place
    if supervisor.keep_failure(stall):
        _say("%s; stacks of all threads:\n%s", stall, stacks)


def _say(text: str, *args: object) -> None:
    """Log from a thread of its own: a log on a dead disk, or one whose lock the stuck thread holds, must not hold us too."""
    start_thread("watchdog's log", log.error, text, *args).join(LOG_S)
