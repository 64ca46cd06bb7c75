"""Ways to break a run from inside, called in a forked child before it begins (the `patch` of a `ForkServer.start`)."""

from __future__ import annotations

import os
import signal
import sys
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
