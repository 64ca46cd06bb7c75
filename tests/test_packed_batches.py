"""Packed batches: what the collator makes of documents, what it takes in bytes, and what a run plans."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dflash_core.bucketing import plan_epoch
from dflash_core.config import BucketingConfig, TrainConfig
from dflash_core.model.anchors import slot_weights
from dflash_core.pipeline.batch_stats import BatchStats
from dflash_core.records import PlannedBatch
from dflash_core.training import schedule
from dflash_core.training.collate import Collator, DraftBatch, batch_bytes
from dflash_core.training.schedule import RunPlan

BLOCK, ANCHORS = 4, 5


class FakeDataset:
    """Sequences of the given loss masks; token values name sequence and position."""

    def __init__(self, masks: list[list[bool]]) -> None:
        self.masks = masks

    def check_files(self, indices: tuple[int, ...]) -> None:
        pass

    def tokens(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        mask = np.array(self.masks[index])
        return (np.arange(len(mask)) + 1000 * (index + 1)).astype(np.int32), mask


def collate(masks: list[list[bool]], samples: tuple[int, ...], packed: bool) -> tuple[Any, DraftBatch]:
    dataset: Any = FakeDataset(masks)
    collator = Collator(dataset, seed=3, num_anchors=ANCHORS, weights_K=slot_weights(BLOCK, 4.0), pad_token_id=7, pin=False)
    return collator(PlannedBatch(0, 0, 2, 0, 0, 1, samples, True, packed))


def tensor_bytes(batch: DraftBatch) -> int:
    tensors = [batch.tokens_RS, batch.anchors_RA, batch.anchor_tokens_RA, batch.labels_RAK, batch.weights_RAK]
    return sum(tensor.nbytes for tensor in (*tensors, *(batch.documents or ())))


documents = st.lists(st.lists(st.booleans(), min_size=1, max_size=14), min_size=1, max_size=6)


@settings(max_examples=80, deadline=None)
@given(masks=documents)
def test_a_packed_row_holds_the_documents_with_the_anchors_they_have_alone(masks: list[list[bool]]) -> None:
    samples = tuple(reversed(range(len(masks))))
    shape, batch = collate(masks, samples, packed=True)
    lengths = [len(masks[sample]) for sample in samples]
    assert batch.documents is not None
    ids, positions, starts = (tensor[0].tolist() for tensor in batch.documents)
    assert ids == [n for n, length in enumerate(lengths) for _ in range(length)]
    assert positions == [p for length in lengths for p in range(length)]
    assert batch.tokens_RS[0].tolist() == [1000 * (s + 1) + p for s in samples for p in range(len(masks[s]))]
    first, num_anchors = [0, *accumulate(lengths)], 0
    for n, sample in enumerate(samples):
        alone_shape, alone = collate(masks, (sample,), packed=False)
        own = slice(num_anchors, num_anchors + alone_shape.num_anchors)
        num_anchors += alone_shape.num_anchors
        count = alone_shape.num_anchors
        assert batch.anchors_RA[0, own].tolist() == [first[n] + a for a in alone.anchors_RA[0, :count].tolist()]
        assert torch.equal(batch.anchor_tokens_RA[0, own], alone.anchor_tokens_RA[0, :count])
        assert torch.equal(batch.labels_RAK[0, own], alone.labels_RAK[0, :count])
        assert torch.equal(batch.weights_RAK[0, own], alone.weights_RAK[0, :count])
        assert starts[own] == [first[n]] * count
    assert batch.anchors_RA.shape[1] == max(1, num_anchors) and batch.anchors_RA[0].tolist() == sorted(
        batch.anchors_RA[0].tolist()
    )
    if num_anchors == 0:
        assert not batch.weights_RAK.any() and not batch.labels_RAK.any()
    labelled = batch.weights_RAK[0] > 0
    owners = torch.tensor(ids)[batch.anchors_RA[0]][:, None].expand(-1, BLOCK)[labelled]
    assert torch.equal(batch.labels_RAK[0][labelled] // 1000 - 1, torch.tensor(samples)[owners])  # never the next document's
    assert (shape.num_sequences, shape.num_tokens, shape.num_padded_tokens) == (len(masks), sum(lengths), sum(lengths))
    assert (shape.max_seq_len, shape.num_anchors, shape.bucket) == (max(lengths), num_anchors, 1)
    assert shape.num_supervised == int(labelled.sum())


@settings(max_examples=60, deadline=None)
@given(masks=documents, packed=st.booleans())
def test_bytes_are_never_underestimated_and_exact_where_all_anchors_are_drawn(masks: list[list[bool]], packed: bool) -> None:
    for filled in (masks, [[True] * (ANCHORS + 3)] * len(masks)):
        _, batch = collate(filled, tuple(range(len(filled))), packed)
        lengths = np.array([len(mask) for mask in filled])
        bound = batch_bytes(lengths, packed, ANCHORS, BLOCK, feature_bytes=100) - 100 * batch.tokens_RS.numel()
        # A padded batch leaves its anchors' own 16 bytes out of account.
        actual = tensor_bytes(batch) - (0 if packed else 16 * batch.anchors_RA.numel())
        assert bound >= actual if filled is masks else bound == actual


def test_a_batch_on_a_device_is_the_same_batch() -> None:
    for packed in (True, False):
        _, batch = collate([[True] * 6, [True] * 3], (0, 1), packed)
        copy = batch.to(torch.device("cpu"))
        assert (copy.documents is None) == (not packed)
        for name in ("tokens_RS", "anchors_RA", "anchor_tokens_RA", "labels_RAK", "weights_RAK"):
            assert torch.equal(getattr(copy, name), getattr(batch, name))
        assert all(map(torch.equal, copy.documents or (), batch.documents or ()))


def test_statistics_of_packed_batches_show_no_padding() -> None:
    stats = BatchStats(num_buckets=3, num_targets=1)
    for samples in ((0, 1), (2,)):
        shape, _ = collate([[True] * 6, [True] * 3, [True] * 8], samples, packed=True)
        stats.record(shape, 0)
    snapshot = stats.snapshot()
    assert snapshot["padding_efficiency"] == 1.0 and snapshot["num_tokens"] == snapshot["num_padded_tokens"] == 17
    assert (snapshot["num_sequences"], snapshot["max_seq_len"], snapshot["avg_batch_size"]) == (3, 8, 1.5)


LENGTHS = np.random.default_rng(0).integers(4, 200, 60).astype(np.int32)


class Planner:
    """Stands in for `plan_epoch`: notes what it is asked for, and plans another number of batches for every epoch."""

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.options: dict[str, Any] = {}

    def __call__(self, *args: Any, token_budget: int, epoch: int, **more: Any) -> Any:
        self.epochs.append(epoch)
        known = {"batches_per_step", "num_cells", "order", "seed"}
        self.options = {key: value for key, value in more.items() if key not in known}
        kept = {key: value for key, value in more.items() if key in known}
        return plan_epoch(*args, token_budget=token_budget + 150 * (epoch % 3), epoch=epoch, **kept)


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> Planner:
    monkeypatch.setattr(schedule, "SEQUENCES_KEPT", 0)  # as for a large dataset: two plans are kept
    planner = Planner()
    monkeypatch.setattr(schedule, "plan_epoch", planner)
    return planner


def make_plan(num_epochs: int = 5, cells: int = 1, max_steps: int | None = None, **bucketing: Any) -> RunPlan:
    train = TrainConfig(num_epochs=num_epochs, max_steps=max_steps)
    return RunPlan(LENGTHS, (60, 200), BucketingConfig(token_budget=400, batches_per_step=3, **bucketing), train, cells)


def test_the_planner_is_told_how_to_pack(planner: Planner) -> None:
    plan = make_plan(strategy="packed", max_sequences=9, quadratic_length=2048, pack_window=7)
    wanted = {"strategy": "packed", "max_sequences": 9, "quadratic_length": 2048, "sort_window": 0, "pack_window": 7}
    assert planner.options == wanted
    assert all(batch.packed for batch in plan.batches(0))
    plan = make_plan(sort_window=4)
    assert planner.options["sort_window"] == 4 and planner.options["strategy"] == "padded"
    assert not any(batch.packed for batch in plan.batches(0))


@pytest.mark.parametrize("cells", [1, 2])
def test_epochs_of_different_numbers_of_batches_are_numbered_through(planner: Planner, cells: int) -> None:
    plan = make_plan(cells=cells)
    sizes = [plan.epoch_plan(epoch).num_steps for epoch in range(5)]
    assert len(set(sizes)) == 3 and plan.num_steps == sum(sizes)
    everything = sorted(batch.seq_no for cell in range(cells) for batch in plan.batches(cell))
    assert everything == list(range(len(everything)))
    for cell in range(cells):
        whole = list(plan.batches(cell))
        assert [batch.position for batch in whole] == list(range(len(whole)))
        for from_step in range(plan.num_steps):
            rest = [batch for batch in whole if batch.step >= from_step]
            assert list(plan.batches(cell, from_step)) == rest
            assert plan.first_position(cell, from_step) == len(whole) - len(rest)
            outlines = list(plan.outlines(cell, from_step))
            assert [outline.step for outline in outlines] == list(range(from_step, plan.num_steps))
            assert [outline.num_batches for outline in outlines] == [
                sum(batch.step == step for batch in rest) for step in range(from_step, plan.num_steps)
            ]
    cut = make_plan(cells=cells, max_steps=sizes[0] + 2)
    assert [outline.step for outline in cut.outlines(0, 0)] == list(range(sizes[0] + 2))
    expected = [batch for batch in plan.batches(0) if batch.step < sizes[0] + 2]
    assert list(cut.batches(0)) == expected


def test_each_epoch_is_planned_once_to_be_counted_and_once_to_be_trained(planner: Planner) -> None:
    plan = make_plan()
    assert planner.epochs == [0, 1, 2, 3, 4]
    planner.epochs.clear()
    feed, lines = plan.batches(0), plan.outlines(0, 0)
    plan.first_position(0, 0)
    ahead = [next(feed) for _ in range(3)]  # as in a run: the feed is a few batches ahead of the train loop
    for outline in lines:
        while ahead and ahead[0].step == outline.step:
            ahead.pop(0)
            ahead.extend(batch for batch in [next(feed, None)] if batch is not None)
    assert planner.epochs == [2, 3, 4]


def test_a_resumed_run_plans_no_epoch_that_lies_behind(planner: Planner) -> None:
    sizes = [make_plan().epoch_plan(epoch).num_steps for epoch in range(5)]
    for from_step in (sum(sizes[:4]), sum(sizes[:4]) + 1, sum(sizes) - 1):
        plan = make_plan()
        planner.epochs.clear()
        first = plan.first_position(0, from_step)
        assert next(batch.position for batch in plan.batches(0, from_step)) == first
        assert [outline.step for outline in plan.outlines(0, from_step)] == list(range(from_step, plan.num_steps))
        assert planner.epochs == [4]


def test_bytes_are_known_before_loading(planner: Planner) -> None:
    plan = make_plan()
    for batch in plan.batches(0):
        assert plan.lengths_of(batch).tolist() == [LENGTHS[sample] for sample in batch.samples]


@pytest.mark.parametrize("packed", [False, True])
def test_anchors_are_drawn_anew_in_every_epoch_and_the_same_each_time(packed: bool) -> None:
    dataset: Any = FakeDataset([[True] * 60])
    collator = Collator(dataset, seed=3, num_anchors=ANCHORS, weights_K=slot_weights(BLOCK, 4.0), pad_token_id=7, pin=False)
    drawn = [collator(PlannedBatch(0, 0, epoch, 0, 0, 1, (0,), True, packed))[1].anchors_RA for epoch in (0, 1, 2, 1)]
    assert torch.equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[1], drawn[2])
