"""The drafter's side of a cell: take ready batches in order, add up gradients, step, report.

One optimizer step is: for each of the cell's batches, forward and backward of the *summed* weighted loss; then one
reduction over all cells; then everything is divided by the global sum of weights, measured, clipped and applied.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dflash_core.config import TrainConfig
from dflash_core.errors import StageError
from dflash_core.model.documents import context_windows
from dflash_core.model.draft import DFlashDraft, embed_blocks, group_size
from dflash_core.model.loss import SOFT_LOSSES, TargetStates, block_loss, expected_acceptance_length
from dflash_core.pipeline import ByteBudget, GivenUp, ReorderBuffer, Supervisor
from dflash_core.training.collate import DraftBatch
from dflash_core.training.device_clock import Seconds, start_clock
from dflash_core.training.distributed import CellGroup
from dflash_core.training.schedule import learning_rate
from dflash_core.training.target_loop import Ready

log = logging.getLogger(__name__)
LogRow = Callable[[str, dict[str, Any]], None]


@dataclass
class StepTotals:
    """What one cell adds up in one step. Times in seconds."""

    num_buckets: int
    block_size: int
    batches: list[tuple[Ready, Tensor, Tensor, Seconds]] = field(default_factory=list)
    target_wait_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    correct_K: Tensor | None = None
    count_K: Tensor | None = None

    def vector(self, device: torch.device, stop: bool) -> Tensor:
        """All sums that the cells share, in one fp32 vector; `unpack` gives them names again.

        Counts above 2^24 would lose their last digits in fp32, so tokens are sent in two parts.
        """
        shapes = [ready.loaded.shape for ready, *_ in self.batches]
        zeros = torch.zeros(self.block_size, device=device)
        buckets = [0.0] * self.num_buckets
        for shape in shapes:
            buckets[shape.bucket] += 1.0
        tokens, padded = sum(s.num_tokens for s in shapes), sum(s.num_padded_tokens for s in shapes)
        counts = [
            len(shapes), sum(s.num_sequences for s in shapes), sum(s.num_anchors for s in shapes),
            tokens >> 12, tokens & 4095, padded >> 12, padded & 4095, float(stop), *buckets,
        ]  # fmt: skip
        loss = torch.stack([loss for _, loss, _, _ in self.batches]).sum() if shapes else zeros.sum()
        weight = torch.stack([weight for _, _, weight, _ in self.batches]).sum() if shapes else zeros.sum()
        correct = zeros if self.correct_K is None else self.correct_K
        count = zeros if self.count_K is None else self.count_K
        return torch.cat([loss.view(1), weight.view(1), correct, count, torch.tensor(counts, device=device)])

    def unpack(self, vector: Tensor) -> dict[str, Any]:
        """Names for the reduced vector. Reading it waits for the device: once per step."""
        values, k = vector.tolist(), self.block_size
        correct, count, rest = values[2 : 2 + k], values[2 + k : 2 + 2 * k], values[2 + 2 * k :]
        accuracy = [c / n if n else 0.0 for c, n in zip(correct[1:], count[1:], strict=True)]
        return {
            "loss": values[0] / values[1] if values[1] else math.nan,
            "weight_sum": values[1],
            "num_supervised": int(sum(count)),
            "accuracy_by_position": accuracy,
            "expected_acceptance_length": expected_acceptance_length(accuracy),
            "num_batches": int(rest[0]),
            "num_sequences": int(rest[1]),
            "num_anchors": int(rest[2]),
            "num_tokens": int(rest[3]) * 4096 + int(rest[4]),
            "num_padded_tokens": int(rest[5]) * 4096 + int(rest[6]),
            "stop": rest[7] > 0,
            "bucket_counts": [int(n) for n in rest[8:]],
        }


class DraftTrainer:
    """Owns the draft, its optimizer and the arithmetic of a step.

    Args:
        draft: fp32 master weights on the drafter's device.
        embedding_VD, head_VD: the target's frozen rows, on the same device.
        config: optimisation.
        num_steps: length of the learning-rate schedule.
        num_buckets: for the step's bucket counts.
        group: the cells of the run.
    """

    def __init__(
        self,
        draft: DFlashDraft,
        embedding_VD: Tensor,
        head_VD: Tensor,
        config: TrainConfig,
        num_steps: int,
        num_buckets: int,
        group: CellGroup,
    ) -> None:
        self.draft, self.config, self.num_steps, self.group = draft, config, num_steps, group
        self.device = next(draft.parameters()).device
        compute = torch.bfloat16 if config.compute_dtype == "bfloat16" else torch.float32
        self._embedding_VD, self._head_VD = embedding_VD.to(compute), head_VD.to(compute)
        self._compute, self._num_buckets = compute, num_buckets
        self._tap_width = len(draft.spec.target_layer_ids) * draft.spec.hidden_size
        self.parameters = list(draft.parameters())
        decayed = [p for p in self.parameters if p.ndim > 1]
        others = [p for p in self.parameters if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)
        self.skipped_in_a_row = 0

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._compute == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._compute)

    def begin(self) -> StepTotals:
        """Start a step: no gradients, empty totals."""
        self.optimizer.zero_grad(set_to_none=True)
        return StepTotals(self._num_buckets, self.draft.spec.block_size)

    def add(self, totals: StepTotals, ready: Ready) -> None:
        """Forward and backward of one batch; gradients add up undivided."""
        started, stop_clock = time.monotonic(), start_clock(self.device)
        loaded = ready.loaded.payload
        windows = None
        if loaded.documents is not None:  # from the batch on the CPU, where reading it waits for nothing
            windows = context_windows(loaded.anchors_RA, loaded.documents.starts_RA, group_size(self.device))
        batch = loaded.to(self.device)
        # A copy: features are made in inference mode, which autograd does not accept.
        features = ready.features_RSF[..., : self._tap_width].to(self.device, self._compute, copy=True)
        with self._autocast():
            blocks = embed_blocks(self._embedding_VD, batch.anchor_tokens_RA, self.draft.spec)
            final = self.draft(features, blocks, batch.anchors_RA, batch.documents, windows)
            parts = block_loss(
                final,
                self._head_VD,
                batch.labels_RAK,
                batch.weights_RAK,
                self.config.loss,
                self.config.dpace_alpha,
                self._target_states(ready, batch),
            )
        middle = time.monotonic()
        torch.autograd.backward(parts.loss_sum)
        totals.forward_s += middle - started
        totals.backward_s += time.monotonic() - middle
        totals.batches.append((ready, parts.loss_sum.detach(), parts.weight_sum.detach(), stop_clock()))
        totals.correct_K = parts.correct_K if totals.correct_K is None else totals.correct_K + parts.correct_K
        totals.count_K = parts.count_K if totals.count_K is None else totals.count_K + parts.count_K

    def _target_states(self, ready: Ready, batch: DraftBatch) -> TargetStates | None:
        """For the soft losses: the target's last states, which its loop has put behind the taps."""
        if self.config.loss not in SOFT_LOSSES:
            return None
        return TargetStates(ready.features_RSF[..., self._tap_width :].to(self.device), batch.anchors_RA)

    def end(self, step: int, totals: StepTotals, stop: bool) -> dict[str, Any]:
        """Join the cells and apply the step; returns the fields of the `steps` row that the loop knows.

        Loss and gradient norm are those of the whole step over all cells. A non-finite one leaves weights and optimizer
        untouched; all cells see the same sums and so agree.
        """
        started = time.monotonic()
        # No label in the whole step (possible in a tiny last step) leaves gradients of 0 over a weight of 0.
        sums = self.group.reduce_step(self.parameters, totals.vector(self.device, stop))
        row = totals.unpack(sums)
        joined, stop_clock = time.monotonic(), start_clock(self.device)
        weight = row.pop("weight_sum")
        for parameter in self.parameters:
            if parameter.grad is not None and weight > 0:
                parameter.grad.div_(weight)
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None]))
        lr = learning_rate(step, self.num_steps, self.config)
        finite = math.isfinite(norm) and math.isfinite(row["loss"])
        if finite:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.clip_norm, torch.tensor(norm, device=self.device))
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.skipped_in_a_row = 0
        else:
            self.skipped_in_a_row += 1
        clipped = finite and norm > self.config.clip_norm
        times = {
            "forward_s": totals.forward_s,
            "backward_s": totals.backward_s,
            "reduce_s": joined - started,
            "optimizer_s": time.monotonic() - joined,
            "optimizer_busy_s": stop_clock()(),
        }
        return {**row, "grad_norm": norm, "clipped": clipped, "lr": lr, "skipped": not finite, **times}


