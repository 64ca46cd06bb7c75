"""The deployments as a team uses them: a real background server, a real `serve`, Prefect's own command line, real trainings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from flows import child, server
from tests.conftest import REPOSITORY, write_micro_experiment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
PATIENCE_S = 120.0
STEPS = 250
ENDLESS = "train.max_steps=100000"  # for trainings that are to be stopped, however slow the machine


class Served:
    """A workspace with a server that stays, and `serve` on it."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.folder, self.home = folder, folder / "workspace"
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
        self.environment = {
            **inherited,
            **server.QUIET,
            "DFLASH_HOME": str(self.home),
            "PYTHONPATH": str(REPOSITORY),
            "COLUMNS": "200",
            "OMP_NUM_THREADS": "1",
        }
        path = write_micro_experiment(folder, target)
        values = yaml.safe_load(path.read_text())
        values["train"] |= {"max_steps": STEPS, "num_epochs": 1000}
        values["evaluate"] |= {"max_prompts": 2, "untrained_prompts": 0}
        path.write_text(yaml.safe_dump(values))
        self.serving: subprocess.Popen[str] | None = None

    def python(self, *words: str, **more: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *words], cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, **more,
        )  # fmt: skip

    def serve(self) -> None:
        with (self.folder / "serve.out").open("w") as sink:
            self.serving = subprocess.Popen(
                [sys.executable, "-m", "flows.serve", "micro.yaml"],
                cwd=self.folder,
                env=self.environment,
                stdout=sink,
                stderr=sink,
            )
        wait_for(lambda: "start one with" in self.said() or self.serving.poll() is not None)  # type: ignore[union-attr]
        assert self.serving.poll() is None, self.said()

    def said(self) -> str:
        return (self.folder / "serve.out").read_text()

    def prefect(self, *words: str) -> str:
        running = server.find(self.home)
        assert running is not None
        environment = {**self.environment, "PREFECT_API_URL": running.url, "PREFECT_HOME": str(self.folder / "client")}
        done = subprocess.run(
            [sys.executable, "-m", "prefect", *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run(self, deployment: str, *words: str) -> str:
        """Start a run of a deployment by Prefect's command line; returns its id."""
        out = self.prefect("deployment", "run", f"dflash-{deployment}/{deployment}", *words)
        return next(line.split()[-1] for line in out.splitlines() if "UUID" in line)

    def ask(self, path: str, **body: Any) -> Any:
        running = server.find(self.home)
        assert running is not None
        request = urllib.request.Request(f"{running.url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)

    def runs(self, flow: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("flow_runs/filter", flows={"name": {"any_": [f"dflash-{flow}"]}})
        return found

    def state(self, run: str) -> str:
        [found] = self.ask("flow_runs/filter", flow_runs={"id": {"any_": [run]}})
        return str(found["state"]["type"])

    def trainings(self) -> list[psutil.Process]:
        """Training processes of this workspace, without their supervisors."""
        return [process for process in processes(self.home) if words_of(process)[1:3] == ["-m", "dflash_core"]]

    def run_dirs(self) -> list[Path]:
        return sorted(self.home.glob("runs/*"))

    def steps(self, run_dir: Path) -> int:
        path = run_dir / "metrics" / "steps.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def manifest(self, run_dir: Path) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((run_dir / "manifest.json").read_text())
        return found

    def train_some(self, deployment: str, *words: str) -> tuple[str, Path]:
        """Start a run of a deployment and wait until it has trained some steps."""
        before = set(self.run_dirs())
        run = self.run(deployment, *words)
        wait_for(lambda: any(self.steps(one) >= 3 for one in set(self.run_dirs()) - before))
        [run_dir] = [one for one in set(self.run_dirs()) - before if self.steps(one)]
        return run, run_dir


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)


def processes(home: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("DFLASH_HOME") == str(home) and child.runs(process):
                found.append(process)
        except psutil.Error:
            continue
    return found


def words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def below_serve(place: Served) -> list[psutil.Process]:
    """What runs in the workspace besides the server: `serve`, its supervisor, its runner, and what these have started."""
    running = server.find(place.home)
    assert running is not None
    family = {running.pid, *(one.pid for one in psutil.Process(running.pid).children(recursive=True))}
    return [one for one in processes(place.home) if one.pid not in family]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, micro_target: Path) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("serve"), micro_target)
    try:
        started = served.python("-m", "flows.server", "start")
        assert started.wait(PATIENCE_S) == 0, started.communicate()[0]
        served.serve()
        yield served
    finally:
        if served.serving is not None and served.serving.poll() is None:
            served.serving.terminate()
            served.serving.wait(PATIENCE_S)
        server.stop(served.home, force=True)
    assert not processes(served.home)


def override(*changes: str) -> list[str]:
    return ["--param", "config=" + json.dumps({"experiment": "micro.yaml", "overrides": changes})]


def test_a_chain_is_cancelled_and_the_next_run_goes_on_to_the_report(place: Served) -> None:
    idle = {process.pid for process in below_serve(place)}
    run, run_dir = place.train_some("experiment")
    assert len(place.trainings()) >= 1
    place.prefect("flow-run", "cancel", run)
    wait_for(lambda: place.state(run) == "CANCELLED")
    assert not place.trainings()
    wait_for(lambda: {process.pid for process in below_serve(place)} == idle)
    manifest = place.manifest(run_dir)
    assert manifest["state"] == "stopped" and 3 <= manifest["num_steps"] < STEPS
    again = place.run("experiment")
    wait_for(lambda: place.state(again) in ("COMPLETED", "FAILED", "CRASHED"))
    assert place.state(again) == "COMPLETED", place.said()
    assert place.run_dirs() == [run_dir]
    done = place.manifest(run_dir)
    assert (done["state"], done["num_steps"], done["attempt"]) == ("completed", STEPS, 1)
    assert (place.home / "reports" / "micro" / "report.html").exists()
    assert [one["name"] for one in place.runs("experiment")] == ["experiment micro"] * 2


def test_trainings_on_one_node_queue(place: Served) -> None:
    first, _ = place.train_some("train", *override("train.seed=11", ENDLESS))
    same = place.run("train", *override("train.seed=12", ENDLESS))
    other = place.run("experiment", *override("train.seed=13", ENDLESS))
    wait_for(lambda: "trains on this node" in json.dumps(place.ask("logs/filter", logs={"flow_run_id": {"any_": [other]}})))
    [found] = place.ask("flow_runs/filter", flow_runs={"id": {"any_": [same]}})
    assert found["state"]["name"] in ("AwaitingConcurrencySlot", "Scheduled", "Late"), "the deployment runs one at a time"
    assert place.state(other) == "RUNNING" and len(place.trainings()) == 1
    for run in (same, other, first):
        place.prefect("flow-run", "cancel", run)
    for run in (same, other, first):
        wait_for(lambda run=run: place.state(run) == "CANCELLED")
    assert not place.trainings()


def test_a_schedule_and_an_event_each_start_a_run(place: Served) -> None:
    place.prefect("deployment", "schedule", "create", "dflash-prepare/prepare", "--interval", "15")
    payload = json.dumps({"path": "somewhere", "experiment": "of-the-event.yaml"})
    place.prefect("event", "emit", "dflash.dataset.arrived", "--resource-id", "test", "--payload", payload)
    wait_for(lambda: place.runs("retrain"))
    assert [run["parameters"]["config"]["experiment"] for run in place.runs("retrain")] == ["of-the-event.yaml"]
    (place.folder / "arrived").mkdir()
    (place.folder / "arrived" / "week.jsonl").write_text("{}\n")
    watch = place.python("-m", "flows.watch_data", "arrived", "--settle", "0.1", "--once")
    assert watch.wait(PATIENCE_S) == 0, watch.communicate()[0]
    wait_for(lambda: len(place.runs("retrain")) == 2)
    assert "micro.yaml" in [run["parameters"]["config"]["experiment"] for run in place.runs("retrain")]
    wait_for(lambda: any(run["auto_scheduled"] and run["state"]["type"] == "COMPLETED" for run in place.runs("prepare")))
    place.prefect("deployment", "schedule", "clear", "dflash-prepare/prepare", "--accept-yes")
    for run in place.runs("retrain"):
        if run["state"]["type"] not in ("COMPLETED", "FAILED", "CRASHED"):
            place.prefect("flow-run", "cancel", run["id"])
            wait_for(lambda run=run: place.state(run["id"]) in ("CANCELLED", "COMPLETED", "FAILED"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_serving_ends_with_all_that_it_has_started(place: Served, number: signal.Signals) -> None:
    run, run_dir = place.train_some("train", *override(f"train.seed={20 + number}", ENDLESS))
    assert place.serving is not None
    place.serving.send_signal(number)
    code = place.serving.wait(PATIENCE_S)
    wait_for(lambda: not below_serve(place))
    assert code == (-number if number == signal.SIGKILL else 0), place.said()
    assert place.manifest(run_dir)["state"] == "stopped" and place.state(run) == "CANCELLED"
    place.serve()
