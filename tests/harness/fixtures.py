"""Fixtures of tests that make whole runs: `pytest_plugins = ["tests.harness.fixtures"]`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import write_micro_experiment
from tests.harness.bench import Bench
from tests.harness.client import ForkServer


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """One process with everything imported, for all tests of whole runs."""
    server = ForkServer(tmp_path_factory.mktemp("fork_server") / "errors.txt")
    yield server
    server.close()


@pytest.fixture(scope="session")
def session_bench(tmp_path_factory: pytest.TempPathFactory, micro_target: Path, fork_server: ForkServer) -> Bench:
    folder = tmp_path_factory.mktemp("bench")
    return Bench(folder, write_micro_experiment(folder, micro_target), fork_server)


@pytest.fixture
def bench(session_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """The shared bench. A test after which a process is left fails."""
    monkeypatch.setenv("DFLASH_HOME", str(session_bench.folder / "workspace"))
    ours = psutil.Process()
    before = set(ours.children(recursive=True))
    yield session_bench
    left = session_bench.server.end_children()
    deadline = time.monotonic() + 2.0
    while others := _living(set(ours.children(recursive=True)) - before):
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    assert not left, f"processes left: {[child.pid for child in left]}, output {left[0].output()[-2000:]}"
    assert not others, f"processes left: {others}"


def _living(processes: set[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE and p.pid != os.getpid()]
