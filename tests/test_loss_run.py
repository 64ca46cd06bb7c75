"""The losses in whole steps and runs: cells and micro-batches, the target's last state, resuming, and where a draft begins."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_core import experiment as root
from dflash_core.config import Loss, TrainConfig
from dflash_core.errors import ConfigError
from dflash_core.model.draft import DFlashDraft, embed_blocks
from dflash_core.model.initialise import calibrate_final_norm
from dflash_core.model.loss import SOFT_LOSSES, TargetStates, block_loss
from dflash_core.model.spec import DraftSpec
from dflash_core.model.target import FrozenTarget
from dflash_core.pipeline import Loaded
from dflash_core.records import BatchShape, PlannedBatch
from dflash_core.training import loop as loop_module
from dflash_core.training.collate import DraftBatch, _pack, _pad
from dflash_core.training.distributed import CellGroup
from dflash_core.training.loop import DraftTrainer, StepTotals
from dflash_core.training.target_loop import Ready
from tests.conftest import TINY_TARGET, write_micro_experiment
from tests.test_model_losses import LOSSES, Case
from tests.test_target_check import make_batch, random_tokens
from tests.test_target_loop import serve
from tests.test_training_run import assert_same_run, losses, rows, start, train, train_until_it_breaks

SPEC = DraftSpec(
    hidden_size=Case.WIDTH,
    intermediate_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=Case.VOCABULARY,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    max_position_embeddings=128,
    tie_word_embeddings=True,
    num_target_layers=6,
    block_size=Case.BLOCK,
    mask_token_id=40,
    target_layer_ids=(1, 3),
)


def make_trainer(loss: Loss, group: CellGroup | None = None) -> DraftTrainer:
    head = 0.5 * torch.randn(Case.VOCABULARY, Case.WIDTH, generator=torch.Generator().manual_seed(5))
    config = TrainConfig(loss=loss, dpace_alpha=0.3, clip_norm=1e9)
    return DraftTrainer(DFlashDraft(SPEC).initialise(1), head, head, config, 10, 1, group or CellGroup())


def make_ready(case: Case, places: list[int], loss: Loss, packed: bool = False) -> Ready:
    """The sequences at `places` as one batch; the states of a place are the same in every batch that has it."""
    generators = [torch.Generator().manual_seed(place) for place in places]
    states = [torch.randn(len(case.tokens[p]), 3 * Case.WIDTH, generator=g) for p, g in zip(places, generators, strict=True)]
    sequences, drawn = [case.tokens[p] for p in places], [case.drawn[p] for p in places]
    batch: DraftBatch = _pack(sequences, drawn) if packed else _pad(sequences, drawn, 0)
    features = torch.cat(states).unsqueeze(0) if packed else torch.nn.utils.rnn.pad_sequence(states, batch_first=True)
    width = (3 if loss in SOFT_LOSSES else 2) * Case.WIDTH
    count = sum(len(tokens) for tokens in sequences)
    shape = BatchShape(0, len(places), count, count, len(sequences[0]), 1, int((batch.weights_RAK > 0).sum()))
    loaded = Loaded(PlannedBatch(0, 0, 0, 0, 0, 0, tuple(places), packed), shape, batch, 1)
    return Ready(loaded, features[..., :width], 0.0, 0.0, 0.0)


class WithOther(CellGroup):
    """A cell whose reduction adds what another one has, which waits there."""

    def __init__(self, other: DraftTrainer, totals: StepTotals) -> None:
        super().__init__()
        self.other, self.totals = other, totals

    def reduce_step(self, parameters: list[torch.nn.Parameter], sums: Tensor) -> Tensor:
        for mine, its in zip(parameters, self.other.parameters, strict=True):
            assert mine.grad is not None and its.grad is not None
            mine.grad += its.grad
        return sums + self.totals.vector(sums.device, stop=False)


def one_step(loss: Loss, batches: list[Ready], others: list[Ready]) -> tuple[dict[str, Any], list[Tensor]]:
    """The row of a step, and its gradients as the optimizer sees them. `others` are the batches of a second cell."""
    trainer = make_trainer(loss)
    if others:
        other = make_trainer(loss)
        totals = other.begin()
        for ready in others:
            other.add(totals, ready)
        trainer.group = WithOther(other, totals)
    totals = trainer.begin()
    for ready in batches:
        trainer.add(totals, ready)
    row = trainer.end(0, totals, stop=False)
    return row, [p.grad.clone() for p in trainer.parameters if p.grad is not None]


@pytest.mark.parametrize("loss", LOSSES)
def test_micro_batches_cells_and_packing_do_not_change_the_step(loss: Loss) -> None:
    """The same three sequences: in one batch, one by one, in two cells, and in a packed row; only sums differ in order."""
    case = Case()

    def ready(*places: int, packed: bool = False) -> Ready:
        return make_ready(case, list(places), loss, packed)

    expected, grads = one_step(loss, [ready(0, 1, 2)], [])
    assert expected["loss"] > 0 and any(bool(grad.any()) for grad in grads)
    for mine, others in (
        ([ready(2), ready(0), ready(1)], []),
        ([ready(1)], [ready(0, 2)]),
        ([ready(0, 1, 2, packed=True)], []),
        ([ready(2, 0, packed=True)], [ready(1)]),
    ):
        row, again = one_step(loss, mine, others)
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert row["num_supervised"] == expected["num_supervised"]
        assert row["accuracy_by_position"] == pytest.approx(expected["accuracy_by_position"])
        for one, other in zip(grads, again, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5 * float(one.abs().max()))


@pytest.mark.parametrize("packed", [False, True])
def test_the_last_state_follows_behind_the_taps_and_gives_the_targets_logits(micro_target: Path, packed: bool) -> None:
    target = FrozenTarget(micro_target, (1, 2), "float32", "sdpa", "cpu", last_state=True)
    tokens = random_tokens(1, 23)
    batch = make_batch(tokens, (9, 14) if packed else None)
    features = target.features(tokens, None, batch.documents)
    assert features.shape == (1, 23, target.feature_width) and target.feature_width == 3 * 32
    with torch.inference_mode():
        parts = [tokens[:, :9], tokens[:, 9:]] if packed else [tokens]
        logits = torch.cat([target.model(input_ids=part).logits for part in parts], dim=1)
    found = features[..., 64:] @ target.head_VH.T
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5 * float(logits.abs().max()))
    taps_alone = FrozenTarget(micro_target, (1, 2), "float32", "sdpa", "cpu")
    assert torch.equal(features[..., :64], taps_alone.features(tokens, None, batch.documents))
    assert target.step(tokens, None)[1].shape == (1, 23, 64)  # what a draft decodes from has no room for it
    target.check_packing("micro")


def test_a_pass_through_all_layers_can_be_given_up_before_each(micro_target: Path) -> None:
    target, asked = FrozenTarget(micro_target, (1, 2), "float32", "sdpa", "cpu", last_state=True), []
    target.features(random_tokens(1, 4), lambda: bool(asked.append(1)))
    assert len(asked) == 5


def test_the_target_loop_serves_and_checks_batches_with_the_last_state(micro_target: Path) -> None:
    target = FrozenTarget(micro_target, (1, 2), "float32", "sdpa", "cpu", "bfloat16", last_state=True)
    ready, events = serve(target)
    assert [tuple(item.features_RSF.shape) for item in ready] == [(2, 6, 96)] * 3
    assert [fields["compared_taps"] for _, _, fields in events] == [[1, 2]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_target_that_scales_its_logits_has_no_soft_labels(micro_target: Path, dtype: str) -> None:
    target = FrozenTarget(micro_target, (1, 2), dtype, "sdpa", "cpu", "bfloat16", last_state=True)
    target.check_last_state("my/model")
    real = target.model.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        output = real(*args, **kwargs)
        output.logits = output.logits * 0.9
        return output

    target.model.forward = scaled
    with pytest.raises(ConfigError, match=r"^target\.path: my/model gives other logits .* train\.loss .*; use cross_entropy"):
        target.check_last_state("my/model")


def step_losses(trainer: DraftTrainer, totals: StepTotals) -> tuple[Tensor, Tensor]:
    """Loss and weights of a step, computed again from its batches."""
    loss = weight = torch.zeros(())
    width = 64  # two taps of the micro target
    for ready, *_ in totals.batches:
        batch, features = ready.loaded.payload, ready.features_RSF.clone()
        blocks = embed_blocks(trainer._embedding_VD, batch.anchor_tokens_RA, trainer.draft.spec)
        final = trainer.draft(features[..., :width], blocks, batch.anchors_RA)
        target = TargetStates(features[..., width:], batch.anchors_RA) if trainer.config.loss in SOFT_LOSSES else None
        labels = (batch.labels_RAK, batch.weights_RAK)
        parts = block_loss(final, trainer._head_VD, *labels, trainer.config.loss, trainer.config.dpace_alpha, target)
        loss, weight = loss + parts.loss_sum, weight + parts.weight_sum
    return loss, weight


@pytest.mark.parametrize("loss", ["dpace", "kl", "total_variation"])
def test_what_is_logged_is_what_is_optimised(micro_experiment: Path, monkeypatch: pytest.MonkeyPatch, loss: str) -> None:
    run_dir = start(
        micro_experiment, "mean", f"train.loss={loss}", "train.max_steps=2", "train.clip_norm=1e9", "train.scale_features=false"
    )
    real, seen = loop_module.DraftTrainer.end, []

    def end(self: Any, step: int, totals: Any, stop: bool) -> Any:
        before = [p.detach().clone() for p in self.parameters]
        expected_loss, weight = step_losses(self, totals)
        expected = torch.autograd.grad(expected_loss / weight, self.parameters)
        row = real(self, step, totals, stop)
        for parameter, gradient in zip(self.parameters, expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)
        assert row["loss"] == pytest.approx(float((expected_loss / weight).detach()), rel=1e-5)
        assert any(not torch.equal(p, b) for p, b in zip(self.parameters, before, strict=True))
        seen.append(row["loss"])
        return row

    monkeypatch.setattr(loop_module.DraftTrainer, "end", end)
    root.train_run(root.load_experiment(run_dir / "config.yaml"), run_dir)
    assert losses(run_dir) == seen and len(seen) == 2
    if loss == "total_variation":
        assert all(0 < value < 1 for value in seen)
    # Bytes are reserved for the last state, too: with the soft losses three states of 32 numbers for every position.
    largest = max(row["num_padded_tokens"] for row in rows(run_dir, "batches"))
    states = 3 if loss in SOFT_LOSSES else 2
    reserved = max(row["max_reserved_bytes"] for row in rows(run_dir, "stats"))
    assert reserved >= largest * states * 32 * 4


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpace", "kl", "total_variation"])
def test_a_run_lowers_each_loss_and_resumes_exactly(micro_experiment: Path, monkeypatch: pytest.MonkeyPatch, loss: str) -> None:
    """Packed, so that labels, anchors and the target's states all stand somewhere else than in their documents."""
    overrides = (f"train.loss={loss}", "bucketing.strategy=packed")
    whole = train(micro_experiment, "whole", *overrides)
    broken = start(micro_experiment, "broken", *overrides)
    train_until_it_breaks(broken, monkeypatch)
    root.train_run(root.load_experiment(broken / "config.yaml"), broken)
    assert_same_run(whole, broken)
    values = losses(train(micro_experiment, "longer", *overrides, "train.max_steps=30", "train.num_epochs=30"))
    assert sum(values[-5:]) < 0.95 * sum(values[:5])


