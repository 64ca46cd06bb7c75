"""The walk over a known answer counts what the draft-verify loop counts, round for round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.config import DraftConfig
from dflash_core.data import Prompt, load_tokenizer, read_prompts
from dflash_core.evaluation import greedy_decode, speculative_decode
from dflash_core.evaluation import walk as walk_module
from dflash_core.evaluation import walk_items as items_module
from dflash_core.evaluation.walk import WalkItem, accepted, known_slots, walk, walk_draft
from dflash_core.evaluation.walk_items import prepare_walk
from dflash_core.model import draft as draft_module
from dflash_core.model.draft import DFlashDraft, embed_blocks
from dflash_core.model.loss import block_loss
from dflash_core.model.spec import DraftSpec
from dflash_core.model.target import FrozenTarget
from tests.conftest import TINY_TARGET

B = 5
LIMIT = 24


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    """A target that says something: one with random weights soon repeats itself, and any draft learns that."""
    return FrozenTarget(TINY_TARGET, (1, 4), "float32", "sdpa", "cpu")


def draft_for(target: FrozenTarget) -> DFlashDraft:
    spec = DraftSpec.build(DraftConfig(num_layers=1, block_size=B, target_layer_ids=target.layer_ids), target.shape, 261)
    return DFlashDraft(spec).initialise(0)


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return read_prompts(TINY_TARGET.parent / "demo" / "held_out.jsonl", load_tokenizer(TINY_TARGET), 2)


@pytest.fixture(scope="module")
def items(target: FrozenTarget, prompts: list[Prompt]) -> list[WalkItem]:
    return prepare_walk(target, prompts, LIMIT, B)


def trained_on(target: FrozenTarget, items: Sequence[WalkItem], steps: int) -> DFlashDraft:
    """Has learnt a part of the answers by heart, so that rounds of every length occur."""
    draft = draft_for(target)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        for item in items:
            anchors, known = torch.arange(item.num_anchors), known_slots(item, B)
            slots = (anchors.unsqueeze(1) + torch.arange(B)).clamp(max=len(item.answer) - 1)
            labels = torch.tensor(item.answer)[slots].unsqueeze(0)
            weights = torch.cat([torch.zeros(len(anchors), 1), known.float()], dim=1).unsqueeze(0)
            features = item.features(item.num_context).unsqueeze(0).clone()
            blocks = embed_blocks(target.embedding_VH, labels[..., 0], draft.spec)
            final = draft(features, blocks, anchors.unsqueeze(0) + len(item.prompt))
            block_loss(final, target.head_VH, labels, weights).loss_sum.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
    return draft


@pytest.fixture(scope="module")
def draft(target: FrozenTarget, items: list[WalkItem]) -> DFlashDraft:
    return trained_on(target, items, 12)


def rounds_by_walk(draft: DFlashDraft, items: Sequence[WalkItem], target: FrozenTarget) -> list[int]:
    found = walk_draft(draft, items, target.embedding_VH, target.head_VH)
    assert found is not None
    return found.by_source["all"].rounds


def test_it_equals_the_loop_round_for_round(
    target: FrozenTarget, draft: DFlashDraft, items: list[WalkItem], prompts: list[Prompt]
) -> None:
    by_loop = [speculative_decode(target, draft, prompt.input_ids, LIMIT) for prompt in prompts]
    assert len({n for decoded in by_loop for n in decoded.accepted}) >= 3  # else this would show little
    for item, decoded in zip(items, by_loop, strict=True):
        found = walk_draft(draft, [item], target.embedding_VH, target.head_VH)
        assert found is not None and found.by_source["all"].rounds == list(decoded.accepted)
        assert found.by_source["all"].num_tokens == len(decoded.tokens)


@pytest.mark.parametrize("limit", [1, 7])
def test_end_tokens_and_limits_are_counted_as_in_the_loop(
    target: FrozenTarget, draft: DFlashDraft, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """Every token of the answers is made an end token in turn, so that ends fall on kept, rejected and last tokens."""
    for prompt in prompts[:1]:
        answer = greedy_decode(target, prompt.input_ids, 12).tokens
        for end in sorted(set(answer))[:3]:
            monkeypatch.setattr(target, "shape", replace(target.shape, eos_token_ids=(end,)))
            expected = speculative_decode(target, draft, prompt.input_ids, limit)
            (item,) = prepare_walk(target, [prompt], limit, B)
            found = walk_draft(draft, [item], target.embedding_VH, target.head_VH)
            assert found is not None and found.by_source["all"].rounds == list(expected.accepted)
            assert found.by_source["all"].num_tokens == len(expected.tokens)


def made_item(length: int, limit: int, ended: bool) -> WalkItem:
    return WalkItem((1, 2, 3), tuple(range(length)), limit, ended, "made up", lambda count: torch.zeros(count, 1))


@st.composite
def patterns(draw: st.DrawFn) -> tuple[WalkItem, torch.Tensor]:
    """An answer, and at which anchors which slots hit."""
    limit, ended = draw(st.integers(1, 30)), draw(st.booleans())
    length = draw(st.integers(1, limit + B - 1)) if ended else limit + B - 1
    item = made_item(length, limit, ended)
    hits = draw(st.lists(st.lists(st.booleans(), min_size=B - 1, max_size=B - 1), min_size=limit, max_size=limit))
    return item, torch.tensor(hits)[: item.num_anchors] & known_slots(item, B)


@settings(max_examples=80, deadline=None)
@given(patterns())
def test_the_walk_is_the_loop_for_any_pattern_of_hits(pattern: tuple[WalkItem, torch.Tensor]) -> None:
    """Against the loop itself, written plainly over token lists."""
    item, hits = pattern
    end = item.answer[-1] if item.ended else None
    tokens, expected = [item.answer[0]], []
    while len(tokens) < item.limit and tokens[-1] != end:
        emitted = []
        for k in range(1, B + 1):  # a proposal for every slot, and the target's own token behind or instead
            emitted.append(item.answer[len(tokens) - 1 + k])
            if emitted[-1] == end or k == B or not hits[len(tokens) - 1, k - 1]:
                break
        expected.append(len(emitted) - 1)
        tokens += emitted
    assert list(walk(accepted(item, hits))) == expected


def test_an_answer_that_is_cut_short_is_no_answer() -> None:
    item = made_item(8, 8, ended=False)
    with pytest.raises(AssertionError, match="cut short"):
        accepted(item, torch.zeros(item.num_anchors, B - 1, dtype=torch.bool))


def test_pieces_change_nothing(
    target: FrozenTarget, draft: DFlashDraft, items: list[WalkItem], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = rounds_by_walk(draft, items, target)
    monkeypatch.setattr(walk_module, "ANCHORS_PER_PIECE", 7)
    monkeypatch.setattr(walk_module, "SLOTS_PER_PIECE", 5)
    monkeypatch.setattr(walk_module, "TOKENS_PER_PIECE", 100)
    assert rounds_by_walk(draft, items, target) == expected


@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_a_target_that_also_gives_its_last_state_is_walked_by_its_taps(
    items: list[WalkItem], prompts: list[Prompt], kept: int
) -> None:
    """As the soft losses load it."""
    soft = FrozenTarget(TINY_TARGET, (1, 4), "float32", "sdpa", "cpu", last_state=True)
    (item,) = prepare_walk(soft, prompts[:1], 4, B, max_feature_bytes=kept)
    count = item.num_context
    torch.testing.assert_close(item.features(count), items[0].features(count))


@pytest.mark.parametrize("fault", ["begins one late", "stops too early"])
def test_planted_faults_are_seen(
    target: FrozenTarget, draft: DFlashDraft, items: list[WalkItem], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """What would make it another number than the loop's: the equality above would fail for each of these."""
    expected = rounds_by_walk(draft, items, target)
    if fault == "begins one late":
        monkeypatch.setattr(walk_module, "walk", lambda accepted_A: walk(accepted_A[1:]))
    else:
        items = [replace(item, limit=item.limit - 3) for item in items]
    assert rounds_by_walk(draft, items, target) != expected


