"""What acceptance is worth in time, measured here: acceptance is not speed.

A draft that keeps tau tokens per round divides the target's forward passes by tau. What that saves depends on what a forward
pass over a block costs beside one over a single token, and on the draft itself. On a GPU that serves few requests both passes
read the same weights and cost nearly the same; on a CPU, and with many rows at once, a pass over B tokens costs up to B times as
much. So a ratio measured on a CPU says little about a GPU, and one of a single row little about a batch.

Plain and drafted decoding run in turns on the same few prompts with the same caches, and medians are compared. Times are those
of the rounds alone: without the prompts' forward passes, per token behind each prompt's first.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from dflash_core.evaluation.decode import Tokens, greedy_decode_many, speculative_decode_many
from dflash_core.evaluation.phases import PhaseClock
from dflash_core.evaluation.rows import why_not_together
from dflash_core.model.draft import DFlashDraft
from dflash_core.model.target import FrozenTarget

NUM_TOKENS, NUM_TURNS = 48, 3
CPU_NOTE = "measured on a CPU, where a pass over a block costs several times one over a token; says little about a GPU"
GPU_NOTE = "measured on this GPU by this program, without a serving engine's kernels and graphs"


def measure_speed(
    target: FrozenTarget, draft: DFlashDraft, prompts: Sequence[Tokens], max_new_tokens: int, batch_prompts: int, num_single: int
) -> dict[str, Any]:
    """Seconds per token, plain and drafted, one prompt at a time and `batch_prompts` at once.

    Args:
        num_single: prompts that are decoded one at a time; 0: nothing is timed.

    Returns:
        `device`, `dtype`, `threads`, `note`, and `single` and `batched` with `batch_prompts, num_prompts, num_tokens,
        plain_s_per_token, speculative_s_per_token, speedup, draft_share, verify_share` (shares of a round's time; what is
        left is bookkeeping). None for `batched` where prompts cannot go together or there is one, and for both where every
        answer is a single token or nothing is timed.
    """
    limit = min(max_new_tokens, NUM_TOKENS)
    prompts = prompts if num_single else []
    together = min(batch_prompts, len(prompts)) if why_not_together(target) is None else 1
    for batch in {1, together} if prompts and limit > 1 else ():  # what only happens once is not timed
        greedy_decode_many(target, prompts[:batch], 2, batch)
        speculative_decode_many(target, draft, prompts[:batch], 2, batch)
    single = _in_turns(target, draft, prompts[:num_single], limit, 1) if prompts else None
    batched = _in_turns(target, draft, prompts[:together], limit, together) if together > 1 else None
    is_cuda = target.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(target.device) if is_cuda else "cpu",
        "dtype": str(target.model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "note": GPU_NOTE if is_cuda else CPU_NOTE,
        "single": single,
        "batched": batched,
    }


def _in_turns(
    target: FrozenTarget, draft: DFlashDraft, prompts: Sequence[Tokens], limit: int, batch: int
) -> dict[str, Any] | None:
    plain, drafted, shares = [], [], []
    num_tokens = 0
    for _ in range(NUM_TURNS):
        clock = PhaseClock(target.device)
        num_tokens = sum(len(d.tokens) - 1 for d in greedy_decode_many(target, prompts, limit, batch, clock=clock))
        if not num_tokens:
            return None
        plain.append(clock.seconds["rounds"] / num_tokens)
        clock = PhaseClock(target.device)
        rounds = [d.accepted for d in speculative_decode_many(target, draft, prompts, limit, batch, clock=clock)]
        # All that the rounds gave, also what the last one gave beyond the limit.
        drafted.append(clock.seconds["rounds"] / sum(sum(kept) + len(kept) for kept in rounds))
        shares.append([clock.seconds[name] / clock.seconds["rounds"] for name in ("draft", "verify")])
    return {
        "batch_prompts": batch,
        "num_prompts": len(prompts),
        "num_tokens": num_tokens,
        "plain_s_per_token": median(plain),
        "speculative_s_per_token": median(drafted),
        "speedup": median(plain) / median(drafted),
        "draft_share": median(share[0] for share in shares),
        "verify_share": median(share[1] for share in shares),
    }