@pytest.mark.parametrize("scale", [0.05, 1.0, 40.0])
def test_logits_of_random_states_begin_with_a_deviation_of_one(scale: float) -> None:
    """Whatever the head's size: here its rows differ among themselves, too, by a factor of up to 9."""
    generator = torch.Generator().manual_seed(0)
    head = scale * torch.randn(500, Case.WIDTH, generator=generator) * (1 + 8 * torch.rand(500, 1, generator=generator))
    draft = calibrate_final_norm(DFlashDraft(SPEC).initialise(0), head)
    logits = draft.norm(torch.randn(2000, Case.WIDTH, generator=generator)) @ head.T
    assert float(logits.detach().std()) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_a_head_that_says_nothing_leaves_the_norm_as_it_is(value: float) -> None:
    draft = calibrate_final_norm(DFlashDraft(SPEC).initialise(0), torch.full((7, Case.WIDTH), value))
    assert draft.norm.weight.tolist() == [1.0] * Case.WIDTH


def test_a_calibrated_draft_begins_with_logits_of_a_bearable_size(tmp_path: Path, home: Path) -> None:
    """At some 12 nats where log V is 5.6, for the mask's own embedding comes through to the tied head; a norm of 1 gives 19."""
    experiment = write_micro_experiment(tmp_path, TINY_TARGET)
    vocabulary = FrozenTarget(TINY_TARGET, (1,), "float32", "sdpa", "cpu").shape.vocab_size
    first = {}
    for wanted in ("false", "true"):
        changes = ("train.max_steps=1", "target.mask_token_id=261", f"train.calibrate_norm={wanted}")
        first[wanted] = losses(train(experiment, f"first-{wanted}", *changes))[0]
    assert math.log(vocabulary) < first["true"] < 2.5 * math.log(vocabulary) < first["false"]
