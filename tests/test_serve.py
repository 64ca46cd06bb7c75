"""The deployments as a team uses them: a real background server, a real `serve`, Prefect's own command line, real trainings.

One server and one `serve` for all tests here. What Prefect's command line does is asked of it once for each kind of thing;
further runs are started by the request that it makes, for every start of it costs seconds. Who else may be killed, and how,
is in test_kill_flows.py.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.bench import rows
from tests.serve_place import ENDED, PATIENCE_S, Place, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 120
ENDLESS = "train.max_steps=100000"  # for trainings that are to be stopped, however slow the machine


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, micro_target: Path) -> Iterator[Place]:
    served = Place(tmp_path_factory.mktemp("serve"), micro_target, STEPS)
    try:
        served.start_server()
        served.serve()
        yield served
    finally:
        served.close()


def trains(place: Place, before: set[Path]) -> Path:
    """Wait until a run that was not there before has trained some steps."""
    wait_for(lambda: any(place.steps(one) >= 3 for one in set(place.run_dirs()) - before))
    [run_dir] = [one for one in set(place.run_dirs()) - before if place.steps(one)]
    return run_dir


def test_a_chain_is_cancelled_and_the_next_run_goes_on_to_the_report(place: Place) -> None:
    idle, before = {process.pid for process in place.below_serve()}, set(place.run_dirs())
    run = place.run("experiment")
    run_dir = trains(place, before)
    assert place.trainings()
    place.prefect("flow-run", "cancel", run)
    wait_for(lambda: place.state(run) == "CANCELLED")
    assert not place.trainings()
    wait_for(lambda: {process.pid for process in place.below_serve()} == idle)
    manifest = place.manifest(run_dir)
    assert manifest["state"] == "stopped" and 3 <= manifest["num_steps"] < STEPS
    again = place.run_quickly("experiment")
    wait_for(lambda: place.state(again) in ENDED)
    assert place.state(again) == "COMPLETED", place.said()
    assert place.run_dirs() == [run_dir]
    done = place.manifest(run_dir)
    assert (done["state"], done["num_steps"], done["attempt"]) == ("completed", STEPS, 1)
    assert [row["step"] for row in rows(run_dir, "steps")] == list(range(STEPS)), "it goes on with the step after the last one"
    assert (place.home / "reports" / "micro" / "report.html").exists()
    assert [one["name"] for one in place.runs("experiment")] == ["experiment micro"] * 2


def test_trainings_on_one_node_queue_and_end_with_serve(place: Place) -> None:
    before = set(place.run_dirs())
    first = place.run_quickly("train", "train.seed=11", ENDLESS)
    run_dir = trains(place, before)
    same = place.run_quickly("train", "train.seed=12", ENDLESS)
    other = place.run_quickly("experiment", "train.seed=13", ENDLESS)
    wait_for(lambda: "trains on this node" in json.dumps(place.ask("logs/filter", logs={"flow_run_id": {"any_": [other]}})))
    found = place.flow_run(same)
    assert found["state"]["name"] in ("AwaitingConcurrencySlot", "Scheduled", "Late"), "the deployment runs one at a time"
    assert place.state(other) == "RUNNING" and len(place.trainings()) == 1
    place.cancel(same)
    wait_for(lambda: place.state(same) == "CANCELLED")
    assert place.state(first) == "RUNNING" and len(place.trainings()) == 1
    place.cancel(first)
    wait_for(lambda: place.state(first) == "CANCELLED")
    assert place.manifest(run_dir)["state"] == "stopped"
    run_dir = trains(place, before | {run_dir})
    assert place.state(other) == "RUNNING" and len(place.trainings()) == 1, "the one that waited has its turn"
    assert place.serving is not None
    place.serving.send_signal(signal.SIGINT)
    assert place.serving.wait(PATIENCE_S) == 0, place.said()
    assert not place.below_serve()
    assert place.manifest(run_dir)["state"] == "stopped" and place.state(other) == "CANCELLED"
    place.serve()


def test_a_schedule_and_an_event_each_start_a_run(place: Place) -> None:
    place.prefect("deployment", "schedule", "create", "dflash-prepare/prepare", "--interval", "15")
    payload = json.dumps({"path": "somewhere", "experiment": "of-the-event.yaml"})
    place.prefect("event", "emit", "dflash.dataset.arrived", "--resource-id", "test", "--payload", payload)
    wait_for(lambda: place.runs("retrain"))
    assert [run["parameters"]["config"]["experiment"] for run in place.runs("retrain")] == ["of-the-event.yaml"]
    (place.folder / "arrived").mkdir()
    (place.folder / "arrived" / "week.jsonl").write_text("{}\n")
    out = place.folder / "watch.out"
    watch = place.python("-m", "flows.watch_data", "arrived", "--settle", "0.1", "--once", out=out)
    assert watch.wait(PATIENCE_S) == 0, out.read_text()
    wait_for(lambda: len(place.runs("retrain")) == 2)
    assert "micro.yaml" in [run["parameters"]["config"]["experiment"] for run in place.runs("retrain")]
    # A second run of the deployment waits for its turn, and need not have it.
    for run in place.runs("retrain"):
        if run["state"]["type"] not in ENDED:
            place.cancel(run["id"])
    wait_for(lambda: any(run["auto_scheduled"] and run["state"]["type"] == "COMPLETED" for run in place.runs("prepare")))
