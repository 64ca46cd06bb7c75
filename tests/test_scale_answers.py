"""Answers in shards by real flows and their task runners: the same folder as without, also after the flow was killed."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import psutil
import pytest

from dflash_core.errors import ConfigError
from dflash_core.experiment_file import load_experiment
from dflash_core.experiment_regenerate import regenerate
from flows import command, server
from tests.conftest import REPOSITORY, TINY_TARGET, write_micro_experiment
from tests.fake_server import FakeServer, Reply, echo, fake_server
from tests.test_regenerate_server import write_prompts
from tests.test_regenerate_shards import contents, left_beside

KEY = "planted-server-key-0123456789"
NUM_ROWS, PATIENCE_S = 60, 200.0
AGAIN = "run the same command again to go on"
RUNNERS = ["thread", "process", "ray", "dask"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass
class Workplace:
    """A workspace with a Prefect server that stays between flows, a server of the target, and prompts for it."""

    experiment: Path
    environment: dict[str, str]
    target: FakeServer

    def overrides(self, name: str, **changes: Any) -> list[str]:
        prompts = self.experiment.parent / "prompts.jsonl"
        ours = {
            "data.name": name,
            "target.path": TINY_TARGET,
            "regenerate.files": f"[{prompts}]",
            "regenerate.base_url": self.target.url,
            "regenerate.api_key_env": "OUR_SERVER_KEY",
            "regenerate.concurrency": 4,
            "regenerate.max_new_tokens": 6,
            "topology.device": "cpu",
        }
        return [f"{key}={value}" for key, value in {**ours, **changes}.items()]

    def start(self, name: str, *words: str, **changes: Any) -> subprocess.Popen[str]:
        sets = [word for change in self.overrides(name, **changes) for word in ("--set", change)]
        return subprocess.Popen(
            [sys.executable, "-m", "flows.regenerate", str(self.experiment), *sets, "--keep-server", *words],
            env=self.environment,
            cwd=self.experiment.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def folder(self, name: str) -> Path:
        return Path(self.environment["DFLASH_HOME"]) / "answers" / name

    def expected(self, tmp_path: Path, name: str, **changes: Any) -> dict[str, Any]:
        """What one process makes of the same prompts."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DFLASH_HOME", str(tmp_path / "alone"))
            patch.setenv("OUR_SERVER_KEY", KEY)
            return contents(Path(regenerate(load_experiment(self.experiment, self.overrides(name, **changes)))["path"]))

    def processes(self) -> set[psutil.Process]:
        """Whatever was started for this workspace, by whomever; daemons of clusters too."""
        return {process for process in psutil.process_iter() if self.is_ours(process)}

    def is_ours(self, process: psutil.Process) -> bool:
        try:
            ours = process.environ().get("DFLASH_HOME") == self.environment["DFLASH_HOME"]
            return ours and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, OSError):
            return False


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory, micro_target: Path) -> Iterator[Workplace]:
    folder = tmp_path_factory.mktemp("answers")
    write_prompts(folder / "prompts.jsonl", NUM_ROWS)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    own = {"PYTHONPATH": str(REPOSITORY), "DFLASH_HOME": str(folder / "workspace"), "OUR_SERVER_KEY": KEY}
    with fake_server() as target:
        place = Workplace(write_micro_experiment(folder, micro_target), {**inherited, **own}, target)
        try:
            subprocess.run([sys.executable, "-m", "flows.server", "start"], env=place.environment, check=True, stdout=DEVNULL)
            yield place
        finally:
            server.stop(folder / "workspace", force=True)


@pytest.fixture(params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if name in ("ray", "dask") and importlib.util.find_spec(f"prefect_{name}") is None:
        pytest.skip(f"the extra {name!r} is not installed: make test-clusters")
    return name


def settled(workplace: Workplace, before: set[psutil.Process]) -> set[psutil.Process]:
    """What is still there of a flow that has ended, after it had time to end."""
    deadline = time.monotonic() + 60
    while (left := workplace.processes() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def test_every_runner_gives_the_same_answers(workplace: Workplace, runner: str, tmp_path: Path) -> None:
    workplace.target.script = echo
    before = workplace.processes()
    workplace.target.asked.clear()
    process = workplace.start(runner, "--task-runner", runner, "--shards", "2")
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert f"shards: 2, by task runner {runner}" in err and "Traceback" not in err and "answers: " in out
    assert len(workplace.target.asked) == NUM_ROWS
    assert {headers.get("Authorization") for headers in workplace.target.headers} == {f"Bearer {KEY}"}
    assert contents(workplace.folder(runner)) == workplace.expected(tmp_path, runner)
    assert settled(workplace, before) == set()
    for path in Path(workplace.environment["DFLASH_HOME"]).rglob("*"):  # Prefect's database among them
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_flow_that_is_killed_loses_nothing_leaves_nothing_and_goes_on(
    workplace: Workplace, runner: str, tmp_path: Path, number: signal.Signals
) -> None:
    if number is signal.SIGKILL and runner == "thread":
        pytest.skip("threads end with their process")
    before, name = workplace.processes(), f"{runner}-{number.name}"
    target, enough = workplace.target, 24

    def hold(body: dict[str, Any], place: int) -> Reply:
        return Reply(body=echo(body, place).body, wait_s=PATIENCE_S if place >= enough else 0.0)

    target.release.clear()
    target.asked.clear()
    target.script = hold
    words = ("--task-runner", runner, "--shards", "2")
    process = workplace.start(name, *words)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while len(target.asked) < enough + 4:  # all that may be under way are waiting
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        left = settled(workplace, before)
    finally:
        target.release.set()
        process.kill()
    assert left == set()
    assert process.returncode == (-9 if number is signal.SIGKILL else 128 + number), err
    assert number is signal.SIGKILL or [line for line in err.splitlines() if line.endswith(AGAIN)], err
    target.asked.clear()
    target.script = echo
    process = workplace.start(name, *words)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert len(target.asked) == NUM_ROWS - enough
    assert contents(workplace.folder(name)) == workplace.expected(tmp_path, name)
    assert [entry for entry in left_beside(workplace.folder(name)) if f".{name}." in entry and not entry.endswith(".lock")] == []


def test_a_target_in_processes_answers_as_in_this_one(workplace: Workplace, tmp_path: Path) -> None:
    write_prompts(workplace.experiment.parent / "few.jsonl", 8)
    changes = {
        "regenerate.base_url": "null",
        "regenerate.api_key_env": "null",
        "regenerate.files": f"[{workplace.experiment.parent}/few.jsonl]",
    }
    process = workplace.start("here", "--task-runner", "process", "--shards", "2", **changes)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert contents(workplace.folder("here")) == workplace.expected(tmp_path, "here", **changes)
    process = workplace.start("here", "--task-runner", "process", **changes)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0 and "unchanged, used again" in err


def test_what_a_shard_cannot_do_is_one_line(workplace: Workplace, tmp_path: Path) -> None:
    workplace.target.script = lambda body, number: Reply(401, {"message": f"not {KEY}"})
    process = workplace.start("refused", "--task-runner", "process", "--shards", "2")
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == ConfigError.exit_code and KEY not in err
    assert "the server refuses the key" in next(line for line in err.splitlines() if line.startswith("error: "))
    assert "Traceback" not in err


def test_regenerate_takes_the_options_of_shards(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    sets = [word for change in workplace.overrides("x") for word in ("--set", change)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_HOME", workplace.environment["DFLASH_HOME"])
        assert command.main("regenerate", [str(workplace.experiment), *sets, "--shards", "2"]) == 2
    assert "--shards and --task-runner-address need --task-runner" in capsys.readouterr().err
