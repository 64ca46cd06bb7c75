"""Attention of the draft: anchors in groups of neighbours, against what else could be done on a CPU.

    python benchmarks/draft_attention.py [--case NAME] [--repeats N]

Prints, for several shapes and group sizes, processor time of attention alone, forward and backward, and the most memory it
allocated at once. All forms are checked to give the same values and gradients before they are timed, in turns, in one
process. They are

- `dense`: one call over [context | all blocks] with one mask: Q x (S + Q) scores;
- `grouped`: the product's (dflash_core/model/attention.py);
- `merged`: by group, context and own block apart in plain torch, joined by their largest score and their sums of exponentials
  (merging by log-sum-exp): Q x (S / 2 + K) scores, all kept for the backward pass;
- `merged kernels`: the same with torch's fused CPU kernels, which give the log-sum-exp away, and a backward pass of our own
  that hands them the merged one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from dflash_core.model.attention import ANCHORS_PER_GROUP, AnchorGroup, KeyValue, anchor_groups, grouped_attention


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    anchors: int
    slots: int
    context: int


CASES = {
    "tiny-256": Shape(6, 2, 32, 64, 8, 256),
    "tiny-1024": Shape(6, 2, 32, 64, 8, 1024),
    "smollm2-512": Shape(9, 3, 64, 64, 16, 512),
    "smollm2-2048": Shape(9, 3, 64, 128, 16, 2048),
}
GROUP_SIZES = (4, 8, 16, 32)
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def apart(x: Tensor, slots: int) -> Tensor:
    """Blocks one by one: [R, H, Q, E] to [R * A, H, K, E]."""
    return x.unflatten(2, (-1, slots)).transpose(1, 2).flatten(0, 1)


def together(x: Tensor, rows: int) -> Tensor:
    """The way back, from [R * A, H, K, ...] to [R, H, Q, ...]."""
    return x.unflatten(0, (rows, -1)).transpose(1, 2).flatten(2, 3)


def dense(query: Tensor, context: KeyValue, block: KeyValue, groups: list[AnchorGroup]) -> Tensor:
    """`groups` holds one group of all anchors."""
    key, value = (torch.cat(pair, dim=2) for pair in zip(context, block, strict=True))
    padded = functional.pad(groups[0].seen[..., : groups[0].end], (0, context.key.shape[2] - groups[0].end))
    seen = torch.cat([padded, groups[0].seen[..., groups[0].end :]], dim=-1)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)


def merged(query: Tensor, context: KeyValue, block: KeyValue, groups: list[AnchorGroup], slots: int) -> Tensor:
    share = query.shape[1] // block.key.shape[1]
    query = query * query.shape[3] ** -0.5
    mixed = []
    for group in groups:
        own, reach = slice(group.first * slots, group.last * slots), slice(group.begin, group.end)
        q, rows = query[:, :, own], len(query)
        key, value, own_key, own_value = (
            t[:, :, part].repeat_interleave(share, dim=1)
            for t, part in zip((*context, *block), (reach, reach, own, own), strict=True)
        )
        far = (q @ key.mT).masked_fill(~group.seen[..., : group.end - group.begin], -torch.inf)
        near = together(apart(q, slots) @ apart(own_key, slots).mT, rows)
        most = torch.maximum(far.amax(-1, keepdim=True), near.amax(-1, keepdim=True)).detach()
        far, near = (far - most).exp(), (near - most).exp()
        out = far @ value + together(apart(near, slots) @ apart(own_value, slots), rows)
        mixed.append(out / (far.sum(-1, keepdim=True) + near.sum(-1, keepdim=True)))
    return torch.cat(mixed, dim=2)


class MergedKernels(torch.autograd.Function):
    """Fused kernels by group; the backward pass is theirs too, given the merged output and log-sum-exp."""

    @staticmethod
    def pieces(
        query: Tensor, tensors: tuple[Tensor, ...], group: AnchorGroup, slots: int
    ) -> tuple[slice, slice, tuple[Tensor, ...], tuple[Tensor, ...]]:
        own, reach = slice(group.first * slots, group.last * slots), slice(group.begin, group.end)
        share = query.shape[1] // tensors[0].shape[1]
        far = (query[:, :, own], *(t[:, :, reach].repeat_interleave(share, dim=1) for t in tensors[:2]))
        near = tuple(
            apart(t, slots) for t in (query[:, :, own], *(t[:, :, own].repeat_interleave(share, 1) for t in tensors[2:]))
        )
        return own, reach, far, near

    @staticmethod
    def forward(ctx: Any, query: Tensor, *rest: Any) -> Tensor:
        *tensors, groups, masks, slots = rest
        outs, sums = [], []
        for group, mask in zip(groups, masks, strict=True):
            _, _, far, near = MergedKernels.pieces(query, tuple(tensors), group, slots)
            out, lse = FLASH(*far, 0.0, False, attn_mask=mask)
            own_out, own_lse = (together(t, len(query)) for t in FLASH(*near, 0.0, False))
            total = torch.logaddexp(lse, own_lse)
            outs.append(out * (lse - total).exp().unsqueeze(-1) + own_out * (own_lse - total).exp().unsqueeze(-1))
            sums.append(total)
        result = torch.cat(outs, dim=2)
        ctx.save_for_backward(query, *tensors, result, torch.cat(sums, dim=2))
        ctx.rest = groups, masks, slots
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, *tensors, out, lse = ctx.saved_tensors
        groups, masks, slots = ctx.rest
        rows, kv_heads = len(query), tensors[0].shape[1]
        grads = [torch.zeros_like(t) for t in (query, *tensors)]

        def add(number: int, place: slice, values: Tensor) -> None:
            grads[number][:, :, place] += values.unflatten(1, (grads[number].shape[1], -1)).sum(2)

        for group, mask in zip(groups, masks, strict=True):
            own, reach, far, near = MergedKernels.pieces(query, tuple(tensors), group, slots)
            parts = FLASH_BACKWARD(grad[:, :, own], *far, out[:, :, own], lse[:, :, own], 0.0, False, attn_mask=mask)
            for number, place, values in zip((0, 1, 2), (own, reach, reach), parts, strict=True):
                add(number, place, values)
            block_lse = apart(lse[:, :, own].unsqueeze(-1), slots).squeeze(-1)
            parts = FLASH_BACKWARD(apart(grad[:, :, own], slots), *near, apart(out[:, :, own], slots), block_lse, 0.0, False)
            for number, values in zip((0, 3, 4), parts, strict=True):
                add(number, own, together(values, rows))
        assert kv_heads == grads[1].shape[1]
        return (*grads, None, None, None)


def merged_kernels(query: Tensor, context: KeyValue, block: KeyValue, groups: list[AnchorGroup], slots: int) -> Tensor:
    masks = []
    for group in groups:
        seen = group.seen[..., : group.end - group.begin]
        masks.append(torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf))
    out: Tensor = MergedKernels.apply(query, *context, *block, groups, masks, slots)
    return out


def gradients(run: Callable[[], Tensor], leaves: list[Tensor], weight: Tensor) -> list[Tensor]:
    out = run()
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


def peak_mib(run: Callable[[], object]) -> float:
    """Most bytes that were allocated at once while `run` ran, over what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    now = most = 0
    for event in seen.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most / 2**20


