"""A preparation in shards makes the dataset that a preparation alone makes, whoever makes which part when."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core import experiment as root
from dflash_core.data.replace_folder import folder_lock, shared_building
from dflash_core.data.shards import share_out
from dflash_core.errors import ConfigError, DataError
from dflash_core.experiment_data import dataset_folder
from dflash_core.experiment_shards import make_shard, plan_shards
from flows import command, server
from flows.shards import task_runner
from flows.tasks import Request
from tests.conftest import REPOSITORY, write_corpus, write_micro_experiment
from tests.prefect_api import ask

PLANTED = "planted-server-key-0123456789"


def write_files(folder: Path) -> list[str]:
    """Overrides for a dataset of several files, one of them large, with bad rows and ids that stand twice."""
    write_corpus(folder / "large.jsonl", 300)
    write_corpus(folder / "small.jsonl", 30)  # its ids are those of the others
    with (folder / "small.jsonl").open("a") as file:
        file.write('{"messages": 3}\nnot json\n')
    files = f"data.files=['{folder}/large.jsonl','{folder}/small.jsonl']"
    return [files, "data.shard_sequences=16", "data.num_workers=1"]


@pytest.fixture
def corpus(micro_experiment: Path) -> list[str]:
    return write_files(micro_experiment.parent)


def alone(path: Path, overrides: list[str]) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads(
        (Path(root.prepare(root.load_experiment(path, [*overrides, "data.name=alone"]))["path"]) / "manifest.json").read_text()
    )
    return manifest


def same(manifest: dict[str, Any], other: dict[str, Any]) -> bool:
    own = ("name", "config_sha256")
    return {k: v for k, v in manifest.items() if k not in own} == {k: v for k, v in other.items() if k not in own}


def manifest_of(path: Path, overrides: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((dataset_folder(root.load_experiment(path, overrides)) / "manifest.json").read_text())
    return found


@pytest.mark.parametrize("num_shards", [1, 4])
def test_the_dataset_does_not_depend_on_shards(
    micro_experiment: Path, corpus: list[str], num_shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = root.load_experiment(micro_experiment, corpus)
    shards = plan_shards(config, num_shards)
    assert len(shards) == num_shards and json.loads(json.dumps(shards)) == shards
    done = [make_shard(shard) for shard in reversed(shards)]
    assert sum(one["num_rows"] for one in done) == 332 and sum(one["num_rejected"] for one in done) == 2
    with monkeypatch.context() as patch:  # nothing is left to tokenize
        patch.setattr("dflash_core.data.pool.write_part", None)
        root.prepare(config)
    assert plan_shards(config, num_shards) == []
    assert same(manifest_of(micro_experiment, corpus), alone(micro_experiment, corpus))


def test_what_is_not_made_in_shards_is_made_when_they_are_put_together(micro_experiment: Path, corpus: list[str]) -> None:
    config = root.load_experiment(micro_experiment, corpus)
    shards = plan_shards(config, 3)
    make_shard(shards[1])
    make_shard(shards[1])  # a task that is run twice
    root.prepare(config)
    assert same(manifest_of(micro_experiment, corpus), alone(micro_experiment, corpus))


def test_the_first_bad_row_is_the_error_whichever_shard_met_it(micro_experiment: Path, corpus: list[str]) -> None:
    strict = [*corpus, "data.on_bad_row=error"]
    config = root.load_experiment(micro_experiment, strict)
    for shard in plan_shards(config, 3):
        make_shard(shard)
    with pytest.raises(DataError) as in_shards:
        root.prepare(config)
    with pytest.raises(DataError) as without:
        alone(micro_experiment, strict)
    assert str(in_shards.value) == str(without.value)


def test_a_file_that_changes_between_plan_and_shard_is_one_line(micro_experiment: Path, corpus: list[str]) -> None:
    shards = plan_shards(root.load_experiment(micro_experiment, corpus), 2)
    write_corpus(micro_experiment.parent / "large.jsonl", 299)
    with pytest.raises(DataError, match=r"large\.jsonl: the file changed since the shards were planned"):
        make_shard(shards[0])


def test_shards_and_a_preparation_exclude_each_other(tmp_path: Path) -> None:
    folder = tmp_path / "dataset"
    with shared_building(folder), shared_building(folder), pytest.raises(DataError, match="another process"), folder_lock(folder):
        pass
    with folder_lock(folder), pytest.raises(DataError, match="another process is preparing it"), shared_building(folder):
        pass


@given(st.lists(st.integers(0, 10**12), max_size=30), st.integers(1, 20))
def test_every_stripe_of_every_file_is_in_one_shard_and_shares_are_fair(sizes: list[int], num_shards: int) -> None:
    files = [(f"f{number}", f"k{number}", size) for number, size in enumerate(sizes)]
    shards = share_out(files, num_shards)
    assert len(shards) <= num_shards and all(shards) and shards == share_out(files, num_shards)
    flat = [stripe for shard in shards for stripe in shard]
    counts = {stripe.key: stripe.num_stripes for stripe in flat}
    assert sorted((s.key, s.stripe) for s in flat) == sorted((key, n) for key, count in counts.items() for n in range(count))
    assert counts.keys() == {key for _, key, _ in files}
    largest = max((sizes[int(s.key[1:])] / s.num_stripes for s in flat), default=0)
    heaviest = max((sum(sizes[int(s.key[1:])] / s.num_stripes for s in shard) for shard in shards), default=0)
    assert heaviest <= sum(sizes) / num_shards + largest + len(flat) + 1  # a list schedule is at most one piece off


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--shards", "2"], "--shards and --task-runner-address need --task-runner"),
        (["--task-runner", "thread", "--shards", "0"], "--shards 0: expected 1 to 10000"),
        (["--task-runner", "process", "--task-runner-address", "x"], "--task-runner-address: process runs on this node"),
    ],
)
def test_runners_are_checked_before_a_server_is_started(
    micro_experiment: Path, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main("prepare", [str(micro_experiment), *words]) == 2
    assert text in capsys.readouterr().err


def test_a_runner_whose_package_is_missing_names_the_extra(
    micro_experiment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert command.main("prepare", [str(micro_experiment), "--task-runner", "ray"]) == 2
    assert "pip install -e '.[ray]'" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "prefect_dask", None)
    with pytest.raises(ConfigError, match="needs the extra 'dask'"):
        task_runner(Request(experiment="x", task_runner="dask"))


@dataclass
class Workplace:
    """A workspace with a server of its own that stays between flows."""

    experiment: Path
    overrides: list[str]
    expected: dict[str, Any]
    environment: dict[str, str]

    def start(self, name: str, *words: str) -> subprocess.Popen[str]:
        changes = [word for change in (*self.overrides, f"data.name={name}") for word in ("--set", change)]
        return subprocess.Popen(
            [sys.executable, "-m", "flows.prepare", str(self.experiment), *changes, "--keep-server", *words],
            env=self.environment,
            cwd=self.experiment.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a group of its own, as a terminal makes it
        )

    def manifest(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.home / "datasets" / name / "manifest.json").read_text())
        return found

    @property
    def home(self) -> Path:
        return Path(self.environment["DFLASH_HOME"])


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory, micro_target: Path) -> Iterator[Workplace]:
    folder = tmp_path_factory.mktemp("runners")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    environment = {
        **inherited,
        "PYTHONPATH": str(REPOSITORY),
        "DFLASH_HOME": str(folder / "workspace"),
        "OUR_SERVER_KEY": PLANTED,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_HOME", str(folder / "workspace"))
        experiment, overrides = write_micro_experiment(folder, micro_target), write_files(folder)
        yield Workplace(experiment, overrides, alone(experiment, overrides), environment)
        server.stop(folder / "workspace", force=True)


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["thread", "process", "ray", "dask"])
def test_every_runner_makes_the_same_dataset(workplace: Workplace, runner: str) -> None:
    if runner in ("ray", "dask") and importlib.util.find_spec(f"prefect_{runner}") is None:
        pytest.skip(f"the extra {runner!r} is not installed: pip install -e '.[{runner}]'")
    process = workplace.start(runner, "--task-runner", runner, "--shards", "2")
    out, err = process.communicate(timeout=115)
    assert process.returncode == 0, err
    assert f"shards: 2, by task runner {runner}" in err and "Traceback" not in err
    assert same(workplace.manifest(runner), workplace.expected)
    assert "dataset: " in out
    for path in workplace.home.rglob("*"):  # Prefect's database among them
        assert not path.is_file() or PLANTED.encode() not in path.read_bytes(), path


@pytest.mark.slow
def test_a_flow_that_is_killed_leaves_no_process_of_its_pool(workplace: Workplace) -> None:
    process = workplace.start("killed", "--task-runner", "process", "--shards", "2")
    flow = psutil.Process(process.pid)

    def pool() -> list[psutil.Process]:
        return [child for child in flow.children() if "spawn_main" in " ".join(child.cmdline())]

    deadline = time.monotonic() + 100
    while len(workers := pool()) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.communicate(timeout=20)
    assert psutil.wait_procs(workers, timeout=60)[1] == []


@pytest.mark.slow
@pytest.mark.parametrize("when", ["the pool starts", "shards are made"])
def test_ctrl_c_says_one_line_and_is_no_crash(workplace: Workplace, when: str) -> None:
    """It reaches every process of the terminal, also those that only begin."""
    name = when.replace(" ", "-")
    write_corpus(workplace.home / "long.jsonl", 40_000)
    process = workplace.start(name, "--set", f"data.files=[{workplace.home}/long.jsonl]", "--task-runner", "process")
    flow, deadline = psutil.Process(process.pid), time.monotonic() + 100
    while not (
        any("spawn_main" in " ".join(child.cmdline()) and child.cpu_times().user > 0.3 for child in flow.children())  # it imports
        if when == "the pool starts"
        else list(workplace.home.glob(f"datasets/.{name}.building/tokens/part-*.json"))
    ):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    family = [child for child in flow.children(recursive=True) if "multiprocessing" in " ".join(child.cmdline())]
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, err
    said = [line for line in err.splitlines() if not re.match(r"\d\d:\d\d:\d\d ", line)]  # without our own lines
    assert said == ["error: interrupted; run the same command again to go on"], err
    assert psutil.wait_procs(family, timeout=60)[1] == []
    runs = ask(workplace.home, "flow_runs/filter", sort="START_TIME_DESC", limit=2)
    assert [(run["state"]["type"], run["state"]["message"]) for run in runs] == [
        ("CANCELLED", "Ended by Ctrl-C; what was done is kept.")
    ] * 2
