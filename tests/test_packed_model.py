"""Packed rows in draft and target: every document comes out as if it stood alone."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.errors import ConfigError
from dflash_core.model import draft as draft_module
from dflash_core.model import target as target_module
from dflash_core.model.documents import Documents, context_windows, runs_of_documents
from dflash_core.model.draft import embed_blocks
from dflash_core.model.loss import block_loss
from dflash_core.model.reference import reference_block, reference_loss
from dflash_core.model.target import FrozenTarget
from tests.conftest import TINY_TARGET
from tests.test_model_draft import SPEC, make_draft

GAMMA = 3.0
# A document of one token, one whose only anchor is its first position, and two whose anchors share a group.
LENGTHS = (9, 1, 6, 4, 11)
ANCHORS = ((0, 3, 7), (0,), (0,), (1, 2), (2, 5, 9, 10))


def documents_of(lengths: tuple[int, ...], anchors: tuple[tuple[int, ...], ...] = ()) -> Documents:
    starts = [0, *accumulate(lengths)][:-1]
    places = [start for start, own in zip(starts, anchors, strict=False) for _ in own]
    return Documents(
        ids_RS=torch.tensor([[n for n, length in enumerate(lengths) for _ in range(length)]]),
        positions_RS=torch.tensor([[p for length in lengths for p in range(length)]]),
        starts_RA=torch.tensor([places]),
    )


class Row:
    """One packed row with random features and tokens, and its documents alone."""

    def __init__(self, seed: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        size, total = SPEC.hidden_size, sum(LENGTHS)
        self.embedding = torch.randn(SPEC.vocab_size, size, generator=generator)
        self.head = torch.randn(SPEC.vocab_size, size, generator=generator)
        self.features = torch.randn(1, total, 2 * size, generator=generator)
        self.tokens = torch.randint(0, 30, (1, total), generator=generator)
        self.documents = documents_of(LENGTHS, ANCHORS)
        self.starts = [0, *accumulate(LENGTHS)][:-1]
        self.anchors = torch.tensor([[s + a for s, own in zip(self.starts, ANCHORS, strict=True) for a in own]])
        self.labels, self.weights = self.targets()

    def targets(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Labels and weights by definition, all tokens supervised: they end with the document."""
        labels = torch.zeros(1, self.anchors.shape[1], SPEC.block_size, dtype=torch.long)
        weights = torch.zeros(labels.shape)
        ends = [s + n for s, n, own in zip(self.starts, LENGTHS, ANCHORS, strict=True) for _ in own]
        for a, (place, end) in enumerate(zip(self.anchors[0].tolist(), ends, strict=True)):
            for k in range(1, min(SPEC.block_size, end - place)):
                labels[0, a, k] = self.tokens[0, place + k]
                weights[0, a, k] = torch.exp(torch.tensor(-(k - 1) / GAMMA))
        return labels, weights

    def run(self, draft: Any, features: torch.Tensor | None = None, windows: Any = None) -> torch.Tensor:
        blocks = embed_blocks(self.embedding, self.tokens.gather(1, self.anchors), SPEC)
        final: torch.Tensor = draft(
            self.features if features is None else features, blocks, self.anchors, self.documents, windows
        )
        return final

    def alone(self) -> list[tuple[int, slice, tuple[int, ...]]]:
        """Number of the first anchor, place in the row, and anchors of each document."""
        first = [0, *accumulate(len(own) for own in ANCHORS)]
        return [(first[n], slice(s, s + LENGTHS[n]), ANCHORS[n]) for n, s in enumerate(self.starts)]


