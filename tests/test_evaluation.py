"""The draft-verify loop equals plain greedy decoding, and the acceptance length is what was counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_core.config import DraftConfig
from dflash_core.data import Prompt
from dflash_core.evaluation import Acceptance, Baseline, Decoded, evaluate_draft, greedy_decode, speculative_decode
from dflash_core.evaluation import decode as decode_module
from dflash_core.model.draft import DFlashDraft, embed_blocks
from dflash_core.model.spec import DraftSpec
from dflash_core.model.target import FrozenTarget, read_target_shape

PROMPTS = [tuple(range(40 + i, 60 + 2 * i)) for i in range(4)]


@pytest.fixture(scope="module")
def target(micro_target: Path) -> FrozenTarget:
    return FrozenTarget(micro_target, (1, 2), "float32", "sdpa", "cpu")


@pytest.fixture(scope="module")
def draft(micro_target: Path) -> DFlashDraft:
    spec = DraftSpec.build(DraftConfig(num_layers=1, block_size=5, num_taps=2), read_target_shape(micro_target), 261)
    return DFlashDraft(spec).initialise(0).eval()


class Oracle:
    """Stands in for the draft's proposals: knows plain greedy's answer and gets a chosen number of tokens right."""

    def __init__(self, answer: tuple[int, ...], prompt_length: int, right: int) -> None:
        self.answer, self.prompt_length, self.right = answer, prompt_length, right

    def propose(self, context: Any, anchor_token: int, *_: Any) -> torch.Tensor:
        done = context.length - self.prompt_length
        assert anchor_token == self.answer[done]
        rest = [*self.answer[done + 1 : done + 5], 0, 0, 0, 0][:4]
        wrong = [(token + 1) % 250 for token in rest]
        return torch.tensor([*rest[: self.right], *wrong[self.right :]])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_output_equals_plain_greedy_decoding(target: FrozenTarget, draft: DFlashDraft, prompt: tuple[int, ...]) -> None:
    plain = greedy_decode(target, prompt, 16)
    drafted = speculative_decode(target, draft, prompt, 16)
    assert drafted.tokens == plain.tokens
    assert drafted.num_target_forwards == len(drafted.accepted) <= plain.num_target_forwards


@pytest.mark.parametrize("right", [0, 1, 3, 4])
def test_a_draft_that_is_right_so_often_is_accepted_so_often(
    target: FrozenTarget, draft: DFlashDraft, monkeypatch: pytest.MonkeyPatch, right: int
) -> None:
    """With caches cropped by one too few or too many, the texts would part after the first rejected token."""
    prompt = PROMPTS[1]
    limit = 1 + 4 * (right + 1)
    answer = greedy_decode(target, prompt, limit + 5).tokens
    assert len(answer) == limit + 5  # the micro target does not end here, or the counts below would be cut
    oracle = Oracle(answer, len(prompt), right)
    monkeypatch.setattr(decode_module.DraftContext, "propose", lambda context, *rest: oracle.propose(context, *rest))
    decoded = speculative_decode(target, draft, prompt, limit)
    assert decoded.tokens == answer[:limit]
    assert decoded.accepted == (right,) * 4


def test_the_draft_sees_states_before_the_anchor_only(
    target: FrozenTarget, draft: DFlashDraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Context in the loop equals the target's states of prompt and answer in one pass, up to the anchor."""
    seen: list[tuple[int, torch.Tensor]] = []
    original = decode_module.DraftContext.propose

    def spy(context: Any, *rest: Any) -> torch.Tensor:
        seen.append((context.length, context.layers[0].key.clone()))
        return original(context, *rest)

    monkeypatch.setattr(decode_module.DraftContext, "propose", spy)
    decoded = speculative_decode(target, draft, PROMPTS[0], 20)
    whole = draft.context(target.features(torch.tensor([[*PROMPTS[0], *decoded.tokens]])).clone())[0].key
    emitted = 1
    for round_number, (length, key) in enumerate(seen):
        assert length == len(PROMPTS[0]) + emitted - 1
        torch.testing.assert_close(key, whole[:, :, :length], rtol=1e-3, atol=1e-3)
        emitted += decoded.accepted[round_number] + 1