@pytest.mark.parametrize("inclusive", [False, True])
def test_what_stands_at_and_behind_an_anchor_is_not_seen(
    target: FrozenTarget, draft: DFlashDraft, items: list[WalkItem], monkeypatch: pytest.MonkeyPatch, inclusive: bool
) -> None:
    """Rubbish from a position on reaches the anchors behind it alone; with an anchor that sees itself this test would fail."""
    item, place = items[0], 10
    finals: list[torch.Tensor] = []
    monkeypatch.setattr(walk_module, "_argmax", lambda final, head: finals.append(final) or torch.zeros(len(final)))
    if inclusive:
        real = draft_module.anchor_groups
        monkeypatch.setattr(draft_module, "anchor_groups", lambda anchors_RA, *rest: real(anchors_RA + 1, *rest))

    def spoilt(count: int) -> torch.Tensor:
        features = item.features(count).clone()
        features[len(item.prompt) + place :] = 9.0
        return features

    walk_draft(draft, [item, replace(item, features=spoilt)], target.embedding_VH, target.head_VH)
    same = [bool(torch.equal(a, b)) for a, b in zip(*(x.view(item.num_anchors, -1) for x in finals), strict=True)]
    assert same == [anchor < place + (0 if inclusive else 1) for anchor in range(item.num_anchors)]


def test_rows_and_figures_agree(target: FrozenTarget, draft: DFlashDraft, items: list[WalkItem]) -> None:
    items = [replace(item, source=f"source {number % 2}") for number, item in enumerate(items)]
    found = walk_draft(draft, items, target.embedding_VH, target.head_VH)
    assert found is not None and set(found.by_source) == {"all", "source 0", "source 1"} == set(found.accuracy)
    rounds = found.by_source["all"].rounds
    assert found.acceptance_length == 1 + sum(rounds) / len(rounds)
    rows = found.rows("training", 7)
    assert {(row["kind"], row["step"]) for row in rows} == {("training", 7)}
    values = {(row["source"], row["metric"], row["position"]): row["value"] for row in rows}
    assert len(values) == len(rows)
    assert values["all", "acceptance_length", None] == found.acceptance_length
    assert values["all", "expected_acceptance_length", None] == found.expected
    hits = [walk_module._hits(draft, item, target.embedding_VH, target.head_VH, None) for item in items]
    total = sum(len(hit) for hit in hits if hit is not None)
    assert found.accuracy["all"].count[0] == total  # every anchor has a next token
    assert values["all", "accuracy", 1] == sum(int(hit[:, 0].sum()) for hit in hits if hit is not None) / total
    for metric in ("num_prompts", "num_tokens", "num_target_forwards"):
        assert values["all", metric, None] == sum(values[f"source {i}", metric, None] for i in range(2))


