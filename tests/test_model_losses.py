"""All four losses: hand-computed cases, the plain reference, and what the pieces must and must not do."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from dflash_core.config import Loss
from dflash_core.model import loss as loss_module
from dflash_core.model.anchors import draw_anchors, slot_weights
from dflash_core.model.loss import SOFT_LOSSES, LossParts, TargetStates, block_loss, dpace_weights
from dflash_core.model.reference import reference_row_loss
from dflash_core.training.collate import DraftBatch, _pad

LOSSES: tuple[Loss, ...] = ("cross_entropy", "dpace", "kl", "total_variation")
# A vocabulary of two whose logits are (0, x) for a state x of one number.
HEAD = torch.tensor([[0.0], [1.0]])
LN3 = math.log(3.0)


def states(*logits: float) -> Tensor:
    """Final states of one block whose slot k has the logits (0, logits[k])."""
    return torch.tensor(logits).view(1, 1, -1, 1).requires_grad_()


def gradient(parts: LossParts, final: Tensor) -> list[float]:
    parts.loss_sum.backward()
    assert final.grad is not None
    return list(final.grad.flatten().tolist())


def test_cross_entropy_by_hand() -> None:
    """q = (1/4, 3/4). The gradient of a logit is q minus 1 at the label, and only row 1 of the head is not 0."""
    final = states(9.0, LN3, LN3)
    parts = block_loss(final, HEAD, torch.tensor([[[0, 1, 0]]]), torch.tensor([[[0.0, 1.0, 0.5]]]))
    assert parts.loss_sum.item() == pytest.approx(1.0 * math.log(4 / 3) + 0.5 * math.log(4), rel=1e-6)
    assert parts.weight_sum.item() == 1.5
    assert gradient(parts, final) == pytest.approx([0.0, 3 / 4 - 1, 0.5 * 3 / 4])


def test_dpace_by_hand() -> None:
    """q = 3/4, 1/4, 3/4 and alpha = 1/2: s = 7/8, 5/8, 7/8. The decayed weights that come with the labels do not count."""
    final, labels = states(0.0, LN3, LN3, LN3), torch.tensor([[[0, 1, 0, 1]]])
    parts = block_loss(final, HEAD, labels, torch.tensor([[[0.0, 1.0, 0.7, 0.3]]]), "dpace", 0.5)
    reached = [7 / 8, 7 / 8 * 5 / 8, 7 / 8 * 5 / 8 * 7 / 8]
    weights = [sum(reached), reached[1] + reached[2], reached[2]]
    assert parts.weight_sum.item() == pytest.approx(sum(weights), rel=1e-6)
    expected = weights[0] * math.log(4 / 3) + weights[1] * math.log(4) + weights[2] * math.log(4 / 3)
    assert parts.loss_sum.item() == pytest.approx(expected, rel=1e-6)
    # The weights are constants to the gradient.
    assert gradient(parts, final) == pytest.approx([0.0, -weights[0] / 4, weights[1] * 3 / 4, -weights[2] / 4])


def test_dpace_leaves_slots_without_a_label_out_of_product_and_sum() -> None:
    """The middle slot of three has no label, whatever the draft thinks there."""
    final, labels = states(0.0, LN3, -50.0, LN3), torch.tensor([[[0, 1, 1, 1]]])
    parts = block_loss(final, HEAD, labels, torch.tensor([[[0.0, 1.0, 0.0, 1.0]]]), "dpace", 0.5)
    first, third = 7 / 8 + 7 / 8 * 7 / 8, 7 / 8 * 7 / 8
    assert parts.weight_sum.item() == pytest.approx(first + third, rel=1e-6)
    assert gradient(parts, final) == pytest.approx([0.0, -first / 4, 0.0, -third / 4])
    assert parts.count_K.tolist() == [0, 1, 0, 1]


@settings(max_examples=40, deadline=None)
@given(on=st.lists(st.booleans(), min_size=2, max_size=9), seed=st.integers(0, 99), alpha=st.floats(0, 1))
def test_dpace_weights_fall_along_a_block_and_count_the_labels_left_where_alpha_is_one(
    on: list[bool], seed: int, alpha: float
) -> None:
    index = torch.tensor([k for k, one in enumerate(on) if one], dtype=torch.long)
    likelihood = torch.rand(len(index), generator=torch.Generator().manual_seed(seed))
    shape = torch.Size((1, 1, len(on)))
    weights = dpace_weights(likelihood, index, shape, alpha).tolist()
    assert weights == sorted(weights, reverse=True) and all(0 <= w <= len(index) for w in weights)
    counted = dpace_weights(likelihood, index, shape, 1.0).tolist()
    assert counted == [len(index) - n for n in range(len(index))]


def soft(final: Tensor, last: list[float], loss: Loss, anchor: int = 0) -> LossParts:
    """One block at `anchor` with all slots but the anchor's on, and the target's states of one row."""
    weights = torch.ones(1, 1, final.shape[2])
    weights[..., 0] = 0
    target = TargetStates(torch.tensor(last).view(1, -1, 1), torch.tensor([[anchor]]))
    return block_loss(final, HEAD, torch.zeros_like(weights, dtype=torch.long), weights, loss, target=target)


def test_kl_by_hand() -> None:
    """p = (1/2, 1/2), q = (1/4, 3/4): sum p log(p / q) = (log 2 + log 2/3) / 2. The gradient is q - p."""
    final = states(0.0, LN3)
    parts = soft(final, [0.0, -7.0], "kl")
    assert parts.loss_sum.item() == pytest.approx((math.log(2) + math.log(2 / 3)) / 2, rel=1e-6)
    assert gradient(parts, final) == pytest.approx([0.0, 3 / 4 - 1 / 2])


def test_kl_is_from_the_target_to_the_draft_and_not_the_other_way() -> None:
    parts = soft(states(0.0, 0.0), [LN3], "kl")
    assert parts.loss_sum.item() == pytest.approx(math.log(1 / 2) / 4 + 3 * math.log(3 / 2) / 4, rel=1e-6)


def test_total_variation_by_hand() -> None:
    """p = (1/2, 1/2), q = (1/4, 3/4): half of 1/4 + 1/4. Where q rises, the distance falls by q(0) q(1) = 3/16."""
    final = states(0.0, LN3)
    parts = soft(final, [0.0, -7.0], "total_variation")
    assert parts.loss_sum.item() == pytest.approx(1 / 4, rel=1e-6)
    assert gradient(parts, final) == pytest.approx([0.0, 3 / 16])


@pytest.mark.parametrize("loss", SOFT_LOSSES)
def test_slot_k_of_anchor_a_is_predicted_by_the_state_at_a_plus_k_minus_1(loss: Loss) -> None:
    """Anchor 2: slots 1, 2 and 3 have the distributions of the target's places 2, 3 and 4, so that nothing is left."""
    last = [3.0, -3.0, 0.5, -1.0, 2.0, 4.0]
    assert soft(states(9.0, *last[2:5]), last, loss, anchor=2).loss_sum.item() == 0
    for wrong in (1, 3):
        assert soft(states(9.0, *last[wrong : wrong + 3]), last, loss, anchor=2).loss_sum.item() > 0.1
    weights, rows = torch.ones(2, 1, 2), torch.tensor([[1.0, 2.0, 3.0], [-1.0, -2.0, -3.0]]).unsqueeze(-1)
    weights[..., 0] = 0
    final = torch.tensor([[9.0, 2.0], [9.0, -3.0]]).view(2, 1, 2, 1)  # the second row's states are its own
    target = TargetStates(rows, torch.tensor([[1], [2]]))
    assert block_loss(final, HEAD, torch.zeros_like(weights, dtype=torch.long), weights, loss, target=target).loss_sum == 0


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), scale=st.sampled_from([0.1, 1.0, 30.0, 3000.0]))
def test_distances_have_their_bounds(seed: int, scale: float) -> None:
    """KL is at least 0 up to rounding, total variation between 0 and 1, and both are 0 of equal distributions."""
    generator = torch.Generator().manual_seed(seed)
    head = torch.randn(37, 5, generator=generator)
    final, last = scale * torch.randn(1, 1, 6, 5, generator=generator), scale * torch.randn(1, 6, 5, generator=generator)
    weights, labels = torch.ones(1, 1, 6), torch.zeros(1, 1, 6, dtype=torch.long)
    weights[..., 0] = 0

    def distance(loss: Loss, last: Tensor) -> float:
        target = TargetStates(last, torch.tensor([[0]]))
        return float(block_loss(final, head, labels, weights, loss, target=target).loss_sum)

    assert distance("kl", last) >= -1e-5 and 0 <= distance("total_variation", last) <= 5 * (1 + 1e-5)
    same = final[:, 0].roll(-1, dims=1)  # slot k is predicted by place k - 1
    assert distance("kl", same) == distance("total_variation", same) == 0


