"""Puts a cell together: plan, targets, drafter, prefetcher, threads. `dflash_core.training.cell` runs and ends it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dflash_core.data import Dataset
from dflash_core.errors import CheckpointError, StageError
from dflash_core.metrics.background import BackgroundSink
from dflash_core.metrics.live import console_sinks
from dflash_core.metrics.sinks import FanOut, JsonlSink, MetricsSink, RunLog
from dflash_core.metrics.wandb_sink import WandbSink
from dflash_core.model.anchors import default_gamma, slot_weights
from dflash_core.model.draft import DFlashDraft
from dflash_core.model.initialise import calibrate_context, calibrate_final_norm
from dflash_core.model.loss import SOFT_LOSSES
from dflash_core.model.target import FrozenTarget
from dflash_core.model.warm_start import start_from
from dflash_core.pipeline import BatchPrefetcher, PrefetchSettings, ReorderBuffer, Supervisor
from dflash_core.provenance import digest_json, provenance, write_json
from dflash_core.records import PlannedBatch
from dflash_core.training.checkpoint import newest_checkpoint, restore
from dflash_core.training.checkpoint_writer import CheckpointWriter
from dflash_core.training.collate import Collator, batch_bytes
from dflash_core.training.devices import CellDevices
from dflash_core.training.distributed import CellGroup
from dflash_core.training.feature_scale import measure_feature_scale
from dflash_core.training.job import TrainingJob
from dflash_core.training.loop import DraftTrainer
from dflash_core.training.monitor import Monitor
from dflash_core.training.retention import Retention, checkpoint_folder
from dflash_core.training.run_folder import identity_differences
from dflash_core.training.schedule import RunPlan
from dflash_core.training.self_check import run_self_checks
from dflash_core.training.stop_request import StopRequest
from dflash_core.training.target_loop import Ready, run_target
from dflash_core.training.validation import HowToValidate, Validator, prepare_validator

log = logging.getLogger(__name__)


def load_target(job: TrainingJob, device: str) -> FrozenTarget:
    """The configured target on one device."""
    config, soft = job.target, job.train.loss in SOFT_LOSSES
    taps, attention = job.spec.target_layer_ids, config.attn_implementation
    target = FrozenTarget(job.target_folder, taps, config.dtype, attention, device, config.feature_dtype, last_state=soft)
    if soft:
        target.check_last_state(config.path)
    return target


def make_trainer(job: TrainingJob, group: CellGroup, device: str, target: FrozenTarget, num_steps: int) -> DraftTrainer:
    """A fresh draft with its optimizer on one device; embedding and head are the target's."""
    embedding, head = target.embedding_VH.to(device), target.head_VH.to(device)
    draft = DFlashDraft(job.spec).initialise(job.train.seed)
    if job.train.calibrate_norm:
        calibrate_final_norm(draft, head)
    scale_F = measure_feature_scale(target, Dataset.open(job.dataset)) if job.train.scale_features else None
    if scale_F is not None:
        calibrate_context(draft, scale_F)
        scale_F = scale_F.to(device)
    draft = draft.to(device)
    group.share_from_first([*draft.parameters(), *([] if scale_F is None else [scale_F])])
    return DraftTrainer(draft, embedding, head, job.train, num_steps, len(job.edges), group, scale_F)


@dataclass(frozen=True)
class CellParts:
    """How a cell gets its target and its trainer. Others stand in where the pipeline itself is measured."""

    load_target: Callable[[TrainingJob, str], FrozenTarget] = load_target
    make_trainer: Callable[[TrainingJob, CellGroup, str, FrozenTarget, int], DraftTrainer] = make_trainer
    validation: HowToValidate | None = None


@dataclass
class Cell:
    """The parts of a running cell. `trained` is the plan's fingerprint without the cells, which a resume may change."""

    job: TrainingJob
    group: CellGroup
    supervisor: Supervisor
    plan: RunPlan
    trained: str
    trainer: DraftTrainer
    prefetcher: BatchPrefetcher
    ready: ReorderBuffer[Ready]
    monitor: Monitor
    writer: CheckpointWriter | None
    sink: RunLog
    first_step: int
    how_to_validate: HowToValidate | None = None
    validator: Validator | None = None  # the first cell's
    log_s: float = field(default=0.0, init=False)

    def event(self, kind: str, step: int, **fields: Any) -> None:
        """Write a row of `events`."""
        log_event(self.sink, self.group.rank, kind, step, **fields)

    def log_rows(self, stream: str, step: int, rows: list[dict[str, Any]]) -> None:
        """Write rows of a step, or raise StageError."""
        with writing_metrics(step):
            for row in rows:
                self.sink.log(stream, row)


