"""The train loop of a cell: step after step, with its metrics, checkpoints, and the way out when asked to stop."""

from __future__ import annotations

import math
import time
from statistics import fmean
from typing import Any

from dflash_core.errors import DFlashError, StageError, TrainingError
from dflash_core.training.assembly import Cell, writing_metrics
from dflash_core.training.checkpoint import Score
from dflash_core.training.distributed import JOIN_PATIENCE
from dflash_core.training.loop import StepTotals, batch_rows, take_batches
from dflash_core.training.retention import passed_over
from dflash_core.training.schedule import StepOutline
from dflash_core.training.stop_request import StopRequest
from dflash_core.training.validation import make_up, validate


def train_steps(cell: Cell, stop: StopRequest) -> int:
    """Train to the end of the plan or until asked to stop; returns the number of the first step not trained."""
    job, trainer, first_step = cell.job, cell.trainer, cell.first_step
    damaged = passed_over(job.run.checkpoints, first_step)
    if first_step or damaged:
        cell.event("resume", first_step, passed_over=damaged)
    next_step, last_saved = first_step, first_step or None
    measured: tuple[int, Score | None] = (first_step, None)  # the newest measurement, and of which step it is
    make_up(cell, stop)
    scores: list[float] = []  # of the steps since the last checkpoint

    def abandon() -> bool:
        """A cell on its own need not finish a long step; several have to agree, which they do at the end of a step."""
        return cell.group.size == 1 and stop.signal_name is not None

    for outline in cell.plan.outlines(cell.group.rank, first_step):
        started, idle = time.monotonic(), cell.monitor.mean_target_idle_s()
        totals = trainer.begin()
        if not take_batches(trainer, outline.num_batches, cell.ready, cell.prefetcher.budget, totals, abandon, cell.supervisor):
            stopping = True  # what the step had added up is dropped; a resume trains it from its first batch
        else:
            row = _end_step(cell, outline.step, totals, stop.signal_name is not None)
            cell.supervisor.check()
            stopping = row.pop("stop")
            waits = {"data_wait_s": cell.monitor.mean_target_idle_s() - idle, "target_wait_s": totals.target_wait_s}
            row |= {**waits, "step_s": time.monotonic() - started, "log_s": cell.log_s}
            with cell.supervisor.busy("metrics"):
                _log_step(cell, outline, totals, row)
            next_step = outline.step + 1
            if not row["skipped"]:
                scores.append(row["expected_acceptance_length"])
            is_last = next_step == cell.plan.num_steps
            if _is_validated(cell, next_step) and (is_last or not stopping):  # else the resume makes up for it
                measured = next_step, validate(cell, next_step, stop if cell.group.size == 1 and not is_last else None)
            if next_step % job.train.checkpoint_every == 0:
                _checkpoint(cell, next_step, scores, measured)
                last_saved = next_step
        if stopping:
            cell.event("signal", next_step, name=stop.signal_name or ANOTHER_CELL)
            break
    if next_step != last_saved:
        _checkpoint(cell, next_step, scores, measured)
    if cell.writer is not None:
        cell.writer.finish()
    cell.monitor.finish()
    return next_step


# What stopped a cell that got no signal itself; the cells stop together.
ANOTHER_CELL = "a signal to another cell"


def _end_step(cell: Cell, step: int, totals: StepTotals, stop: bool) -> dict[str, Any]:
    """Join the cells and apply the step; raises StageError, which names it, for what goes wrong in it."""
    stage = f"optimizer step {step}"
    with cell.supervisor.busy(stage, patience=JOIN_PATIENCE):
        try:
            return cell.trainer.end(step, totals, stop)
        except DFlashError:
            raise
        except (Exception, SystemExit) as error:
            raise StageError(stage, None, error) from error


def _is_validated(cell: Cell, next_step: int) -> bool:
    how = cell.how_to_validate
    return how is not None and how.is_due(cell.job.train, next_step, cell.plan.num_steps)


def _checkpoint(cell: Cell, next_step: int, scores: list[float], measured: tuple[int, Score | None]) -> None:
    """Save the state, with what was measured at this step, or else the mean of the steps' estimates, which begin anew."""
    if cell.writer is not None:
        if not (cell.job.run.path / "manifest.json").exists():  # a checkpoint would make a folder that only looks like a run
            raise TrainingError(f"{cell.job.run.path}: the run was deleted while it was trained")
        if next_step > cell.first_step and not (cell.job.run.metrics / "steps.jsonl").exists():
            raise TrainingError(f"{cell.job.run.metrics}: the metrics were deleted while they were written")
        skipped = cell.trainer.skipped_in_a_row
        counters = {"identity": cell.job.identity, "plan": cell.trained, "skipped_in_a_row": skipped}
        score = measured[1] if measured[0] == next_step else None
        if score is None and scores:
            score = Score(fmean(scores))
        with cell.supervisor.busy("snapshot"):
            cell.writer.save(next_step, cell.trainer.draft, cell.trainer.optimizer, counters, score)
    scores.clear()


def _log_step(cell: Cell, outline: StepOutline, totals: StepTotals, row: dict[str, Any]) -> None:
    """Log a finished step and its batches; raises TrainingError after too many non-finite steps in a row."""
    rows = batch_rows(totals)
    started = time.monotonic()
    with writing_metrics(outline.step):
        for batch_row in rows:
            cell.sink.log("batches", batch_row)
        if cell.group.is_first:
            step = {
                "step": outline.step,
                "epoch": outline.epoch,
                **row,
                "mean_seq_len": row["num_tokens"] / max(1, row["num_sequences"]),
                "max_seq_len": outline.max_seq_len,
                "prefetch_depths": cell.prefetcher.depths(),
                "ready_depth": cell.ready.depth(),
            }
            cell.sink.log("steps", step)
    if row["skipped"]:
        _log_skip(cell, outline.step, rows, row)
    cell.monitor.step_done(outline.step)
    cell.log_s = time.monotonic() - started  # told in the next step's row


def _log_skip(cell: Cell, step: int, rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """Every cell writes down its own batches of a skipped step, and which of them had a loss that is not finite."""
    batches = [batch["seq_no"] for batch in rows]
    not_finite = [batch["seq_no"] for batch in rows if not math.isfinite(batch["loss_sum"])]
    cell.event("skip", step, batches=batches, not_finite=not_finite, grad_norm=row["grad_norm"], loss=row["loss"])
    in_a_row = cell.trainer.skipped_in_a_row
    if in_a_row >= cell.job.train.max_skipped_in_a_row:
        culprits = f", of which {not_finite} have a loss that is not finite" if not_finite else ""
        raise TrainingError(
            f"{in_a_row} steps in a row had a non-finite loss or gradient; batches of step {step}: "
            f"{cell.plan.step_batches(step)}{culprits}"
        )