class Case:
    """A padded batch with gaps in what is supervised, random states, and the sequences it was made of."""

    VOCABULARY, WIDTH, BLOCK, GAMMA = 41, 12, 5, 3.0

    def __init__(self, seed: int = 0) -> None:
        numbers, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        lengths = (14, 9, 17)
        self.tokens = [numbers.integers(0, self.VOCABULARY, n).astype(np.int32) for n in lengths]
        self.masks = [numbers.random(n) < 0.8 for n in lengths]
        self.drawn = [
            draw_anchors(t, m, num_anchors=6, weights_K=slot_weights(self.BLOCK, self.GAMMA), generator=numbers)
            for t, m in zip(self.tokens, self.masks, strict=True)
        ]
        self.batch: DraftBatch = _pad(self.tokens, self.drawn, 0)
        self.final = 2 * torch.randn(*self.batch.labels_RAK.shape, self.WIDTH, generator=generator)
        self.last = 2 * torch.randn(*self.batch.tokens_RS.shape, self.WIDTH, generator=generator)
        self.head = torch.randn(self.VOCABULARY, self.WIDTH, generator=generator)

    def parts(self, loss: Loss, final: Tensor, rows: slice = slice(None)) -> LossParts:
        batch = self.batch
        target = TargetStates(self.last[rows], batch.anchors_RA[rows]) if loss in SOFT_LOSSES else None
        return block_loss(final[rows], self.head, batch.labels_RAK[rows], batch.weights_RAK[rows], loss, 0.3, target)

    def reference(self, loss: Loss, final: Tensor) -> tuple[Tensor, float]:
        total, weights = torch.zeros(()), 0.0
        for r, (tokens, mask, drawn) in enumerate(zip(self.tokens, self.masks, self.drawn, strict=True)):
            how: dict[str, Any] = {"loss": loss, "alpha": 0.3, "last_SD": self.last[r] if loss in SOFT_LOSSES else None}
            anchors = drawn.positions.tolist()
            own = final[r, : len(anchors)]
            part, weight = reference_row_loss(own, self.head, tokens.tolist(), mask.tolist(), anchors, self.GAMMA, **how)
            total, weights = total + part, weights + weight
        return total, weights


