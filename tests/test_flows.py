"""The flows as a user runs them: as programs, against one real background server, on a small stand-in for the core.

What is checked is what a user sees: exit codes, readable lines, and what Prefect shows afterwards.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows import deployments, server
from flows.launch import HEADER
from tests.prefect_api import ask

PATIENCE_S = 100.0
FAKE = Path(__file__).with_name("fake_experiment.py")
NOISE = ("Traceback", "database is locked", "Crash detected", "prefect.", "| ERROR", "| WARNING")


@dataclass
class Outcome:
    code: int
    out: str
    err: str


class Workplace:
    """A workspace with a server, and the flows as programs in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "workspace"
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
        repository = str(FAKE.parents[1])
        self.environment = {**inherited, "DFLASH_HOME": str(self.home), "PYTHONPATH": repository, "COLUMNS": "100"}

    def start(self, module: str, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(FAKE), f"flows.{module}", *words]
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, module: str, *words: str) -> Outcome:
        return self.end(self.start(module, *words))

    @staticmethod
    def end(process: subprocess.Popen[str]) -> Outcome:
        out, err = process.communicate(timeout=PATIENCE_S)
        return Outcome(process.returncode, out, err)

    def experiment(self, name: str, **document: Any) -> str:
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps({"name": name, **document}))
        return str(path)

    def run_dir(self, experiment: str, run: str) -> Path:
        return self.home / "runs" / f"{experiment}-{run}"

    def ask(self, path: str, **body: Any) -> Any:
        return ask(self.home, path, **body)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    workplace = Workplace(tmp_path_factory.mktemp("flows"))
    try:
        starters = [workplace.start("server", "start") for _ in range(2)]  # two at once must end with one server
        answers = [Workplace.end(starter) for starter in starters]
        assert [answer.code for answer in answers] == [0, 0], answers
        assert answers[0].out == answers[1].out
        yield workplace
    finally:
        server.stop(workplace.home, force=True)
    left = [process.pid for process in psutil.process_iter() if home_of(process) == str(workplace.home / "prefect")]
    assert not left, "stop left processes behind"
    log = (workplace.home / "prefect" / "server.log").read_text()
    assert not real_errors(log), log


def real_errors(log: str) -> list[str]:
    """Last lines of the tracebacks in a server's log, without those of requests that a client broke off.

    A flow that ends while one of its requests is under way leaves such a traceback behind; nothing is wrong with it.
    """
    after = log.split("Traceback (most recent call last):\n")[1:]
    ends = [next((line for line in text.splitlines() if line[:1].strip()), "cut off") for text in after]
    return [end for end in ends if not end.startswith("asyncio.exceptions.CancelledError")]


def test_the_server_s_log_is_searched_for_real_errors() -> None:
    broken_off = "ERROR\nTraceback (most recent call last):\n  File x\n    rollback()\nasyncio.exceptions.CancelledError\nnext\n"
    assert real_errors(broken_off) == []
    assert real_errors(broken_off + "Traceback (most recent call last):\n  File x\nValueError: no\n") == ["ValueError: no"]
    assert real_errors("Traceback (most recent call last):\n  File x\n") == ["cut off"]


def home_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("PREFECT_HOME")
    except psutil.Error:
        return None


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def states(place: Workplace) -> list[str]:
    """States of all flow runs, the latest first."""
    return [run["state"]["type"] for run in place.ask("flow_runs/filter", sort="START_TIME_DESC")]


