"""The rule by which a drafter replaces the current one: a pure function of what was measured, with its reason in words.

Both drafters decode the same held-out prompts. The new one is promoted if the whole interval of the difference lies above
`min_gain`. The first drafter of a target is compared with decoding without one, which makes exactly one token per target
forward. What cannot be compared, or could not be served, is rejected: that is no statement about how good it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dflash_core.registry.paired import Compared, compare_paired


@dataclass(frozen=True)
class PromptResult:
    """One prompt as a drafter decoded it. `key` stands for the prompt's id and tokens."""

    key: str
    num_tokens: int
    num_rounds: int


@dataclass(frozen=True)
class Measured:
    """A drafter on held-out prompts.

    Attributes:
        name: the drafter's id.
        target_weights: digest of the target that it was trained for; None: not known (an old or a published drafter).
        lossless: whether every text equals plain greedy decoding; None: not checked.
        num_different: texts that do not.
    """

    name: str
    target_weights: str | None
    block_size: int
    prompts: tuple[PromptResult, ...]
    lossless: bool | None
    num_different: int = 0


@dataclass(frozen=True)
class Rule:
    """What a promotion needs (the keys of `retrain` in an experiment), and how often prompts are resampled."""

    min_gain: float = 0.0
    confidence: float = 0.95
    min_prompts: int = 16
    require_lossless: bool = True
    same_block_size: bool = True
    num_samples: int = 1000


@dataclass(frozen=True)
class Verdict:
    """`promoted`: better. `kept`: not shown to be better, the current one stays. `rejected`: not comparable or not fit to serve.

    `compared` is None where nothing could be compared.
    """

    decision: Literal["promoted", "kept", "rejected"]
    reason: str
    compared: Compared | None = None

    @property
    def promote(self) -> bool:
        return self.decision == "promoted"


def decide(
    new: Measured, old: Measured | None, rule: Rule, *, target_weights: str, asked: Sequence[str], unservable: str | None = None
) -> Verdict:
    """Whether `new` replaces `old`.

    Args:
        old: the current drafter; None: there is none.
        target_weights: digest of the target as it is now.
        asked: keys of the held-out prompts as they are now.
        unservable: why no engine could serve the new drafter with this target; None: one can.
    """
    compared = _compare(new, old, rule)
    if problem := _not_comparable(new, old, rule, target_weights, asked) or unservable or _not_fit(new, old, rule):
        return Verdict("rejected", problem, compared)
    if compared is None:
        text = "not one round was drafted on two prompts (answers of a single token), so there is nothing to compare"
        return Verdict("rejected", text, None)
    text = _figures(new, old, compared, rule)
    if compared.difference.low > rule.min_gain:
        return Verdict("promoted", f"{text}, all of it above {rule.min_gain:g}", compared)
    return Verdict("kept", f"{text}, {_why_not(compared, rule, first=old is None)}", compared)


def _compare(new: Measured, old: Measured | None, rule: Rule) -> Compared | None:
    """None where the prompts are not the same ones, or say nothing."""
    counts = [(float(prompt.num_tokens), float(prompt.num_rounds)) for prompt in new.prompts]
    if old is None:
        others = [(rounds, rounds) for _, rounds in counts]  # one token per target forward
    elif _keys(old) != _keys(new):
        return None
    else:
        others = [(float(prompt.num_tokens), float(prompt.num_rounds)) for prompt in old.prompts]
    return compare_paired(counts, others, rule.confidence, rule.num_samples)


def _keys(measured: Measured) -> list[str]:
    return [prompt.key for prompt in measured.prompts]


def _not_comparable(new: Measured, old: Measured | None, rule: Rule, target_weights: str, asked: Sequence[str]) -> str | None:
    for who in (new, old):
        if who is None:
            continue
        if who.target_weights not in (None, target_weights):
            return f"the target has changed: {who.name} was trained for other weights than those that it was measured with"
        if len(who.prompts) < len(asked):
            return f"the evaluation is incomplete: {who.name} was measured on {len(who.prompts)} of {len(asked)} held-out prompts"
        if _keys(who) != list(asked):
            return f"the held-out prompts have changed since {who.name} was measured"
    if len(asked) < rule.min_prompts:
        return f"{len(asked)} held-out prompts are too few to decide by (retrain.min_prompts is {rule.min_prompts})"
    return None


def _not_fit(new: Measured, old: Measured | None, rule: Rule) -> str | None:
    if old is not None and rule.same_block_size and new.block_size != old.block_size:
        return (
            f"its block size is {new.block_size} and the current one's {old.block_size}, which stands in the commands that serve"
            " it (num_speculative_tokens); retrain.same_block_size: false allows it"
        )
    if rule.require_lossless and new.lossless is None:
        return "whether its texts equal plain greedy decoding was not checked (evaluate.check_lossless)"
    if rule.require_lossless and not new.lossless:
        return f"not lossless: {new.num_different} of {len(new.prompts)} texts differ from plain greedy decoding"
    return None


def _figures(new: Measured, old: Measured | None, compared: Compared, rule: Rule) -> str:
    against = "1 of decoding without a drafter" if old is None else f"{compared.old.value:.3f} of {old.name}"
    found = compared.difference
    interval = f"a {rule.confidence * 100:g} % interval of {found.low:+.3f} to {found.high:+.3f}"
    return (
        f"{compared.new.value:.3f} tokens per target forward against {against} on the same {len(new.prompts)} held-out prompts:"
        f" a difference of {found.value:+.3f} with {interval}"
    )


def _why_not(compared: Compared, rule: Rule, first: bool) -> str:
    found, needed = compared.difference, f"{rule.min_gain:g}"
    if found.high < 0:
        return "all of it below 0: it is worse" + (" than no drafter" if first else "")
    if found.low == found.high == 0:
        return "so the two do not differ"
    if found.high <= rule.min_gain:
        return f"none of it above {needed} (retrain.min_gain)"
    return f"which is not all above {needed} (retrain.min_gain)"
