"""Training on several nodes: torchrun agents that meet at one address, here two on loopback with a cell each."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from dflash_core import cli
from dflash_core import experiment as root
from dflash_core.errors import ConfigError
from dflash_core.training.run_folder import RunFolder
from tests.conftest import write_micro_experiment
from tests.test_training_run import assert_same_run, rows, start

PATIENCE_S = 100.0
ALONE = "data.num_workers=1"  # so small a corpus is not worth processes


class Node:
    """One agent and its cell. Its processes end with the block that started it."""

    def __init__(self, run_dir: Path, port: int, *words: str, number: int = 0) -> None:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *words]
        meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test", "--local-addr=127.0.0.1"]
        train = ["-m", "dflash_core", "train", str(run_dir / "config.yaml"), "--run-dir", str(run_dir)]
        self.log = run_dir / f"agent-{number}.log"
        with self.log.open("w") as out:
            self.process = psutil.Popen(
                [*launcher, *meet, *train], stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )

    def wait(self) -> int:
        return int(self.process.wait(PATIENCE_S))

    def kill(self) -> None:
        """As when a node loses its power: agent and cell at once."""
        for process in [*self.process.children(recursive=True), self.process]:
            process.kill()

    def end(self) -> None:
        if self.process.is_running():
            self.kill()
        self.process.wait(PATIENCE_S)


@pytest.fixture
def nodes() -> Iterator[Callable[..., list[Node]]]:
    """Starts two agents of a run."""
    started: list[Node] = []

    def launch(run_dir: Path, *words: str) -> list[Node]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        pair = [Node(run_dir, port, *words, number=number) for number in (0, 1)]
        started.extend(pair)
        return pair

    yield launch
    for node in started:
        node.end()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def num_steps(run_dir: Path) -> int:
    return len(rows(run_dir, "steps")) if (run_dir / "metrics" / "steps.jsonl").exists() else 0


@pytest.fixture(scope="module")
def one_node(tmp_path_factory: pytest.TempPathFactory, micro_target: Path) -> Path:
    """A run of two cells on one node, started as the flows start it."""
    folder = tmp_path_factory.mktemp("one_node")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_HOME", str(folder / "workspace"))
        run_dir = start(write_micro_experiment(folder, micro_target), "one-node", "topology.cells=2", ALONE)
        subprocess.run(root.train_command(run_dir), check=True, capture_output=True, timeout=PATIENCE_S)
    return run_dir


def test_more_cells_than_batches_is_one_line(micro_experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = start(micro_experiment, "few", ALONE)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match=r"bucketing\.batches_per_step: 2 batches for the 3 cells of all nodes"):
        root.train_run(root.load_experiment(run_dir / "config.yaml"), run_dir)
    assert root.run_state(run_dir) == "created"


def test_a_folder_for_torchrun_is_made_and_found_again(micro_experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # as after a requeue
        cli.create(micro_experiment, overrides=[ALONE])
    first, second = map(Path, capsys.readouterr().out.split())
    assert first == second and root.run_state(first) == "created"


@pytest.mark.slow
def test_two_nodes_train_what_two_cells_of_one_node_train(
    micro_experiment: Path, one_node: Path, nodes: Callable[..., list[Node]]
) -> None:
    run_dir = start(micro_experiment, "two-nodes", ALONE)
    assert [node.wait() for node in nodes(run_dir)] == [0, 0]
    assert RunFolder(run_dir).read_manifest()["state"] == "completed"
    assert {row["cell"] for row in rows(run_dir, "batches")} == {0, 1}
    assert_same_run(run_dir, one_node)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_is_lost_ends_the_other_and_the_run_resumes(
    micro_experiment: Path, one_node: Path, nodes: Callable[..., list[Node]], lost: int
) -> None:
    run_dir = start(micro_experiment, "lost", ALONE)
    paced = root.load_experiment(run_dir / "config.yaml", ["train.checkpoint_every=1"])
    root.create_run(paced, "lost", run_dir)
    pair = nodes(run_dir)
    wait_until(lambda: num_steps(run_dir) >= 2)
    pair[lost].kill()
    assert pair[1 - lost].wait() != 0
    told = [line for line in pair[1 - lost].log.read_text().splitlines() if line.startswith("error: ")]
    assert len(told) == 1 and "another cell ended" in told[0], pair[1 - lost].log.read_text()
    assert root.run_state(run_dir) == "failed"
    assert [node.wait() for node in nodes(run_dir)] == [0, 0]
    assert_same_run(run_dir, one_node)


@pytest.mark.slow
def test_an_agent_that_is_told_to_stop_stops_both_nodes_in_good_order(
    micro_experiment: Path, one_node: Path, nodes: Callable[..., list[Node]]
) -> None:
    run_dir = start(micro_experiment, "stopped", ALONE)
    pair = nodes(run_dir)
    wait_until(lambda: num_steps(run_dir) >= 1)
    pair[1].process.send_signal(signal.SIGTERM)
    assert all(node.wait() != 0 for node in pair)
    assert root.run_state(run_dir) == "stopped"
    assert [node.wait() for node in nodes(run_dir)] == [0, 0]
    assert_same_run(run_dir, one_node)
