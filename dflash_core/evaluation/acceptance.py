"""Acceptance length of a draft on held-out prompts, measured by real draft-verify decoding.

Acceptance length (tau) is the number of tokens emitted per target forward pass: kept draft tokens plus the target's
own, so it runs from 1 to the block size ("+1 included").
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

from dflash_core.data import Prompt
from dflash_core.evaluation.bootstrap import ratio_interval
from dflash_core.evaluation.decode import BATCH_PROMPTS, Decoded, Tokens, greedy_decode_many, speculative_decode_many
from dflash_core.evaluation.lossless import Difference, explain_difference
from dflash_core.model.draft import DFlashDraft
from dflash_core.model.target import FrozenTarget

log = logging.getLogger(__name__)
ALL_SOURCES = "all"
BOOTSTRAP_SAMPLES = 1000
# Differences that are looked into; each costs a forward pass per token.
MOST_EXPLAINED = 8


@dataclass
class Acceptance:
    """Rounds of one group of prompts. `accepted` holds, for each prompt, the draft tokens kept in each of its rounds."""

    block_size: int
    num_tokens: int = 0
    accepted: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, decoded: Decoded) -> None:
        self.num_tokens += len(decoded.tokens)
        self.accepted.append(decoded.accepted)

    @property
    def num_prompts(self) -> int:
        return len(self.accepted)

    @property
    def rounds(self) -> list[int]:
        """Draft tokens kept in each round, over all prompts."""
        return list(chain.from_iterable(self.accepted))

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per target forward, +1 included; None without a round (every answer was one token)."""
        rounds = self.rounds
        return 1 + sum(rounds) / len(rounds) if rounds else None

    def interval(self, num_samples: int = BOOTSTRAP_SAMPLES) -> tuple[float, float] | None:
        """95 % confidence interval of the acceptance length over prompts; None for a single one (`bootstrap`)."""
        return ratio_interval([sum(kept) + len(kept) for kept in self.accepted], list(map(len, self.accepted)), num_samples)

    def histogram(self) -> list[int]:
        """Rounds that kept 0, 1 .. B - 1 draft tokens."""
        counts = Counter(self.rounds)
        return [counts[kept] for kept in range(self.block_size)]

    def prefix_survival(self) -> list[float]:
        """Share of rounds in which slots 1 .. k were all kept, for k = 1 .. B - 1."""
        rounds = self.rounds
        return [sum(n >= k for n in rounds) / len(rounds) for k in range(1, self.block_size)] if rounds else []

    def conditional(self) -> list[float | None]:
        """Share of slot k kept among the rounds that reached it; None where none did."""
        survival = [1.0, *self.prefix_survival()]
        return [after / before if before else None for before, after in pairwise(survival)]


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate_draft` found.

    Attributes:
        prompts, decoded, equals_greedy: one for each prompt, in order; `equals_greedy` is None where that was not checked.
        differences: the first of those that differ from plain greedy decoding, looked into.
        seconds: what decoding with the draft took.
    """

    by_source: dict[str, Acceptance]
    prompts: tuple[Prompt, ...]
    decoded: tuple[Decoded, ...]
    equals_greedy: tuple[bool | None, ...]
    differences: tuple[Difference, ...]
    seconds: float
    bootstrap_samples: int = BOOTSTRAP_SAMPLES

    @property
    def overall(self) -> Acceptance:
        return self.by_source[ALL_SOURCES]

    @property
    def mismatches(self) -> tuple[str, ...]:
        """Prompts whose text differs from plain greedy decoding."""
        return tuple(prompt.id for prompt, equal in zip(self.prompts, self.equals_greedy, strict=True) if equal is False)

    @property
    def lossless(self) -> bool | None:
        """Whether all texts equal plain greedy decoding; None where that was not checked."""
        return None if None in self.equals_greedy else not self.mismatches

    @property
    def num_plain_forwards(self) -> int:
        """Forward passes of plain greedy decoding for the same texts: one for each token behind the prompt's own."""
        return self.overall.num_tokens - self.overall.num_prompts

    def prompt_rows(self) -> list[dict[str, Any]]:
        """One row for each prompt: what it is, the new tokens, and the draft tokens kept in each round."""
        return [
            {
                "id": prompt.id,
                "source": prompt.source,
                "num_prompt_tokens": len(prompt.input_ids),
                "prompt_ids": list(prompt.input_ids),
                "tokens": list(decoded.tokens),
                "accepted": list(decoded.accepted),
                "equals_greedy": equal,
            }
            for prompt, decoded, equal in zip(self.prompts, self.decoded, self.equals_greedy, strict=True)
        ]

    def rows(self, kind: str, step: int) -> list[dict[str, Any]]:
        """`evals` rows: one per source, position and metric. The position of `histogram` is a number of kept draft tokens."""
        rows: list[dict[str, Any]] = []

        def add(source: str, position: int | None, metric: str, value: float | None) -> None:
            rows.append({"kind": kind, "step": step, "source": source, "position": position, "metric": metric, "value": value})

        for source, part in self.by_source.items():
            low, high = part.interval(self.bootstrap_samples) or (None, None)
            add(source, None, "acceptance_length", part.acceptance_length)
            add(source, None, "acceptance_length_low", low)
            add(source, None, "acceptance_length_high", high)
            add(source, None, "num_prompts", part.num_prompts)
            add(source, None, "num_tokens", part.num_tokens)
            add(source, None, "num_target_forwards", len(part.rounds))
            for k, value in enumerate(part.prefix_survival(), start=1):
                add(source, k, "prefix_survival", value)
            for k, kept in enumerate(part.conditional(), start=1):
                add(source, k, "conditional_acceptance", kept)
            for num_kept, count in enumerate(part.histogram()):
                add(source, num_kept, "histogram", count)
        if self.lossless is not None:
            add(ALL_SOURCES, None, "lossless", float(self.lossless))
        return rows


class Baseline:
    """Plain greedy answers, decoded once and kept for every draft that is measured on the same prompts."""

    def __init__(self, target: FrozenTarget, max_new_tokens: int, batch_prompts: int = BATCH_PROMPTS) -> None:
        self._target, self.max_new_tokens, self._batch_prompts = target, max_new_tokens, batch_prompts
        self._answers: dict[Tokens, Tokens] = {}

    def answers(self, prompts: Sequence[Prompt]) -> list[Tokens]:
        """The new tokens of each prompt."""
        missing = list({prompt.input_ids: None for prompt in prompts if prompt.input_ids not in self._answers})
        found = greedy_decode_many(self._target, missing, self.max_new_tokens, self._batch_prompts)
        self._answers |= {prompt: decoded.tokens for prompt, decoded in zip(missing, found, strict=True)}
        return [self._answers[prompt.input_ids] for prompt in prompts]


def evaluate_draft(
    target: FrozenTarget,
    draft: DFlashDraft,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    baseline: Baseline | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    batch_prompts: int = BATCH_PROMPTS,
    bootstrap_samples: int = BOOTSTRAP_SAMPLES,
) -> Evaluation:
    """Decode all prompts with the draft.

    Args:
        baseline: compare each answer with plain greedy decoding; None leaves the check out.
        progress: called with the prompts done and their number.
        batch_prompts: prompts decoded at once.
        bootstrap_samples: resamplings behind each confidence interval.
    """
    started = time.monotonic()
    tokens = [prompt.input_ids for prompt in prompts]
    decoded = speculative_decode_many(target, draft, tokens, max_new_tokens, batch_prompts, progress)
    seconds = time.monotonic() - started
    block_size = draft.spec.block_size
    by_source = {ALL_SOURCES: Acceptance(block_size)}
    for prompt, result in zip(prompts, decoded, strict=True):
        for source in {ALL_SOURCES, prompt.source}:  # once, where a source has that very name
            by_source.setdefault(source, Acceptance(block_size)).add(result)
    answers = [None] * len(prompts) if baseline is None else baseline.answers(prompts)
    equal = tuple(None if answer is None else answer == d.tokens for answer, d in zip(answers, decoded, strict=True))
    different = [
        (prompt, answer, result.tokens)
        for prompt, answer, result in zip(prompts, answers, decoded, strict=True)
        if answer is not None and answer != result.tokens
    ]
    differences = [
        explain_difference(target, prompt.id, prompt.input_ids, answer, drafted, block_size)
        for prompt, answer, drafted in different[:MOST_EXPLAINED]
    ]
    if different:
        ties = sum(difference.near_tie for difference in differences)
        log.warning(
            "%d of %d answers differ from plain greedy decoding; of the first %d, %d part at a near tie of the target's logits",
            len(different), len(prompts), len(differences), ties,
        )  # fmt: skip
    return Evaluation(by_source, tuple(prompts), tuple(decoded), equal, tuple(differences), seconds, bootstrap_samples)
