"""The supervisor between the launcher and a training: one small process that leaves nobody behind.

It is run by file path (`python -P child.py PARENT_PID GRACE_S COMMAND...`), so that it needs neither this package nor
the caller's folder. It stays between the two because only a living process can keep three promises at once:

- It is a *subreaper*: whatever the command starts, in whatever session, stays its descendant, also when the parents in
  between are gone. `torchrun` starts every rank in its own session, so killing a process group would miss them.
- It notices the death of the launcher, even by SIGKILL (PR_SET_PDEATHSIG, and a look at the parent's id for the moment
  before it was set and for systems without it), and then ends the command in good order.
- It passes SIGTERM on to the command alone, waits for the grace, and then kills every descendant that is left.

Signals: SIGTERM or SIGINT asks for an orderly end, SIGUSR1 for an end now. Exit code: the command's, or 128 + the number
of the signal that ended it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36
URGENT = signal.SIGUSR1
POLL_S = 0.1
LINGER_S = 1.0  # helpers of a finished command (such as a metrics uploader) may end by themselves
TERM_S = 2.0  # then they are asked
KILL_S = 10.0  # a killed process that is still there after this hangs in the kernel, and no signal helps
EXIT_CANNOT_START = 127


def prctl(option: int, value: int) -> None:
    """Set a property of this process; nothing happens on systems without `prctl`."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


class _Stop:
    """What the signals have asked for so far."""

    def __init__(self) -> None:
        self.requested = False
        self.urgent = False
        for number in (signal.SIGTERM, signal.SIGINT, URGENT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: object) -> None:
        self.requested = True
        self.urgent = self.urgent or number == URGENT


def main(argv: Sequence[str]) -> int:
    """Run `COMMAND` from `[parent_pid, grace_s, *command]` and return its exit code."""
    parent, grace_s, command = int(argv[0]), float(argv[1]), list(argv[2:])
    stop = _Stop()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return 128 + signal.SIGTERM
    supervisor = os.getpid()

    def die_with_supervisor() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != supervisor:
            os._exit(128 + signal.SIGTERM)

    try:
        # This process has one thread only, so code between fork and exec is safe here, and nowhere else.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_supervisor)
    except OSError as error:
        sys.stderr.write(f"error: cannot start {command[0]}: {error.strerror}\n")
        return EXIT_CANNOT_START
    deadline = _watch(process, parent, grace_s, stop)
    if deadline is None:
        _end_descendants([(None, LINGER_S), (signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S)])
    elif process.returncode is None or stop.urgent:
        _end_descendants([(signal.SIGKILL, KILL_S)])
    else:
        # The command ended in time, but ranks or helpers of it may still be saving.
        _end_descendants([(signal.SIGTERM, min(TERM_S, max(0.0, deadline - time.monotonic()))), (signal.SIGKILL, KILL_S)])
    code = process.poll()
    if code is None:
        return 128 + signal.SIGKILL
    return code if code >= 0 else 128 - code


def _watch(process: subprocess.Popen[bytes], parent: int, grace_s: float, stop: _Stop) -> float | None:
    """Wait for the command; returns None if it ended by itself, else the end of the grace it was given."""
    deadline = None
    while process.poll() is None:
        if os.getppid() != parent:
            stop.requested = True
        if stop.requested and deadline is None:
            process.terminate()
            deadline = time.monotonic() + grace_s
        if deadline is not None and (stop.urgent or time.monotonic() > deadline):
            break
        _collect_adopted(process.pid)
        time.sleep(POLL_S)
    return deadline


def _collect_adopted(command: int) -> None:
    """Collect orphans that have ended, for they are this process's now; the command itself is left to its `Popen`."""
    if sys.platform != "linux":
        return  # no subreaper, no orphans
    peek = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, peek)) is not None and ended.si_pid != command:
            os.waitpid(ended.si_pid, 0)


def _end_descendants(phases: Sequence[tuple[signal.Signals | None, float]]) -> None:
    """End all descendants: in each phase send the signal, then wait at most that many seconds for them to be gone."""
    for number, patience_s in phases:
        signalled: set[psutil.Process] = set()
        deadline = time.monotonic() + patience_s
        while living := _living_descendants():
            for process in living:
                if number is not None and process not in signalled:  # newly forked ones get it too
                    signalled.add(process)
                    send(process, number)
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S / 2)
        else:
            return
    pids = [process.pid for process in _living_descendants()]
    if pids:
        sys.stderr.write(f"error: processes {pids} do not end, even when killed\n")


def _living_descendants() -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if runs(process)]


def runs(process: psutil.Process) -> bool:
    """True if that very process still runs. One that has ended but was not collected by its parent (a zombie) does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def send(process: psutil.Process, number: int) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def wait_gone(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until none of them runs, at most `timeout_s`; returns those that still do. Own children are collected."""
    deadline = time.monotonic() + timeout_s
    while living := [process for process in processes if runs(process)]:
        if time.monotonic() > deadline:
            return living
        time.sleep(POLL_S / 2)
    for process in processes:
        with contextlib.suppress(psutil.TimeoutExpired, psutil.NoSuchProcess):
            process.wait(timeout=0)
    return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
