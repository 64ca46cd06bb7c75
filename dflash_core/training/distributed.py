"""Cells of one run: how their gradients and decisions are joined.

Each cell adds up the gradients of its batches without dividing. Once per step everything that has to be agreed on goes
through a single all-reduce of one flat fp32 buffer: the gradients and, behind them, the step's sums (loss, weights,
counts, stop requests). Division by the global weight comes after (docs/decisions/0002-one-flat-all-reduce.md).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from dflash_core.errors import CellLostError, TrainingError
from dflash_core.provenance import digest_json

# How much longer than the watchdog's limit a wait for the other cells may last: a cell that hangs is to be named by its own
# watchdog, not by those that wait for it.
JOIN_PATIENCE = 1.5


class CellGroup:
    """This cell among all cells. With one cell nothing is sent."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @classmethod
    def from_environment(cls, device: str, timeout_s: float) -> CellGroup:
        """Join the group that `torchrun` describes (NCCL for a GPU, gloo for a CPU), or stand alone without one.

        Args:
            device: the drafter's, whose tensors are joined.
            timeout_s: how long a cell waits for the others.

        Raises:
            CellLostError: the others did not come.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        on_gpu = device.startswith("cuda")
        if on_gpu:
            torch.cuda.set_device(device)  # else every cell would take memory of the first GPU
        if size > 1:
            try:
                limit = timedelta(seconds=timeout_s)
                store, rank, size = next(rendezvous("env://", timeout=limit))
                # A launcher that starts the cells again keeps its store; addresses of the attempt before are still in it, and
                # a cell would wait for processes that are gone.
                store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
                backend = "nccl" if on_gpu else "gloo"
                distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
            except RuntimeError as error:
                raise CellLostError(f"cell {os.environ.get('RANK')}: the other cells could not be reached") from error
        return cls(int(os.environ.get("RANK", "0")), size)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def reduce_step(self, parameters: list[torch.nn.Parameter], sums: Tensor) -> Tensor:
        """Replace every gradient by the sum over cells; returns the summed `sums` (1-D).

        A cell that had no batch in the step takes part with zeros.
        """
        if self.size == 1:
            return sums
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        flat = torch.cat([*(g.flatten() for g in grads), sums])
        self._all_reduce(flat)
        offset = 0
        for parameter in parameters:
            count = parameter.numel()
            parameter.grad = flat[offset : offset + count].view_as(parameter).clone()
            offset += count
        return flat[offset:]

    def _all_reduce(self, values: Tensor, **how: Any) -> None:
        """Join `values` (1-D) of all cells in place; raises `CellLostError` if another cell is gone."""
        try:
            distributed.all_reduce(values, **how)
            values[-1].item()  # a GPU reports a lost peer only when it is waited for
        except RuntimeError as error:
            raise CellLostError(f"cell {self.rank}: another cell ended; its own error says why") from error

    def check_agreement(self, facts: dict[str, Any], device: str) -> None:
        """Make sure that all cells would do the same: each comes with its own `facts`, under the same keys.

        Every cell plans for itself. Cells on several nodes may see another dataset or other checkpoints; then sequences
        would be trained twice or never, and cells with another number of steps would wait for ever.

        Raises:
            TrainingError: the cells differ in some fact; the keys are named.
        """
        if self.size == 1:
            return
        digests = torch.tensor([int(digest_json(value)[:15], 16) for value in facts.values()], device=device)
        both = torch.cat([digests, -digests])
        self._all_reduce(both, op=distributed.ReduceOp.MAX)
        most, least = both.chunk(2)
        different = [key for key, high, low in zip(facts, most.tolist(), (-least).tolist(), strict=True) if high != low]
        if different:
            raise TrainingError(f"the cells of this run differ in {', '.join(different)}; every node needs the same files")

    def share_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Replace the tensors of all cells by those of the first one: what was computed on unlike devices may differ in rounding.

        Raises:
            CellLostError: another cell is gone.
        """
        if self.size == 1:
            return
        try:
            for tensor in tensors:
                distributed.broadcast(tensor.detach(), src=0)
        except RuntimeError as error:
            raise CellLostError(f"cell {self.rank}: another cell ended; its own error says why") from error

    def wait_for_all(self, device: str) -> None:
        """Go on when every cell has come here."""
        if self.size > 1:
            self._all_reduce(torch.zeros(1, device=device))

    def any(self, answer: bool, device: str) -> bool:
        """Whether some cell says yes; all cells come here together."""
        if self.size == 1:
            return answer
        answers = torch.full((1,), float(answer), device=device)
        self._all_reduce(answers, op=distributed.ReduceOp.MAX)
        return bool(answers.item())

    def close(self) -> None:
        if self.size > 1 and distributed.is_initialized():
            distributed.destroy_process_group()


PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_launcher() -> None:
    """Let the system send SIGTERM to this process when its parent dies: a torchrun that is killed leaves no cell behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