def log_event(sink: RunLog, cell: int, kind: str, step: int, **fields: Any) -> None:
    """Write a row of `events`, or raise StageError. Threads that start before there is a `Cell` use it, too."""
    with writing_metrics(step):
        sink.log("events", {"kind": kind, "step": step, "cell": cell, **fields})


@contextmanager
def writing_metrics(step: int) -> Iterator[None]:
    """The rows are the truth about a run, which must not go on without them; says that it was they that failed."""
    try:
        yield
    except OSError as error:
        raise StageError(f"metrics of step {step}", None, error) from error


@dataclass(frozen=True)
class Groundwork:
    """What takes long to make and touches nothing but memory: a stop may fall anywhere into it."""

    dataset: Dataset
    plan: RunPlan
    targets: dict[str, FrozenTarget]
    trainer: DraftTrainer
    first_step: int
    fingerprint: str
    trained: str
    how_to_validate: HowToValidate | None
    validator: Validator | None
    checked: dict[str, Any] | None


def prepare_cell(job: TrainingJob, group: CellGroup, devices: CellDevices, parts: CellParts, stop: StopRequest) -> Groundwork:
    """Plan the run, load targets and draft, and the newest checkpoint; agree with the other cells on what is trained.

    Raises:
        CheckpointError: the newest checkpoint is of another run than the configured one.
        TrainingError: the cells of the run would not train the same, or what they train could not be served.
        ConfigError: the self-checks have found a key that is wrong.
        StoppedWhileBuilding: see `prepare_validator`.
    """
    dataset = Dataset.open(job.dataset)
    plan = RunPlan(dataset.lengths, job.edges, job.bucketing, job.train, group.size)
    # One frozen target per device; target loops that share a device share it.
    targets = {device: parts.load_target(job, device) for device in dict.fromkeys(devices.targets)}
    first_target = targets[devices.targets[0]]
    if job.bucketing.strategy == "packed":
        first_target.check_packing(job.target.path)
    trainer = parts.make_trainer(job, group, devices.draft, first_target, plan.num_steps)
    fingerprint, trained = plan.epoch_plan(0).fingerprint(), plan.epoch_plan(0).trained_fingerprint()
    first_step = _resume(job, trainer, trained)
    checked = run_self_checks(job, dataset, targets, trainer)
    planned = {"plan": fingerprint, "num_steps": plan.num_steps, "newest checkpoint": first_step}
    group.check_agreement({**job.identity, **planned}, devices.draft)
    validator = prepare_validator(parts.validation, job, group, devices.draft, first_target, stop)
    return Groundwork(dataset, plan, targets, trainer, first_step, fingerprint, trained, parts.validation, validator, checked)


def build_cell(
    job: TrainingJob, group: CellGroup, devices: CellDevices, supervisor: Supervisor, attempt: int, made: Groundwork
) -> Cell:
    """Put the pipeline around what is there, and start its threads."""
    plan, trainer, first_step = made.plan, made.trainer, made.first_step
    collator = Collator(
        made.dataset,
        seed=job.train.seed,
        num_anchors=job.train.num_anchors,
        weights_K=slot_weights(job.spec.block_size, job.train.loss_gamma or default_gamma(job.spec.block_size)),
        pad_token_id=made.targets[devices.targets[0]].shape.pad_token_id,
        pin=devices.is_cuda,
    )
    batches = plan.batches(group.rank, first_step)
    prefetcher = _make_prefetcher(job, plan, collator, len(devices.targets), batches, supervisor)
    first_position = plan.first_position(group.rank, first_step)
    ready: ReorderBuffer[Ready] = ReorderBuffer("ready buffer", first_position, supervisor, wait_limit_s(job))
    if group.is_first:
        fingerprints = {"plan": made.fingerprint, "config": digest_json(job.identity)}
        fingerprints |= {key: job.identity[key] for key in ("dataset", "tokenizer", "target_weights")}
        write_json(job.run.provenance, provenance([devices.draft, *devices.targets], fingerprints))
        job.run.update_manifest(num_planned_steps=plan.num_steps)
    sink = _open_sinks(job, group, attempt, plan.num_steps)  # last of what can fail: from here on somebody closes it
    if made.checked is not None:
        _log_self_checks(sink, group.rank, first_step, made.checked)
    monitor = Monitor(prefetcher, ready, sink, group.rank, job.prefetch.stats_every_steps, supervisor)
    writer = _make_writer(job, first_step, partial(log_event, sink, group.rank), supervisor) if group.is_first else None
    prefetcher.start()
    for number, device in enumerate(devices.targets):
        queue = prefetcher.queues[number]
        on_event = partial(log_event, sink, group.rank)
        parts_of_it = (made.targets[device], number, queue, ready, supervisor, on_event)
        supervisor.start(f"target {number}", run_target, *parts_of_it, done=queue.is_drained)
    validation = (made.how_to_validate, made.validator)
    return Cell(
        job, group, supervisor, plan, made.trained, trainer, prefetcher, ready, monitor, writer, sink, first_step, *validation
    )


