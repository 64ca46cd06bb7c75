"""Measuring the draft on held-out prompts while it is trained, between two steps.

The first cell measures, in the train loop's own thread; the others wait for it before their next step. So a measurement and a
step are each held to their own limit, and neither counts as a stall of the other. How the draft is measured is handed in by
whoever starts the cell (`HowToValidate`): training knows nothing of evaluation.

A measurement draws nothing and changes nothing, so the run's losses and weights are those of a run without it. It is due at a
step by the step's number alone. A stop leaves out, or breaks off, one that is due; then the resume makes up for it before its
first step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from dflash_core.config import TrainConfig
from dflash_core.errors import DFlashError, StageError
from dflash_core.model.draft import DFlashDraft
from dflash_core.model.target import FrozenTarget
from dflash_core.training.checkpoint import MEASURED, Score, read_state, set_score
from dflash_core.training.distributed import JOIN_PATIENCE, CellGroup
from dflash_core.training.job import TrainingJob
from dflash_core.training.retention import checkpoint_folder
from dflash_core.training.stop_request import StoppedWhileBuilding, StopRequest

if TYPE_CHECKING:
    from dflash_core.training.assembly import Cell

log = logging.getLogger(__name__)
KIND = "training"  # of the `evals` rows


@dataclass(frozen=True)
class Validation:
    """One measurement.

    Attributes:
        acceptance_length: +1 included; None where no answer has a round.
        expected: the estimate from the accuracy of each slot.
        by_source: acceptance length by source of the prompts.
        rows: gives the `evals` rows, from their kind and the step.
    """

    acceptance_length: float | None
    expected: float | None
    by_source: dict[str, float | None]
    rows: Callable[[str, int], list[dict[str, Any]]]


class Validator(Protocol):
    """Measures a draft."""

    @property
    def measured_on(self) -> str:
        """Prompts and settings in words; figures are compared only where these are the same."""

    def __call__(self, draft: DFlashDraft, should_stop: Callable[[], bool]) -> Validation | None:
        """`should_stop` is asked now and then; when it says yes the result is None."""


# Called with the job, a loaded target, and what is to be called after each piece of the preparation.
MakeValidator = Callable[[TrainingJob, FrozenTarget, Callable[[], None]], Validator]


@dataclass(frozen=True)
class HowToValidate:
    """When a draft is measured, which all cells know, and how, which only the first one needs."""

    every_steps: int | None
    make: MakeValidator

    def is_due(self, train: TrainConfig, next_step: int, num_steps: int) -> bool:
        """After every so many steps, and with `keep_best` wherever a checkpoint is due; its score is what was measured."""
        if self.every_steps is not None and next_step % self.every_steps == 0:
            return True
        return train.keep_best and (next_step % train.checkpoint_every == 0 or next_step == num_steps)


def prepare_validator(
    how: HowToValidate | None, job: TrainingJob, group: CellGroup, device: str, target: FrozenTarget, stop: StopRequest
) -> Validator | None:
    """Make the first cell's validator, which may decode for minutes; the other cells wait for it piece by piece.

    Raises:
        StoppedWhileBuilding: some cell was asked to stop.
    """
    if how is None:
        return None

    def meet(more: bool) -> bool:
        """Whether the first cell still has something to do."""
        if group.size > 1 and group.any(stop.signal_name is not None, device):
            raise StoppedWhileBuilding
        return group.any(more, device)

    if not group.is_first:
        while meet(False):
            pass
        return None
    started = time.monotonic()
    validator = how.make(job, target, lambda: (meet(True), None)[1])
    meet(False)
    log.info("the draft is measured on %s; prepared in %.1f s", validator.measured_on, time.monotonic() - started)
    return validator


def validate(cell: Cell, next_step: int, stop: StopRequest | None) -> Score | None:
    """Measure the draft and log it; all cells come here together.

    Args:
        stop: breaks a measurement off; None where it is to come to its end.

    Returns:
        On the first cell the score of a checkpoint of this step; None where there is no figure, or it was broken off.

    Raises:
        StageError: the measurement failed; the step is named.
    """
    score = _measure(cell, next_step, stop) if cell.validator is not None else None
    if cell.group.size > 1:
        with cell.supervisor.busy("validation of the first cell", patience=JOIN_PATIENCE):
            cell.group.wait_for_all(str(cell.trainer.device))
    return score


def make_up(cell: Cell, stop: StopRequest) -> None:
    """Before the first step of a resume: measure what was due at its checkpoint and was left out for a stop."""
    step = cell.first_step
    if cell.how_to_validate is None or not step or not cell.how_to_validate.is_due(cell.job.train, step, cell.plan.num_steps):
        return
    folder = checkpoint_folder(cell.job.run.checkpoints, step)
    known = Score.from_state(read_state(folder)) if cell.group.is_first else None
    # The first cell decides: another one might look when the score is there already.
    if not cell.group.any(cell.group.is_first and not (known is not None and known.is_measured), str(cell.trainer.device)):
        return
    score = validate(cell, step, stop if cell.group.size == 1 else None)
    if score is not None:
        try:
            set_score(folder, score)
        except OSError as error:
            raise StageError(f"score of {folder.name}", None, error) from error


def _measure(cell: Cell, next_step: int, stop: StopRequest | None) -> Score | None:
    assert cell.validator is not None
    stage, started = f"validation after {next_step} steps", time.monotonic()

    def should_stop() -> bool:
        return cell.supervisor.stopping or (stop is not None and stop.signal_name is not None)

    with cell.supervisor.busy(stage):
        try:
            found = cell.validator(cell.trainer.draft, should_stop)
        except DFlashError:
            raise
        except (Exception, SystemExit) as error:
            raise StageError(stage, None, error) from error
    cell.supervisor.check()
    if found is None:
        return None
    cell.log_rows("evals", next_step, found.rows(KIND, next_step))
    cell.event(
        "validation",
        next_step,
        validation_s=time.monotonic() - started,
        acceptance_length=found.acceptance_length,
        expected_acceptance_length=found.expected,
        by_source=found.by_source,
    )
    if found.acceptance_length is None:
        return None
    return Score(found.acceptance_length, f"{MEASURED} on {cell.validator.measured_on}")
