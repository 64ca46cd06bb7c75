"""Starts the training child, relays its lines, forwards cancellation, and leaves no process behind.

`launch` is to be called in the main thread: signals become exceptions there, and only there. It polls and never blocks.
The command writes straight into its log file, and the launcher reads along: so a launcher that dies breaks no pipe of a
training that is saving its state. The processes, and who ends whom:

    flow (launch) -> supervisor (flows/child.py, own session) -> command -> its ranks and helpers

- KeyboardInterrupt, Prefect's TerminationSignal or any other exception here: SIGTERM to the supervisor, which passes it
  to the command, waits for the grace, and kills what is left. A second signal in that time ends everything at once.
- The flow is killed with SIGKILL: the supervisor notices and does the same.
- The supervisor is killed: the command gets SIGTERM from the kernel, and the launcher ends the descendants it has
  recorded once a second.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from dflash_core.errors import EXIT_DONE, EXIT_STOPPED_BY_SIGNAL, EXIT_USER_ERROR, StoppedBySignal, TrainingError, UserError
from flows import child

log = logging.getLogger(__name__)

POLL_S = 0.1
RECORD_S = 1.0
MARGIN_S = 5.0  # beyond the grace, for the supervisor to kill and to report
TAIL_BYTES = 64 * 1024
HEADER = "=== launch "
ERROR_LINE = re.compile(r"^(?:\[[^\]]*\]:?\s*)?error: (?P<text>.+)$")  # a rank's lines may carry a [prefix]
STAMP = re.compile(r"^\d\d:\d\d:\d\d (?:INFO )?")  # the logger that a line is passed to writes its own
# How torchrun says which rank has ended first.
RANK_LINE = re.compile(r"^.*failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+) .*$")
TRACEBACK_LINE = re.compile(r"^(?:\[[^\]]*\]:?\s*)?(?P<text>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt)\b.*)$")


def launch(
    command: Sequence[str],
    *,
    log_file: Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
    grace_s: float = 20.0,
    keep_open: Sequence[int] = (),
) -> int:
    """Run `command` to its end and return its exit code; 128 + n if signal n ended it.

    Args:
        command: program and arguments.
        log_file: gets all output of the command, appended; folders are created.
        cwd: working folder of the command; default: the caller's.
        env: its whole environment; default: the caller's.
        on_line: called with every full line of output, in this thread.
        grace_s: seconds the command has to end after SIGTERM.
        keep_open: file descriptors the supervisor holds until no process of the command is left; a `node_lock` given
            here stays locked as long as the training lives, also if the flow is killed.

    Raises:
        Whatever interrupts it (KeyboardInterrupt, Prefect's TerminationSignal, an exception of `on_line`), after the
        command and all its descendants have ended.
    """
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab", buffering=0) as sink:
        sink.write(
            f"{HEADER}{datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')} {shlex.join(command)}\n".encode()
        )
        follower = _Follower(log_file, sink.seek(0, os.SEEK_END), on_line)
        # -P: the supervisor is run by path, and its folder must not become a place to import from.
        supervisor_command = [sys.executable, "-P", str(Path(child.__file__)), str(os.getpid()), str(grace_s), *command]
        family: set[psutil.Process] = set()
        supervisor = None
        try:
            with signals_held() as held:
                supervisor = subprocess.Popen(
                    supervisor_command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
                    cwd=cwd, env=None if env is None else dict(env), start_new_session=True, pass_fds=tuple(keep_open),
                )  # fmt: skip
            if held:
                signal.raise_signal(held[0])
            _follow(supervisor, family, follower)
        except BaseException:
            if supervisor is not None:
                _stop(supervisor, family, grace_s)
            raise
    follower.read(final=True)
    _end_recorded(family, grace_s)
    code = supervisor.returncode
    return code if code >= 0 else 128 - code


def raise_for_exit(code: int, log_file: Path) -> None:
    """Turn the exit code of a training into the error it stands for.

    Raises:
        UserError: code 2. StoppedBySignal: code 4. TrainingError: any other code but 0. Each quotes the child's last error line.
    """
    if code == EXIT_DONE:
        return
    reason = last_error_line(log_file)
    if code == EXIT_USER_ERROR:
        raise UserError(reason or f"training ended with exit code {code}; see {log_file}")
    if code == EXIT_STOPPED_BY_SIGNAL:
        raise StoppedBySignal(reason or "training was stopped by a signal")
    ended = f"ended with exit code {code}"
    if code - 128 in {int(number) for number in signal.Signals}:
        ended = f"was ended by {signal.Signals(code - 128).name}"
        if code - 128 == signal.SIGKILL:
            ended += " (the system does this when memory runs out)"
        if code - 128 == signal.SIGBUS:
            ended += " (the system does this when a mapped file was cut off, or its disk failed)"
    raise TrainingError(f"training {ended}{': ' + reason if reason else ''}; see {log_file}")


def last_error_line(log_file: Path) -> str | None:
    """Of the last launch into `log_file`: its last `error: ...`, else a killed rank, the end of its traceback, its last line."""
    text = "\n".join(last_lines(log_file))
    lines = text.rpartition(HEADER)[2].splitlines()[1:]
    for pattern in (ERROR_LINE, RANK_LINE, TRACEBACK_LINE):
        for line in reversed(lines):
            if (match := pattern.match(line)) and "another cell ended" not in line:
                return _killed_rank(match) if pattern is RANK_LINE else match["text"]
    return lines[-1].strip() if lines else None


def _killed_rank(match: re.Match[str]) -> str:
    code = int(match["code"])
    how = f"was ended by {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"ended with exit code {code}"
    return f"the process of cell {match['rank']} {how}"


def last_lines(path: Path, count: int | None = None) -> list[str]:
    """The last `count` lines of a file that are not blank; without `count` all within its last 64 KiB."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return lines if count is None else lines[-count:]


@contextlib.contextmanager
def node_lock(folder: Path, label: str, poll_s: float = 0.5) -> Iterator[int]:
    """Hold the right to train on this node; a second caller waits, says so, and can be interrupted.

    The lock file carries the host's name, so nodes that share the folder do not wait for each other. Yields the
    descriptor that holds the lock (see `keep_open` of `launch`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"node-{socket.gethostname()}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        told = -float("inf")
        while not try_lock(descriptor, fcntl.LOCK_EX):
            if time.monotonic() - told > 60:
                told = time.monotonic()
                holder = os.pread(descriptor, 4096, 0).decode(errors="replace").strip() or "another process"
                log.info("waiting: %s trains on this node", holder)
            time.sleep(poll_s)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{label} (process {os.getpid()})\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def only_one(path: Path, otherwise: str) -> Iterator[None]:
    """Hold the lock file `path`; raises UserError with the line `otherwise` if another process holds it. Makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not try_lock(descriptor, fcntl.LOCK_EX):
            raise UserError(otherwise)
        yield
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, kind: int) -> bool:
    """Take a `flock` of a kind (`LOCK_EX`, `LOCK_SH`) if that is possible at once."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Relay:
    """Passes lines to a logger, at most `burst` at once and one per `interval_s` on average; counts the rest, keeps the last."""

    def __init__(self, logger: logging.Logger, interval_s: float = 1.0, burst: int = 10) -> None:
        self.logger, self.interval_s, self.burst = logger, interval_s, burst
        self.credit, self.last = float(burst), time.monotonic()
        self.skipped, self.latest = 0, ""

    def __call__(self, line: str) -> None:
        line = STAMP.sub("", line)
        now = time.monotonic()
        self.credit = min(self.burst, self.credit + (now - self.last) / self.interval_s)
        self.last = now
        if self.credit < 1:
            self.skipped, self.latest = self.skipped + 1, line
            return
        self.credit -= 1
        if self.skipped:
            self.logger.info("(%d more in the log file)", self.skipped)
            self.skipped = 0
        self.logger.info("%s", line)

    def finish(self) -> None:
        """Show the last line even if it came too fast."""
        if self.skipped:
            if self.skipped > 1:
                self.logger.info("(%d more in the log file)", self.skipped - 1)
            self.skipped = 0
            self.logger.info("%s", self.latest)


class _Follower:
    """Reads what is appended to a file, line by line. Of a line with carriage returns only the last part is shown."""

    def __init__(self, path: Path, offset: int, on_line: Callable[[str], None] | None) -> None:
        self.path, self.offset, self.on_line = path, offset, on_line
        self.rest = b""

    def read(self, final: bool = False) -> None:
        """Pass on the lines that have come since; with `final` also one that has no end yet."""
        if self.on_line is None:
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read()
        self.offset += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        if final and self.rest:
            lines.append(self.rest)
            self.rest = b""
        for line in lines:
            text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2].rstrip()
            if text:
                self.on_line(text)


def _follow(supervisor: subprocess.Popen[bytes], family: set[psutil.Process], follower: _Follower) -> None:
    recorded = -float("inf")
    while supervisor.poll() is None:
        follower.read()
        if time.monotonic() - recorded > RECORD_S:
            recorded = time.monotonic()
            _record(supervisor, family)
        time.sleep(POLL_S)


def _record(supervisor: subprocess.Popen[bytes], family: set[psutil.Process]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        family.update(psutil.Process(supervisor.pid).children(recursive=True))
    family -= {process for process in family if not child.runs(process)}


def _stop(supervisor: subprocess.Popen[bytes], family: set[psutil.Process], grace_s: float) -> None:
    """End the supervisor and all below it; a further SIGINT or SIGTERM in this time cuts the grace short."""
    with signals_held() as held:
        _record(supervisor, family)
        supervisor.terminate()
        deadline = time.monotonic() + grace_s + child.KILL_S + MARGIN_S
        hurried = False
        while supervisor.poll() is None and time.monotonic() < deadline:
            if held and not hurried:
                hurried = True
                supervisor.send_signal(child.URGENT)
            time.sleep(POLL_S)
        _record(supervisor, family)
        if supervisor.poll() is None:
            supervisor.kill()
            supervisor.wait(timeout=MARGIN_S)
        _end_recorded(family, 0.0)


def _end_recorded(family: set[psutil.Process], grace_s: float) -> None:
    """End recorded descendants that outlived their supervisor, which happens only if that one was killed."""
    living = [process for process in family if child.runs(process)]
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, MARGIN_S)):
        for process in living:
            child.send(process, number)
        living = child.wait_gone(living, patience_s)


@contextlib.contextmanager
def signals_held() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM instead of raising, so that no exception falls between two steps that belong together.

    In a thread other than the main one there is nothing to hold: signals raise only in the main thread.
    """
    held: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield held
        return
    previous = {number: signal.signal(number, lambda n, _frame: held.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield held
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