@pytest.mark.parametrize("size", [7, 512])
@pytest.mark.parametrize("loss", LOSSES)
def test_values_and_gradients_equal_the_reference(loss: Loss, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loss_module.SLOTS_PER_PIECE, "cpu", size)
    for seed in range(3):
        case = Case(seed)
        fast, slow = case.final.clone().requires_grad_(), case.final.clone().requires_grad_()
        parts, (total, weights) = case.parts(loss, fast), case.reference(loss, slow)
        assert parts.count_K.sum() > 20
        # fp32: sums over a vocabulary of 41 and some 30 slots differ in order only.
        assert parts.loss_sum.item() == pytest.approx(total.item(), rel=1e-5)
        assert parts.weight_sum.item() == pytest.approx(weights, rel=1e-5)
        parts.loss_sum.backward()
        total.backward()
        assert fast.grad is not None and slow.grad is not None
        assert float((fast.grad - slow.grad).abs().max()) <= 1e-4 * float(slow.grad.abs().max())


@pytest.mark.parametrize("loss", LOSSES)
def test_a_batch_cut_into_rows_adds_up_to_the_whole(loss: Loss) -> None:
    """Sums and their weights, never means: what the step divides once is the same for any cut."""
    case, results = Case(), []
    for cut in ((slice(0, 3),), (slice(0, 1), slice(1, 3)), (slice(2, 3), slice(0, 2))):
        final = case.final.clone().requires_grad_()
        loss_sum = weight_sum = 0.0
        for rows in cut:
            parts = case.parts(loss, final, rows)
            parts.loss_sum.backward()
            loss_sum, weight_sum = loss_sum + parts.loss_sum.item(), weight_sum + parts.weight_sum.item()
        assert final.grad is not None
        results.append((loss_sum / weight_sum, final.grad / weight_sum))
    for mean, grad in results[1:]:
        assert mean == pytest.approx(results[0][0], rel=1e-6)
        torch.testing.assert_close(grad, results[0][1], rtol=1e-5, atol=1e-8)


