"""The batches that a run has consumed read like its plan, at every level: what was planned is what was trained."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dflash_core import experiment as root
from dflash_core.analysis.order import order_levels_by_epoch
from dflash_core.analysis.runs import load_runs
from dflash_core.bucketing import OrderLevels, order_levels, plan_levels
from dflash_core.data import Dataset
from dflash_core.training.run_folder import RunFolder
from dflash_core.training.schedule import RunPlan
from tests.test_training_run import rows, start, train

WHOLE = ("train.num_epochs=2", "train.max_steps=1000", "bucketing.batches_per_step=3")
WAYS = [
    ("bucketing.sort_window=0",),
    ("bucketing.quadratic_length=64",),
    ("bucketing.sort_window=2",),
    ("bucketing.strategy=packed", "bucketing.pack_window=2"),
]


def consumed(batches: list[dict[str, Any]], num_buckets: int, num_cells: int) -> OrderLevels:
    column = {name: [row[name] for row in batches] for name in batches[0]}
    return order_levels(
        column["bucket"],
        step=column["step"],
        cell=column["cell"],
        mean_length=column["mean_seq_len"],
        num_buckets=num_buckets,
        num_sequences=column["num_sequences"],
        num_tokens=column["num_tokens"],
        num_padded_tokens=column["num_padded_tokens"],
        cost=column["cost"],
        num_cells=num_cells,
    )


def assert_run_reads_like_its_plan(run_dir: Path) -> RunPlan:
    config = root.load_experiment(run_dir / "config.yaml")
    lengths = Dataset.open(Path(RunFolder(run_dir).read_manifest()["dataset"])).lengths
    plan = RunPlan(lengths, root.edges(config, lengths), config.bucketing, config.train, config.topology.cells)
    batches = sorted(rows(run_dir, "batches"), key=lambda row: row["seq_no"])
    assert [row["seq_no"] for row in batches] == list(range(len(batches)))
    levels = order_levels_by_epoch(load_runs([run_dir])[0])
    for epoch in range(config.train.num_epochs):
        planned = plan_levels(plan.epoch_plan(epoch))
        found = consumed([row for row in batches if row["epoch"] == epoch], len(plan.edges), config.topology.cells)
        assert found == planned
        assert levels[epoch] == planned, "analysis reads the same from the run's folder"
        assert planned.steps.num_steps > 2 and planned.flat.longest_run == planned.flat.shortest_possible_longest_run
    assert batches[-1]["step"] + 1 == plan.num_steps
    return plan


@pytest.mark.parametrize(
    "way",
    [WAYS[0], *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS[1:3]), WAYS[3]],
    ids=["random", "quadratic", "sorted", "packed"],
)
def test_consumed_batches_read_like_the_plan(micro_experiment: Path, way: tuple[str, ...]) -> None:
    assert_run_reads_like_its_plan(train(micro_experiment, "levels", *WHOLE, *way))


@pytest.mark.slow
def test_so_do_those_of_two_cells(micro_experiment: Path) -> None:
    two = start(micro_experiment, "two", *WHOLE, *WAYS[3], "topology.cells=2")
    done = subprocess.run(root.train_command(two), capture_output=True, text=True, timeout=110, env=dict(os.environ), check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert_run_reads_like_its_plan(two)
