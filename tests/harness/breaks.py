"""Ways to break a run from inside, called in a forked child before it begins (the `patch` of a `ForkServer.start`)."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree"}


def _changes_a_file(event: str, arguments: tuple[Any, ...]) -> bool:
    if event == "open":
        flags = arguments[2]
        return bool(isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    return event in CHANGES


def die_at_file_change(number: int, below: str) -> None:
    """SIGKILL right before the process changes anything below a folder for the `number`-th time, from 1 on.

    Python tells of every file it opens, renames or removes before it does so, whoever asked for it.
    """
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if _changes_a_file(event, arguments) and str(arguments[0]).startswith(below):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def signal_at_step(step: int, number: int) -> None:
    """A signal to the own process right before the gradients of `step` are joined."""
    from dflash_core.training.loop import DraftTrainer

    real = DraftTrainer.end

    def end(self: DraftTrainer, this_step: int, *rest: Any) -> Any:
        if this_step == step:
            os.kill(os.getpid(), number)
        return real(self, this_step, *rest)

    DraftTrainer.end = end  # type: ignore[method-assign]


def signal_while_building(number: int) -> None:
    """A signal to the own process while the cell is built, before any thread is started."""
    from dflash_core.training import assembly

    real = assembly.RunPlan

    def plan(*arguments: Any) -> Any:
        os.kill(os.getpid(), number)
        return real(*arguments)

    assembly.RunPlan = plan  # type: ignore[assignment, misc]


def signal_before_the_run(number: int) -> None:
    """A signal to the own process while it works out what it is to train."""
    from dflash_core.training import cell

    real = cell.is_complete

    def asked(job: Any) -> bool:
        os.kill(os.getpid(), number)
        return real(job)

    cell.is_complete = asked


def signal_at_step_and_while_saving(step: int, number: int, again: int, saving: str) -> None:
    """A signal at a step, and another one at every change of a file in whose path `saving` occurs."""
    signal_at_step(step, number)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if _changes_a_file(event, arguments) and saving in str(arguments[0]):
            os.kill(os.getpid(), again)

    sys.addaudithook(hook)


def misbehave(kind: str) -> Any:
    """Raise, block, die or return garbage; says when, on the clock that all processes share."""
    sys.stderr.write(f"broken at {time.monotonic()}\n")
    sys.stderr.flush()
    if kind == "raises":
        raise RuntimeError("boom")
    if kind == "full disk":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if kind == "blocks":
        time.sleep(1000.0)
    if kind == "dies":
        raise SystemExit(7)
    return {"nothing": None, "garbage": "garbage", "blocks": None}[kind]


def _after(number: int, real: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """`real`, which misbehaves from the `number`-th call on."""
    calls = count(1)  # its steps are atomic, and stages call from several threads

    def wrapped(*arguments: Any, **named: Any) -> Any:
        return misbehave(kind) if next(calls) >= number else real(*arguments, **named)

    return wrapped


def break_stage(stage: str, kind: str, number: int) -> None:
    """Let the `number`-th call of a stage, and all that come after it, misbehave."""
    import torch

    from dflash_core.model.target import FrozenTarget
    from dflash_core.pipeline import BatchPrefetcher
    from dflash_core.training import loop
    from dflash_core.training.collate import Collator
    from dflash_core.training.schedule import RunPlan

    if stage == "feed":
        real = RunPlan.batches

        def batches(*arguments: Any) -> Any:
            for position, planned in enumerate(real(*arguments)):
                yield planned if position + 1 < number else misbehave(kind)

        RunPlan.batches = batches  # type: ignore[method-assign]
        return
    owner, name = {
        "loader": (Collator, "__call__"),
        "target": (FrozenTarget, "features"),
        "drafter": (loop, "block_loss"),
        "optimizer": (torch.optim.AdamW, "step"),
        "monitor": (BatchPrefetcher, "get_batch_stats"),
    }[stage]
    setattr(owner, name, _after(number, getattr(owner, name), kind))


def break_file_change(kind: str, containing: str, events: Sequence[str] = ()) -> None:
    """Misbehave at every change of a file in whose path `containing` occurs; only at some kinds of change if named."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if _changes_a_file(event, arguments) and containing in str(arguments[0]) and (not events or event in events):
            misbehave(kind)

    sys.addaudithook(hook)


def break_fsync(thread: str, number: int) -> None:
    """The disk turns out to be full when a thread, told by a part of its name, is to bring data there."""
    real, late = os.fsync, _after(number, os.fsync, "full disk")

    def fsync(file: Any) -> None:
        (late if thread in threading.current_thread().name else real)(file)

    os.fsync = fsync


def limit_file_size(num_bytes: int) -> None:
    """Let the system refuse to make any file larger than this (EFBIG); the signal that comes with it is ignored."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
    sys.stderr.write(f"broken at {time.monotonic() + 60.0}\n")  # the moment is the system's; only the outcome is looked at
    sys.stderr.flush()


def at_step(step: int, action: str, path: str) -> None:
    """Do something to a file or folder before a step: `delete`, `truncate` or `delete folder`."""
    from dflash_core.training.loop import DraftTrainer

    real = DraftTrainer.end

    def end(self: DraftTrainer, this_step: int, *rest: Any) -> Any:
        if this_step == step:
            sys.stderr.write(f"broken at {time.monotonic()}\n")
            sys.stderr.flush()
            {"delete": os.unlink, "truncate": lambda path: os.truncate(path, 0), "delete folder": shutil.rmtree}[action](path)
        return real(self, this_step, *rest)

    DraftTrainer.end = end  # type: ignore[method-assign]


def slow_target_load(seconds: float) -> None:
    """Loading the target takes as long as a large one does."""
    from dflash_core.training import assembly

    real = assembly.FrozenTarget

    def load(*arguments: Any, **named: Any) -> Any:
        sys.stderr.write("loading\n")
        sys.stderr.flush()
        time.sleep(seconds)
        return real(*arguments, **named)

    assembly.FrozenTarget = load  # type: ignore[assignment, misc]


def poison_batch(seq_no: int) -> None:
    """The loss of one batch is not a number."""
    from dflash_core.training.loop import DraftTrainer

    real = DraftTrainer.add

    def add(self: DraftTrainer, totals: Any, ready: Any) -> None:
        real(self, totals, ready)
        if ready.loaded.planned.seq_no == seq_no:
            parts = totals.batches[-1]
            totals.batches[-1] = (parts[0], parts[1] * float("nan"), *parts[2:])

    DraftTrainer.add = add  # type: ignore[method-assign]
