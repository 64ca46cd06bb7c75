"""The target loops of a cell: one thread per target device, batches in, tapped states out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash_core.errors import StageError
from dflash_core.model.documents import Documents
from dflash_core.model.target import ForwardAbandoned, FrozenTarget, TargetShape
from dflash_core.pipeline import Channel, Closed, Loaded, ReorderBuffer, Stopped, Supervisor
from dflash_core.records import PlannedBatch
from dflash_core.training.collate import DraftBatch
from dflash_core.training.device_clock import Seconds, start_clock
from dflash_core.training.split_batch import Split, features_in_parts
from dflash_core.training.target_check import check_first_batch, check_shape, check_values

log = logging.getLogger(__name__)
# Called with the kind of an event, the step it belongs to, and its fields by name.
OnEvent = Callable[..., None]


class Target(Protocol):
    """What a target loop asks of its target: `FrozenTarget`, or what stands in for it where the pipeline is measured."""

    @property
    def device(self) -> torch.device: ...
    @property
    def shape(self) -> TargetShape: ...
    @property
    def layer_ids(self) -> tuple[int, ...]: ...
    def features(self, tokens: Tensor, should_stop: Callable[[], bool] | None, documents: Documents | None, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Ready:
    """A batch with its features [R, S, F], ready to be trained on: the taps, and behind them the last state if it is asked for."""

    loaded: Loaded
    features_RSF: Tensor
    queued_s: float
    target_forward_s: float
    target_busy_s: float


def no_event(kind: str, step: int, **fields: Any) -> None:
    """For target loops that nobody listens to."""


def run_target(
    target: Target,
    number: int,
    queue: Channel[Loaded],
    ready: ReorderBuffer[Ready],
    supervisor: Supervisor,
    on_event: OnEvent = no_event,
) -> None:
    """Body of a target thread; ends when its queue is closed and empty.

    The shape of every batch's states is checked, and what is in them on the first batch that is finite, with an event
    `target_checked`.
    A batch that does not fit into memory goes through in parts, with an event `out_of_memory` for each split.

    Raises:
        StageError: a batch could not be served, or its states are useless; target and batch are named.
    """
    checked = False
    while True:
        try:
            loaded = queue.get()
        except Closed:
            return
        started, planned = time.monotonic(), loaded.planned
        try:
            with supervisor.busy(f"target {number}", planned.seq_no):
                features, busy_s = _serve(target, number, loaded, supervisor, on_event)
                done = time.monotonic()
                # A batch whose states are not finite is for the skip guard, wherever it stands: a resume may begin with it.
                if not checked and bool(torch.isfinite(features).all()):
                    found = _look_into(target, loaded.payload, features)
                    on_event("target_checked", planned.step, **_source(target, number, planned), **found)
                    checked = True
        except ForwardAbandoned:
            raise Stopped from None
        except StageError:  # an event that could not be written
            raise
        except Exception as error:  # the batch's number is known only here
            raise StageError(f"target {number}", planned.seq_no, error) from error
        ready.put(planned.position, Ready(loaded, features, started - loaded.dispatched_at, done - started, busy_s()))


def _serve(target: Target, number: int, loaded: Loaded, supervisor: Supervisor, on_event: OnEvent) -> tuple[Tensor, Seconds]:
    """Features of a batch, ready to be read from another stream, and the device-busy time that they took."""
    batch: DraftBatch = loaded.payload
    planned, stop_clock = loaded.planned, start_clock(target.device)

    def on_split(split: Split) -> None:
        log.warning("target %d: %d tokens of batch %d did not fit on %s; they go through in %d parts, which costs time;"
                    " a lower bucketing.token_budget avoids it", number, split.num_tokens, planned.seq_no, target.device,
                    split.num_parts)  # fmt: skip
        sizes = {"rows": split.num_rows, "sequences": split.num_documents, "tokens": split.num_tokens, "parts": split.num_parts}
        on_event("out_of_memory", planned.step, **_source(target, number, planned), **sizes)

    features = features_in_parts(
        target.features, batch, lambda: supervisor.stopping, target.device, target.shape.pad_token_id, on_split
    )
    busy_s = stop_clock()
    width = target.feature_width if isinstance(target, FrozenTarget) else _tap_width(target)
    features = check_shape(features, batch.tokens_RS, width)
    if target.device.type == "cuda":
        torch.cuda.current_stream(target.device).synchronize()  # the drafter reads on another stream
    return features, busy_s


def _look_into(target: Target, batch: DraftBatch, features_RSF: Tensor) -> dict[str, Any]:
    """The check of the first batch's taps. Something that stands in for a target has no model to be compared with."""
    features_RSF = features_RSF[..., : _tap_width(target)]
    if isinstance(target, FrozenTarget):
        return check_first_batch(target, batch, features_RSF)
    return {"tap_rms": check_values(features_RSF, target.layer_ids)}


def _tap_width(target: Target) -> int:
    return len(target.layer_ids) * target.shape.hidden_size


def _source(target: Target, number: int, planned: PlannedBatch) -> dict[str, Any]:
    return {"target": number, "device": str(target.device), "seq_no": planned.seq_no}
