"""Greedy decoding, plain and with a DFlash draft: of one prompt at a time, and of many together.

The draft-verify loop (docs/field.md 1, 'Decode loop'): the draft sees the target's states of all positions before the
anchor and proposes a block; the target runs over the anchor and the proposals in one forward pass; the longest matching
prefix is kept, and the target's own token at the first mismatch is the next anchor. What comes out must equal plain
greedy decoding token for token.

`greedy_decode` and `speculative_decode` are the plain form, with transformers' own cache and nothing saved. The `_many` forms
take prompts of about the same length together (`evaluation/rows.py`): each row advances by what it accepts, and a row that has
ended leaves. In fp32 they give the same tokens and the same rounds. In bf16 a token can differ where the two best logits are
closer than the rounding, because sums are made in another order: between batch sizes as between plain and drafted decoding.

Shapes: R rows, Q new positions, K slots of a block, F features, V vocabulary, D hidden.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from dflash_core.evaluation.phases import PhaseClock, phase
from dflash_core.evaluation.rows import DraftRows, TargetRows, why_not_together
from dflash_core.model.draft import DFlashDraft, KeyValue, embed_blocks
from dflash_core.model.target import FrozenTarget

log = logging.getLogger(__name__)
BATCH_PROMPTS = 8
Tokens = tuple[int, ...]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Decoded:
    """Result of one prompt.

    Attributes:
        tokens: new tokens, at most the limit, ending with the end token where there was one.
        accepted: draft tokens kept in each round; a round emits one more (the target's own).
        num_target_forwards: forward passes of the target after the prompt's. Prompts that are decoded together share them;
            here each counts those that it took part in.
    """

    tokens: Tokens
    accepted: tuple[int, ...]
    num_target_forwards: int


def _cut(tokens: list[int], eos: Tokens, limit: int) -> Tokens:
    """Tokens up to the first end token (kept), at most `limit`."""
    for i, token in enumerate(tokens[:limit]):
        if token in eos:
            return tuple(tokens[: i + 1])
    return tuple(tokens[:limit])


@torch.inference_mode()
def greedy_decode(target: FrozenTarget, prompt: Tokens, max_new_tokens: int, clock: PhaseClock | None = None) -> Decoded:
    """Plain greedy decoding with a cache: one forward pass per token."""
    cache = DynamicCache(config=target.model.config)
    with phase(clock, "prefill"):
        logits, _ = target.step(torch.tensor([prompt]), cache)
        tokens = [int(logits[0, -1].argmax())]
    forwards = 0
    with phase(clock, "rounds"):
        while len(tokens) < max_new_tokens and tokens[-1] not in target.shape.eos_token_ids:
            with phase(clock, "verify"):
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
def speculative_decode(
    target: FrozenTarget, draft: DFlashDraft, prompt: Tokens, max_new_tokens: int, clock: PhaseClock | None = None
) -> Decoded:
    """The draft-verify loop. `accepted` counts what the target confirmed, as serving engines do, up to an end token."""
    dtype = next(draft.parameters()).dtype
    embedding, head = target.embedding_VH.to(dtype), target.head_VH.to(dtype)
    eos = target.shape.eos_token_ids
    cache, context = DynamicCache(config=target.model.config), DraftContext(draft)
    cache.activate_past_recording()  # layers with a window or a running state keep what a crop goes back to
    with phase(clock, "prefill"):
        logits, features = target.step(torch.tensor([prompt]), cache)
        cache.crop(0)
        context.append(features)
        tokens = [int(logits[0, -1].argmax())]
    accepted: list[int] = []
    with phase(clock, "rounds"):
        while len(tokens) < max_new_tokens and tokens[-1] not in eos:
            with phase(clock, "draft"):
                proposals = context.propose(tokens[-1], embedding, head)
            with phase(clock, "verify"):
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
            cache.crop(num_kept + 1 - len(block))  # a negative number removes that many positions from the end
            with phase(clock, "draft"):
                context.append(features[:, : num_kept + 1])
    return Decoded(_cut(tokens, eos, max_new_tokens), tuple(accepted), len(accepted))


@dataclass
class _Row:
    """One prompt on its way."""

    tokens: list[int]
    rounds: list[int] = field(default_factory=list)  # tokens kept besides the target's own

    def take(self, emitted: Sequence[int], eos: Tokens) -> None:
        """Add the tokens of a round, up to an end token."""
        last = next((i for i, token in enumerate(emitted) if token in eos), len(emitted) - 1)
        self.rounds.append(last)
        self.tokens += emitted[: last + 1]


@dataclass
class _Group:
    """Rows that are decoded together. `active` are those that have not ended, in the order of their cache."""

    target: FrozenTarget
    limit: int
    cache: TargetRows
    rows: list[_Row]
    active: list[_Row]

    @classmethod
    def begin(
        cls, target: FrozenTarget, prompts: Sequence[Tokens], limit: int, spare: int, clock: PhaseClock | None
    ) -> tuple[_Group, Tensor]:
        """Run the prompts, right-padded, and choose each row's first token; also returns their features [R, Q, F].

        Args:
            spare: new positions of a round, which must find room behind the longest row.
        """
        lengths = [len(prompt) for prompt in prompts]
        padded_RQ = torch.full((len(prompts), max(lengths)), target.shape.pad_token_id)
        for row, prompt in zip(padded_RQ, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        cache = TargetRows(target, len(prompts), max(lengths) + limit + spare)
        with phase(clock, "prefill"):
            logits, features_RQF = target.step_rows(padded_RQ, cache, torch.tensor(lengths).unsqueeze(1) - 1)
            rows = [_Row([token]) for token in logits[:, 0].argmax(-1).tolist()]
        cache.buffers.grow(lengths)
        return cls(target, limit, cache, rows, list(rows)), features_RQF

    def anchors(self) -> Tensor:
        """The last token of each active row, [R, 1]."""
        return torch.tensor([[row.tokens[-1]] for row in self.active], device=self.target.device)

    def leave(self, *caches: TargetRows | DraftRows) -> bool:
        """Take the rows that have ended out of `caches`; says whether any are left."""
        eos = self.target.shape.eos_token_ids
        stay = [i for i, row in enumerate(self.active) if len(row.tokens) < self.limit and row.tokens[-1] not in eos]
        if stay and len(stay) < len(self.active):
            for cache in caches:
                cache.buffers.keep(stay)
        self.active = [self.active[i] for i in stay]
        return bool(stay)

    def decoded(self, drafted: bool) -> list[Decoded]:
        eos = self.target.shape.eos_token_ids
        return [
            Decoded(_cut(row.tokens, eos, self.limit), tuple(row.rounds) if drafted else (), len(row.rounds)) for row in self.rows
        ]


def _greedy_group(target: FrozenTarget, prompts: Sequence[Tokens], limit: int, clock: PhaseClock | None) -> list[Decoded]:
    group, _ = _Group.begin(target, prompts, limit, 1, clock)
    with phase(clock, "rounds"):
        while group.leave(group.cache):
            with phase(clock, "verify"):
                logits, _ = target.step_rows(group.anchors(), group.cache)
                own = logits[:, 0].argmax(-1).tolist()
            group.cache.buffers.grow([1] * len(own))
            for row, token in zip(group.active, own, strict=True):
                row.take([token], ())
    return group.decoded(drafted=False)


def _speculative_group(
    target: FrozenTarget, draft: DFlashDraft, prompts: Sequence[Tokens], limit: int, clock: PhaseClock | None
) -> list[Decoded]:
    dtype, spec, eos = next(draft.parameters()).dtype, draft.spec, target.shape.eos_token_ids
    embedding, head = target.embedding_VH.to(dtype), target.head_VH.to(dtype)
    group, features_RQF = _Group.begin(target, prompts, limit, spec.block_size, clock)
    context = DraftRows(draft, len(prompts), group.cache.buffers.capacity, target.device)
    with phase(clock, "prefill"):
        context.append(features_RQF, group.cache.buffers.lengths)
    with phase(clock, "rounds"):
        while group.leave(group.cache, context):
            with phase(clock, "draft"):
                anchors_R1 = group.anchors()
                proposals_RK = context.propose(anchors_R1, embedding, head)
            with phase(clock, "verify"):
                logits, features_RQF = target.step_rows(torch.cat([anchors_R1, proposals_RK], dim=1), group.cache)
                own_RK = logits.argmax(-1)
                num_kept_R = (proposals_RK == own_RK[:, :-1]).cumprod(1).sum(1)
                # What is kept of the proposals is what the target chose itself; its token at the first mismatch follows.
                own, counts = own_RK.tolist(), (num_kept_R + 1).tolist()
            group.cache.buffers.grow(counts)
            with phase(clock, "draft"):
                context.append(features_RQF, counts)
            for row, tokens, count in zip(group.active, own, counts, strict=True):
                row.take(tokens[:count], eos)
    return group.decoded(drafted=True)


def _in_groups(prompts: Sequence[Tokens], size: int) -> Iterator[list[int]]:
    """Numbers of prompts of neighbouring lengths; padding then costs little."""
    by_length = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    return (by_length[first : first + size] for first in range(0, len(by_length), size))


def _decode_many(
    target: FrozenTarget,
    prompts: Sequence[Tokens],
    batch_prompts: int,
    together: Callable[[list[Tokens]], list[Decoded]],
    alone: Callable[[Tokens], Decoded],
    progress: Progress | None,
) -> list[Decoded]:
    reason = why_not_together(target)
    if reason is not None:
        log.info("prompts are decoded one at a time with this target: %s", reason)
    done: dict[int, Decoded] = {}
    for numbers in _in_groups(prompts, batch_prompts if reason is None else 1):
        chosen = [prompts[number] for number in numbers]
        done |= zip(numbers, together(chosen) if reason is None else [alone(chosen[0])], strict=True)
        if progress is not None:
            progress(len(done), len(prompts))
    return [done[number] for number in range(len(prompts))]


@torch.inference_mode()
def greedy_decode_many(
    target: FrozenTarget,
    prompts: Sequence[Tokens],
    max_new_tokens: int,
    batch_prompts: int = BATCH_PROMPTS,
    progress: Progress | None = None,
    clock: PhaseClock | None = None,
) -> list[Decoded]:
    """`greedy_decode` of many prompts, `batch_prompts` at once; results in the order of the prompts.

    A target whose rows cannot go together (`rows.why_not_together`) takes them one at a time, which is logged.

    Args:
        progress: called with the prompts done and their number.
        clock: adds up the time by phase.
    """
    return _decode_many(
        target,
        prompts,
        batch_prompts,
        lambda group: _greedy_group(target, group, max_new_tokens, clock),
        lambda prompt: greedy_decode(target, prompt, max_new_tokens, clock),
        progress,
    )


@torch.inference_mode()
def speculative_decode_many(
    target: FrozenTarget,
    draft: DFlashDraft,
    prompts: Sequence[Tokens],
    max_new_tokens: int,
    batch_prompts: int = BATCH_PROMPTS,
    progress: Progress | None = None,
    clock: PhaseClock | None = None,
) -> list[Decoded]:
    """`speculative_decode` of many prompts, `batch_prompts` at once; see `greedy_decode_many`."""
    return _decode_many(
        target,
        prompts,
        batch_prompts,
        lambda group: _speculative_group(target, draft, group, max_new_tokens, clock),
        lambda prompt: speculative_decode(target, draft, prompt, max_new_tokens, clock),
        progress,
    )