@pytest.fixture(params=[1, 2, 128])
def group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Anchors that share an attention call: one alone, groups across documents, all together."""
    monkeypatch.setitem(draft_module.ANCHORS_PER_GROUP, "cpu", request.param)
    return int(request.param)


def test_a_packed_row_equals_the_reference_of_each_document_alone(group: int) -> None:
    row, draft, slow = Row(), make_draft(), make_draft()
    final = row.run(draft)
    parts = block_loss(final, row.head, row.labels, row.weights)
    total, weights = torch.zeros(()), 0.0
    for first, place, anchors in row.alone():
        tokens = row.tokens[0, place].tolist()
        for n, anchor in enumerate(anchors):
            x = row.embedding[torch.tensor([tokens[anchor], *[SPEC.mask_token_id] * 3])]
            expected = reference_block(slow, row.features[0, place], x, anchor)
            # fp32, two layers: sums of a few hundred products differ in order only.
            torch.testing.assert_close(final[0, first + n], expected, rtol=1e-5, atol=1e-5)
            loss, weight = reference_loss(expected, row.head, tokens, [True] * len(tokens), anchor, GAMMA)
            total, weights = total + loss, weights + weight
    assert float(parts.weight_sum) == pytest.approx(weights, rel=1e-6)
    torch.testing.assert_close(parts.loss_sum, total, rtol=1e-5, atol=1e-4)
    parts.loss_sum.backward()
    total.backward()
    for (name, fast), plain in zip(draft.named_parameters(), slow.parameters(), strict=True):
        assert fast.grad is not None and plain.grad is not None
        torch.testing.assert_close(fast.grad, plain.grad, rtol=1e-4, atol=1e-3, msg=name)


def test_a_packed_row_equals_the_same_documents_in_padded_rows(group: int) -> None:
    row, packed, padded = Row(), make_draft(), make_draft()
    best = torch.nn.functional.linear(row.run(packed).detach(), row.head).argmax(-1)
    row.labels[:, ::2] = best[:, ::2]  # hits, so that there is something to count
    together = block_loss(row.run(packed), row.head, row.labels, row.weights)
    loss, weight, correct, count = torch.zeros(()), torch.zeros(()), torch.zeros(4), torch.zeros(4)
    for first, place, anchors in row.alone():
        own = slice(first, first + len(anchors))
        blocks = embed_blocks(row.embedding, row.tokens[:, place][:, list(anchors)], SPEC)
        final = padded(row.features[:, place], blocks, torch.tensor([anchors]))
        parts = block_loss(final, row.head, row.labels[:, own], row.weights[:, own])
        loss, weight = loss + parts.loss_sum, weight + parts.weight_sum
        correct, count = correct + parts.correct_K, count + parts.count_K
    torch.testing.assert_close(together.loss_sum, loss, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(together.weight_sum, weight)
    assert torch.equal(together.count_K, count) and torch.equal(together.correct_K, correct)
    assert count.tolist() == [0, 9, 6, 5] and all(0 < c < n for c, n in zip(correct[1:], count[1:], strict=True))
    together.loss_sum.backward()
    loss.backward()
    for (name, one), other in zip(packed.named_parameters(), padded.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other[1].grad, rtol=1e-4, atol=1e-3, msg=name)


def test_context_positions_begin_again_with_every_document() -> None:
    """Rotary embedding is relative, so that only the keys themselves show where a document's positions begin."""
    row, draft = Row(), make_draft()
    whole = draft.context(row.features, positions_RS=row.documents.positions_RS)
    for _, place, _ in row.alone():
        for layer, alone in zip(whole, draft.context(row.features[:, place]), strict=True):
            torch.testing.assert_close(layer.key[:, :, place], alone.key, rtol=1e-5, atol=1e-5)


def test_blocks_stand_where_their_document_puts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    row, real = Row(), draft_module.rotary_angles
    seen: list[list[int]] = []

    def noting(positions: torch.Tensor, *rest: Any) -> Any:
        seen.append(positions.flatten().tolist())
        return real(positions, *rest)

    monkeypatch.setattr(draft_module, "rotary_angles", noting)
    row.run(make_draft())
    context = [place for length in LENGTHS for place in range(length)]
    assert seen == [context, [anchor + k for own in ANCHORS for anchor in own for k in range(SPEC.block_size)]]


def test_nothing_outside_the_document_and_nothing_from_the_anchor_on_matters(group: int) -> None:
    row, draft = Row(), make_draft()
    before = row.run(draft)
    documents, anchors = row.documents.ids_RS[0], row.anchors[0]
    of_anchor = documents[anchors]
    for place in range(sum(LENGTHS)):
        changed = row.features.clone()
        changed[0, place] += 5.0
        after = row.run(draft, changed)
        sees = (of_anchor == documents[place]) & (anchors > place)
        # The same shapes and kernels: what is not seen changes nothing at all, whatever value it has.
        assert torch.equal(after[0, ~sees], before[0, ~sees]), place
        assert bool(((after - before)[0, sees].abs().amax(dim=(1, 2)) > 1e-6).all()), place


