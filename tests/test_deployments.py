"""What is deployed: the same by `serve` and by `prefect.yaml`, with forms, queues, a schedule that is off, and a trigger."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2.sandbox
import pytest

from dflash_core.errors import ConfigError, UserError
from flows import deployments, serve
from flows.launch import only_one
from tests.conftest import REPOSITORY

# Both lists in one form: Prefect is imported once, in a process of its own and with a home of its own.
CODE = """
import json, sys, yaml
from prefect.deployments.runner import RunnerDeployment
from prefect.events.schemas.deployment_triggers import DeploymentEventTrigger
from types import SimpleNamespace
from flows import reconcile, serve
from flows.launch import only_one
from flows.sweep import SweepRequest
from flows.tasks import Request, markdown_table, told

def form(request):
    schema = request.model_json_schema()
    return {"fields": list(schema["properties"]), "required": schema["required"],
            "silent": [key for key, one in schema["properties"].items() if not one.get("description")]}

def trigger(one):
    return [sorted(one.expect), one.parameters, one.enabled, one.posture.value]

def served(one):
    schedules = [[s.schedule.cron, s.schedule.timezone, s.slug, s.active] for s in one.schedules or []]
    return {
        "name": one.name, "flow": one.flow_name, "description": one.description, "tags": one.tags,
        "parameters": one.parameters, "limit": [one.concurrency_limit, one.concurrency_options.collision_strategy.value],
        "schedules": schedules, "triggers": [trigger(t) for t in one.triggers], "entrypoint": one.entrypoint,
        "enforced": one.enforce_parameter_schema, "paused": one.paused,
    }

def written(one):
    limit = one["concurrency_limit"]
    return {
        "name": one["name"], "flow": "dflash-" + one["entrypoint"].partition(":")[2], "description": one["description"],
        "tags": one["tags"], "parameters": one["parameters"], "limit": [limit["limit"], limit["collision_strategy"]],
        "schedules": [[s["cron"], s["timezone"], s["slug"], s["active"]] for s in one.get("schedules", [])],
        "triggers": [trigger(DeploymentEventTrigger.model_validate(t)) for t in one.get("triggers", [])],
        "entrypoint": one["entrypoint"].replace("/", ".").replace(".py:", "."),
        "enforced": True, "paused": False,
    }

def holds_the_server(deployment):
    held = []
    reconcile.server.hold = held.append
    reconcile.record_process(None, SimpleNamespace(deployment_id=deployment, tags=reconcile.own_tags()), None)
    return bool(held)

