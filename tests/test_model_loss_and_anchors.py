"""Anchors against their definition, and the loss against hand-computed cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.config import DraftConfig, check_draft_fits
from dflash_core.model import loss as loss_module
from dflash_core.model.anchors import default_gamma, draw_anchors, slot_weights
from dflash_core.model.loss import block_loss, expected_acceptance_length
from dflash_core.training.collate import _pack, _pad


@settings(max_examples=60, deadline=None)
@given(mask=st.lists(st.booleans(), min_size=2, max_size=40), block=st.integers(2, 9), limit=st.integers(1, 12))
def test_anchors_equal_their_definition(mask: list[bool], block: int, limit: int) -> None:
    tokens = np.arange(100, 100 + len(mask), dtype=np.int32)
    weights_K = slot_weights(block, 4.0)
    anchors = draw_anchors(tokens, np.array(mask), num_anchors=limit, weights_K=weights_K, generator=np.random.default_rng(0))
    allowed = [a for a in range(len(mask) - 1) if mask[a] and mask[a + 1]]
    positions = anchors.positions.tolist()
    assert positions == sorted(set(positions)) and set(positions) <= set(allowed)
    assert len(positions) == min(limit, len(allowed))
    for a, labels, weights in zip(positions, anchors.labels, anchors.weights, strict=True):
        for k in range(block):
            on = k > 0 and a + k < len(mask) and all(mask[a : a + k + 1])
            assert weights[k] == (weights_K[k] if on else 0)
            if on:
                assert labels[k] == 100 + a + k


def test_a_block_is_labelled_up_to_the_end_of_its_answer_and_not_beyond_a_gap() -> None:
    """Two answers with a turn of two tokens between them; blocks of five slots. No slot is on behind one that is off."""
    mask = np.array([0, 1, 1, 1, 0, 0, 1, 1, 1], dtype=bool)
    tokens, weights_K = np.arange(50, 59, dtype=np.int32), slot_weights(5, 2.0)
    drawn = draw_anchors(tokens, mask, num_anchors=9, weights_K=weights_K, generator=np.random.default_rng(0))
    assert drawn.positions.tolist() == [1, 2, 6, 7]
    assert drawn.labels.tolist() == [[0, 52, 53, 0, 0], [0, 53, 0, 0, 0], [0, 57, 58, 0, 0], [0, 58, 0, 0, 0]]
    one, two = 1.0, math.exp(-0.5)
    expected = [[0, one, two, 0, 0], [0, one, 0, 0, 0], [0, one, two, 0, 0], [0, one, 0, 0, 0]]
    np.testing.assert_allclose(drawn.weights, expected, rtol=1e-6)


def test_packed_or_padded_a_block_ends_with_its_document() -> None:
    """The first document is supervised to its last token, and the one behind it from its first on."""
    sequences = [np.array([7, 8, 9], dtype=np.int32), np.array([4, 5, 6, 3], dtype=np.int32)]
    drawn = [
        draw_anchors(
            tokens,
            np.ones(len(tokens), dtype=bool),
            num_anchors=8,
            weights_K=slot_weights(4, 2.0),
            generator=np.random.default_rng(0),
        )
        for tokens in sequences
    ]
    packed, padded = _pack(sequences, drawn), _pad(sequences, drawn, 0)
    assert packed.anchors_RA.tolist() == [[0, 1, 3, 4, 5]]
    labels = [[0, 8, 9, 0], [0, 9, 0, 0], [0, 5, 6, 3], [0, 6, 3, 0], [0, 3, 0, 0]]
    assert packed.labels_RAK[0].tolist() == labels
    assert padded.labels_RAK.tolist() == [[*labels[:2], [0] * 4], labels[2:]]
    assert torch.equal(packed.weights_RAK[0] > 0, packed.labels_RAK[0] > 0)
    assert torch.equal(padded.weights_RAK > 0, padded.labels_RAK > 0)


def test_every_allowed_position_can_be_drawn() -> None:
    mask = np.ones(20, dtype=bool)
    seen: set[int] = set()
    for seed in range(60):
        drawn = draw_anchors(
            np.zeros(20, np.int32), mask, num_anchors=4, weights_K=slot_weights(4, 4.0), generator=np.random.default_rng(seed)
        )
        seen |= set(drawn.positions.tolist())
    assert seen == set(range(19))


def test_published_decay() -> None:
    assert [default_gamma(b) for b in (16, 10, 8)] == [7.0, 5.0, 4.0]
    assert slot_weights(8, 4.0)[:3].tolist() == pytest.approx([0.0, 1.0, math.exp(-0.25)])


def test_loss_of_a_case_computed_by_hand() -> None:
    """Two slots over a vocabulary of two with logits (0, ln 3): probabilities 1/4 and 3/4."""
    head = torch.tensor([[0.0], [1.0]])
    final = torch.full((1, 1, 3, 1), math.log(3.0))
    labels = torch.tensor([[[0, 1, 0]]])
    weights = torch.tensor([[[0.0, 1.0, 0.5]]])
    parts = block_loss(final, head, labels, weights)
    assert float(parts.loss_sum) == pytest.approx(1.0 * -math.log(3 / 4) + 0.5 * -math.log(1 / 4))
    assert float(parts.weight_sum) == 1.5
    assert parts.correct_K.tolist() == [0, 1, 0] and parts.count_K.tolist() == [0, 1, 1]


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(13, 8, generator=generator)
    labels = torch.randint(0, 13, (2, 5, 4), generator=generator)
    weights = torch.rand(2, 5, 4, generator=generator)
    weights[..., 0] = 0
    results = []
    for size in (10_000, 7):
        monkeypatch.setitem(loss_module.SLOTS_PER_PIECE, "cpu", size)
        final = torch.randn(2, 5, 4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        parts = block_loss(final, head, labels, weights)
        parts.loss_sum.backward()
        results.append((parts.loss_sum.detach(), final.grad, parts.correct_K))
    for whole, pieces in zip(*results, strict=True):
        torch.testing.assert_close(pieces, whole)


def test_a_batch_without_labels_has_a_loss_of_zero_and_a_gradient() -> None:
    final = torch.randn(1, 1, 4, 8, requires_grad=True)
    parts = block_loss(final, torch.randn(5, 8), torch.zeros(1, 1, 4, dtype=torch.long), torch.zeros(1, 1, 4))
    parts.loss_sum.backward()
    assert float(parts.loss_sum.detach()) == 0 and float(parts.weight_sum) == 0
    assert final.grad is not None and not final.grad.any()


def test_expected_acceptance_length() -> None:
    assert expected_acceptance_length([0.5, 0.5]) == 1.75
    assert expected_acceptance_length([0.0, 1.0]) == 1.0
    assert expected_acceptance_length([1.0] * 7) == 8.0


@pytest.mark.parametrize(
    ("layers", "taps", "expected"), [(36, 5, (1, 9, 17, 25, 33)), (6, 3, (1, 2, 3)), (8, 1, (4,)), (28, 2, (1, 25))]
)
def test_default_taps(layers: int, taps: int, expected: tuple[int, ...]) -> None:
    assert check_draft_fits(DraftConfig(num_taps=taps), layers) == expected


def test_taps_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="num_taps"):
        check_draft_fits(DraftConfig(num_taps=5), 6)
    with pytest.raises(ValueError, match="target_layer_ids"):
        check_draft_fits(DraftConfig(target_layer_ids=(3, 3)), 6)
    with pytest.raises(ValueError, match="target_layer_ids"):
        check_draft_fits(DraftConfig(target_layer_ids=(1, 6)), 6)
