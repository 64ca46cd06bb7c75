"""One cell: builds everything, starts the threads, runs the train loop, and ends in order.

    plan -> prefetcher -> target loops -> ready buffer -> train loop -> metrics, checkpoints

Building, running and ending are three files: `assembly`, `steps`, and this one.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from dflash_core.data import Dataset
from dflash_core.errors import (
    EXIT_TRAINING_FAILED,
    CellLostError,
    ConfigError,
    DataError,
    DFlashError,
    StageError,
    StoppedBySignal,
)
from dflash_core.pipeline import Stopped, Supervisor, watchdog
from dflash_core.pipeline.threads import start_thread
from dflash_core.redaction import without_secrets
from dflash_core.training.assembly import Cell, CellParts, build_cell, prepare_cell
from dflash_core.training.checkpoint import MEASURED, newest_checkpoint
from dflash_core.training.devices import CellDevices, cell_devices
from dflash_core.training.distributed import CellGroup
from dflash_core.training.job import TrainingJob
from dflash_core.training.retention import checkpoint_folder
from dflash_core.training.run_folder import identity_differences, now
from dflash_core.training.schedule import RunPlan
from dflash_core.training.steps import ANOTHER_CELL, train_steps
from dflash_core.training.stop_request import StoppedWhileBuilding, StopRequest

log = logging.getLogger(__name__)
JOIN_TIMEOUT_S = 3.0  # a stop is to be over within 5 s
WORTH_COMPACTING_BYTES = 4 * 1024**2  # smaller ones are read as fast as they are


def is_complete(job: TrainingJob) -> bool:
    """Whether the run has ended and its newest checkpoint holds all the steps that are configured now."""
    if job.run.read_manifest()["state"] != "completed":
        return False
    found = newest_checkpoint(job.run.checkpoints)
    if found is None or identity_differences(found[1]["counters"]["identity"], job.identity, "there")[0]:
        return False  # what differs is told when the resume is refused
    lengths = Dataset.open(job.dataset).lengths
    plan = RunPlan(lengths, job.edges, job.bucketing, job.train, job.topology.cells)
    return int(found[1]["next_step"]) >= plan.num_steps


def run_cell(job: TrainingJob, parts: CellParts | None = None) -> dict[str, Any]:
    """Train, or resume, this process's cell of a run; returns the run's manifest.

    Args:
        job: what to train, and where.
        parts: how target and trainer are made, where others are to stand in for them.

    Raises:
        StoppedBySignal: a signal came; the state was saved.
        TrainingError: anything else; the first failure of any thread.
    """
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)  # a signal such as SIGBUS ends the process without a word otherwise
    torch.set_num_threads(job.topology.threads_per_device)
    local_cell = int(os.environ.get("LOCAL_RANK", "0"))
    devices = cell_devices(job.topology, local_cell)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes % job.topology.cells:  # a multiple is a run over several nodes
        raise ConfigError(f"topology.cells: {job.topology.cells}, but {processes} processes were started")
    if processes > job.bucketing.batches_per_step:
        few = f"{job.bucketing.batches_per_step} batches for the {processes} cells of all nodes"
        raise ConfigError(f"bucketing.batches_per_step: {few}; some cells would never train")
    # Longer than the watchdog's limit: a cell that hangs is to be named by its own watchdog, not by those that wait for it.
    group = CellGroup.from_environment(devices.draft, 2 * job.prefetch.stall_timeout_s)
    try:
        with StopRequest().listening() as stop, job.run.owned() if group.is_first else nullcontext():
            return _run(job, group, devices, stop, parts or CellParts())
    finally:
        group.close()


def _run(job: TrainingJob, group: CellGroup, devices: CellDevices, stop: StopRequest, parts: CellParts) -> dict[str, Any]:
    attempt = _begin(job, group, devices)
    try:
        with Supervisor("cell", JOIN_TIMEOUT_S) as supervisor:
            try:
                # Alone, a cell need not build to the end once it is asked to stop; several agree at the end of a step.
                with stop.raising() if group.size == 1 else nullcontext():
                    blueprint = prepare_cell(job, group, devices, parts, stop)
                cell = build_cell(job, group, devices, supervisor, attempt, blueprint)
                with watchdog(supervisor, job.prefetch.stall_timeout_s, partial(_give_up, job, group)):
                    try:
                        next_step = train_steps(cell, stop)
                    except BaseException as error:
                        if isinstance(error, DFlashError):
                            supervisor.keep_failure(error)  # from here on the watchdog counts
                        _close(cell, failed=True)
                        raise
                    supervisor.forgive_stragglers = stop.signal_name is not None
                    _close(cell, failed=False)
            except Stopped:  # some thread failed; what it raised is what the user must see
                raise supervisor.failure or RuntimeError("stopped without a reason") from None
        if supervisor.failure is not None:
            raise supervisor.failure
    except StoppedWhileBuilding:
        job.run.update_manifest(state="stopped", finished=now())
        when = f"stopped by {stop.signal_name or ANOTHER_CELL} before the first step of this attempt"
        raise StoppedBySignal(f"{when}; run again to resume") from None
    except BaseException as error:
        _record_failure(job, group, error)
        raise
    return _end(job, cell, stop, next_step)


def _begin(job: TrainingJob, group: CellGroup, devices: CellDevices) -> int:
    """Say in the manifest that the run is on; returns the number of this attempt.

    Raises:
        StoppedBySignal: torchrun starts a run again that had only been stopped; to it, any exit code but 0 is a failure.
    """
    manifest = job.run.read_manifest()
    if manifest["state"] == "stopped" and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        raise StoppedBySignal("the run was stopped by a signal; run again to resume")
    attempt = int(manifest.get("attempt", -1)) + 1
    group.wait_for_all(devices.draft)  # every cell has read the number before the first one writes it
    if group.is_first:
        job.run.update_manifest(state="running", attempt=attempt, pid=os.getpid(), started=now(), finished=None, error=None)
    group.wait_for_all(devices.draft)  # and what a cell writes from here on comes after it
    return attempt


def _end(job: TrainingJob, cell: Cell, stop: StopRequest, next_step: int) -> dict[str, Any]:
    """Say in the manifest how the run ended; raises StoppedBySignal if steps are left."""
    done = next_step >= cell.plan.num_steps
    if cell.group.is_first:
        assert cell.writer is not None and cell.writer.last_written is not None
        measured = job.run.read_manifest().get("evaluation") or {}
        stale = {"acceptance_length": None, "lossless": None, "evaluation": None, "evaluation_digest": None}
        job.run.update_manifest(
            **(stale if measured.get("step") != next_step else {}),  # figures of an earlier checkpoint
            state="completed" if done else "stopped",
            num_steps=next_step,
            checkpoint=str(cell.writer.last_written.relative_to(job.run.path)),
            best=_best(cell),
            finished=now(),
        )
        if done:
            _compact_metrics(job)
    if not done:
        raise StoppedBySignal(
            f"stopped by {stop.signal_name or ANOTHER_CELL} after step {next_step} of {cell.plan.num_steps}; run again to resume"
        )
    return job.run.read_manifest()


def _compact_metrics(job: TrainingJob) -> None:
    """So that whoever analyses a long run reads Parquet from the first time on; a second for each hundred megabytes.

    Not after a stop, which must be over soon and is mostly resumed. The manifest says already how the run ended, and its JSONL
    stays: a kill in here loses nothing, and rows that another cell still writes make the Parquet stale, not wrong.
    """
    if sum(path.stat().st_size for path in job.run.metrics.glob("*.jsonl")) >= WORTH_COMPACTING_BYTES:
        from dflash_core.analysis.reader import compact_streams  # slow to import

        compact_streams(job.run.path)


def _best(cell: Cell) -> dict[str, Any] | None:
    """The best of the checkpoints that were measured, for the manifest; None where none was."""
    found = cell.writer.best() if cell.writer is not None else None
    if found is None:
        return None
    step, score = found
    folder = checkpoint_folder(cell.job.run.checkpoints, step)
    name = str(folder.relative_to(cell.job.run.path))
    return {"checkpoint": name, "step": step, MEASURED: score.value, "score_kind": score.kind}


def _close(cell: Cell, failed: bool) -> None:
    """End the threads, and then the metrics, which threads may still be logging to.

    After a failure that failure is what the user must see, not that a full disk cannot be flushed either.
    """
    cell.supervisor.close()
    try:
        cell.sink.close()
    except OSError as error:
        if not failed:
            raise StageError("metrics", None, error) from error
        log.error("the metrics could not be closed: %s", error)


def _give_up(job: TrainingJob, group: CellGroup, error: DFlashError) -> None:
    """End this process at once: some thread hears nothing any more, and the other cells must not wait for it."""
    start_thread("last words", _record_failure, job, group, error).join(2.0)  # a dead disk must not hold this up
    sys.stderr.write(f"error: {without_secrets(' '.join(str(error).split()))}\n")
    sys.stderr.flush()
    os._exit(EXIT_TRAINING_FAILED)


def _record_failure(job: TrainingJob, group: CellGroup, error: BaseException) -> None:
    """Put the failure into the manifest: any cell its own, and one that only lost the others leaves theirs alone."""
    if not (job.run.path / "manifest.json").exists():
        return  # somebody has deleted the run; what is written now would look like one
    if isinstance(error, StoppedBySignal):
        return
    text = str(error) if isinstance(error, DFlashError) else f"{type(error).__name__}: {error}"
    try:
        if isinstance(error, CellLostError) and (not group.is_first or job.run.read_manifest().get("error") is not None):
            return
        job.run.update_manifest(state="failed", error=text, finished=now())
    except (OSError, DataError) as second:  # such as a full disk; the first failure is what the user must see
        log.error("the manifest could not be written: %s", second)
