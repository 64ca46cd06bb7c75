"""Acceptance length without decoding: all blocks of a known greedy answer at once, and a walk over them.

With greedy decoding the target's answer does not depend on the draft. So it is decoded once; one forward pass of the target
over prompt and answer gives the states of all positions, and the draft proposes the blocks behind *all* anchors of the answer
together. How many proposals the draft-verify loop would keep at an anchor is the length of the prefix that equals the answer;
going on behind them visits the anchors that the loop visits. What comes out is what `speculative_decode` counts, round for
round (in fp32; elsewhere up to ties within the rounding), at the cost of one pass of the draft over the answers.

The loop's last round may run over the limit of new tokens, and its kept tokens count. So an answer that has not ended must be
known for B - 1 tokens beyond the limit.

Beside it stands the cheap estimate from the accuracy of each slot over all anchors (docs/field.md 1, 'Acceptance length').

Shapes: S positions, A anchors, B slots of a block, F features, D hidden, V vocabulary, N slots that are asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dflash_core.evaluation.acceptance import ALL_SOURCES, Acceptance
from dflash_core.evaluation.decode import Decoded
from dflash_core.model.draft import DFlashDraft, embed_blocks
from dflash_core.model.loss import expected_acceptance_length

# What exists at once: the blocks of so many anchors, and logits of so many slots by so many tokens (128 MiB in fp32).
ANCHORS_PER_PIECE = 128
SLOTS_PER_PIECE, TOKENS_PER_PIECE = 2048, 16384


@dataclass(frozen=True)
class WalkItem:
    """A prompt with the target's own greedy answer.

    Attributes:
        prompt, answer: token ids. The answer ends with the end token, or goes on for B - 1 tokens beyond `limit`.
        limit: most new tokens that the loop would emit.
        ended: whether the answer's last token is an end token.
        features: gives the target's states [S, F] of the first S positions; asked for `num_context` of them.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    limit: int
    ended: bool
    source: str
    features: Callable[[int], Tensor]

    @property
    def num_anchors(self) -> int:
        """Tokens of the answer at which the loop could begin a round; the first one stands at position `len(prompt)`."""
        return max(0, min(len(self.answer), self.limit) - 1)

    @property
    def num_context(self) -> int:
        """Positions before the last anchor, S."""
        return len(self.prompt) + max(0, self.num_anchors - 1)


@dataclass
class SlotAccuracy:
    """Hits and tokens to be hit of slots 1 .. B - 1, over all anchors."""

    correct: list[int]
    count: list[int]

    def add(self, hits_AK: Tensor, known_AK: Tensor) -> None:
        self.correct = [a + b for a, b in zip(self.correct, hits_AK.sum(0).tolist(), strict=True)]
        self.count = [a + b for a, b in zip(self.count, known_AK.sum(0).tolist(), strict=True)]

    def by_slot(self) -> list[float | None]:
        return [hits / n if n else None for hits, n in zip(self.correct, self.count, strict=True)]

    @property
    def expected_acceptance_length(self) -> float:
        return expected_acceptance_length([share or 0.0 for share in self.by_slot()])