def test_an_anchor_without_any_context_sees_its_own_block(group: int) -> None:
    final = Row().run(make_draft())
    assert bool(torch.isfinite(final).all())
    lonely = Row()
    lonely.documents = documents_of((1,) * sum(LENGTHS), ((0,),) * sum(LENGTHS))
    lonely.anchors = torch.arange(sum(LENGTHS)).unsqueeze(0)
    assert bool(torch.isfinite(lonely.run(make_draft())).all())


def test_windows_known_beforehand_and_the_whole_context_give_the_same(group: int) -> None:
    """On a GPU windows come from the batch on the CPU; a window larger than needed changes rounding only."""
    row, draft = Row(), make_draft()
    known = context_windows(row.anchors, row.documents.starts_RA, group)
    assert torch.equal(row.run(draft, windows=known), row.run(draft))
    whole = [(0, sum(LENGTHS))] * len(known)
    torch.testing.assert_close(row.run(draft, windows=whole), row.run(draft), rtol=1e-5, atol=1e-5)


def test_a_window_runs_from_the_first_document_to_the_last_anchor() -> None:
    row = Row()
    assert context_windows(row.anchors, row.documents.starts_RA, 3) == [(0, 7), (9, 17), (16, 25), (20, 30)]


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=12), most=st.integers(1, 40))
def test_runs_hold_whole_documents_and_are_as_long_as_they_may_be(lengths: list[int], most: int) -> None:
    runs = runs_of_documents(documents_of(tuple(lengths)).ids_RS, most)
    bounds = [0, *accumulate(lengths)]
    assert [begin for begin, _, _ in runs] == [0, *(end for _, end, _ in runs[:-1])] and runs[-1][1] == sum(lengths)
    for begin, end, count in runs:
        assert bounds.index(end) - bounds.index(begin) == count
        assert count == 1 or end - begin <= most
        if end < bounds[-1]:
            assert end - begin + lengths[bounds.index(end)] > most


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def target(request: pytest.FixtureRequest, micro_target: Path) -> FrozenTarget:
    return FrozenTarget(micro_target, (1, 2), "float32", request.param, "cpu")


