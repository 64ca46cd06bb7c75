"""Cross-entropy through the frozen head: gradients made in the forward pass, against pieces that are computed again.

    python benchmarks/head_loss.py [--rows V] [--width D] [--slots N]

Prints time (forward and backward, median of rounds taken in turns) and the memory that a pass takes at its peak beyond
its inputs, for several piece sizes, and the ratio to the other form with its pieces of 2048 slots. That form keeps no
logits either: each piece is a checkpoint, whose backward pass makes the logits again, a third product with the head.
Memory is the growth of the process's peak resident size, each case in a fresh process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dflash_core.model import loss as loss_module
from dflash_core.model.loss import block_loss

SIZES = (128, 512, 2048)
RECOMPUTED_SIZE, ROUNDS = 2048, 3


def _piece(final_ND: Tensor, head_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    logits = functional.linear(final_ND, head_VD).float()
    return functional.cross_entropy(logits, labels_N, reduction="none"), logits.argmax(-1) == labels_N


def recomputed(final_ND: Tensor, head_VD: Tensor, labels_N: Tensor) -> Tensor:
    """The sum of losses by checkpointed pieces; hits are computed, too, and dropped."""
    pieces = [slice(start, start + RECOMPUTED_SIZE) for start in range(0, len(labels_N), RECOMPUTED_SIZE)]
    results = [checkpoint(_piece, final_ND[p], head_VD, labels_N[p], use_reentrant=False) for p in pieces]
    return torch.cat([loss for loss, _ in results]).sum()


def fused(size: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """`block_loss` of blocks of a single slot, in pieces of `size`."""

    def run(final_ND: Tensor, head_VD: Tensor, labels_N: Tensor) -> Tensor:
        loss_module.SLOTS_PER_PIECE["cpu"] = size
        blocks = (1, len(labels_N), 1)
        return block_loss(final_ND.view(*blocks, -1), head_VD, labels_N.view(blocks), torch.ones(blocks)).loss_sum

    return run


def case(size: int | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return recomputed if size is None else fused(size)


def make_inputs(rows: int, width: int, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    final = torch.randn(slots, width, generator=generator).requires_grad_()
    head = torch.randn(rows, width, generator=generator) / width**0.5
    return final, head, torch.randint(0, rows, (slots,), generator=generator)


def seconds(size: int | None, inputs: tuple[Tensor, Tensor, Tensor]) -> float:
    inputs[0].grad = None
    started = time.perf_counter()
    case(size)(*inputs).backward()
    return time.perf_counter() - started


def peak_megabytes(size: int | None, rows: int, width: int, slots: int) -> float:
    """To be called in a process of its own: a peak never falls."""
    torch.set_num_threads(1)
    seconds(size, make_inputs(rows, width, 2))  # what a first call loads
    inputs = make_inputs(rows, width, slots)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds(size, inputs)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=49152, help="rows of the head (default: SmolLM2's)")
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--slots", type=int, default=4096)
    sizes = parser.parse_args()
    shape = (sizes.rows, sizes.width, sizes.slots)
    cases = [None, *SIZES]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        memory = [pool.apply(peak_megabytes, (size, *shape)) for size in cases]
    inputs = make_inputs(*shape)
    grads = []
    for size in cases:
        seconds(size, inputs)
        assert inputs[0].grad is not None
        grads.append(inputs[0].grad.clone())
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0], rtol=1e-4, atol=1e-6)
    times = [[seconds(size, inputs) for size in cases] for _ in range(ROUNDS)]
    print(f"{sizes.slots} slots, head [{sizes.rows}, {sizes.width}], {torch.get_num_threads()} threads, median of {ROUNDS}")
    print(f"{'form':>18} {'s':>8} {'ratio':>7} {'peak MB':>9} {'ratio':>7}")
    for n, size in enumerate(cases):
        name = f"again, {RECOMPUTED_SIZE}" if size is None else f"once, {size}"
        time_ratio = statistics.median(row[n] / row[0] for row in times)
        second = statistics.median(row[n] for row in times)
        print(f"{name:>18} {second:8.2f} {time_ratio:7.2f} {memory[n]:9.0f} {memory[n] / memory[0]:7.2f}")


if __name__ == "__main__":
    main()