def test_hits_are_hits_on_the_label_for_every_loss() -> None:
    case = Case()
    counted = [case.parts(loss, case.final) for loss in LOSSES]
    best = (case.final @ case.head.T).argmax(-1)
    hits = ((best == case.batch.labels_RAK) & (case.batch.weights_RAK > 0)).sum(dim=(0, 1)).float()
    assert all(torch.equal(parts.correct_K, hits) for parts in counted)
    assert all(torch.equal(parts.count_K, (case.batch.weights_RAK > 0).sum(dim=(0, 1)).float()) for parts in counted)


class Largest(TorchDispatchMode):
    """The largest tensor that any operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and not tensor.is_inference():
                self.numel = max(self.numel, tensor.numel())
        return out


def large_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, TargetStates]:
    """60 labelled slots, 700 rows of the head, states of 4 numbers: only logits are large."""
    generator = torch.Generator().manual_seed(0)
    final, head = torch.randn(2, 10, 4, 4, generator=generator), torch.randn(700, 4, generator=generator)
    labels, weights = torch.randint(0, 700, (2, 10, 4), generator=generator), torch.ones(2, 10, 4)
    weights[..., 0] = 0
    anchors = torch.arange(10).repeat(2, 1)
    return final.requires_grad_(), head, labels, weights, TargetStates(torch.randn(2, 14, 4, generator=generator), anchors)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_logits_of_a_batch_never_exist_at_once(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    """No operation, forward or backward, gives more than one piece's logits."""
    monkeypatch.setitem(loss_module.SLOTS_PER_PIECE, "cpu", 8)
    final, head, labels, weights, target = large_inputs()
    with Largest() as largest:
        block_loss(final, head, labels, weights, loss, 0.5, target if loss in SOFT_LOSSES else None).loss_sum.backward()
    assert largest.numel == 8 * 700