experiments, schedule, timezone = json.loads(sys.argv[1])
print(json.dumps({
    "served": [served(one) for one in serve.build([], None)],
    "written": [written(one) for one in yaml.safe_load(open("prefect.yaml"))["deployments"]],
    "several": [served(one) for one in serve.build(experiments, schedule, timezone)],
    "forms": [form(Request), form(SweepRequest)],
    "told": [told("# T\\n\\nmade\\n## A\\n\\n" + "x" * n + "\\n## B\\ny\\n") for n in (10, 70_000)],
    "tables": [markdown_table([dict.fromkeys("abcdefg", n) for n in range(runs)]) for runs in (2, 6)],
    "holds": [holds_the_server(deployment) for deployment in (None, "id")],
}))
"""


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path_factory.mktemp("home"))}
    asked = json.dumps([["x/one.yaml", "two.yaml"], "5 4 * * *", "Europe/Berlin"])
    done = subprocess.run(
        [sys.executable, "-c", CODE, asked],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    return found


def test_a_run_of_a_deployment_holds_its_server_and_a_command_has_its_session(lists: dict[str, Any]) -> None:
    assert lists["holds"] == [False, True]


def test_prefect_yaml_deploys_what_serve_serves(lists: dict[str, Any]) -> None:
    assert lists["served"] == lists["written"]
    assert [one["name"] for one in lists["served"]] == [one.stage for one in deployments.ALL]


def test_nothing_starts_by_itself_but_what_was_asked_for(lists: dict[str, Any]) -> None:
    for one in lists["served"]:
        assert not any(active for *_, active in one["schedules"])
        assert bool(one["triggers"]) == bool(one["schedules"]) == (one["name"] == "retrain")
        assert one["limit"] == [1, "ENQUEUE"] and one["description"] and "dflash" in one["tags"]


def test_several_experiments_have_a_set_each(lists: dict[str, Any]) -> None:
    names = [one["name"] for one in lists["several"]]
    assert len(set(names)) == len(names) == 2 * len(deployments.ALL) and "retrain-one" in names and "retrain-two" in names
    retrain = next(one for one in lists["several"] if one["name"] == "retrain-one")
    assert retrain["schedules"] == [["5 4 * * *", "Europe/Berlin", "weekly", True]]
    assert retrain["triggers"][0][1] == retrain["parameters"] == {"config": {"experiment": "x/one.yaml"}}


def test_the_forms_ask_for_what_matters_first_and_say_what_goes_into_each_field(lists: dict[str, Any]) -> None:
    plain, sweep = lists["forms"]
    assert plain["fields"][:3] == ["experiment", "overrides", "run"] and plain["required"] == ["experiment"]
    assert sweep["fields"][:3] == ["experiment", "grid", "overrides"] and sorted(sweep["required"]) == ["experiment", "grid"]
    assert set(sweep["fields"]) == {*plain["fields"], "grid", "most"} and plain["silent"] == sweep["silent"] == []


def test_of_a_long_report_an_artifact_has_whole_sections(lists: dict[str, Any]) -> None:
    short, long = lists["told"]
    assert short.split() == ["made", "##", "A", "x" * 10, "##", "B", "y"] and "# T" not in short
    assert long.split()[0] == "made" and "x" not in long and long.endswith("(The rest is in the report.)\n")


def test_a_table_stands_upright_where_a_page_would_cut_it_off(lists: dict[str, Any]) -> None:
    few, many = (table.splitlines() for table in lists["tables"])
    assert few[:3] == ["| a | 0 | 1 |", "| --- | --- | --- |", "| b | 0 | 1 |"] and len(few) == 8
    assert many[:3] == ["| a | b | c | d | e | f | g |", "| --- " * 7 + "|", "| 0 | 0 | 0 | 0 | 0 | 0 | 0 |"] and len(many) == 8


@pytest.mark.parametrize("own", ["a.yaml", "it's mine.yaml", "back\\slash.yaml", '{{ "x" }}.yaml'])
def test_the_event_s_experiment_wins_over_the_own_one(own: str) -> None:
    template = jinja2.sandbox.SandboxedEnvironment().from_string(deployments.experiment_of_event(own))
    assert template.render(event={"payload": {"experiment": "other.yaml"}}) == "other.yaml"
    for payload in ({}, {"experiment": None}, {"experiment": ""}):
        assert template.render(event={"payload": payload}) == own


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        (["nope.yaml"], ConfigError, r"nope\.yaml: cannot be read"),
        (["demo.yaml", "sub/demo.yaml"], ConfigError, "same file name.*demo, demo"),
        (["demo.yaml", "--timezone", "Moon/Dark"], UserError, "--timezone Moon/Dark: not known"),
        (["demo.yaml", "--schedule", "weekly"], UserError, "--schedule 'weekly': not a cron line of five fields"),
        (
            ["demo.yaml", "--schedule"],
            UserError,
            r"demo\.yaml: a retraining is one run, .* needs an experiment with one; it has 2",
        ),
    ],
)
def test_mistakes_cost_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], error: type[Exception], text: str
) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("demo.yaml", "sub/demo.yaml"):
        (tmp_path / name).write_text((REPOSITORY / "flows/experiments/demo.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DFLASH_CONFINE", "0")
    with pytest.raises(error, match=text):
        serve._check(serve._parser().parse_args(words))


def test_an_experiment_that_runs_would_be_refused_for_is_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "demo.yaml"
    path.write_text((REPOSITORY / "flows/experiments/demo.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "workspace"))
    with pytest.raises(ConfigError, match=r"experiment: demo\.yaml: leads outside the folders allowed here"):
        serve._check(serve._parser().parse_args(["demo.yaml"]))
    monkeypatch.setenv("DFLASH_ALLOWED_PATHS", str(tmp_path))
    serve._check(serve._parser().parse_args(["demo.yaml"]))


def test_a_second_serve_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path))
    with only_one(tmp_path / "locks" / "serve.lock", "never"), pytest.raises(UserError, match="served already"):
        serve._serve(serve._parser().parse_args([]), [])
    assert not (tmp_path / "prefect").exists(), "no server was started"


def test_the_command_knows_what_stands_above_the_core_and_imports_no_prefect(tmp_path: Path) -> None:
    code = """
import sys
from flows import cli
from flows.launch import only_one
for words in (["--help"], ["server", "status"], ["server", "url"], ["watch-data", "nowhere"], ["sweep", "x", "--grid", "a"]):
    sys.argv = ["dflash", *words]
    try:
        cli.main()
    except SystemExit as end:
        print(words[0], end.code, file=sys.stderr)
print("prefect" in sys.modules, "torch" in sys.modules)
"""
    environment = {**os.environ, "DFLASH_HOME": str(tmp_path / "workspace"), "COLUMNS": "120"}
    environment.pop("PREFECT_API_URL", None)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert all(f" {name} " in done.stdout for name in ("server", "serve", "watch-data", "sweep", "prepare", "registry")), done
    assert done.stdout.splitlines()[-1] == "False False", done
    ends = [line for line in done.stderr.splitlines() if not line.startswith("error: ")]
    assert ends == ["server 1", "no server runs", "server 1", "watch-data 2", "sweep 2"], done.stderr
