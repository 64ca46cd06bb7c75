"""A sweep as it is typed: ended by Ctrl-C in the middle, it goes on where it was, and compares all of its runs once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from flows import server
from tests.conftest import REPOSITORY, write_micro_experiment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PATIENCE_S = 300.0
STEPS = 100


class Place:
    """A folder with an experiment and its workspace."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.folder, self.home = folder, folder / "workspace"
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
        self.environment = {**inherited, "DFLASH_HOME": str(self.home), "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        path = write_micro_experiment(folder, target)
        values = yaml.safe_load(path.read_text())
        values["train"] |= {"max_steps": STEPS, "num_epochs": 1000}
        values["evaluate"] |= {"max_prompts": 2, "untrained_prompts": 0}
        path.write_text(yaml.safe_dump(values))

    def sweep(self) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "flows.cli", "sweep", "micro.yaml", "--grid", "train.lr=1e-3,2e-3", "--keep-server"]
        with (self.folder / "out").open("w") as sink:
            return subprocess.Popen(words, cwd=self.folder, env=self.environment, stdout=sink, stderr=sink)

    def said(self) -> str:
        return (self.folder / "out").read_text()

    def manifest(self, run: str) -> dict[str, Any]:
        """Of the run of a point of the grid; empty before there is one."""
        found = list(self.home.glob(f"runs/micro-sweep-{run}-*/manifest.json"))
        assert len(found) <= 1, "the run of a point is found again"
        return json.loads(found[0].read_text()) if found else {}

    def steps(self, run: str) -> int:
        return sum(path.read_text().count("\n") for path in self.home.glob(f"runs/micro-sweep-{run}-*/metrics/steps.jsonl"))


@pytest.fixture
def place(tmp_path: Path, micro_target: Path) -> Iterator[Place]:
    found = Place(tmp_path, micro_target)
    yield found
    server.stop(found.home, force=True)
    deadline = time.monotonic() + PATIENCE_S
    while left := [one.cmdline() for one in psutil.process_iter() if _home(one) == str(found.home)]:
        assert time.monotonic() < deadline, f"processes are left: {left}"
        time.sleep(0.1)


def _home(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("DFLASH_HOME") if process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None


def test_a_sweep_that_was_interrupted_goes_on_and_compares_once(place: Place) -> None:
    first, second = "lr-0.001", "lr-0.002"
    sweep = place.sweep()
    try:
        deadline = time.monotonic() + PATIENCE_S
        while place.steps(second) < 3:
            assert sweep.poll() is None and time.monotonic() < deadline, place.said()
            time.sleep(0.05)
        sweep.send_signal(signal.SIGINT)
        code = sweep.wait(timeout=PATIENCE_S)
    finally:
        sweep.kill()
        sweep.wait()
    assert code == 4, place.said()
    assert place.said().rstrip().endswith("run the same command again to go on")
    done, stopped = place.manifest(first), place.manifest(second)
    assert (done["state"], done["num_steps"]) == ("completed", STEPS)
    assert stopped["state"] == "stopped" and 3 <= stopped["num_steps"] < STEPS
    assert not (place.home / "reports").exists()

    again = place.sweep()
    try:
        code = again.wait(timeout=PATIENCE_S)
    finally:
        again.kill()
        again.wait()
    assert code == 0, place.said()
    resumed = place.manifest(second)
    assert (resumed["state"], resumed["num_steps"], resumed["attempt"]) == ("completed", STEPS, 1)
    assert (place.manifest(first)["attempt"], place.steps(first)) == (0, STEPS), "what is finished is adopted"
    assert [path.name for path in (place.home / "reports").iterdir()] == ["micro-sweep"]
    report = (place.home / "reports" / "micro-sweep" / "report.md").read_text()
    assert first in report and second in report
    assert len(list((place.home / "runs").iterdir())) == 2
