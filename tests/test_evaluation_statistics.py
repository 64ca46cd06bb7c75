"""Figures of an evaluation: intervals, histogram, positions, near ties, and what is shown of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_core.config import DraftConfig
from dflash_core.data import Prompt
from dflash_core.evaluation import (
    Acceptance,
    Decoded,
    describe_evaluation,
    evaluate_draft,
    explain_difference,
    greedy_decode,
    measure_speed,
    ratio_interval,
)
from dflash_core.evaluation import speed as speed_module
from dflash_core.model.draft import DFlashDraft
from dflash_core.model.spec import DraftSpec
from dflash_core.model.target import FrozenTarget, read_target_shape

PROMPT = tuple(range(40, 60))


@pytest.fixture(scope="module")
def target(micro_target: Path) -> FrozenTarget:
    return FrozenTarget(micro_target, (1, 2), "float32", "sdpa", "cpu")


@pytest.fixture(scope="module")
def draft(micro_target: Path) -> DFlashDraft:
    spec = DraftSpec.build(DraftConfig(num_layers=1, block_size=5, num_taps=2), read_target_shape(micro_target), 261)
    return DFlashDraft(spec).initialise(0).eval()


def drawn_prompts(generator: np.random.Generator, count: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Tokens and rounds of prompts whose rounds are alike: each prompt has a chance of its own, and keeps up to 7 a round."""
    rounds = generator.integers(5, 30, size=count)
    chance = generator.beta(4, 3, size=count)
    kept = [np.minimum(generator.geometric(1 - p, size=n) - 1, 7).sum() for p, n in zip(chance, rounds, strict=True)]
    return np.array(kept) + rounds, rounds


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """0.95 of 200 trials, give or take three standard errors and the bootstrap's known shortfall with 40 prompts."""
    generator = np.random.default_rng(1)
    tokens, rounds = drawn_prompts(generator, 20_000)
    truth = tokens.sum() / rounds.sum()
    covered = 0
    for _ in range(200):
        low, high = ratio_interval(*drawn_prompts(generator, 40), 300, generator) or (0.0, 0.0)
        covered += low <= truth <= high
    assert 0.87 <= covered / 200 <= 0.99


def test_the_interval_is_that_of_the_delta_method_for_many_prompts() -> None:
    """sd of a ratio of means: sqrt(sum((t - R r)^2)) / sum(r) (Cochran, Sampling Techniques, 1977, eq. 6.9)."""
    tokens, rounds = drawn_prompts(np.random.default_rng(2), 400)
    ratio = tokens.sum() / rounds.sum()
    sd = np.sqrt(((tokens - ratio * rounds) ** 2).sum()) / rounds.sum()
    low, high = ratio_interval(tokens, rounds, 4000) or (0.0, 0.0)
    assert (low, high) == pytest.approx((ratio - 1.96 * sd, ratio + 1.96 * sd), abs=0.12 * sd)


def test_intervals_of_few_prompts() -> None:
    assert ratio_interval([5], [2], 100) is None
    assert ratio_interval([5, 0], [2, 0], 100) is None  # a prompt without a round says nothing
    assert ratio_interval([], [], 100) is None
    assert ratio_interval([4, 8, 2], [2, 4, 1], 100) == (2.0, 2.0)
    assert ratio_interval([4, 9], [2, 3], 500) == ratio_interval([4, 9], [2, 3], 500) == (2.0, 3.0)


def test_figures_of_a_case_computed_by_hand() -> None:
    part = Acceptance(block_size=4)
    part.add(Decoded((1,) * 6, (3, 0), 2))
    part.add(Decoded((1,) * 4, (1, 0), 2))
    part.add(Decoded((1,), (), 0))
    assert part.num_prompts == 3 and part.num_tokens == 11 and part.rounds == [3, 0, 1, 0]
    assert part.histogram() == [2, 1, 0, 1]
    assert part.acceptance_length == 2.0 and part.interval(200) == (1.5, 2.5)
    assert part.prefix_survival() == [0.5, 0.25, 0.25] and part.conditional() == [0.5, 0.5, 1.0]


def test_rows_carry_interval_and_histogram(target: FrozenTarget, draft: DFlashDraft) -> None:
    prompts = [Prompt(f"p{i}", "s", PROMPT[: 3 + i]) for i in range(3)]
    found = evaluate_draft(target, draft, prompts, 6, bootstrap_samples=50)
    rows = {(r["source"], r["metric"], r["position"]): r["value"] for r in found.rows("trained", 3)}
    assert [rows["s", "histogram", n] for n in range(5)] == found.overall.histogram()
    assert (rows["all", "acceptance_length_low", None], rows["all", "acceptance_length_high", None]) == found.overall.interval(50)
    assert found.lossless is None and found.num_plain_forwards == found.overall.num_tokens - 3
    first = found.prompt_rows()[0]
    assert first["tokens"] == list(found.decoded[0].tokens) and first["prompt_ids"] == list(PROMPT[:3])
    assert first["num_prompt_tokens"] == 3 and first["equals_greedy"] is None


