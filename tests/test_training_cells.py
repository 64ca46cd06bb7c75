"""Cells agree on what they train before they begin: every cell plans for itself, perhaps on another node."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from dflash_core import experiment as root
from dflash_core.errors import CellLostError, DataError, StoppedBySignal, TrainingError, UserError
from dflash_core.training.distributed import CellGroup
from dflash_core.training.run_folder import RunFolder
from tests.test_training_run import start

FACTS: dict[str, Any] = {"edges": [3, 9], "plan": "ab", "num_steps": 7}


def two_cells(monkeypatch: pytest.MonkeyPatch, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """The cell of `ours` meets one that sends what the cell of `theirs` sends."""
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(distributed, "all_reduce", lambda tensor, op: sent.append(tensor.clone()))
    CellGroup(1, 2).check_agreement(theirs, "cpu")
    monkeypatch.setattr(distributed, "all_reduce", lambda tensor, op: tensor.copy_(torch.maximum(tensor, sent[0])))
    CellGroup(0, 2).check_agreement(ours, "cpu")


@pytest.mark.parametrize("change", [{"edges": [3, 8]}, {"num_steps": 8}, {"plan": "ac"}, {"edges": [3], "num_steps": 1}])
def test_cells_that_differ_say_in_what(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    for ours, theirs in ((FACTS, FACTS | change), (FACTS | change, FACTS)):
        with pytest.raises(TrainingError, match=f"differ in {', '.join(change)};"):
            two_cells(monkeypatch, ours, theirs)


def test_cells_that_agree_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    two_cells(monkeypatch, FACTS, dict(FACTS))
    CellGroup().check_agreement(FACTS, "cpu")  # alone: nothing is sent


def test_a_cell_that_is_gone_is_not_mistaken_for_one_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any, **__: Any) -> None:
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(distributed, "all_reduce", lost)
    with pytest.raises(CellLostError, match="cell 1: another cell ended"):
        CellGroup(1, 2).check_agreement(FACTS, "cpu")


CELL = """
import sys
from dflash_core import experiment as root
from dflash_core.errors import TrainingError
run_dir, rank = sys.argv[1:]
config = root.load_experiment(run_dir + "/config.yaml", ["train.seed=1"] if rank == "1" else [])
try:
    root.train_run(config, run_dir)
except TrainingError as error:
    sys.exit("refused: " + str(error))
"""


@pytest.mark.slow
def test_a_run_whose_cells_plan_differently_trains_no_step(micro_experiment: Path) -> None:
    run_dir = start(micro_experiment, "split", "topology.cells=2")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    cells = [
        subprocess.Popen(
            [sys.executable, "-c", CELL, str(run_dir), rank],
            env={**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        told = [cell.communicate(timeout=90)[1] for cell in cells]
    finally:
        for cell in cells:
            cell.kill()
    for text in told:
        assert "refused: the cells of this run differ in train.seed, plan" in text
    manifest = RunFolder(run_dir).read_manifest()
    assert manifest["state"] == "failed" and "differ in train.seed" in manifest["error"]
    assert not (run_dir / "metrics" / "steps.jsonl").exists()


def test_torchrun_does_not_undo_a_stop(micro_experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To torchrun every exit code but 0 is a failure, and with topology.max_restarts it starts the cells again."""
    run_dir = start(micro_experiment, "stopped")
    RunFolder(run_dir).update_manifest(state="stopped")
    config = root.load_experiment(run_dir / "config.yaml")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(StoppedBySignal, match="stopped by a signal"):
        root.train_run(config, run_dir)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert root.train_run(config, run_dir)["state"] == "completed"


def test_a_second_start_does_not_touch_the_config_of_the_first(micro_experiment: Path) -> None:
    run_dir = start(micro_experiment, "first")
    before = (run_dir / "config.yaml").read_bytes()
    with RunFolder(run_dir).owned(), pytest.raises(UserError, match="another process is training this run"):
        root.create_run(root.load_experiment(micro_experiment, ["train.max_steps=3"]), "first", run_dir)
    assert (run_dir / "config.yaml").read_bytes() == before


@pytest.mark.parametrize("text", ["{}", "[1, 2]", "null", '{"run_id": "x"}', "{"])
def test_a_manifest_that_is_none_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=r"manifest\.json: not a readable run manifest"):
        RunFolder(tmp_path).read_manifest()


def test_cells_do_not_lose_each_others_words_in_the_manifest(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.update_manifest(run_id="x", state="running")

    def write(cell: int) -> None:
        for number in range(20):
            run.update_manifest(**{f"cell{cell}-{number}": number})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert all(run.read_manifest()[f"cell{cell}-{number}"] == number for cell in range(4) for number in range(20))
