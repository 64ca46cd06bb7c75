"""The owner of a fork server: starts `dflash` command lines in forked children and hears how they end."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
START_LIMIT_S = 110.0
PATIENCE_S = 60.0  # for anything that is expected to happen; how long it took is measured where it matters
Patch = tuple[str, dict[str, Any]]


class Child:
    """One forked process. `code` is its exit code once it has ended, negative for a signal."""

    def __init__(self, server: ForkServer, pid: int, out: Path, offset: int) -> None:
        self.server, self.pid, self.out, self._offset = server, pid, out, offset
        self.code: int | None = None
        self.started = time.monotonic()
        self.ended = float("inf")

    def poll(self) -> int | None:
        self.server.read(0.0)
        return self.code

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """The exit code; a child that does not end in time is killed and fails the test."""
        deadline = time.monotonic() + timeout_s
        while self.code is None:
            if (left := deadline - time.monotonic()) <= 0:
                self.kill()
                raise AssertionError(f"process {self.pid} did not end within {timeout_s:.1f} s:\n{self.output()[-6000:]}")
            self.server.read(left)
        return self.code

    def send(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self.send(signal.SIGKILL)
        while self.code is None:
            self.server.read(PATIENCE_S)

    def output(self) -> str:
        """Both streams of this process, without what others wrote into the file before."""
        return self.out.read_bytes()[self._offset :].decode(errors="replace") if self.out.exists() else ""

    def errors(self) -> list[str]:
        """The lines that begin with `error: `."""
        return [line for line in self.output().splitlines() if line.startswith("error: ")]


class ForkServer:
    """Owns the server process and, through it, all children."""

    def __init__(self, log: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(REPOSITORY)}
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.harness.fork_server"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, cwd=REPOSITORY, env=environment,
            )  # fmt: skip
        self._log, self._pending = log, b""
        self._children: dict[int, Child] = {}
        self._started: list[int] = []
        self._ready = False
        self._wait_for(lambda: self._ready)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def living(self) -> list[Child]:
        self.read(0.0)
        return list(self._children.values())

    def start(self, argv: Sequence[str], out: Path, patch: Patch | None = None, **environment: str) -> Child:
        """Start `dflash ARGV`; its output, both streams, is appended to `out`."""
        assert self._process.stdin is not None
        offset = out.stat().st_size if out.exists() else 0
        env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        request = {"argv": list(argv), "env": env, "cwd": str(REPOSITORY), "out": str(out), "patch": patch}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        self._wait_for(lambda: bool(self._started))
        child = Child(self, self._started.pop(), out, offset)
        self._children[child.pid] = child
        return child

    def _wait_for(self, answered: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not answered():
            self.read(max(0.0, deadline - time.monotonic()))
            assert time.monotonic() < deadline, "the fork server does not answer"

    def read(self, timeout_s: float) -> None:
        """Take what the server has to say, waiting at most so long for the first word."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            return
        data = os.read(self._process.stdout.fileno(), 65536)
        assert data, f"the fork server ended: {self._log.read_text()}"
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "ready" in message:
                self._ready = True
            elif "started" in message:
                self._started.append(message["started"])
            else:
                child = self._children.pop(message["ended"])
                child.code, child.ended = message["code"], time.monotonic()

    def end_children(self) -> list[Child]:
        """Kill what still lives; returns it."""
        left = self.living
        for child in left:
            child.kill()
        return left

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def wait_until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S, poll_s: float = 0.002) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"this did not happen within {timeout_s:.0f} s"
        time.sleep(poll_s)