@dataclass(frozen=True)
class Walk:
    """What `walk_draft` found, by source and over all of them."""

    by_source: dict[str, Acceptance]
    accuracy: dict[str, SlotAccuracy] = field(repr=False)
    seconds: float

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per target forward, +1 included; None where no answer has a round."""
        return self.by_source[ALL_SOURCES].acceptance_length

    @property
    def expected(self) -> float | None:
        """The estimate from the accuracy of the slots, which takes their hits for independent."""
        accuracy = self.accuracy[ALL_SOURCES]
        return accuracy.expected_acceptance_length if accuracy.count[0] else None

    def rows(self, kind: str, step: int) -> list[dict[str, Any]]:
        """`evals` rows: one per source, position and metric."""
        rows: list[dict[str, Any]] = []

        def add(source: str, position: int | None, metric: str, value: float | None) -> None:
            rows.append({"kind": kind, "step": step, "source": source, "position": position, "metric": metric, "value": value})

        for source, part in self.by_source.items():
            accuracy = self.accuracy[source]
            add(source, None, "acceptance_length", part.acceptance_length)
            add(source, None, "expected_acceptance_length", accuracy.expected_acceptance_length if accuracy.count[0] else None)
            add(source, None, "num_prompts", part.num_prompts)
            add(source, None, "num_tokens", part.num_tokens)
            add(source, None, "num_target_forwards", len(part.rounds))
            for metric, values in (
                ("prefix_survival", part.prefix_survival()),
                ("conditional_acceptance", part.conditional()),
                ("accuracy", accuracy.by_slot()),
            ):
                for k, value in enumerate(values, start=1):
                    add(source, k, metric, value)
        return rows


def walk_draft(
    draft: DFlashDraft,
    items: Sequence[WalkItem],
    embedding_VD: Tensor,
    head_VD: Tensor,
    should_stop: Callable[[], bool] | None = None,
) -> Walk | None:
    """The acceptance length that the draft-verify loop would measure on `items`, and the estimate beside it.

    Draws nothing, leaves no gradients, and changes nothing of the draft, so that it may stand between two training steps.

    Args:
        embedding_VD, head_VD: the target's rows, on any device and in any number format; they are not copied as a whole.
        should_stop: asked before each piece of work; when it says yes the result is None.
    """
    started, block_size = time.monotonic(), draft.spec.block_size
    by_source = {ALL_SOURCES: Acceptance(block_size)}
    accuracy: dict[str, SlotAccuracy] = {}
    was_training = draft.training
    draft.eval()
    try:
        for item in items:
            hits = _hits(draft, item, embedding_VD, head_VD, should_stop)
            if hits is None:
                return None
            known_AK = known_slots(item, block_size)
            rounds = tuple(walk(accepted(item, hits)))
            decoded = Decoded(item.answer[: item.limit], rounds, len(rounds))
            for source in {ALL_SOURCES, item.source}:  # once, where a source has that very name
                by_source.setdefault(source, Acceptance(block_size)).add(decoded)
                none = SlotAccuracy([0] * (block_size - 1), [0] * (block_size - 1))
                accuracy.setdefault(source, none).add(hits, known_AK)
    finally:
        draft.train(was_training)
    return Walk(by_source, accuracy, time.monotonic() - started)


def walk(accepted_A: Sequence[int]) -> Iterator[int]:
    """The rounds of the loop, from the number of kept proposals at every anchor: p -> p + n(p) + 1."""
    anchor = 0
    while anchor < len(accepted_A):
        yield accepted_A[anchor]
        anchor += accepted_A[anchor] + 1


def known_slots(item: WalkItem, block_size: int) -> Tensor:
    """Which of slots 1 .. B - 1 behind each anchor stand before the end of the answer: [A, B - 1]."""
    slots = torch.arange(item.num_anchors).unsqueeze(1) + torch.arange(1, block_size)
    return slots < len(item.answer)


def accepted(item: WalkItem, hits_AK: Tensor) -> list[int]:
    """Proposals that the loop keeps at each anchor, from the slots that hit [A, B - 1].

    At an end token the round stops; it is the token that a round emits beside the kept ones, whoever proposed it.
    """
    assert item.ended or len(item.answer) >= item.limit + hits_AK.shape[1], "an answer cut short says nothing of its last round"
    left_A = len(item.answer) - 1 - torch.arange(item.num_anchors)
    kept: list[int] = torch.minimum(hits_AK.long().cumprod(1).sum(1), left_A - 1).tolist()
    return kept


@torch.no_grad()  # not inference mode: what a module keeps from here must be fit for training
def _hits(
    draft: DFlashDraft, item: WalkItem, embedding_VD: Tensor, head_VD: Tensor, should_stop: Callable[[], bool] | None
) -> Tensor | None:
    """Whether slot k behind each anchor proposes the answer's token, [A, B - 1] on the CPU; unknown slots do not."""
    spec, parameter = draft.spec, next(draft.parameters())
    known_AK = known_slots(item, spec.block_size)
    hits_AK = torch.zeros_like(known_AK)
    if item.num_anchors == 0:
        return hits_AK
    features_1SF = item.features(item.num_context).unsqueeze(0)
    context = draft.context(features_1SF.to(parameter.device, parameter.dtype))
    answer = torch.tensor(item.answer)
    for first in range(0, item.num_anchors, ANCHORS_PER_PIECE):
        if should_stop is not None and should_stop():
            return None
        piece = torch.arange(first, min(first + ANCHORS_PER_PIECE, item.num_anchors))
        blocks = embed_blocks(embedding_VD, answer[piece].unsqueeze(0).to(embedding_VD.device), spec)
        places_1A = (len(item.prompt) + piece).unsqueeze(0).to(parameter.device)
        final_1AKD = draft.blocks(blocks.to(parameter.device, parameter.dtype), context, places_1A)
        known = known_AK[piece]
        proposed_N = _argmax(final_1AKD[0, :, 1:][known.to(parameter.device)], head_VD)
        labels_N = answer[(piece.unsqueeze(1) + torch.arange(1, spec.block_size))[known]]
        hits_AK[piece] = hits_AK[piece].masked_scatter(known, proposed_N.cpu() == labels_N)
    return hits_AK


def _argmax(final_ND: Tensor, head_VD: Tensor) -> Tensor:
    """The token with the highest logit of each state, [N]; neither all logits nor a copy of the whole head exist at once."""
    best_N = torch.full((len(final_ND),), -torch.inf, dtype=final_ND.dtype, device=final_ND.device)
    token_N = torch.zeros(len(final_ND), dtype=torch.long, device=final_ND.device)
    for begin in range(0, len(head_VD), TOKENS_PER_PIECE):
        rows = head_VD[begin : begin + TOKENS_PER_PIECE].to(final_ND.device, final_ND.dtype)
        for first in range(0, len(final_ND), SLOTS_PER_PIECE):
            piece = slice(first, first + SLOTS_PER_PIECE)
            value, place = functional.linear(final_ND[piece], rows).max(-1)
            better = value > best_N[piece]
            best_N[piece] = torch.where(better, value, best_N[piece])
            token_N[piece] = torch.where(better, place + begin, token_N[piece])
    return token_N
