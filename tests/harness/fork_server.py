"""A process that has everything imported and forks a `dflash` command line on request.

Importing torch and transformers takes seconds, a fork milliseconds. Requests come as JSON lines on standard input
(`argv`, `env`, `cwd`, `out`, `patch`). Answers go as JSON lines to standard output: `{"ready": pid}` once,
`{"started": pid}`, and `{"ended": pid, "code": code}` when a child has ended, with the code negative for a signal. The end
of standard input ends the server, and the server's end ends its children.

A child runs `dflash_core.cli.main` as the command line does, with the default handling of signals, and leaves through
the interpreter's own shutdown. `patch` names a function (`module:name`) and its arguments, called first: it is how a
test breaks a stage.

Forking is safe here because no import starts a thread of its own; the server refuses to serve if one has.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

TINY_TARGET = Path(__file__).resolve().parents[2] / "data" / "tiny_target"
PR_SET_PDEATHSIG = 1
# pyarrow's allocator starts this thread when it is loaded, and has fork handlers that start it again in the child.
FORK_SAFE = "jemalloc_bg_thd"


def preload() -> None:
    """Import what a training run imports, and make sure that it can still be forked."""
    import pandas  # noqa: F401 - the stages import it when they need it
    import torch
    import tqdm
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import dflash_core.cli
    import dflash_core.experiment
    import dflash_core.training.cell  # noqa: F401

    torch.set_num_threads(1)
    tqdm.tqdm.monitor_interval = 0  # its bars would start a thread
    # transformers imports much, and compiles a thousand patterns, only when it first loads a model.
    AutoTokenizer.from_pretrained(TINY_TARGET)
    AutoModelForCausalLM.from_pretrained(TINY_TARGET)
    gc.collect()
    deadline = time.monotonic() + 10.0  # threads that have done their work may still be on their way out
    while (others := other_threads()) and time.monotonic() < deadline:
        time.sleep(0.05)
    if others:
        sys.exit(f"the fork server has threads after its imports, which a fork would lose: {others}")
    gc.freeze()


def other_threads() -> list[str]:
    """Names of the threads that a fork would lose."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):
            name = (task / "comm").read_text().strip()
            if task.name != str(os.getpid()) and name != FORK_SAFE:
                names.append(name)
    return names


def serve() -> dict[str, Any] | None:
    """Answer requests. Returns the request in each child, and None in the server when its input has ended."""
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the owner decides what it means
    pending = b""
    while True:
        readable, _, _ = select.select([0, wake], [], [])
        if wake in readable:
            os.read(wake, 4096)
            reap()
        if 0 in readable:
            data = os.read(0, 65536)
            if not data:
                return None
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                if (pid := os.fork()) == 0:
                    signal.set_wakeup_fd(-1)
                    os.close(wake), os.close(woken)
                    return dict(request)
                answer({"started": pid})


def reap() -> None:
    """Tell of every child that has ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        answer({"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def answer(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def become(request: dict[str, Any], server: int) -> None:
    """Turn this fork into the process that the request describes."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # it ended before the line above
        os._exit(1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing, out = os.open(os.devnull, os.O_RDONLY), os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(nothing, 0), os.dup2(out, 1), os.dup2(out, 2)
    os.close(nothing), os.close(out)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = ["dflash", *request["argv"]]
    if request["patch"]:
        name, arguments = request["patch"]
        module, function = name.split(":")
        getattr(importlib.import_module(module), function)(**arguments)


def main() -> None:
    preload()
    server = os.getpid()
    answer({"ready": server})
    request = serve()
    if request is not None:
        become(request, server)
        from dflash_core.cli import main as command_line

        command_line()


if __name__ == "__main__":
    main()
