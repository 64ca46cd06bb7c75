"""A workspace with a real background server and real trainings of the micro experiment, for tests of what runs in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

from flows import child, server
from tests.conftest import REPOSITORY, write_micro_experiment
from tests.prefect_api import ask

PATIENCE_S = 300.0  # nothing takes a tenth of it, unless the machine is busy with other things
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


class Place:
    """A workspace whose server stays, and perhaps `serve` on it. `steps` is the length of a training that may end."""

    def __init__(self, folder: Path, target: Path, steps: int, **train: Any) -> None:
        self.folder, self.home, self.num_steps = folder, folder / "workspace", steps
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
        self.environment = {
            **inherited,
            **server.QUIET,
            "DFLASH_HOME": str(self.home),
            "DFLASH_ALLOWED_PATHS": f"{folder}{os.pathsep}{target}",  # deployments' runs are confined
            "PYTHONPATH": str(REPOSITORY),
            "COLUMNS": "200",
            "OMP_NUM_THREADS": "1",
        }
        path = write_micro_experiment(folder, target)
        values = yaml.safe_load(path.read_text())
        values["train"] |= {"max_steps": steps, "num_epochs": 100_000, **train}
        values["evaluate"] |= {"max_prompts": 2, "untrained_prompts": 0}
        path.write_text(yaml.safe_dump(values))
        self.serving: subprocess.Popen[bytes] | None = None

    def python(self, *words: str, out: Path | None = None) -> subprocess.Popen[bytes]:
        """A program in this workspace; both streams go to `out`."""
        with (out or Path(os.devnull)).open("ab") as sink:
            return subprocess.Popen(
                [sys.executable, *words], cwd=self.folder, env=self.environment, stdout=sink, stderr=subprocess.STDOUT
            )

    def start_server(self) -> None:
        out = self.folder / "server.out"
        assert self.python("-m", "flows.server", "start", out=out).wait(PATIENCE_S) == 0, out.read_text()

    def serve(self) -> None:
        """Start `serve`, and wait until it has registered everything."""
        out = self.folder / "serve.out"
        out.write_bytes(b"")
        self.serving = self.python("-m", "flows.serve", "micro.yaml", out=out)
        wait_for(lambda: "start one with" in self.said() or self.serving.poll() is not None)  # type: ignore[union-attr]
        assert self.serving.poll() is None, self.said()

    def said(self) -> str:
        return (self.folder / "serve.out").read_text()

    def close(self) -> None:
        """End `serve` and the server; nothing of the workspace may be left."""
        if self.serving is not None and self.serving.poll() is None:
            self.serving.terminate()
            self.serving.wait(PATIENCE_S)
        server.stop(self.home, force=True)
        left = processes(self.home)
        for process in left:
            child.send(process, 9)
        assert not left, left

    def prefect(self, *words: str) -> str:
        """Prefect's own command line."""
        running = server.find(self.home)
        assert running is not None
        environment = {**self.environment, "PREFECT_API_URL": running.url, "PREFECT_HOME": str(self.folder / "client")}
        done = subprocess.run(
            [sys.executable, "-m", "prefect", *words],
            env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run(self, deployment: str, *words: str) -> str:
        """Start a run of a deployment by Prefect's command line; returns its id."""
        out = self.prefect("deployment", "run", f"dflash-{deployment}/{deployment}", *words)
        return next(line.split()[-1] for line in out.splitlines() if "UUID" in line)

    def run_quickly(self, deployment: str, *changes: str) -> str:
        """The same by one request."""
        name = f"dflash-{deployment}/{deployment}"
        deployed = self.ask(f"deployments/name/{name}")
        parameters = {"config": {"experiment": "micro.yaml", "overrides": changes}}
        made = self.ask(f"deployments/{deployed['id']}/create_flow_run", parameters=parameters, state={"type": "SCHEDULED"})
        return str(made["id"])

    def cancel(self, run: str) -> None:
        """What the button on the page of a flow run asks for."""
        self.ask(f"flow_runs/{run}/set_state", state={"type": "CANCELLING"})

    def ask(self, path: str, **body: Any) -> Any:
        return ask(self.home, path, **body)

    def runs(self, flow: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("flow_runs/filter", flows={"name": {"any_": [f"dflash-{flow}"]}})
        return found

    def flow_run(self, run: str) -> dict[str, Any]:
        [found] = self.ask("flow_runs/filter", flow_runs={"id": {"any_": [run]}})
        assert isinstance(found, dict)
        return found

    def state(self, run: str) -> str:
        return str(self.flow_run(run)["state"]["type"])

    def trainings(self) -> list[psutil.Process]:
        """Training processes of this workspace, without their supervisors and launchers."""
        return [process for process in processes(self.home) if "dflash_core" in words_of(process)[:4]]

    def run_dirs(self) -> list[Path]:
        return sorted(self.home.glob("runs/*"))

    def steps(self, run_dir: Path) -> int:
        path = run_dir / "metrics" / "steps.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def manifest(self, run_dir: Path) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((run_dir / "manifest.json").read_text())
        return found

    def below_serve(self) -> list[psutil.Process]:
        """What runs in the workspace besides the server: `serve`, its supervisor, its runner, and what these have started."""
        running = server.find(self.home)
        family = set() if running is None else {running.pid, *(one.pid for one in below(running.pid))}
        return [one for one in processes(self.home) if one.pid not in family]


def wait_for(condition: Callable[[], Any], patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def processes(home: Path) -> list[psutil.Process]:
    """All that run in a workspace."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("DFLASH_HOME") == str(home) and child.runs(process):
                found.append(process)
        except psutil.Error:
            continue
    return found


def below(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