def test_decoding_proposes_what_the_training_forward_predicts(target: FrozenTarget, draft: DFlashDraft) -> None:
    """Lossless decoding holds for any draft, so it cannot see a wrong anchor position or shifted slots; this can."""
    sharp = DFlashDraft(draft.spec).initialise(0).eval()
    with torch.no_grad():
        for parameter in sharp.parameters():  # attention far from uniform
            parameter.mul_(3.0 if parameter.ndim == 2 else 1.0)
    tokens = torch.randint(0, 250, (1, 24), generator=torch.Generator().manual_seed(2))
    features = target.features(tokens)
    for anchor in range(1, 20):
        with torch.inference_mode():
            x = embed_blocks(target.embedding_VH, tokens[:, anchor : anchor + 1], sharp.spec)
            final = sharp(features, x, torch.tensor([[anchor]]))
            expected = (final[0, 0, 1:] @ target.head_VH.T).argmax(-1)
            context = decode_module.DraftContext(sharp)
            context.append(features[:, :anchor])
            proposed = context.propose(int(tokens[0, anchor]), target.embedding_VH, target.head_VH)
        assert torch.equal(proposed, expected)


def test_decoding_ends_with_the_end_token(target: FrozenTarget, draft: DFlashDraft, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = PROMPTS[2]
    answer = greedy_decode(target, prompt, 40).tokens
    shape = target.shape
    end = answer[7]
    monkeypatch.setattr(target, "shape", shape.__class__(**{**shape.__dict__, "eos_token_ids": (end,)}))
    expected = answer[: answer.index(end) + 1]
    assert greedy_decode(target, prompt, 40).tokens == expected
    oracle = Oracle(answer, len(prompt), 4)
    monkeypatch.setattr(decode_module.DraftContext, "propose", lambda context, *rest: oracle.propose(context, *rest))
    decoded = speculative_decode(target, draft, prompt, 40)
    assert decoded.tokens == expected
    assert 1 + sum(n + 1 for n in decoded.accepted) == len(expected)


def test_acceptance_figures_of_a_case_computed_by_hand() -> None:
    part = Acceptance(block_size=4)
    part.add(Decoded((1,) * 9, (3, 0, 1, 0), 4))
    assert part.acceptance_length == 2.0
    assert part.prefix_survival() == [0.5, 0.25, 0.25]
    assert part.conditional() == [0.5, 0.5, 1.0]
    assert Acceptance(4).acceptance_length is None


def test_evaluation_reports_by_source_and_notices_a_difference(target: FrozenTarget, draft: DFlashDraft) -> None:
    prompts = [Prompt(f"p{i}", "even" if i % 2 == 0 else "odd", ids) for i, ids in enumerate(PROMPTS)]
    baseline = Baseline(target, 8)
    good = evaluate_draft(target, draft, prompts, 8, baseline)
    assert good.lossless is True and not good.mismatches
    assert {name: part.num_prompts for name, part in good.by_source.items()} == {"all": 4, "even": 2, "odd": 2}
    rounds = good.by_source["even"].rounds + good.by_source["odd"].rounds
    assert sorted(rounds) == sorted(good.overall.rounds)
    baseline._answers[PROMPTS[3]] = (1, 2, 3)
    bad = evaluate_draft(target, draft, prompts, 8, baseline)
    assert bad.lossless is False and bad.mismatches == ("p3",)
    values = {(r["source"], r["metric"]): r["value"] for r in bad.rows("trained", 7) if r["position"] is None}
    assert values["all", "lossless"] == 0.0 and values["odd", "num_prompts"] == 2