def test_an_experiment_from_data_to_report_and_again(place: Workplace) -> None:
    path = place.experiment("demo", runs={"shuffle": {"steps": 20}, "diverse": {"steps": 30}})
    first = place.run("experiment", path)
    assert first.code == 0, first.err
    assert not [noise for noise in NOISE if noise in first.err], first.err
    assert "│ demo-diverse │ 4" in first.out
    assert last_line(first.out) == f"report: {place.home}/reports/demo/report.html"
    shown = [line.split(" ", 1)[1] for line in first.err.splitlines()]
    assert "starting at step 0" in shown and "step 30" in shown

    assert states(place)[0] == "COMPLETED"
    artifacts = place.ask("artifacts/filter", artifacts={"key": {"any_": ["comparison-demo"]}})
    assert "| demo-diverse | 4 |" in artifacts[0]["data"]
    assert "## Summary\n\n- nothing stood out." in artifacts[0]["data"] and "# Runs compared" not in artifacts[0]["data"]
    assert any(f"/artifacts/artifact/{artifacts[0]['id']}" in line for line in shown)
    wait_for(lambda: "step 30" in [entry["message"] for entry in place.ask("logs/filter", limit=200)])

    [run] = place.ask("flow_runs/filter", sort="START_TIME_DESC", limit=1)
    assert sorted(tag.partition(":")[0] for tag in run["tags"]) == ["host", "process"]
    stages = place.ask("task_runs/filter", flow_runs={"id": {"any_": [run["id"]]}})
    assert len(stages) == 7 and not [tag for stage in stages for tag in stage["tags"]], "each would ask for slots (reconcile.py)"

    again = place.run("experiment", path)
    assert again.code == 0, again.err
    assert again.out == first.out
    assert again.err.count("complete already, used again") == 2 and "starting at step" not in again.err
    assert (place.run_dir("demo", "shuffle") / "logs" / "train.log").read_text().count(HEADER) == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_training_in_good_order_and_the_same_command_goes_on(place: Workplace, number: int) -> None:
    name = f"stopped-{int(number)}"
    path = place.experiment(name, runs={"a": {"steps": 100, "pace": 0.1}})
    run_dir = place.run_dir(name, "a")
    process = place.start("train", path)
    wait_for(lambda: (run_dir / "count").exists() and int((run_dir / "count").read_text() or 0) >= 3)
    process.send_signal(number)
    outcome = Workplace.end(process)
    assert outcome.code == 4, outcome.err
    assert not [noise for noise in NOISE if noise in outcome.err], outcome.err
    assert states(place)[0] == "CANCELLED"
    assert last_line(outcome.err) == (
        f"error: training was stopped by a signal and its state saved in {run_dir}; run the same command again to go on"
    )
    assert not psutil.pid_exists(int((run_dir / "pid").read_text()))
    saved = int((run_dir / "count").read_text())
    (run_dir / "count").write_text("98")  # so that the test need not wait for the rest
    resumed = place.run("train", path)
    assert 3 <= saved < 100 and resumed.code == 0, resumed.err
    assert "starting at step 98" in resumed.err


@pytest.mark.slow
def test_a_killed_flow_leaves_no_training_and_is_marked_as_crashed(place: Workplace) -> None:
    path = place.experiment("killed", runs={"a": {"steps": 3000, "pace": 0.1}}, fail_prepare=None)
    run_dir = place.run_dir("killed", "a")
    process = place.start("train", path)
    wait_for((run_dir / "pid").exists)
    process.kill()
    Workplace.end(process)
    wait_for(lambda: not psutil.pid_exists(int((run_dir / "pid").read_text())))
    assert (run_dir / "state").read_text() == "stopped"
    assert states(place)[0] == "RUNNING"
    outcome = place.run("train", path, "--set", 'fail_prepare="corpus.jsonl, row 3: not JSON"')
    assert outcome.code == 2
    assert last_line(outcome.err) == "error: corpus.jsonl, row 3: not JSON"
    assert not [noise for noise in NOISE if noise in outcome.err], outcome.err
    assert states(place)[:2] == ["FAILED", "CRASHED"]


