"""Greedy decoding, plain and with a DFlash draft, of one prompt at a time.

The draft-verify loop (docs/field.md 1, 'Decode loop'): the draft sees the target's states of all positions before the
anchor and proposes a block; the target runs over the anchor and the proposals in one forward pass; the longest matching
prefix is kept, and the target's own token at the first mismatch is the next anchor. What comes out must equal plain
greedy decoding token for token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dflash_core.model.draft import DFlashDraft, KeyValue, embed_blocks
from dflash_core.model.target import FrozenTarget


@dataclass(frozen=True)
class Decoded:
    """Result of one prompt.

    Attributes:
        tokens: new tokens, at most the limit, ending with the end token where there was one.
        accepted: draft tokens kept in each round; a round emits one more (the target's own).
        num_target_forwards: forward passes of the target after the prompt's.
    """

    tokens: tuple[int, ...]
    accepted: tuple[int, ...]
    num_target_forwards: int


def _new_cache(target: FrozenTarget) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=target.model.config)


def _cut(tokens: list[int], eos: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """Tokens up to the first end token (kept), at most `limit`."""
    for i, token in enumerate(tokens[:limit]):
        if token in eos:
            return tuple(tokens[: i + 1])
    return tuple(tokens[:limit])


@torch.inference_mode()
def greedy_decode(target: FrozenTarget, prompt: tuple[int, ...], max_new_tokens: int) -> Decoded:
    """Plain greedy decoding with a cache: one forward pass per token."""
    cache = _new_cache(target)
    logits, _ = target.step(torch.tensor([prompt]), cache)
    tokens = [int(logits[0, -1].argmax())]
    forwards = 0
    while len(tokens) < max_new_tokens and tokens[-1] not in target.shape.eos_token_ids:
        logits, _ = target.step(torch.tensor([tokens[-1:]]), cache)
        tokens.append(int(logits[0, -1].argmax()))
        forwards += 1
    return Decoded(tuple(tokens), (), forwards)


class DraftContext:
    """The draft's keys and values of all verified positions; grows as tokens are accepted."""

    def __init__(self, draft: DFlashDraft) -> None:
        self._draft = draft
        self.layers: list[KeyValue] = []
        self.length = 0

    def append(self, features_1SF: Tensor) -> None:
        """Add the target's states of the next positions."""
        new = self._draft.context(features_1SF.to(next(self._draft.parameters()).dtype), self.length)
        if self.layers:
            new = [
                KeyValue(torch.cat([old.key, more.key], dim=2), torch.cat([old.value, more.value], dim=2))
                for old, more in zip(self.layers, new, strict=True)
            ]
        self.layers, self.length = new, self.length + features_1SF.shape[1]

    def propose(self, anchor_token: int, embedding_VD: Tensor, head_VD: Tensor) -> Tensor:
        """Greedy proposals for slots 1 .. B - 1 behind an anchor that stands right after the context: [B - 1]."""
        anchor = torch.tensor([[self.length]], device=embedding_VD.device)
        tokens = torch.tensor([[anchor_token]], device=embedding_VD.device)
        final = self._draft.blocks(embed_blocks(embedding_VD, tokens, self._draft.spec), self.layers, anchor)
        return functional.linear(final[0, 0, 1:], head_VD).argmax(-1)


@torch.inference_mode()
def speculative_decode(target: FrozenTarget, draft: DFlashDraft, prompt: tuple[int, ...], max_new_tokens: int) -> Decoded:
    """The draft-verify loop. `accepted` counts what the target confirmed, as serving engines do, up to an end token."""
    dtype = next(draft.parameters()).dtype
    embedding, head = target.embedding_VH.to(dtype), target.head_VH.to(dtype)
    eos = target.shape.eos_token_ids
    cache, context = _new_cache(target), DraftContext(draft)
    logits, features = target.step(torch.tensor([prompt]), cache)
    context.append(features)
    tokens = [int(logits[0, -1].argmax())]
    accepted: list[int] = []
    while len(tokens) < max_new_tokens and tokens[-1] not in eos:
        proposals = context.propose(tokens[-1], embedding, head)
        block = torch.cat([torch.tensor([tokens[-1]], device=proposals.device), proposals])
        logits, features = target.step(block.unsqueeze(0), cache)
        own = logits[0].argmax(-1)
        # The proposals up to the first that differs from the target's own choice.
        num_kept = int((proposals == own[:-1]).cumprod(0).sum())
        emitted = [*proposals[:num_kept].tolist(), int(own[num_kept])]
        ended = next((i for i, token in enumerate(emitted) if token in eos), None)
        if ended is not None:
            emitted = emitted[: ended + 1]
        accepted.append(len(emitted) - 1)
        tokens += emitted
        num_rejected = len(block) - 1 - num_kept
        if num_rejected:
            cache.crop(-num_rejected)  # a negative number removes that many positions from the end
        context.append(features[:, : num_kept + 1])
    return Decoded(_cut(tokens, eos, max_new_tokens), tuple(accepted), len(accepted))
