"""Whole runs on packed rows: the same guarantees as for padded batches, and the same sums over an epoch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from dflash_core import experiment as root
from dflash_core.data import Dataset
from dflash_core.errors import ConfigError
from dflash_core.model.target import FrozenTarget
from dflash_core.training.run_folder import RunFolder
from tests.test_training_run import assert_same_run, losses, rows, start, train, train_until_it_breaks

PACKED = "bucketing.strategy=packed"


@pytest.fixture
def packed(micro_experiment: Path) -> Path:
    return train(micro_experiment, "packed", PACKED)


def test_a_packed_run_trains_whole_rows_and_lowers_the_loss(micro_experiment: Path) -> None:
    run_dir = train(micro_experiment, "longer", PACKED, "train.max_steps=25", "train.num_epochs=25")
    trained, batches = losses(run_dir), rows(run_dir, "batches")
    assert sum(trained[-5:]) < 0.8 * sum(trained[:5])
    assert all(row["num_padded_tokens"] == row["num_tokens"] <= 512 for row in batches)
    assert max(row["num_sequences"] for row in batches) > 2
    assert all(row["max_seq_len"] * row["num_sequences"] >= row["num_tokens"] for row in batches)
    dataset = Dataset.open(Path(RunFolder(run_dir).read_manifest()["dataset"]))
    first = [row for row in batches if row["epoch"] == 0]
    assert sum(row["num_sequences"] for row in first) == len(dataset)
    assert sum(row["num_tokens"] for row in first) == int(dataset.lengths.sum())
    for step in rows(run_dir, "steps"):
        mine = [row for row in batches if row["step"] == step["step"]]
        assert step["max_seq_len"] == max(row["max_seq_len"] for row in mine)
        assert step["num_padded_tokens"] == step["num_tokens"] == sum(row["num_tokens"] for row in mine)
    assert rows(run_dir, "stats")[-1]["padding_efficiency"] == 1.0
    edges = root.edges(root.load_experiment(run_dir / "config.yaml"), dataset.lengths)
    assert all(row["max_seq_len"] <= edges[row["bucket"]] for row in batches)


@pytest.mark.parametrize(
    ("targets", "workers", "dispatch"), [pytest.param(3, 4, "round_robin", marks=pytest.mark.slow), (2, 1, "least_loaded")]
)
def test_topology_does_not_change_the_losses_of_packed_rows(
    micro_experiment: Path, packed: Path, targets: int, workers: int, dispatch: str
) -> None:
    other = train(
        micro_experiment,
        f"other-{targets}",
        PACKED,
        f"topology.targets_per_cell={targets}",
        f"prefetch.num_workers={workers}",
        f"prefetch.dispatch={dispatch}",
        "prefetch.queue_batches=1",
        "prefetch.max_bytes=100000",
    )
    assert_same_run(packed, other)
    assert len({row["target"] for row in rows(other, "batches")}) == targets


@pytest.mark.slow
def test_two_cells_train_the_packed_rows_of_one(micro_experiment: Path, packed: Path) -> None:
    two = start(micro_experiment, "two", PACKED, "topology.cells=2")
    done = subprocess.run(root.train_command(two), capture_output=True, text=True, timeout=110, env=dict(os.environ), check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert losses(two) == pytest.approx(losses(packed), rel=1e-4)  # only the order of summation differs
    batches = rows(two, "batches")
    assert {row["cell"] for row in batches} == {0, 1}
    assert sorted(row["seq_no"] for row in batches) == [row["seq_no"] for row in rows(packed, "batches")]


def test_a_packed_run_that_failed_midway_resumes_exactly(
    micro_experiment: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = start(micro_experiment, "broken", PACKED)
    config = root.load_experiment(run_dir / "config.yaml")
    train_until_it_breaks(run_dir, monkeypatch)
    root.train_run(config, run_dir)
    assert_same_run(packed, run_dir)
    assert [event["step"] for event in rows(run_dir, "events") if event["kind"] == "resume"] == [4]


@pytest.mark.slow
def test_an_epoch_of_packed_rows_sums_up_to_an_epoch_of_padded_batches(micro_experiment: Path) -> None:
    """With weights that do not move, packing must not change what an epoch is made of: losses, weights, anchors."""
    still = ("train.num_epochs=1", "train.max_steps=1000", "train.lr=1e-20")
    one, other = train(micro_experiment, "padded", *still), train(micro_experiment, "packed-still", PACKED, *still)
    for key in ("num_sequences", "num_tokens", "num_anchors", "num_supervised", "loss_sum", "weight_sum"):
        padded, packed = (sum(row[key] for row in rows(run_dir, "batches")) for run_dir in (one, other))
        # Counts are exact; losses are fp32 sums of some thousand terms in another order.
        assert packed == (pytest.approx(padded, rel=1e-5) if key.endswith("_sum") else padded), key
    assert len(rows(other, "batches")) <= len(rows(one, "batches"))


def test_a_target_that_cannot_keep_documents_apart_is_refused_at_the_start(
    micro_experiment: Path, micro_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FrozenTarget._tapped
    monkeypatch.setattr(FrozenTarget, "_tapped", lambda self, tokens, _, *rest: real(self, tokens, None, *rest))
    run_dir = start(micro_experiment, "leaking", PACKED)
    with pytest.raises(ConfigError, match=r"target\.path: .* cannot be trained with bucketing\.strategy: packed") as caught:
        root.train_run(root.load_experiment(run_dir / "config.yaml"), run_dir)
    assert str(micro_target) in str(caught.value) and "\n" not in str(caught.value)
    assert RunFolder(run_dir).read_manifest()["state"] == "failed" and not (run_dir / "metrics" / "steps.jsonl").exists()
    train(micro_experiment, "padded", "train.max_steps=2")  # padded batches ask for nothing of the kind