@pytest.mark.slow
def test_dead_runs_are_found_in_every_state_of_being_under_way(place: Workplace) -> None:
    flow = place.ask("flows/", name="dflash-dead")["id"]
    host = f"host:{socket.gethostname()}"
    dead, alive = ("process:4194303:1.00", f"process:{os.getpid()}:{psutil.Process().create_time():.2f}")
    made = {}
    for state in ("RUNNING", "PAUSED", "CANCELLING", "PENDING"):
        for whose in (dead, alive):
            run = place.ask("flow_runs/", flow_id=flow, tags=[host, whose], state={"type": state})["id"]
            made[run] = "CRASHED" if whose == dead and state != "PENDING" else state
    code = "from flows import reconcile; print(reconcile.mark_dead_runs())"
    address = server.find(place.home)
    assert address is not None
    environment = {**place.environment, **server.client_environment(place.home / "prefect", address.url)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert done.stdout == "3\n", done.stderr
    assert {
        run["id"]: run["state"]["type"] for run in place.ask("flow_runs/filter", flow_runs={"id": {"any_": list(made)}})
    } == made
    for run in made:  # nothing of it is under way for later tests
        place.ask(f"flow_runs/{run}/set_state", state={"type": "CANCELLED"}, force=True)


@pytest.mark.parametrize(
    ("end", "child_code", "code", "text", "shown"),
    [
        ("error: target: no mask token", 2, 2, "error: target: no mask token", "FAILED"),
        pytest.param(
            "error: loss is not finite",
            3,
            3,
            "error: training ended with exit code 3: loss is not finite; see ",
            "FAILED",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "error: stopped by SIGTERM after step 2", 4, 4, "error: stopped by SIGTERM after step 2", "CANCELLED",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_failed_training_gives_its_reason_its_code_and_its_state(
    place: Workplace, end: str, child_code: int, code: int, text: str, shown: str
) -> None:
    path = place.experiment(f"bad-{child_code}", runs={"a": {"steps": 2, "end": end, "code": child_code}})
    outcome = place.run("experiment", path)
    assert outcome.code == code
    assert last_line(outcome.err).startswith(text)
    assert not [noise for noise in NOISE if noise in outcome.err], outcome.err
    assert outcome.out == ""
    [state] = [run["state"] for run in place.ask("flow_runs/filter", sort="START_TIME_DESC", limit=1)]
    assert state["type"] == shown and text.removeprefix("error: ") in state["message"] and "\n" not in state["message"].strip()


@pytest.mark.slow
def test_a_defect_keeps_its_traceback_once(place: Workplace) -> None:
    outcome = place.run("prepare", place.experiment("defect", runs={"a": {}}, defect=True))
    assert outcome.code == 1
    assert outcome.err.count("Traceback") == 1 and outcome.err.count("ZeroDivisionError: a defect of ours\n") == 1
    assert last_line(outcome.err).startswith("error: unexpected ZeroDivisionError: a defect of ours")


@pytest.mark.slow
def test_each_stage_alone(place: Workplace) -> None:
    path = place.experiment("stages", runs={"a": {"steps": 2}, "b": {"steps": 3}})
    early = place.run("evaluate", path)
    assert early.code == 2 and "run 'a' is not trained (state: created); run: python -m flows.train" in early.err
    assert place.run("prepare", path).code == 0
    assert place.run("train", path, "--run", "b").code == 0
    assert not place.run_dir("stages", "a").joinpath("count").exists()
    assert place.run("evaluate", path, "--run", "b").code == 0
    assert place.run("analyze", path).code == 2
    assert place.run("train", path).code == 0
    outcome = place.run("analyze", path)
    assert outcome.code == 0 and "stages-b" in outcome.out


def test_bad_input_costs_one_line_and_starts_nothing(tmp_path: Path) -> None:
    place = Workplace(tmp_path)
    path = place.experiment("x", runs={"a": {}})
    for words, text in [
        ([str(tmp_path / "nope.yaml")], "nope.yaml: no such file"),
        ([path, "--set", "nmae=1"], "x.json: unknown key 'nmae'"),
        ([path, "--run", "b"], "x.json: no run 'b'; there are: a"),
    ]:
        outcome = place.run("train", *words)
        assert outcome.code == 2
        assert outcome.err == f"error: {tmp_path}/{text}\n"
    assert not (place.home / "prefect").exists()
    debug = place.run("train", path, "--run", "b", "--debug")
    assert debug.code == 2 and "Traceback" in debug.err


def test_prefect_is_not_imported_before_the_input_is_checked(tmp_path: Path) -> None:
    code = "import sys; import flows.command, flows.server, flows.launch, flows.console; print('prefect' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout == "False\n"


def test_the_deployments_name_flows_and_give_them_valid_parameters(tmp_path: Path) -> None:
    code = """
import sys, yaml
from prefect.flows import load_flow_from_entrypoint
for deployment in yaml.safe_load(open("prefect.yaml"))["deployments"]:
    flow = load_flow_from_entrypoint(deployment["entrypoint"])
    given = deployment["parameters"]
    if flow.name == "dflash-sweep":  # whoever starts it says the grid
        given = {"config": given["config"] | {"grid": ["train.lr=1e-3,2e-3"]}}
    flow.validate_parameters(given)
    [fields] = flow.parameters.model_dump()["definitions"].values()
    assert all("description" in field for field in fields["properties"].values()), fields
    print(flow.name)
"""
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=FAKE.parents[1],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.stdout.split() == [f"dflash-{one.stage}" for one in deployments.ALL], done.stderr


def test_what_can_be_known_beforehand_costs_no_server(tmp_path: Path) -> None:
    workplace = Workplace(tmp_path)
    experiment = workplace.experiment("unready", runs={}, fail_check="data/x.jsonl: no such file")
    outcome = workplace.run("experiment", experiment)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.strip() == "error: data/x.jsonl: no such file"
    assert not (workplace.home / "prefect").exists()
