"""One cell: builds everything, starts the threads, runs the train loop, and ends in order.

    plan -> prefetcher -> target loops -> ready buffer -> train loop -> metrics, checkpoints

Building, running and ending are three places: `_build`, `_train`, and the `with` blocks of `run_cell`.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from dflash_core.data import Dataset
from dflash_core.errors import CellLostError, CheckpointError, ConfigError, DFlashError, StoppedBySignal
from dflash_core.metrics.console import ConsoleSink
from dflash_core.metrics.sinks import FanOut, JsonlSink, MetricsSink, RunLog
from dflash_core.metrics.wandb_sink import WandbSink
from dflash_core.model.anchors import default_gamma, slot_weights
from dflash_core.model.draft import DFlashDraft
from dflash_core.model.target import FrozenTarget
from dflash_core.pipeline import BatchPrefetcher, PrefetchSettings, ReorderBuffer, Stopped, Supervisor
from dflash_core.provenance import digest_json, provenance, write_json
from dflash_core.records import PlannedBatch
from dflash_core.training.checkpoint import CheckpointWriter, newest_checkpoint, restore, take_snapshot
from dflash_core.training.collate import Collator, batch_bytes
from dflash_core.training.devices import CellDevices, cell_devices
from dflash_core.training.distributed import CellGroup
from dflash_core.training.job import TrainingJob
from dflash_core.training.loop import DraftTrainer, StepTotals, batch_rows, take_batches
from dflash_core.training.monitor import Monitor
from dflash_core.training.run_folder import identity_differences, now
from dflash_core.training.schedule import RunPlan, StepOutline
from dflash_core.training.target_loop import Ready, run_target

log = logging.getLogger(__name__)


class StopRequest:
    """Set by SIGTERM and SIGINT; the train loop looks at it after every step."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Handle the two signals while inside; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _frame: object) -> None:
        self.signal_name = signal.Signals(number).name


@dataclass
class Cell:
    """The parts of a running cell, put together by `_build`."""

    job: TrainingJob
    group: CellGroup
    supervisor: Supervisor
    plan: RunPlan
    trainer: DraftTrainer
    prefetcher: BatchPrefetcher
    ready: ReorderBuffer[Ready]
    monitor: Monitor
    writer: CheckpointWriter | None
    sink: RunLog
    first_step: int

    def event(self, kind: str, step: int, **fields: Any) -> None:
        self.sink.log("events", {"kind": kind, "step": step, "cell": self.group.rank, **fields})


def is_complete(job: TrainingJob) -> bool:
    """Whether the run has ended and its newest checkpoint holds all the steps that are configured now."""
    if job.run.read_manifest()["state"] != "completed":
        return False
    found = newest_checkpoint(job.run.checkpoints)
    if found is None or found[1]["counters"]["identity"] != job.identity:
        return False  # what differs is told when the resume is refused
    lengths = Dataset.open(job.dataset).lengths
    plan = RunPlan(lengths, job.edges, job.bucketing, job.train, job.topology.cells)
    return int(found[1]["next_step"]) >= plan.num_steps


def run_cell(job: TrainingJob) -> dict[str, Any]:
    """Train, or resume, this process's cell of a run; returns the run's manifest.

    Raises:
        StoppedBySignal: a signal came; the state was saved.
        TrainingError: anything else; the first failure of any thread.
    """
    torch.set_num_threads(job.topology.threads_per_device)
    local_cell = int(os.environ.get("LOCAL_RANK", "0"))
    devices = cell_devices(job.topology, local_cell)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes % job.topology.cells:  # a multiple is a run over several nodes
        raise ConfigError(f"topology.cells: {job.topology.cells}, but {processes} processes were started")
    group = CellGroup.from_environment("nccl" if devices.is_cuda else "gloo", job.prefetch.stall_timeout_s)
    try:
        with StopRequest().listening() as stop, job.run.owned() if group.is_first else nullcontext():
            return _run(job, group, devices, stop)
    finally:
        group.close()


def _run(job: TrainingJob, group: CellGroup, devices: CellDevices, stop: StopRequest) -> dict[str, Any]:
    attempt = int(job.run.read_manifest().get("attempt", -1)) + 1
    group.wait_for_all()  # every cell has read the number before the first one writes it
    if group.is_first:
        job.run.update_manifest(state="running", attempt=attempt, pid=os.getpid(), started=now(), finished=None, error=None)
    try:
        with Supervisor("cell") as supervisor:
            sink: RunLog | None = None
            try:
                cell = _build(job, group, devices, supervisor, attempt)
                sink = cell.sink
                next_step = _train(cell, stop)
            except Stopped:  # some thread failed; what it raised is what the user must see
                raise supervisor.failure or RuntimeError("stopped without a reason") from None
            finally:
                supervisor.close()  # before the sink: threads may still be logging
                if sink is not None:
                    sink.close()
        if supervisor.failure is not None:
            raise supervisor.failure
    except BaseException as error:
        _record_failure(job, group, error)
        raise
    done = next_step >= cell.plan.num_steps
    folder = newest_checkpoint(job.run.checkpoints)
    if group.is_first:
        measured = job.run.read_manifest().get("evaluation") or {}
        stale = {"acceptance_length": None, "lossless": None, "evaluation": None, "evaluation_digest": None}
        job.run.update_manifest(
            **(stale if measured.get("step") != next_step else {}),  # figures of an earlier checkpoint
            state="completed" if done else "stopped",
            num_steps=next_step,
            checkpoint=str(folder[0].relative_to(job.run.path)) if folder else None,
            finished=now(),
        )
    if not done:
        raise StoppedBySignal(
            f"stopped by {stop.signal_name} after step {next_step} of {cell.plan.num_steps}; run again to resume"
        )
    return job.run.read_manifest()