def forms(shape: Shape, leaves: list[Tensor], anchors: Tensor) -> dict[str, Callable[[], Tensor]]:
    query, context, block = leaves[0], KeyValue(*leaves[1:3]), KeyValue(*leaves[3:])
    ANCHORS_PER_GROUP["cpu"] = shape.anchors
    runs: dict[str, Callable[[], Tensor]] = {
        "dense": partial(dense, query, context, block, anchor_groups(anchors, shape.slots, shape.context))
    }
    for size in GROUP_SIZES:
        ANCHORS_PER_GROUP["cpu"] = size
        groups = anchor_groups(anchors, shape.slots, shape.context)
        for name, form in (("grouped", grouped_attention), ("merged", merged), ("merged kernels", merged_kernels)):
            runs[f"{name} by {size}"] = partial(form, query, context, block, groups, shape.slots)
    return runs


def measure(name: str, shape: Shape, repeats: int) -> None:
    generator = torch.Generator().manual_seed(0)
    anchors = torch.randint(1, shape.context, (1, shape.anchors), generator=generator).sort().values
    queries = shape.anchors * shape.slots

    def leaf(heads: int, length: int) -> Tensor:
        return torch.randn(1, heads, length, shape.head_dim, generator=generator).requires_grad_()

    context, block = [leaf(shape.kv_heads, shape.context) for _ in "kv"], [leaf(shape.kv_heads, queries) for _ in "kv"]
    leaves = [leaf(shape.heads, queries), *context, *block]
    weight = torch.randn(leaves[0].shape, generator=generator)
    runs = forms(shape, leaves, anchors)
    expected = gradients(runs["grouped by 8"], leaves, weight)
    for run in runs.values():
        for found, wanted in zip(gradients(run, leaves, weight), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    times: dict[str, list[float]] = {form: [] for form in runs}
    for _ in range(repeats):
        for form, run in runs.items():
            started = time.process_time()
            gradients(run, leaves, weight)
            times[form].append(time.process_time() - started)
    base = statistics.median(times["grouped by 8"])
    print(f"{name}: {shape}, {torch.get_num_threads()} threads, median of {repeats}")
    for form, run in runs.items():
        middle = statistics.median(times[form])
        most = peak_mib(lambda: gradients(run, leaves, weight))  # noqa: B023
        print(f"  {form:20s} {middle * 1e3:8.1f} ms  {middle / base:5.2f} x grouped by 8  {most:7.1f} MiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    for name, shape in CASES.items():
        if options.case in (None, name):
            measure(name, shape, options.repeats)


if __name__ == "__main__":
    main()
