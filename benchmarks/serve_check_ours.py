"""How serve_check.py counts our own rounds the way vLLM counts its rounds.

vLLM counts a round before it cuts the answer at an end token; `Decoded.accepted`, and with it `dflash evaluate`, counts after.
Only an answer's last round can differ.
"""

from __future__ import annotations

import torch
from transformers import DynamicCache

from dflash_core.evaluation.decode import Decoded, DraftContext
from dflash_core.model.draft import DFlashDraft
from dflash_core.model.target import FrozenTarget


@torch.inference_mode()
def whole_rounds(target: FrozenTarget, draft: DFlashDraft, prompt: tuple[int, ...], decoded: Decoded) -> list[int]:
    """Draft tokens kept in each round, those behind an end token included: the last round is drafted and verified once more."""
    if not decoded.accepted:
        return []
    *earlier, _ = decoded.accepted
    known = [*prompt, *decoded.tokens[: 1 + sum(kept + 1 for kept in earlier)]]
    dtype = next(draft.parameters()).dtype
    cache, context = DynamicCache(config=target.model.config), DraftContext(draft)
    _, features = target.step(torch.tensor([known[:-1]]), cache)
    context.append(features)
    proposals = context.propose(known[-1], target.embedding_VH.to(dtype), target.head_VH.to(dtype))
    block = torch.cat([torch.tensor([known[-1]], device=proposals.device), proposals])
    own = target.step(block.unsqueeze(0), cache)[0][0].argmax(-1)
    return [*earlier, int((proposals == own[:-1]).cumprod(0).sum())]