def _log_self_checks(sink: RunLog, cell: int, step: int, found: dict[str, Any]) -> None:
    """Write the event, or close the sink, which nobody else knows yet."""
    try:
        log_event(sink, cell, "self_check", step, **found)
    except StageError:
        with suppress(OSError):
            sink.close()
        raise


def _make_writer(job: TrainingJob, first_step: int, on_event: Callable[..., None], supervisor: Supervisor) -> CheckpointWriter:
    root = job.run.checkpoints
    resumed_from = checkpoint_folder(root, first_step) if first_step else None
    return CheckpointWriter(root, Retention.from_config(job.train), supervisor, on_event, resumed_from)


def wait_limit_s(job: TrainingJob) -> float:
    """Limit of a single wait: twice the watchdog's, which knows more of what is going on and so speaks first."""
    return 2.0 * job.prefetch.stall_timeout_s


def _make_prefetcher(
    job: TrainingJob, plan: RunPlan, collator: Collator, num_targets: int, batches: Iterator[PlannedBatch], supervisor: Supervisor
) -> BatchPrefetcher:
    states = len(job.spec.target_layer_ids) + (job.train.loss in SOFT_LOSSES)  # of each position: the taps, and the last one
    feature_bytes = states * job.spec.hidden_size * job.target.state_bytes

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
        stall_timeout_s=wait_limit_s(job),
    )
    return BatchPrefetcher(batches, collator, size_of, settings, supervisor)


def _open_sinks(job: TrainingJob, group: CellGroup, attempt: int, num_steps: int) -> RunLog:
    sinks: list[MetricsSink] = [JsonlSink(job.run.metrics)]
    if group.is_first:
        sinks += console_sinks(job.run_id, num_steps, job.metrics.console_every_s)
        _add_wandb(job, sinks)
    return RunLog(FanOut(sinks), job.run_id, attempt)


def _add_wandb(job: TrainingJob, sinks: list[MetricsSink]) -> None:
    """W&B in a thread of its own, for a row takes it milliseconds. A run can do without: a failure to start it is a warning."""
    if job.metrics.wandb == "disabled":
        return
    try:
        wandb = WandbSink(job.metrics.wandb, job.metrics.wandb_project, job.run_id, job.run.wandb, job.shown_config)
    except Exception as error:  # noqa: BLE001 - whatever it is, the JSONL files have it all
        log.warning("W&B is off: it could not be started: %s: %s", type(error).__name__, error)
    else:
        sinks.append(BackgroundSink(wandb))


def _resume(job: TrainingJob, trainer: DraftTrainer, trained: str) -> int:
    """Load the newest good checkpoint, or else the weights to begin with, if any; returns the step to go on with."""
    found = newest_checkpoint(job.run.checkpoints)
    if found is None:
        if job.init_from is not None:  # only here: a resume must not need the folder
            start_from(trainer.draft, job.init_from)
        return 0
    folder, state = found
    counters = state["counters"]
    saved, current = {**counters["identity"], "plan": counters.get("plan")}, {**job.identity, "plan": trained}
    different, listed = identity_differences(saved, current, "in the checkpoint")
    if different:
        raise CheckpointError(f"{folder}: cannot be resumed with another {', '.join(different)} ({listed})")
    restore(folder, trainer.draft, trainer.optimizer)
    trainer.skipped_in_a_row = int(counters["skipped_in_a_row"])
    log.info("resuming from %s at step %d", folder.name, state["next_step"])
    return int(state["next_step"])
