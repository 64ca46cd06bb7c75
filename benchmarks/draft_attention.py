"""Attention of the draft: anchors in groups of neighbours, against one masked call over context and all blocks.

    python benchmarks/draft_attention.py

Prints, for several row lengths and group sizes, the time of a forward and backward pass of one attention layer over that
of the dense form, measured in turns in one process. The dense form is one mask over [context | all blocks]: Q x (S + Q)
scores. Both are checked to give the same numbers before they are timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from dflash_core.model import draft as draft_module
from dflash_core.model.draft import DraftAttention, DraftLayer, KeyValue, anchor_groups, rotary_angles, rotate
from dflash_core.model.spec import DraftSpec

SPEC = DraftSpec(
    hidden_size=192, intermediate_size=512, num_layers=1, num_heads=6, num_kv_heads=2, head_dim=32, vocab_size=264,
    rms_norm_eps=1e-6, rope_theta=10_000.0, max_position_embeddings=4096, tie_word_embeddings=True, num_target_layers=6,
    block_size=8, mask_token_id=261, target_layer_ids=(1,),
)  # fmt: skip
ANCHORS, REPEATS = 64, 7
GROUP_SIZES = (4, 8, 16, 32, 64)


def dense(attention: DraftAttention, x: Tensor, context: KeyValue, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same attention with one boolean mask over [context | all blocks]."""
    rows, anchors, slots, _ = x.shape
    flat = (rows, anchors * slots)
    flat_x, flat_cos, flat_sin = x.reshape(*flat, -1), cos.view(*flat, -1), sin.view(*flat, -1)
    query = attention.q_norm(attention.q_proj(flat_x).view(*flat, SPEC.num_heads, SPEC.head_dim)).transpose(1, 2)
    query = rotate(query, flat_cos.unsqueeze(1), flat_sin.unsqueeze(1))
    block = attention.key_value(flat_x, flat_cos, flat_sin)
    key, value = torch.cat([context.key, block.key], dim=2), torch.cat([context.value, block.value], dim=2)
    own = torch.arange(anchors).repeat_interleave(slots)
    seen = torch.cat([~hidden[0].repeat_interleave(slots, 0), own[:, None] == own[None, :]], dim=1)
    mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
    out: Tensor = attention.o_proj(mixed.transpose(1, 2).reshape(rows, anchors, slots, -1))
    return out


def seconds(run: Callable[[], Tensor]) -> float:
    started = time.perf_counter()
    run().sum().backward()
    return time.perf_counter() - started


def main() -> None:
    torch.manual_seed(0)
    attention = DraftLayer(SPEC).self_attn
    print(
        f"{ANCHORS} anchors x {SPEC.block_size} slots, {torch.get_num_threads()} threads, forward + backward, median of {REPEATS}"
    )
    print(f"{'context':>8} {'dense ms':>10}" + "".join(f"{f'by {size}':>9}" for size in GROUP_SIZES) + "   (dense / grouped)")
    for length in (256, 512, 1024, 2048):
        anchors = torch.randint(1, length, (1, ANCHORS)).sort().values
        cos, sin = rotary_angles(anchors.unsqueeze(-1) + torch.arange(SPEC.block_size), SPEC.head_dim, SPEC.rope_theta)
        states = torch.randn(1, length, SPEC.hidden_size)
        x = torch.randn(1, ANCHORS, SPEC.block_size, SPEC.hidden_size)
        angles = rotary_angles(torch.arange(length).unsqueeze(0), SPEC.head_dim, SPEC.rope_theta)
        hidden = torch.arange(length) >= anchors.unsqueeze(-1)

        def grouped(size: int) -> Tensor:
            draft_module.ANCHORS_PER_GROUP["cpu"] = size
            groups = anchor_groups(anchors, SPEC.block_size, length)  # noqa: B023
            out: Tensor = attention(x, attention.key_value(states, *angles), groups, cos, sin)  # noqa: B023
            return out

        def whole() -> Tensor:
            return dense(attention, x, attention.key_value(states, *angles), hidden, cos, sin)  # noqa: B023

        runs = [whole, *(partial(grouped, size) for size in GROUP_SIZES)]
        for run in runs[1:]:
            torch.testing.assert_close(run(), whole(), rtol=1e-4, atol=1e-5)
        times = [[seconds(run) for run in runs] for _ in range(REPEATS)]
        slow, *fast = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"{length:8d} {slow * 1e3:10.1f}" + "".join(f"{slow / t:9.2f}" for t in fast))


if __name__ == "__main__":
    main()