def take_batches(
    trainer: DraftTrainer,
    count: int,
    ready: ReorderBuffer[Ready],
    budget: ByteBudget,
    totals: StepTotals,
    abandon: Callable[[], bool],
    supervisor: Supervisor,
) -> bool:
    """Train on the next `count` batches and give their bytes back.

    `abandon` is asked before each batch and while waiting for it; when it says yes the step is left unfinished and the
    result is False.

    Raises:
        StageError: a batch could not be trained; it is named.
    """
    for _ in range(count):
        if abandon():
            return False
        try:
            item, waited = ready.get(abandon)
        except GivenUp:
            return False
        totals.target_wait_s += waited
        seq_no = item.loaded.planned.seq_no
        with supervisor.busy("drafter", seq_no):
            try:
                trainer.add(totals, item)
            except (Exception, SystemExit) as error:  # the batch's number is known only here
                raise StageError("drafter", seq_no, error) from error
        budget.release(item.loaded.num_bytes)
    return True


def batch_rows(totals: StepTotals) -> list[dict[str, Any]]:
    """The `batches` rows of a step. Reads losses from the device, which waits for it."""
    rows = []
    for ready, loss, weight, draft_busy_s in totals.batches:
        planned, shape = ready.loaded.planned, ready.loaded.shape
        rows.append(
            {
                "seq_no": planned.seq_no,
                "step": planned.step,
                "epoch": planned.epoch,
                "cell": planned.cell,
                "target": ready.loaded.target,
                "bucket": planned.bucket,
                "num_sequences": shape.num_sequences,
                "mean_seq_len": shape.mean_seq_len,
                "max_seq_len": shape.max_seq_len,
                "num_tokens": shape.num_tokens,
                "num_padded_tokens": shape.num_padded_tokens,
                "cost": planned.cost,
                "num_anchors": shape.num_anchors,
                "num_supervised": shape.num_supervised,
                "loss_sum": float(loss),
                "weight_sum": float(weight),
                "load_s": ready.loaded.load_s,
                "queued_s": ready.queued_s,
                "target_forward_s": ready.target_forward_s,
                "target_busy_s": ready.target_busy_s,
                "draft_busy_s": draft_busy_s(),
            }
        )
    return rows