def _record_failure(job: TrainingJob, group: CellGroup, error: BaseException) -> None:
    """Put the failure into the manifest: any cell its own, and one that only lost the others leaves theirs alone."""
    if isinstance(error, CellLostError) and (not group.is_first or job.run.read_manifest().get("error") is not None):
        return
    text = str(error) if isinstance(error, DFlashError) else f"{type(error).__name__}: {error}"
    try:
        job.run.update_manifest(state="failed", error=text, finished=now())
    except OSError as second:  # such as a full disk; the first failure is what the user must see
        log.error("the manifest could not be written: %s", second)


def _open_sinks(job: TrainingJob, group: CellGroup, attempt: int, num_steps: int) -> RunLog:
    sinks: list[MetricsSink] = [JsonlSink(job.run.metrics)]
    if group.is_first:
        sinks.append(ConsoleSink(num_steps, job.metrics.console_every_s))
        if job.metrics.wandb != "disabled":
            sinks.append(WandbSink(job.metrics.wandb, job.metrics.wandb_project, job.run_id, job.run.wandb, job.shown_config))
    return RunLog(FanOut(sinks), job.run_id, attempt)


def _load_targets(job: TrainingJob, devices: CellDevices) -> dict[str, FrozenTarget]:
    """One frozen target per device; target loops that share a device share it."""
    taps, target = job.spec.target_layer_ids, job.target
    return {
        device: FrozenTarget(job.target_folder, taps, target.dtype, target.attn_implementation, device)
        for device in dict.fromkeys(devices.targets)
    }


def _make_trainer(job: TrainingJob, group: CellGroup, device: str, target: FrozenTarget, num_steps: int) -> DraftTrainer:
    draft = DFlashDraft(job.spec).initialise(job.train.seed).to(device)
    embedding, head = target.embedding_VH.to(device), target.head_VH.to(device)
    return DraftTrainer(draft, embedding, head, job.train, num_steps, len(job.edges), group)


def _make_prefetcher(
    job: TrainingJob, plan: RunPlan, collator: Collator, num_targets: int, batches: Iterator[PlannedBatch], supervisor: Supervisor
) -> BatchPrefetcher:
    feature_bytes = len(job.spec.target_layer_ids) * job.spec.hidden_size * (2 if job.target.dtype == "bfloat16" else 4)

    def size_of(planned: PlannedBatch) -> int:
        lengths = plan.lengths_of(planned)
        return batch_bytes(lengths, planned.packed, job.train.num_anchors, job.spec.block_size, feature_bytes)

    settings = PrefetchSettings(
        num_targets=num_targets,
        num_buckets=len(job.edges),
        num_workers=job.prefetch.num_workers,
        dispatch=job.prefetch.dispatch,
        queue_batches=job.prefetch.queue_batches,
        max_bytes=job.prefetch.max_bytes,
        stall_timeout_s=job.prefetch.stall_timeout_s,
    )
    return BatchPrefetcher(batches, collator, size_of, settings, supervisor)


