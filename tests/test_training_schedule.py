"""Which batches a run trains: positions, resume, and that the number of cells changes nothing but the sharing."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from dflash_core.bucketing import choose_boundaries
from dflash_core.config import BucketingConfig, TopologyConfig, TrainConfig
from dflash_core.errors import ConfigError
from dflash_core.training.devices import CellDevices, cell_devices
from dflash_core.training.schedule import RunPlan, learning_rate

LENGTHS = np.random.default_rng(0).integers(4, 200, 90).astype(np.int32)
EDGES = choose_boundaries(LENGTHS, 4)


def make_plan(cells: int = 1, **train: int) -> RunPlan:
    bucketing = BucketingConfig(token_budget=512, batches_per_step=4)
    return RunPlan(LENGTHS, EDGES, bucketing, TrainConfig(num_epochs=3, **train), cells)


def test_each_epoch_trains_every_sequence_once() -> None:
    plan = make_plan()
    batches = list(plan.batches(0))
    for epoch in range(3):
        samples = [s for b in batches if b.epoch == epoch for s in b.samples]
        assert sorted(samples) == list(range(len(LENGTHS)))
    assert [b.seq_no for b in batches] == [b.position for b in batches] == list(range(len(batches)))
    assert sorted({b.step for b in batches}) == list(range(plan.num_steps))
    ends = [b.step for b in batches if b.ends_step]
    assert ends == list(range(plan.num_steps))


@pytest.mark.parametrize("from_step", [0, 1, 5, 9])
def test_a_resumed_run_sees_the_rest_of_the_same_plan(from_step: int) -> None:
    plan = make_plan()
    whole, rest = list(plan.batches(0)), list(plan.batches(0, from_step))
    assert rest == [b for b in whole if b.step >= from_step]
    assert plan.first_position(0, from_step) == rest[0].position
    outlines = list(plan.outlines(0, from_step))
    assert [o.step for o in outlines] == list(range(from_step, plan.num_steps))
    for outline in outlines:
        mine = [b for b in whole if b.step == outline.step]
        assert outline.num_batches == len(mine)
        assert outline.max_seq_len == max(LENGTHS[list(b.samples)].max() for b in mine)


def test_cells_share_the_steps_of_the_same_batches() -> None:
    alone, shared = make_plan(), make_plan(cells=2)
    expected = {b.seq_no: (b.step, b.samples) for b in alone.batches(0)}
    together = {b.seq_no: (b.step, b.samples) for cell in (0, 1) for b in shared.batches(cell)}
    assert together == expected
    for cell in (0, 1):
        positions = [b.position for b in shared.batches(cell)]
        assert positions == list(range(len(positions)))
        assert shared.first_position(cell, 6) == next(b.position for b in shared.batches(cell, 6))


def test_a_step_names_its_batches_of_all_cells_in_every_epoch() -> None:
    shared = make_plan(cells=3)
    for step in range(shared.num_steps):
        mine = [b.seq_no for cell in range(3) for b in shared.batches(cell, step) if b.step == step]
        assert shared.step_batches(step) == sorted(mine)


def test_what_is_trained_does_not_depend_on_the_cells() -> None:
    one, three = make_plan(cells=1).epoch_plan(1), make_plan(cells=3).epoch_plan(1)
    assert one.trained_fingerprint() == three.trained_fingerprint() and one.fingerprint() != three.fingerprint()
    assert one.trained_fingerprint() != make_plan(cells=1, seed=1).epoch_plan(1).trained_fingerprint()


def test_max_steps_cuts_the_plan() -> None:
    plan = make_plan(max_steps=5)
    assert plan.num_steps == 5
    assert {b.step for b in plan.batches(0)} == set(range(5))


def test_learning_rate_rises_then_falls_to_its_floor() -> None:
    config = TrainConfig(lr=1.0, warmup_fraction=0.1, final_lr_fraction=0.2)
    rates = [learning_rate(step, 100, config) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1.0)
    assert rates[10] == pytest.approx(1.0) and rates[55] == pytest.approx(0.6, abs=0.01)
    assert all(a >= b for a, b in pairwise(rates[10:])) and rates[-1] == pytest.approx(0.2, abs=0.01)


def test_devices_of_the_eight_gpu_topologies() -> None:
    apart = TopologyConfig(cells=2, targets_per_cell=3, device="cuda")
    assert cell_devices(apart, 1, num_gpus=8).targets == ("cuda:4", "cuda:5", "cuda:6")
    assert cell_devices(apart, 1, num_gpus=8).draft == "cuda:7"
    together = TopologyConfig(cells=8, colocated=True, device="cuda")
    assert {cell_devices(together, c, num_gpus=8).draft for c in range(8)} == {f"cuda:{c}" for c in range(8)}


def test_a_topology_that_does_not_fit_says_what_would() -> None:
    with pytest.raises(ConfigError, match=r"8 GPUs are needed and 4 exist.*cells: 4, colocated: true"):
        cell_devices(TopologyConfig(cells=2, targets_per_cell=3, device="cuda"), 0, num_gpus=4)
    with pytest.raises(ConfigError, match="no GPU"):
        cell_devices(TopologyConfig(device="cuda"), 0, num_gpus=0)


def test_listed_gpus_are_taken_in_their_order() -> None:
    listed = TopologyConfig(cells=2, targets_per_cell=1, devices=("cuda:6", "cuda:2", "cuda:0", "cuda:7"))
    assert cell_devices(listed, 0, num_gpus=8) == CellDevices("cuda:2", ("cuda:6",))
    assert cell_devices(listed, 1, num_gpus=8) == CellDevices("cuda:7", ("cuda:0",))
    together = TopologyConfig(cells=2, targets_per_cell=2, colocated=True, devices=("cuda:3", "cuda:1"))
    assert cell_devices(together, 1, num_gpus=4) == CellDevices("cuda:1", ("cuda:1", "cuda:1"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"devices": ("cuda:1", "cuda:1")}, "cuda:1 stands twice"),
        ({"devices": ("cuda:0", "cuda:4")}, "cuda:4 does not exist; there are 4 GPUs"),
        (
            {"devices": ("cuda:0",)},
            "2 GPUs are needed and 1 are listed in topology.devices; with 1 GPUs these fit: cells: 1, col",
        ),
        ({"devices": ("cuda:0", "cuda:1"), "device": "cpu"}, "lists GPUs, but topology.device is cpu"),
    ],
)
def test_listed_gpus_that_cannot_be_used_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cell_devices(TopologyConfig(**given), 0, num_gpus=4)