def test_a_difference_is_a_near_tie_only_where_the_logits_are_nearly_equal(
    target: FrozenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = greedy_decode(target, PROMPT, 9).tokens
    with torch.inference_mode():
        logits = target.step(torch.tensor([[*PROMPT, *plain[:6]]]), None)[0][0, -1]
    second = int(logits.topk(2).indices[1])
    wrong = explain_difference(target, "p", PROMPT, plain, (*plain[:6], second, *plain[7:]), 5)
    assert (wrong.position, wrong.plain, wrong.drafted, wrong.near_tie) == (6, plain[6], second, False)
    assert wrong.gap == pytest.approx(float(logits[plain[6]] - logits[second]), abs=1e-3)
    assert wrong.tolerance is not None and 0 < wrong.tolerance < 1e-2 < wrong.gap
    # The same place with a head whose two rows nearly agree: what one of them gains, rounding can take.
    head = target.head_VH.clone()
    head[second] = head[plain[6]] * (1 - 1e-7)
    monkeypatch.setattr(type(target), "step", _with_head(type(target).step, head, target))
    tie = explain_difference(target, "p", PROMPT, plain, (*plain[:6], second, *plain[7:]), 5)
    assert tie.near_tie and abs(tie.gap or 0.0) <= (tie.tolerance or 0.0)
    ended = explain_difference(target, "p", PROMPT, plain, plain[:4], 5)
    assert (ended.position, ended.drafted, ended.gap, ended.near_tie) == (4, None, None, False)


def _with_head(step: Any, head: torch.Tensor, target: FrozenTarget) -> Any:
    def changed(self: FrozenTarget, tokens: torch.Tensor, cache: Any) -> Any:
        states = self.model.get_decoder()(input_ids=tokens, cache=cache, use_cache=True).last_hidden_state
        return torch.nn.functional.linear(states, head), None

    return changed


def test_speed_counts_what_ran(target: FrozenTarget, draft: DFlashDraft, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never absolute times: shares are shares, ratios fit their parts, and both forms ran in turns."""
    monkeypatch.setattr(speed_module, "NUM_TOKENS", 4)
    monkeypatch.setattr(speed_module, "NUM_TURNS", 2)
    order: list[str] = []
    for name in ("greedy_decode_many", "speculative_decode_many"):
        real = getattr(speed_module, name)
        monkeypatch.setattr(speed_module, name, lambda *a, real=real, name=name, **k: (order.append(name[0]), real(*a, **k))[1])
    found = measure_speed(target, draft, [PROMPT, PROMPT[:7], PROMPT[:5]], 9, 3, 2)
    assert "".join(order) == "gs" * (2 + 2 * speed_module.NUM_TURNS)
    assert (found["single"]["num_prompts"], found["batched"]["num_prompts"]) == (2, 3)
    assert (found["single"]["num_tokens"], found["batched"]["num_tokens"]) == (6, 9)
    for part in (found["single"], found["batched"]):
        assert 0 < part["draft_share"] + part["verify_share"] <= 1
        assert part["speedup"] == pytest.approx(part["plain_s_per_token"] / part["speculative_s_per_token"])
    assert found["device"] == "cpu" and found["threads"] == torch.get_num_threads() and "little about a GPU" in found["note"]
    not_timed = measure_speed(target, draft, [PROMPT, PROMPT[:7]], 9, 2, 0)
    assert not_timed["single"] is None and not_timed["batched"] is None
    nothing = measure_speed(target, draft, [PROMPT, PROMPT[:7]], 1, 2, 2)
    assert nothing["single"] is None and nothing["batched"] is None


def test_a_reader_is_told_what_differs_and_why() -> None:
    part = {
        "plain_s_per_token": 0.002,
        "speculative_s_per_token": 0.001,
        "speedup": 2.0,
        "draft_share": 0.25,
        "verify_share": 0.7,
    }
    result = {
        "acceptance_length": 2.0, "acceptance_interval": [1.5, 2.5], "acceptance_length_untrained": None,
        "num_prompts": 2, "num_tokens": 9, "by_source": {"all": 2.0, "a": 1.5, "b": 2.5},
        "interval_by_source": {"all": [1.5, 2.5], "a": None, "b": None}, "histogram": [1, 0, 3],
        "conditional_by_position": [0.75, None], "prefix_survival_by_position": [0.75, 0.5], "lossless": False,
        "mismatches": ["x", "y"], "training": {"steps": 4, "num_anchors": 1200, "hours": 0.5},
        "differences": [
            {"id": "x", "position": 3, "plain": 7, "drafted": 8, "gap": 0.01, "tolerance": 0.1, "near_tie": True},
            {"id": "y", "position": 1, "plain": 7, "drafted": 8, "gap": 2.0, "tolerance": 0.1, "near_tie": False},
            {"id": "z", "position": 1, "plain": 7, "drafted": None, "gap": None, "tolerance": None, "near_tie": False},
        ],
        "speed": {
            "num_plain_forwards": 8, "num_speculative_forwards": 4, "target_forwards_saved": 2.0, "device": "cpu",
            "dtype": "float32", "threads": 1, "note": "a note", "single": {**part, "batch_prompts": 1}, "batched": None,
        },
    }  # fmt: skip
    text = "\n".join(describe_evaluation(result))
    for piece in (
        "2.000 (95 % of the prompts' resamplings: 1.500 to 2.500)", "b: 2.500", "1,200 anchors, 0.50 hours", "75.0%",
        "NOT lossless: 2 texts", "x: at new token 3", "rounding explains it", "rounding does NOT explain it", "has ended",
        "4 instead of 8", "2.0 ms per token plain, 1.0 ms with the draft (2.00 times as fast", "a note",
    ):  # fmt: skip
        assert piece in text, piece
    result |= {"acceptance_length": None, "acceptance_interval": None, "histogram": [0, 0, 0], "lossless": None}
    result |= {"conditional_by_position": [], "prefix_survival_by_position": [], "training": None}
    text = "\n".join(describe_evaluation(result))
    assert "acceptance length - on 2 prompts" in text and "no rounds" in text and "not compared" in text