def _build(job: TrainingJob, group: CellGroup, devices: CellDevices, supervisor: Supervisor, attempt: int) -> Cell:
    dataset = Dataset.open(job.dataset)
    plan = RunPlan(dataset.lengths, job.edges, job.bucketing, job.train, group.size)
    targets = _load_targets(job, devices)
    first_target = targets[devices.targets[0]]
    if job.bucketing.strategy == "packed":
        first_target.check_packing(job.target.path)
    trainer = _make_trainer(job, group, devices.draft, first_target, plan.num_steps)
    first_step = _resume(job, trainer)
    fingerprint = plan.epoch_plan(0).fingerprint()
    planned = {"plan": fingerprint, "num_steps": plan.num_steps, "newest checkpoint": first_step}
    group.check_agreement({**job.identity, **planned}, devices.draft)
    collator = Collator(
        dataset,
        seed=job.train.seed,
        num_anchors=job.train.num_anchors,
        weights_K=slot_weights(job.spec.block_size, job.train.loss_gamma or default_gamma(job.spec.block_size)),
        pad_token_id=first_target.shape.pad_token_id,
        pin=devices.is_cuda,
    )
    batches = plan.batches(group.rank, first_step)
    prefetcher = _make_prefetcher(job, plan, collator, len(devices.targets), batches, supervisor)
    first_position = plan.first_position(group.rank, first_step)
    ready: ReorderBuffer[Ready] = ReorderBuffer("ready buffer", first_position, supervisor, job.prefetch.stall_timeout_s)
    if group.is_first:
        fingerprints = {"plan": fingerprint, "config": digest_json(job.identity)}
        fingerprints |= {key: job.identity[key] for key in ("dataset", "tokenizer", "target_weights")}
        write_json(job.run.provenance, provenance([devices.draft, *devices.targets], fingerprints))
    sink = _open_sinks(job, group, attempt, plan.num_steps)  # last of what can fail: from here on somebody closes it
    monitor = Monitor(prefetcher, ready, sink, group.rank, job.prefetch.stats_every_steps, supervisor)
    writer = CheckpointWriter(job.run.checkpoints, job.train.keep_last, supervisor) if group.is_first else None
    prefetcher.start()
    for number, device in enumerate(devices.targets):
        queue = prefetcher.queues[number]
        supervisor.start(f"target {number}", run_target, targets[device], number, queue, ready, supervisor)
    return Cell(job, group, supervisor, plan, trainer, prefetcher, ready, monitor, writer, sink, first_step)


def _resume(job: TrainingJob, trainer: DraftTrainer) -> int:
    """Load the newest good checkpoint, if any; returns the step to go on with."""
    found = newest_checkpoint(job.run.checkpoints)
    if found is None:
        return 0
    folder, state = found
    saved = state["counters"]["identity"]
    different, listed = identity_differences(saved, job.identity, "in the checkpoint")
    if different:
        raise CheckpointError(f"{folder}: cannot be resumed with another {', '.join(different)} ({listed})")
    restore(folder, trainer.draft, trainer.optimizer)
    trainer.skipped_in_a_row = int(state["counters"]["skipped_in_a_row"])
    log.info("resuming from %s at step %d", folder.name, state["next_step"])
    return int(state["next_step"])


def _checkpoint(cell: Cell, next_step: int) -> None:
    if cell.writer is None:
        return
    counters = {"identity": cell.job.identity, "skipped_in_a_row": cell.trainer.skipped_in_a_row}
    started = time.monotonic()
    cell.writer.submit(take_snapshot(next_step, cell.trainer.draft, cell.trainer.optimizer, counters))
    cell.event("checkpoint", next_step, snapshot_s=time.monotonic() - started)


def _train(cell: Cell, stop: StopRequest) -> int:
    """The train loop; returns the number of the first step not trained."""
    job, trainer, first_step = cell.job, cell.trainer, cell.first_step
    if first_step:
        cell.event("resume", first_step)
    next_step, last_saved = first_step, first_step or None

    def abandon() -> bool:
        """A cell on its own need not finish a long step; several have to agree, which they do at the end of a step."""
        return cell.group.size == 1 and stop.signal_name is not None

    for outline in cell.plan.outlines(cell.group.rank, first_step):
        started, idle = time.monotonic(), cell.monitor.mean_target_idle_s()
        totals = trainer.begin()
        if not take_batches(trainer, outline.num_batches, cell.ready, cell.prefetcher.budget, totals, abandon):
            stopping = True  # what the step had added up is dropped; a resume trains it from its first batch
        else:
            row = trainer.end(outline.step, totals, stop.signal_name is not None)
            cell.supervisor.check()
            stopping = row.pop("stop")
            waits = {"data_wait_s": cell.monitor.mean_target_idle_s() - idle, "target_wait_s": totals.target_wait_s}
            _log_step(cell, outline, totals, {**row, **waits, "step_s": time.monotonic() - started})
            next_step = outline.step + 1
            if next_step % job.train.checkpoint_every == 0:
                _checkpoint(cell, next_step)
                last_saved = next_step
        if stopping:
            cell.event("signal", next_step, name=stop.signal_name)
            break
    if next_step != last_saved:
        _checkpoint(cell, next_step)
    if cell.writer is not None:
        cell.writer.finish()
    cell.monitor.finish()
    return next_step


def _log_step(cell: Cell, outline: StepOutline, totals: StepTotals, row: dict[str, Any]) -> None:
    """Log a finished step and its batches; raises TrainingError after too many non-finite steps in a row."""
    rows = batch_rows(totals)
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
        seq_nos = [batch_row["seq_no"] for batch_row in rows]
        cell.event("skip", outline.step, batches=seq_nos, grad_norm=row["grad_norm"], loss=row["loss"])
        cell.trainer.refuse_endless_skipping(seq_nos)
    cell.monitor.step_done(outline.step)
