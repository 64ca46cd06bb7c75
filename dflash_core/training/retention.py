"""Which checkpoints stay on disk, what they are called, and how the others go.

A checkpoint is a folder `step-000100`. Every other name below the root is hidden, begins with one of two marks, and is
rubbish: a folder that is being written, or one that is being deleted. A kill at any moment leaves at most rubbish, which the
next write sweeps up; a name that looks like a checkpoint is never half.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_core.config import TrainConfig

WRITING, DELETING = ".tmp-", ".old-"
_NAME = re.compile(r"step-([0-9]{6,})")


def checkpoint_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step is, or would be. `step` is the first one that it has not trained."""
    return root / f"step-{step:06d}"


def step_of(folder: Path) -> int:
    """The step in a checkpoint's name."""
    return int(folder.name.removeprefix("step-"))


def by_step(root: Path) -> list[Path]:
    """Everything named like a checkpoint, by step; as text, step-1000000 would come before step-999999."""
    found = [path for path in root.glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted((path for path in found if path == checkpoint_folder(root, step_of(path))), key=step_of)


def passed_over(root: Path, step: int) -> list[str]:
    """Names of what stands there for later steps than the one that a run goes on from: these were found damaged."""
    return [folder.name for folder in by_step(root) if step_of(folder) > step]


def hide(folder: Path) -> Path:
    """Take the name of a checkpoint from `folder`, at once and as a whole; what is returned may be removed piece by piece."""
    return folder.rename(folder.with_name(f"{DELETING}{folder.name}"))


def remove(path: Path) -> None:
    """Remove a folder with all that is in it, or whatever else has its name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def sweep(root: Path) -> None:
    """Remove what a writer that was killed has left."""
    for mark in (WRITING, DELETING):
        for leftover in root.glob(f"{mark}*"):
            remove(leftover)


@dataclass(frozen=True)
class Retention:
    """What is kept: the newest `keep_last`, those of steps divisible by `keep_every`, and with `keep_best` the best one."""

    keep_last: int
    keep_every: int | None = None
    keep_best: bool = False

    @classmethod
    def from_config(cls, config: TrainConfig) -> Retention:
        return cls(config.keep_last, config.keep_every, config.keep_best)

    def surplus(
        self, steps: Sequence[int], is_good: Callable[[int], bool], score: Callable[[int], float | None]
    ) -> tuple[list[int], list[int]]:
        """The steps whose checkpoints are kept, and those whose are to go.

        Args:
            steps: of all checkpoints in question, ascending.
            is_good: whether the checkpoint of a step is whole. It may read the whole checkpoint, so it is asked only of
                those that would be a reason to delete another one.
            score: of the checkpoint of a step, the higher the better; None where there is none. The older of two equals is
                the better one.

        A damaged checkpoint that would be kept counts for nothing, so a good one stays in its stead. It does not go either,
        for it may be that it only could not be read now; it goes with its age, like the others.
        """
        kept: set[int] = set()
        damaged: set[int] = set()

        def counts(step: int) -> bool:
            if step not in kept and step not in damaged:
                (kept if is_good(step) else damaged).add(step)
            return step in kept

        for step in reversed(steps):
            if len(kept) == self.keep_last:
                break
            counts(step)
        if self.keep_best:
            scored = [(-value, step) for step in steps if (value := score(step)) is not None and math.isfinite(value)]
            next((step for _, step in sorted(scored) if counts(step)), None)
        if self.keep_every is not None:
            kept |= {step for step in steps if step % self.keep_every == 0} - damaged
        return sorted(kept), [step for step in steps if step not in kept | damaged]
