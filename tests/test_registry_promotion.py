"""The rule of promotion: what it needs, what it refuses, and that it says why in words with figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.registry import Measured, PromptResult, Rule, Verdict, decide
from dflash_core.registry.paired import compare_paired

TARGET = "t" * 64
BLOCK = 8
RULE = Rule(min_prompts=8, num_samples=100)
# For each prompt the rounds of a drafter, and the tokens that they made: one to BLOCK tokens a round.
Rounds = list[tuple[int, float]]
rounds = st.lists(st.tuples(st.integers(1, 40), st.floats(1, BLOCK)), min_size=8, max_size=24)


def measured(found: Rounds, name: str = "new", **changes: object) -> Measured:
    prompts = tuple(PromptResult(f"p{i}", round(n * tau), n) for i, (n, tau) in enumerate(found))
    return replace(Measured(name, TARGET, BLOCK, prompts, True), **changes)  # type: ignore[arg-type]


def verdict(new: Measured, old: Measured | None, rule: Rule | None = None, asked: int | None = None, **more: object) -> Verdict:
    keys = [f"p{i}" for i in range(len(new.prompts) if asked is None else asked)]
    given = {"target_weights": TARGET, "asked": keys, **more}
    return decide(new, old, rule or RULE, **given)  # type: ignore[arg-type]


@given(rounds)
@settings(max_examples=30)
def test_a_drafter_is_not_better_than_itself(found: Rounds) -> None:
    result = verdict(measured(found), measured(found, "old"))
    assert result.decision == "kept" and "the two do not differ" in result.reason
    assert result.compared is not None and result.compared.difference.value == 0.0


@given(rounds, st.floats(0.05, 2.0))
@settings(max_examples=30)
def test_one_that_needs_fewer_rounds_for_every_prompt_is_promoted_and_the_other_way_round_is_worse(
    found: Rounds, gain: float
) -> None:
    old = measured(found, "old")
    more = tuple(replace(p, num_tokens=p.num_tokens + max(1, round(gain * p.num_rounds))) for p in old.prompts)
    new = replace(old, name="new", prompts=more)
    better = verdict(new, old)
    assert better.promote and "all of it above 0" in better.reason
    worse = verdict(old, new)
    assert worse.decision == "kept" and "it is worse" in worse.reason
    assert better.compared is not None and worse.compared is not None
    there, back = better.compared.difference, worse.compared.difference
    assert (there.value, there.low, there.high) == pytest.approx((-back.value, -back.high, -back.low))


@given(rounds, rounds, st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=25)
def test_what_is_promoted_has_its_whole_interval_above_the_gain_and_stays_so_for_a_smaller_gain(
    a: Rounds, b: Rounds, gain: float, less: float
) -> None:
    count = min(len(a), len(b))
    new, old = measured(a[:count]), measured(b[:count], "old")
    result = verdict(new, old, replace(RULE, min_gain=gain))
    assert result.compared is not None
    found = result.compared.difference
    assert result.promote == (found.low > gain)
    if result.promote:
        assert verdict(new, old, replace(RULE, min_gain=gain * less)).promote
    wide = compare_paired(*[[(p.num_tokens, p.num_rounds) for p in m.prompts] for m in (new, old)], 0.99, 100)
    assert wide is not None and wide.difference.low <= found.low and wide.difference.high >= found.high


def test_pairing_finds_a_small_gain_that_separate_intervals_hide() -> None:
    """Prompts differ by far more than the drafters do; on each of them the new one is a little better."""
    hard_and_easy: Rounds = [(20, 1.5 + 0.35 * (i % 16)) for i in range(16)]
    old = measured(hard_and_easy, "old")
    new = measured([(n, tau + 0.1) for n, tau in hard_and_easy])
    result = verdict(new, old)
    assert result.promote and result.compared is not None
    assert result.compared.new.low < result.compared.old.high  # the two intervals overlap


def test_the_first_drafter_must_beat_decoding_without_one() -> None:
    good = verdict(measured([(10, 2.0)] * 8), None)
    assert good.promote
    assert good.reason == (
        "2.000 tokens per target forward against 1 of decoding without a drafter on the same 8 held-out prompts:"
        " a difference of +1.000 with a 95 % interval of +1.000 to +1.000, all of it above 0"
    )
    useless = verdict(measured([(10, 1.0)] * 8), None)
    assert useless.decision == "kept" and "the two do not differ" in useless.reason
    assert verdict(measured([(10, 2.0)] * 8), None, replace(RULE, min_gain=1.0)).decision == "kept"


def test_a_gain_that_may_be_chance_does_not_promote() -> None:
    old = measured([(20, 2.0 + 0.2 * (i % 3)) for i in range(12)], "old")
    new = measured([(20, 2.05 + 0.2 * ((i + 1) % 3)) for i in range(12)])
    result = verdict(new, old)
    assert result.decision == "kept" and "which is not all above 0 (retrain.min_gain)" in result.reason
    assert result.compared is not None and result.compared.difference.value > 0
    enough = verdict(measured([(20, 2.5)] * 12), measured([(20, 2.3)] * 12, "old"), replace(RULE, min_gain=0.5))
    assert enough.decision == "kept" and enough.reason.endswith("none of it above 0.5 (retrain.min_gain)")


def test_the_interval_is_as_wide_as_the_rule_s_confidence() -> None:
    """A gain on most prompts, a loss on some: enough at 80 %, not at 99 %."""
    old = measured([(20, 2.0)] * 12, "old")
    new = measured([(20, 2.4 if i % 3 else 1.7) for i in range(12)])
    bold, careful = (verdict(new, old, replace(RULE, confidence=level, num_samples=1000)) for level in (0.8, 0.99))
    assert bold.promote and " 80 % interval " in bold.reason
    assert careful.decision == "kept" and " 99 % interval " in careful.reason


GOOD, OLD = measured([(10, 3.0)] * 10), measured([(10, 2.0)] * 10, "old")


@pytest.mark.parametrize(
    ("new", "old", "more", "text"),
    [
        (replace(GOOD, prompts=GOOD.prompts[:3]), OLD, {"asked": 10}, "incomplete: new was measured on 3 of 10 held-out prompts"),
        (GOOD, replace(OLD, prompts=OLD.prompts[:9]), {}, "incomplete: old was measured on 9 of 10 held-out prompts"),
        (GOOD, None, {"asked": 11}, "incomplete: new was measured on 10 of 11"),
        (GOOD, replace(OLD, prompts=OLD.prompts[::-1]), {}, "the held-out prompts have changed since old was measured"),
        (GOOD, None, {"asked": 9}, "the held-out prompts have changed since new was measured"),
        (replace(GOOD, target_weights="other"), OLD, {}, "the target has changed: new was trained for other weights"),
        (GOOD, replace(OLD, target_weights="other"), {}, "the target has changed: old was trained for other weights"),
        (replace(GOOD, lossless=False, num_different=2), OLD, {}, "not lossless: 2 of 10 texts differ from plain"),
        (replace(GOOD, lossless=None), OLD, {}, "was not checked (evaluate.check_lossless)"),
        (replace(GOOD, block_size=16), OLD, {}, "its block size is 16 and the current one's 8"),
        (GOOD, OLD, {"unservable": "taps [9] are not layers of the target"}, "taps [9] are not layers of the target"),
        (GOOD, OLD, {"rule": replace(RULE, min_prompts=11)}, "10 held-out prompts are too few to decide by"),
        (replace(GOOD, prompts=tuple(PromptResult(f"p{i}", 0, 0) for i in range(10))), None, {}, "nothing to compare"),
    ],
)
def test_what_cannot_be_compared_or_served_is_rejected_with_its_reason(
    new: Measured, old: Measured | None, more: dict[str, object], text: str
) -> None:
    result = verdict(new, old, **more)  # type: ignore[arg-type]
    assert result.decision == "rejected" and text in result.reason


def test_what_the_rule_may_be_told_to_allow() -> None:
    allowed = replace(RULE, require_lossless=False, same_block_size=False)
    assert verdict(replace(GOOD, lossless=False, num_different=2, block_size=16), OLD, allowed).promote
    assert verdict(replace(GOOD, target_weights=None), OLD).promote  # a published drafter does not say


def test_a_prompt_without_a_round_counts_for_nothing() -> None:
    silent = PromptResult("p10", 0, 0)
    new, old = (replace(m, prompts=(*m.prompts, silent)) for m in (GOOD, OLD))
    assert verdict(new, old).compared == verdict(GOOD, OLD).compared


def test_each_drafter_s_own_interval_is_that_of_its_evaluation() -> None:
    from dflash_core.evaluation.bootstrap import ratio_interval

    counts = [(7.0 + 3 * (i % 5), 5.0 + i % 3) for i in range(12)]
    for confidence in (0.8, 0.95):
        found = compare_paired(counts, counts[::-1], confidence, 300)
        expected = ratio_interval([a for a, _ in counts], [b for _, b in counts], 300, level=confidence)
        assert found is not None and (found.new.low, found.new.high) == expected
