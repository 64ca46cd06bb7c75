"""The target loops of a cell: one thread per target device, batches in, tapped states out."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_core.errors import StageError
from dflash_core.model.target import ForwardAbandoned, FrozenTarget
from dflash_core.pipeline import Channel, Closed, Loaded, ReorderBuffer, Stopped, Supervisor
from dflash_core.training.device_clock import start_clock


@dataclass(frozen=True, slots=True)
class Ready:
    """A batch with its features [R, S, T * H], ready to be trained on."""

    loaded: Loaded
    features_RSF: Tensor
    queued_s: float
    target_forward_s: float
    target_busy_s: float


def check_features(features_RSF: Tensor, width: int) -> None:
    """Refuse states that no training can use: wrong width, not finite, or all zero.

    All-zero captured states have been seen in serving engines; they train without any error (docs/field.md 3).
    """
    if features_RSF.shape[-1] != width:
        raise ValueError(f"captured states are {features_RSF.shape[-1]} wide, expected {width}")
    if not bool(torch.isfinite(features_RSF).all()):
        raise ValueError("captured states are not finite")
    if not bool(features_RSF.any()):
        raise ValueError("captured states are all zero")


def run_target(
    target: FrozenTarget, number: int, queue: Channel[Loaded], ready: ReorderBuffer[Ready], supervisor: Supervisor
) -> None:
    """Body of a target thread; ends when its queue is closed and empty. The first batch's states are checked."""
    width = len(target.layer_ids) * target.shape.hidden_size
    checked = False
    while True:
        try:
            loaded = queue.get()
        except Closed:
            return
        started, stop_clock = time.monotonic(), start_clock(target.device)
        try:
            with supervisor.busy(f"target {number}", loaded.planned.seq_no):
                batch = loaded.payload
                features = target.features(batch.tokens_RS, lambda: supervisor.stopping, batch.documents)
                busy_s = stop_clock()
                if not checked:
                    check_features(features, width)
                    checked = True
                if target.device.type == "cuda":
                    torch.cuda.current_stream(target.device).synchronize()  # the drafter reads on another stream
        except ForwardAbandoned:
            raise Stopped from None
        except Exception as error:  # the batch's number is known only here
            raise StageError(f"target {number}", loaded.planned.seq_no, error) from error
        done = time.monotonic()
        ready.put(loaded.planned.position, Ready(loaded, features, started - loaded.dispatched_at, done - started, busy_s()))
