"""A pool of processes that ends with us, however we end.

Each process holds the reading end of a pipe whose writing end only we have, and ends when that closes, which a SIGKILL
cannot prevent. (The standard library's fork server and resource tracker, which have no work of their own, stay until this
process ends.)
"""

from __future__ import annotations

import contextvars
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

Result = TypeVar("Result")


def default_num_processes() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def one_thread() -> None:
    """For `start`: libraries that compute with threads of their own use one, for there is a process per core already. They look
    when they are loaded, so nothing that loads them may be preloaded."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "POLARS_MAX_THREADS"):
        os.environ[name] = "1"


@contextmanager
def repeated(call: Callable[[], None], every_s: float, name: str) -> Iterator[None]:
    """Call a function every so many seconds while inside, in a thread that ends, and is waited for, with the block.

    It runs in the context of the caller, so lines that it logs belong to the caller's flow. What it raises ends the thread.
    """
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(every_s):
            call()

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Processes:
    """A pool of processes that can be ended at once.

    Args:
        num_processes: how many.
        start: called first in each process, with `arguments`.
        preload: modules that the fork server imports once for all of them.
    """

    def __init__(
        self, num_processes: int, start: Callable[..., None], arguments: tuple[Any, ...] = (), preload: Sequence[str] = ()
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(preload))
        self._lifeline, self._our_end = context.Pipe(duplex=False)
        self._executor = ProcessPoolExecutor(num_processes, context, _start, (self._lifeline, start, arguments))

    def submit(self, work: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Queue a call; raises `BrokenProcessPool`, as the future does, when a process was killed."""
        return self._executor.submit(work, *arguments)

    def close(self, at_once: bool) -> None:
        """Wait for the processes to end; `at_once` ends them in the middle of their work."""
        if at_once:
            self._our_end.close()
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._our_end.close()
        self._lifeline.close()


def _start(lifeline: Connection, start: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """First thing in a process. Ctrl-C is the parent's business alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(lifeline,), name="lifeline", daemon=True).start()
    start(*arguments)


def _end_with(lifeline: Connection) -> None:
    """End when the other end is closed: by the parent that gives up, or by the kernel when the parent is gone."""
    try:
        lifeline.poll(None)
    finally:
        os._exit(1)
