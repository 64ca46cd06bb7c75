"""Answers of the target for many prompts: greedy as the evaluation decodes, or drawn.

What is drawn for a prompt depends on its own seed alone, not on what is decoded beside it, but for rounding.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from dflash_core.evaluation.decode import Tokens, greedy_decode_many
from dflash_core.evaluation.rows import TargetRows, why_not_together
from dflash_core.model.target import FrozenTarget


class _Drawn:
    """The tokens of one prompt on their way."""

    def __init__(self, seed: int, temperature: float, target: FrozenTarget, limit: int) -> None:
        self.tokens: list[int] = []
        self._generator = torch.Generator().manual_seed(seed)
        self._temperature, self._eos, self._limit = temperature, target.shape.eos_token_ids, limit

    def draw(self, logits_V: Tensor) -> None:
        """Draw the next token; on the host, where a seed means the same on every device."""
        shares_V = torch.softmax(logits_V.float().cpu() / self._temperature, dim=-1)
        self.tokens.append(int(torch.multinomial(shares_V, 1, generator=self._generator)))

    @property
    def ended(self) -> bool:
        return len(self.tokens) >= self._limit or self.tokens[-1] in self._eos


def _draw_alone(target: FrozenTarget, prompt: Tokens, drawn: _Drawn) -> None:
    cache = DynamicCache(config=target.model.config)
    logits, _ = target.step(torch.tensor([prompt]), cache)
    drawn.draw(logits[0, -1])
    while not drawn.ended:
        logits, _ = target.step(torch.tensor([drawn.tokens[-1:]]), cache)
        drawn.draw(logits[0, -1])


def _draw_together(target: FrozenTarget, prompts: Sequence[Tokens], rows: Sequence[_Drawn], limit: int) -> None:
    lengths = [len(prompt) for prompt in prompts]
    padded_RQ = torch.full((len(prompts), max(lengths)), target.shape.pad_token_id)
    for row, prompt in zip(padded_RQ, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    cache = TargetRows(target, len(prompts), max(lengths) + limit)
    logits, _ = target.step_rows(padded_RQ, cache, torch.tensor(lengths).unsqueeze(1) - 1)
    cache.buffers.grow(lengths)
    active = list(rows)
    while True:
        for place, row in enumerate(active):
            row.draw(logits[place, -1])
        stay = [place for place, row in enumerate(active) if not row.ended]
        if not stay:
            return
        if len(stay) < len(active):
            cache.buffers.keep(stay)
        active = [active[place] for place in stay]
        logits, _ = target.step_rows(torch.tensor([[row.tokens[-1]] for row in active]), cache)
        cache.buffers.grow([1] * len(active))


@torch.inference_mode()
def answer_many(
    target: FrozenTarget,
    prompts: Sequence[Tokens],
    max_new_tokens: int,
    *,
    temperature: float,
    seeds: Sequence[int],
    batch_prompts: int,
) -> list[Tokens]:
    """New tokens of each prompt, at most `max_new_tokens`, with the end token where there was one.

    Args:
        temperature: 0 for greedy.
        seeds: one for each prompt; unused when greedy.
    """
    if temperature == 0:
        return [decoded.tokens for decoded in greedy_decode_many(target, prompts, max_new_tokens, batch_prompts)]
    drawn = [_Drawn(seed, temperature, target, max_new_tokens) for seed in seeds]
    size = batch_prompts if why_not_together(target) is None else 1
    by_length = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    for first in range(0, len(by_length), size):
        chosen = by_length[first : first + size]
        if len(chosen) == 1:
            _draw_alone(target, prompts[chosen[0]], drawn[chosen[0]])
        else:
            _draw_together(target, [prompts[number] for number in chosen], [drawn[number] for number in chosen], max_new_tokens)
    return [tuple(row.tokens) for row in drawn]