def assert_documents_are_as_if_alone(target: FrozenTarget, lengths: tuple[int, ...]) -> None:
    tokens = torch.randint(0, 250, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    features = target.features(tokens, None, documents_of(lengths))
    for n, end in enumerate(accumulate(lengths)):
        place = slice(end - lengths[n], end)
        alone = target.features(tokens[:, place])
        # The micro target's states go up to about 100: the tolerance is relative to them.
        torch.testing.assert_close(features[:, place], alone, rtol=1e-5, atol=1e-5 * float(alone.abs().max()))


@pytest.mark.parametrize("most", [1, 20, 512])
def test_states_of_a_packed_row_are_those_of_its_documents_alone(
    target: FrozenTarget, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Every document by itself, runs of a few, and all in one."""
    monkeypatch.setitem(target_module.TOKENS_PER_RUN, "cpu", most)
    assert_documents_are_as_if_alone(target, (9, 1, 1, 14, 3, 27))
    assert_documents_are_as_if_alone(target, (12,))


def test_so_are_those_of_the_tiny_target() -> None:
    assert_documents_are_as_if_alone(FrozenTarget(TINY_TARGET, (1, 2, 4), "float32", "sdpa", "cpu"), (30, 50, 7))


def test_other_documents_tokens_change_no_state(target: FrozenTarget) -> None:
    lengths, tokens = (8, 5, 9), torch.randint(0, 250, (1, 22), generator=torch.Generator().manual_seed(2))
    before = target.features(tokens, None, documents_of(lengths))
    changed = tokens.clone()
    changed[0, 8:13] = (changed[0, 8:13] + 1) % 250
    after = target.features(changed, None, documents_of(lengths))
    assert torch.equal(after[:, :8], before[:, :8]) and torch.equal(after[:, 13:], before[:, 13:])
    assert not torch.equal(after[:, 8:13], before[:, 8:13])


def test_positions_given_to_the_target_begin_again(target: FrozenTarget) -> None:
    """Its rotary embedding is relative, too; a target with learned positions would notice."""
    given: list[list[int]] = []
    handle = target.model.get_decoder().rotary_emb.register_forward_pre_hook(lambda _, args: given.append(args[1][0].tolist()))
    try:
        target.features(torch.zeros(1, 9, dtype=torch.long), None, documents_of((4, 2, 3)))
    finally:
        handle.remove()
    assert given == [[0, 1, 2, 3, 0, 1, 0, 1, 2]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_target_that_keeps_documents_apart_passes(micro_target: Path, dtype: str, attention: str) -> None:
    FrozenTarget(micro_target, (1, 2, 4), dtype, attention, "cpu").check_packing("micro")


REFUSED = r"^target\.path: my/model cannot be trained with bucketing\.strategy: packed: .*; use padded$"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("taps", [(0, 1), (1, 3)])
def test_a_target_with_a_state_along_the_row_is_refused(micro_target: Path, taps: tuple[int, ...], dtype: str) -> None:
    """A short convolution in one layer reaches three positions across the border, and is a leak for all layers behind."""
    leaking = FrozenTarget(micro_target, taps, dtype, "sdpa", "cpu")

    def convolve(_module: Any, args: Any) -> Any:
        states = args[0]
        shifted = [torch.roll(states, n, dims=1) * (torch.arange(states.shape[1]) >= n)[:, None] for n in (1, 2, 3)]
        return (states + 0.25 * sum(shifted), *args[1:])

    leaking.model.get_decoder().layers[1].register_forward_pre_hook(convolve)
    with pytest.raises(ConfigError, match=REFUSED) as caught:
        leaking.check_packing("my/model")
    assert "see each other" in str(caught.value)


def test_a_target_that_ignores_positions_is_refused(micro_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for takes_them in (True, False):
        target = FrozenTarget(micro_target, (1, 2), "float32", "sdpa", "cpu")
        decoder = target.model.get_decoder()

        def deaf(input_ids: torch.Tensor, use_cache: bool, position_ids: Any = None) -> Any:
            return decoder(input_ids=input_ids, use_cache=use_cache)  # noqa: B023

        def without(input_ids: torch.Tensor, use_cache: bool) -> Any:
            return decoder(input_ids=input_ids, use_cache=use_cache)  # noqa: B023

        model = SimpleNamespace(get_decoder=lambda f=deaf if takes_them else without: f, dtype=target.model.dtype)
        monkeypatch.setattr(target, "model", model)
        with pytest.raises(ConfigError, match=REFUSED) as caught:
            target.check_packing("my/model")
        assert ("see each other" if takes_them else "cannot be given positions") in str(caught.value)


def test_one_leaking_tap_among_many_is_enough(micro_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The taps are judged one by one: a mean over them would dilute a leak that only the last layers see."""
    target = FrozenTarget(micro_target, (0, 1, 2, 3), "float32", "sdpa", "cpu")
    real, size = target._tapped, target.shape.hidden_size
    factor = 1.0

    def leaking(tokens: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        states = real(tokens, positions).clone()
        if positions is not None:
            states[:, :, 3 * size :] *= factor
        return states

    monkeypatch.setattr(target, "_tapped", leaking)
    target.check_packing("my/model")
    factor += 2 * target_module.PACKING_TOLERANCE[torch.float32]
    with pytest.raises(ConfigError, match=REFUSED):
        target.check_packing("my/model")


def test_a_target_that_refuses_positions_by_their_value_is_refused(micro_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = FrozenTarget(micro_target, (1, 2), "float32", "sdpa", "cpu")

    def refuse(*_: Any) -> Any:
        raise ValueError("positions must\nascend")

    monkeypatch.setattr(target, "_tapped", refuse)
    with pytest.raises(ConfigError, match=REFUSED) as caught:
        target.check_packing("my/model")
    assert "it cannot be given positions (positions must ascend)" in str(caught.value)
