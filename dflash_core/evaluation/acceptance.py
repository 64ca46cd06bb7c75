"""Acceptance length of a draft on held-out prompts, measured by real draft-verify decoding.

Acceptance length (tau) is the number of tokens emitted per target forward pass: kept draft tokens plus the target's
own, so it runs from 1 to the block size ("+1 included").
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from dflash_core.data import Prompt
from dflash_core.evaluation.decode import Decoded, greedy_decode, speculative_decode
from dflash_core.model.draft import DFlashDraft
from dflash_core.model.target import FrozenTarget

log = logging.getLogger(__name__)
ALL_SOURCES = "all"


@dataclass
class Acceptance:
    """Rounds of one group of prompts."""

    block_size: int
    num_prompts: int = 0
    num_tokens: int = 0
    rounds: list[int] = field(default_factory=list)

    def add(self, decoded: Decoded) -> None:
        self.num_prompts += 1
        self.num_tokens += len(decoded.tokens)
        self.rounds += decoded.accepted

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per target forward, +1 included; None without a round (every answer was one token)."""
        return 1 + sum(self.rounds) / len(self.rounds) if self.rounds else None

    def prefix_survival(self) -> list[float]:
        """Share of rounds in which slots 1 .. k were all kept, for k = 1 .. B - 1."""
        return [sum(n >= k for n in self.rounds) / len(self.rounds) for k in range(1, self.block_size)] if self.rounds else []

    def conditional(self) -> list[float | None]:
        """Share of slot k kept among the rounds that reached it; None where none did."""
        survival = [1.0, *self.prefix_survival()]
        return [after / before if before else None for before, after in pairwise(survival)]


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate_draft` found. `mismatches` names prompts whose text differs from plain greedy decoding."""

    by_source: dict[str, Acceptance]
    lossless: bool | None
    mismatches: tuple[str, ...]
    seconds: float

    @property
    def overall(self) -> Acceptance:
        return self.by_source[ALL_SOURCES]

    def rows(self, kind: str, step: int) -> list[dict[str, Any]]:
        """`evals` rows: one per source, position and metric."""
        rows: list[dict[str, Any]] = []

        def add(source: str, position: int | None, metric: str, value: float | None) -> None:
            rows.append({"kind": kind, "step": step, "source": source, "position": position, "metric": metric, "value": value})

        for source, part in self.by_source.items():
            add(source, None, "acceptance_length", part.acceptance_length)
            add(source, None, "num_prompts", part.num_prompts)
            add(source, None, "num_tokens", part.num_tokens)
            add(source, None, "num_target_forwards", len(part.rounds))
            for k, value in enumerate(part.prefix_survival(), start=1):
                add(source, k, "prefix_survival", value)
            for k, kept in enumerate(part.conditional(), start=1):
                add(source, k, "conditional_acceptance", kept)
        if self.lossless is not None:
            add(ALL_SOURCES, None, "lossless", float(self.lossless))
        return rows


class Baseline:
    """Plain greedy answers, decoded once and kept for every draft that is measured on the same prompts."""

    def __init__(self, target: FrozenTarget, max_new_tokens: int) -> None:
        self._target, self.max_new_tokens = target, max_new_tokens
        self._answers: dict[tuple[int, ...], tuple[int, ...]] = {}

    def answer(self, prompt: Prompt) -> tuple[int, ...]:
        key = prompt.input_ids
        if key not in self._answers:
            self._answers[key] = greedy_decode(self._target, key, self.max_new_tokens).tokens
        return self._answers[key]


def evaluate_draft(
    target: FrozenTarget,
    draft: DFlashDraft,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    baseline: Baseline | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Decode all prompts with the draft.

    Args:
        baseline: compare each answer with plain greedy decoding; None leaves the check out.
        progress: called with the prompts done and their number.
    """
    started = time.monotonic()
    by_source = {ALL_SOURCES: Acceptance(draft.spec.block_size)}
    mismatches = []
    for done, prompt in enumerate(prompts, start=1):
        decoded = speculative_decode(target, draft, prompt.input_ids, max_new_tokens)
        for source in (ALL_SOURCES, prompt.source):
            by_source.setdefault(source, Acceptance(draft.spec.block_size)).add(decoded)
        if baseline is not None and baseline.answer(prompt) != decoded.tokens:
            mismatches.append(prompt.id)
        if progress is not None:
            progress(done, len(prompts))
    lossless = None if baseline is None else not mismatches
    if mismatches:
        log.warning("%d of %d answers differ from plain greedy decoding: %s", len(mismatches), len(prompts), mismatches[:5])
    return Evaluation(by_source, lossless, tuple(mismatches), time.monotonic() - started)
