"""What listens, listens on this machine alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest

from dflash_core import experiment as root
from tests.conftest import REPOSITORY
from tests.test_training_run import start

PATIENCE_S = 100.0


def listening(processes: list[psutil.Process]) -> list[tuple[int, str]]:
    """Process and address of every socket that waits for connections."""
    found = []
    for process in processes:
        sockets = process.net_connections("inet") if process.is_running() else []
        found += [(process.pid, one.laddr.ip) for one in sockets if one.status == psutil.CONN_LISTEN]
    return found


def test_the_store_of_one_node_listens_on_loopback() -> None:
    from dflash_core.training.one_node import LoopbackRendezvous

    own = psutil.Process()
    before = listening([own])
    handler = LoopbackRendezvous("id")
    new = [entry for entry in listening([own]) if entry not in before]
    assert new == [(os.getpid(), "127.0.0.1")]
    met = handler.next_rendezvous()
    met.store.set("key", "value")
    assert met.store.get("key") == b"value" and (met.rank, met.world_size) == (0, 1)
    assert met.bootstrap_store_info is not None and met.bootstrap_store_info.master_addr == "127.0.0.1"


def test_no_command_of_ours_uses_the_launcher_that_listens_everywhere(
    micro_experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = root.train_command(start(micro_experiment, "two", "topology.cells=2", "data.num_workers=1"))
    assert "dflash_core.training.one_node" in command and "--standalone" not in command
    sources = [path for folder in ("dflash_core", "flows") for path in (REPOSITORY / folder).rglob("*.py")]
    assert [str(path) for path in sources if re.search(r"\"--standalone\"|\"torch\.distributed\.run\"", path.read_text())] == []


CELL = """
import sys, time
from pathlib import Path
import torch
from dflash_core.training.distributed import CellGroup
group = CellGroup.from_environment("cpu", 60.0)
total = torch.ones(1)
torch.distributed.all_reduce(total)
folder = Path(sys.argv[1])
(folder / f"met-{group.rank}").write_text(str(int(total)))
while not (folder / "enough").exists():
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_two_cells_of_one_node_listen_on_loopback(tmp_path: Path) -> None:
    """Launcher and cells, torchrun's store and gloo's own sockets."""
    (tmp_path / "cell.py").write_text(CELL)
    words = ["--nproc-per-node=2", str(tmp_path / "cell.py"), str(tmp_path)]
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_SOCKET_IFNAME")}
    environment["PYTHONPATH"] = str(REPOSITORY)
    launcher = psutil.Popen(
        [sys.executable, "-m", "dflash_core.training.one_node", *words], env=environment, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while len(met := [path.read_text() for path in tmp_path.glob("met-*")]) < 2 or "" in met:
            assert launcher.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        found = listening([launcher, *launcher.children(recursive=True)])
        assert met == ["2", "2"] and len(found) >= 3  # the store, and each cell
        assert [entry for entry in found if not ip_address(entry[1]).is_loopback] == []
        (tmp_path / "enough").touch()
        assert launcher.wait(PATIENCE_S) == 0
    finally:
        (tmp_path / "enough").touch()
        if launcher.is_running():
            launcher.terminate()
            launcher.wait(PATIENCE_S)