def test_without_a_round_there_is_no_figure(target: FrozenTarget, draft: DFlashDraft, prompts: list[Prompt]) -> None:
    found = walk_draft(draft, prepare_walk(target, prompts[:1], 1, B), target.embedding_VH, target.head_VH)
    assert found is not None and found.acceptance_length is None and found.expected is None and found.rows("training", 1)


def test_it_ends_when_asked_to_and_leaves_the_draft_as_it_was(
    target: FrozenTarget, draft: DFlashDraft, items: list[WalkItem]
) -> None:
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    random_state = torch.get_rng_state()
    for parameter in draft.parameters():
        parameter.grad = torch.ones_like(parameter)
    for mode in (True, False):
        draft.train(mode)
        answers = iter([False, True])
        assert walk_draft(draft, items, target.embedding_VH, target.head_VH, answers.__next__) is None
        assert walk_draft(draft, items[:1], target.embedding_VH, target.head_VH) is not None
        assert draft.training is mode
    assert all(torch.equal(before[name], tensor) for name, tensor in draft.state_dict().items())
    assert all(p.grad is not None and (p.grad == 1).all() and p.requires_grad for p in draft.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
    draft.zero_grad()


def test_states_beyond_the_bytes_are_computed_again(
    target: FrozenTarget, items: list[WalkItem], prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    real = target.features
    monkeypatch.setattr(target, "features", lambda tokens: asked.append(tokens.shape[1]) or real(tokens))
    contexts, one = [item.num_context for item in items], items[0].num_context * len(target.layer_ids) * 192 * 4
    known = {item.prompt: item.answer for item in items}

    def bounded(max_feature_bytes: int) -> list[WalkItem]:
        asked.clear()
        answers = lambda _, prompts, limit: [known[prompt] for prompt in prompts]  # noqa: E731
        return prepare_walk(target, prompts, LIMIT, B, max_feature_bytes=max_feature_bytes, decode=answers)

    bounded(one - 1)
    assert contexts[0] not in asked
    made = bounded(one)
    assert asked == contexts[:1]
    for item, expected in zip(made, items, strict=True):
        assert torch.equal(item.features(item.num_context), expected.features(item.num_context))
    assert asked == contexts  # the first one was kept


def test_answers_are_decoded_once_and_a_damaged_file_is_made_anew(
    target: FrozenTarget, prompts: list[Prompt], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def decode(target: FrozenTarget, prompts: Sequence[Any], limit: int) -> Any:
        calls.append(limit)
        return [tuple(range(7, 7 + limit)) for _ in prompts]

    def answers(some: list[Prompt] = prompts[:2], limit: int = 6, block: int = B, weights: str = "w") -> list[Any]:
        made = prepare_walk(
            target, some, limit, block, cache=tmp_path / "cache", weights=weights, decode=decode, max_feature_bytes=0
        )
        return [item.answer for item in made]

    first = answers()
    assert answers() == first and calls == [10]
    answers(prompts[1:3]), answers(limit=7), answers(weights="v")
    assert calls == [10, 10, 11, 10] and len(list((tmp_path / "cache").iterdir())) == 4
    assert answers(limit=7, block=B - 1) == first and len(calls) == 4  # only how far they reach counts
    key = items_module.answers_key(target, [prompt.input_ids for prompt in prompts[:2]], 10, "w")
    path = tmp_path / "cache" / f"{key[:24]}.json"
    whole = path.read_text()
    for damage in ("", "[]", "{}", whole[:-30], whole.replace(f"{first[0][1]}", f"{first[0][1] + 1}", 1), "\xff"):
        path.write_text(damage, encoding="latin-1")
        caplog.clear()
        assert answers() == first and path.read_text() == whole
        assert "damaged" in caplog.text and str(path) in caplog.text
    assert len(calls) == 4 + 6


def test_answers_that_cannot_be_kept_are_used_all_the_same(
    target: FrozenTarget, prompts: list[Prompt], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert prepare_walk(target, prompts[:1], 2, B, cache=tmp_path / "file")[0].answer
    assert "could not be kept" in caplog.text


def test_a_draft_that_gives_no_numbers_is_accepted_never(target: FrozenTarget, items: list[WalkItem]) -> None:
    draft = draft_for(target)
    with torch.no_grad():
        draft.norm.weight.fill_(torch.nan)
    found = walk_draft(draft, items[:1], target.embedding_VH, target.head_VH)
    assert found is not None and found.acceptance_length == 1.0