@pytest.mark.parametrize(("loss", "products"), [("cross_entropy", 2), ("dpace", 2), ("kl", 3), ("total_variation", 3)])
def test_the_head_is_multiplied_twice_and_without_a_gradient_once(loss: Loss, products: int) -> None:
    """And once more for the target's own logits."""
    final, head, labels, weights, target = large_inputs()
    arguments = (head, labels, weights, loss, 0.5, target if loss in SOFT_LOSSES else None)
    product = 2 * 60 * 700 * 4
    with FlopCounterMode(display=False) as counter:
        parts = block_loss(final, *arguments)
        parts.loss_sum.backward()
    # A vector product along the vocabulary is no product with the head.
    by_kind = {str(kind): flops for kind, flops in counter.get_flop_counts()["Global"].items()}
    assert by_kind["aten.mm"] == products * product
    for with_grad, states_RAKD in ((False, final), (True, final.detach())):
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(with_grad):
            again = block_loss(states_RAKD, *arguments)
        assert {str(kind): flops for kind, flops in counter.get_flop_counts()["Global"].items()}["aten.mm"] == (
            (products - 1) * product
        )
        assert again.loss_sum.grad_fn is None and torch.equal(again.loss_sum, parts.loss_sum.detach())


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_can_be_used_more_than_once(loss: Loss) -> None:
    """Twice in one sum, in two backward passes, and beside another loss of the same states."""
    case = Case()
    once, often = case.final.clone().requires_grad_(), case.final.clone().requires_grad_()
    case.parts(loss, once).loss_sum.backward()
    parts = case.parts(loss, often)
    (2 * parts.loss_sum + parts.loss_sum).backward(retain_graph=True)
    parts.loss_sum.backward()
    case.parts(loss, often).loss_sum.backward()
    assert once.grad is not None and often.grad is not None
    torch.testing.assert_close(often.grad, 5 * once.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_softmax_is_in_fp32_whatever_the_product_is_in(loss: Loss) -> None:
    """4095 logits of 0 and one of 3: bf16 has 8 bits, which is 0.03 of a loss of about 8 and 1 of a sum of 4096."""
    head = torch.zeros(4096, 8, dtype=torch.bfloat16)
    head[5, 0] = 1.0
    final = torch.zeros(1, 1, 2, 8, dtype=torch.bfloat16)
    final[0, 0, 1, 0] = 3.0
    final.requires_grad_()
    target = TargetStates(torch.zeros(1, 1, 8, dtype=torch.bfloat16), torch.tensor([[0]])) if loss in SOFT_LOSSES else None
    labels, weights = torch.tensor([[[0, 7]]]), torch.tensor([[[0.0, 1.0]]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        parts = block_loss(final, head, labels, weights, loss, 1.0, target)
    total, five = 4095 + math.exp(3.0), math.exp(3.0) / (4095 + math.exp(3.0))
    expected = {
        "kl": (math.log(total) - math.log(4096)) - 3.0 / 4096,
        "total_variation": five - 1 / 4096,  # what one side gains the other has lost
    }.get(loss, math.log(total))
    assert parts.loss_sum.dtype == torch.float32 and parts.loss_sum.item() == pytest.approx(expected, rel=1e-4)
    parts.loss_sum.backward()
    wanted = {"kl": five - 1 / 4096, "total_variation": five * (1 - five)}.get(loss, five)
    assert final.grad is not None and final.grad.dtype == torch.bfloat16
    assert float(final.grad[0, 0, 1, 0]) == pytest.approx(wanted, rel=2**-8)


def test_weights_are_not_rounded_to_the_number_format_of_the_states() -> None:
    """2 / 3 of a gradient of 2^-1 exactly is rounded once, whether the weight comes from the slot or from behind the loss."""
    final = torch.zeros(1, 1, 2, 1, dtype=torch.bfloat16, requires_grad=True)
    parts = block_loss(final, HEAD.bfloat16(), torch.tensor([[[0, 0]]]), torch.tensor([[[0.0, 1.1]]]))
    (parts.loss_sum * 1.3).backward()
    assert final.grad is not None
    assert final.grad[0, 0, 1, 0] == torch.tensor(0.5 * 1.1 * 1.3).bfloat16()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", LOSSES)
def test_extreme_logits_stay_finite(loss: Loss, dtype: torch.dtype) -> None:
    """Logits of tens of thousands, the draft sure of what the target rules out; a draft of today starts far from there."""
    case = Case()
    final = (1e4 * case.final).to(dtype).requires_grad_()
    case.last, case.head = (-1e4 * case.last).to(dtype), case.head.to(dtype)
    parts = case.parts(loss, final)
    parts.loss_sum.backward()
    assert final.grad is not None and bool(torch.isfinite(final.grad).all())
    assert math.isfinite(parts.loss_sum.item()) and parts.weight_sum.item() > 0


@pytest.mark.parametrize("loss", LOSSES)
def test_states_that_are_not_finite_make_a_loss_that_is_not(loss: Loss) -> None:
    """The guard that skips such a step looks at loss and gradient norm."""
    case = Case()
    final = case.final.clone()
    labelled = (case.batch.weights_RAK > 0).nonzero()[0]
    final[tuple(labelled)] = math.nan
    assert math.isnan(case.parts(loss, final.requires_grad_()).loss_sum.item())


@pytest.mark.parametrize("loss", LOSSES)
def test_no_label_means_a_loss_of_zero_with_a_gradient(loss: Loss) -> None:
    final = torch.randn(1, 1, 4, 8, requires_grad=True)
    target = TargetStates(torch.randn(1, 1, 8), torch.zeros(1, 1, dtype=torch.long)) if loss in SOFT_LOSSES else None
    nothing = torch.zeros(1, 1, 4)
    parts = block_loss(final, torch.randn(5, 8), nothing.long(), nothing, loss, 0.5, target)
    parts.loss_sum.backward()
    assert parts.loss_sum.item() == parts.weight_sum.item() == 0
    assert final.grad is not None and not final.grad.any()


def test_soft_losses_need_the_target_and_the_others_do_not_take_it() -> None:
    case = Case()
    labels, weights = case.batch.labels_RAK, case.batch.weights_RAK
    target = TargetStates(case.last, case.batch.anchors_RA)
    for loss in LOSSES:
        wrong = None if loss in SOFT_LOSSES else target
        with pytest.raises(ValueError, match="target's last states"):
            block_loss(case.final, case.head, labels, weights, loss, 0.5, wrong)
