"""What the parameters of a deployment may point at, and what they may not."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from dflash_core.errors import ConfigError, UserError
from dflash_core.experiment_confine import FILES, FOLDERS, KEYS, SERVERS, Confinement
from dflash_core.experiment_file import ExperimentConfig, load_experiment
from flows import deployments
from flows.tasks import Request
from tests.conftest import write_micro_experiment

# Texts that name no place: names, words of a closed list, and what other programs take.
NO_PLACE = {
    "name", "description", "data.name", "data.columns", "data.template_variables", "regenerate.model",
    "metrics.wandb_project", "topology.devices", "runs",
}  # fmt: skip


@pytest.fixture
def inside(home: Path, micro_target: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An experiment of which everything lies in the workspace, asked for by a deployment."""
    home.mkdir()
    shutil.copytree(micro_target, home / "target")
    monkeypatch.setenv("DFLASH_CONFINE", "1")
    for name in ("DFLASH_ALLOWED_PATHS", "DFLASH_ALLOWED_URLS", "DFLASH_ALLOWED_KEY_VARIABLES"):
        monkeypatch.delenv(name, raising=False)
    return write_micro_experiment(home, home / "target")


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        Request(experiment=str(path), overrides=overrides).load()
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_what_lies_in_the_workspace_is_taken(inside: Path) -> None:
    config = Request(experiment=str(inside), overrides=(f"data.files=[{inside.parent}/tr*.jsonl]",)).load()
    assert config.name == "micro"


@pytest.mark.parametrize("key", [*FILES, *FOLDERS])
@pytest.mark.parametrize(
    "place", ["/etc/passwd", "{home}/../other.jsonl", "../../etc/passwd", "file:///etc/passwd", "file://~/x"]
)
def test_a_path_that_leads_outside_is_one_line_that_names_the_key(inside: Path, key: str, place: str) -> None:
    place = place.format(home=inside.parent)
    value = f"[{place!r}]" if key.endswith(".files") else repr(place)
    assert refused(inside, f"{key}={value}").startswith(f"{key}: {place}: ")


@pytest.mark.parametrize(
    "url", ["http://example.org/x.jsonl", "s3://b/x.jsonl", "zip://x.jsonl::file:///etc/x.zip", "simplecache::http://h/x.jsonl"]
)
def test_urls_are_refused_unless_they_were_allowed(inside: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_ALLOWED_URLS", "s3://bucket/chats http://example.org/chats/")
    assert "URLs are not allowed here" in refused(inside, f"data.files=['{url}']")


def test_what_was_allowed_is_allowed_and_no_more(inside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x.jsonl").write_text("{}\n")
    monkeypatch.setenv("DFLASH_ALLOWED_PATHS", str(outside))
    monkeypatch.setenv("DFLASH_ALLOWED_URLS", "s3://bucket/chats")
    Request(experiment=str(inside), overrides=(f"data.files=['{outside}/x.jsonl', 's3://bucket/chats/x.jsonl']",)).load()
    for url in ("s3://bucket/chats-of-others/x.jsonl", "s3://bucket/chats/../x.jsonl", "s3://bucket/chats/%2e%2e/x.jsonl"):
        refused(inside, f"data.files=['{url}']")
    refused(inside, f"data.files=['{outside}-of-others/x.jsonl']")
    monkeypatch.setenv("DFLASH_ALLOWED_PATHS", "data")
    assert refused(inside) == "DFLASH_ALLOWED_PATHS: data is not an absolute path"


@pytest.mark.parametrize(
    "override",
    [
        'data.files=["/etc/a\\nb.jsonl"]', 'data.files=["../a\\n*/.."]', 'data.held_out="s3://a\\nb"',
        'target.path="package:a\\nb"', 'regenerate.base_url="http://a\\nb/v1"', 'regenerate.api_key_env="DFLASH_A_KEY\\n"',
    ],
)  # fmt: skip
def test_what_a_form_sent_cannot_begin_a_line(inside: Path, override: str) -> None:
    assert refused(inside, "regenerate.base_url=http://127.0.0.1:1/v1", override).startswith(override.partition("=")[0])


def test_symbolic_links_are_followed(inside: Path, tmp_path: Path) -> None:
    home, outside = inside.parent, tmp_path / "outside"
    outside.mkdir()
    shutil.copy(home / "train.jsonl", outside / "train.jsonl")
    (home / "link.jsonl").symlink_to(outside / "train.jsonl")
    (home / "folder").symlink_to(outside)
    (home / "loop.jsonl").symlink_to(home / "loop.jsonl")
    for pattern in ("link.jsonl", "l*k.jsonl", "folder/train.jsonl", "folder/*.jsonl", "**/train.jsonl"):
        assert "leads outside" in refused(inside, f"data.files=['{home}/{pattern}']")
    assert "not a usable path" in refused(inside, f"data.files=['{home}/loop.jsonl']")
    for literal in ("[l].jsonl", "wh?t*.jsonl"):  # the file that is called like this is read, not what it would match
        (home / literal).symlink_to(outside / "train.jsonl")
        assert "leads outside" in refused(inside, f"data.files=['{home}/{literal}']")
    assert "a pattern with '..'" in refused(inside, f"data.files=['{home}/*/../../x.jsonl']")
    (home / "target" / "model.safetensors").unlink()
    (home / "target" / "model.safetensors").symlink_to(outside / "train.jsonl")
    assert refused(inside).startswith(f"target.path: {home}/target/model.safetensors: leads outside")
    link = home / "experiment.yaml"
    link.symlink_to(tmp_path / "secret.yaml")
    assert refused(link).startswith("experiment: ")


def test_the_runs_of_an_experiment_are_checked_too(inside: Path) -> None:
    text = refused(inside, "runs=[{name: a, set: {draft.init_from: /etc}}]")
    assert text.startswith("draft.init_from: /etc: leads outside")


def test_keys_are_sent_to_no_server_but_an_allowed_one(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("http://example.org/v1", "http://127.0.0.1.example.org/v1", "http://localhost@example.org/v1"):
        assert "not on this machine" in refused(inside, f"regenerate.base_url={url}")
    Request(experiment=str(inside), overrides=("regenerate.base_url=http://127.0.0.1:8000/v1",)).load()
    monkeypatch.setenv("DFLASH_ALLOWED_URLS", "http://example.org/v1")
    Request(experiment=str(inside), overrides=("regenerate.base_url=http://example.org/v1",)).load()
    refused(inside, "regenerate.base_url=http://example.org/v1.evil")


@pytest.mark.parametrize(
    "name", ["WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "PATH", "XDFLASH_A_KEY", "DFLASH_KEYS", "dflash_a_key"]
)
def test_a_form_sends_no_variable_but_one_that_holds_such_a_key(inside: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any port of this machine may be the server, also one that somebody listens on to see what comes."""
    key = f"regenerate.api_key_env={name}"
    server = "regenerate.base_url=http://127.0.0.1:8000/v1"
    assert refused(inside, server, key).startswith(f"regenerate.api_key_env: {name}: not allowed here")
    assert "not allowed here" in refused(inside, server, f"runs=[{{name: a, set: {{regenerate.api_key_env: {name}}}}}]")
    for own in ("DFLASH_SERVER_KEY", "DFLASH_KEY", "VLLM_API_KEY"):
        Request(experiment=str(inside), overrides=(server, f"regenerate.api_key_env={own}")).load()
    monkeypatch.setenv("DFLASH_ALLOWED_KEY_VARIABLES", f"OTHER_KEY, {name}")
    Request(experiment=str(inside), overrides=(server, key)).load()
    refused(inside, server, f"regenerate.api_key_env={name}_2")
    monkeypatch.setenv("DFLASH_ALLOWED_KEY_VARIABLES", "A_KEY B_KEY")
    assert refused(inside).startswith("DFLASH_ALLOWED_KEY_VARIABLES: 'A_KEY B_KEY' is not the name of a variable")
    monkeypatch.setenv("DFLASH_CONFINE", "0")
    Request(experiment=str(inside), overrides=(server, key)).load()


@pytest.mark.parametrize("name", ["../up", "a/b", "..", "/etc", "a\nb", "", ".hidden", "a\0b"])
@pytest.mark.parametrize("key", ["name", "data.name"])
def test_names_that_become_folders_hold_no_path(inside: Path, name: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_CONFINE", "0")
    with pytest.raises(ConfigError):
        load_experiment(inside, [f"{key}={name!r}"])
    with pytest.raises(ConfigError):
        load_experiment(inside, [f"runs=[{{name: {name!r}}}]"])


def test_the_command_line_is_not_confined_and_a_deployment_is(
    inside: Path, micro_experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DFLASH_CONFINE")
    Request(experiment=str(micro_experiment)).load()
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "x")  # how Prefect's own tests set it
    refused(micro_experiment)
    monkeypatch.setenv("DFLASH_CONFINE", "0")
    Request(experiment=str(micro_experiment)).load()
    monkeypatch.setenv("DFLASH_CONFINE", "yes")
    with pytest.raises(UserError, match="DFLASH_CONFINE: 'yes'"):
        Request(experiment=str(micro_experiment)).load()


def holds_text(annotation: Any) -> bool:
    return annotation in (str, object) or any(holds_text(inner) for inner in get_args(annotation) if not isinstance(inner, str))


def test_every_key_that_can_name_a_place_is_known() -> None:
    """A new key that takes a text must be put among the places, or here among those that name none."""
    found = set()
    for name, field in ExperimentConfig.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            found |= {f"{name}.{key}" for key, inner in section.model_fields.items() if holds_text(inner.annotation)}
        elif name == "runs" or holds_text(section):
            found.add(name)
    assert found == {*FILES, *FOLDERS, *SERVERS, *KEYS, *NO_PLACE}


def test_places_are_resolved_when_they_are_allowed(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    bounds = Confinement((real.resolve(),), ())
    bounds.check_path("x", str(tmp_path / "link" / "a.jsonl"))


def test_a_form_names_no_cluster_of_its_own(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(experiment=str(inside), task_runner="ray", task_runner_address="ray://example.org:10001")
    with pytest.raises(ConfigError, match=r"task_runner_address: ray://example\.org:10001: not on this machine"):
        request.load()
    monkeypatch.setenv("DFLASH_ALLOWED_URLS", "ray://example.org:10001")
    assert request.load().name == "micro"


@pytest.mark.parametrize("name", ["a.b", "../x", "/etc", "", "torch.utils.collect_env", ".hidden", "a b"])
def test_a_package_that_holds_the_target_is_a_plain_name(inside: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To find `a.b` Python runs `a`; and what begins as a package must not pass as a path of the checkout."""
    monkeypatch.chdir(inside.parent)
    assert refused(inside, f"target.path='package:{name}'") == f"target.path: package:{name}: not the name of a package"


FLOWS = ["prepare", "regenerate", "train", "evaluate", "analyze", "experiment", "retrain", "sweep"]


@pytest.mark.parametrize("stage", FLOWS)
def test_every_flow_looks_where_its_parameters_point(
    inside: Path, micro_experiment: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The experiment's path, as a form or an event names it, and keys that a form changes; nothing has been made by then."""
    assert {deployed.stage for deployed in deployments.ALL} == set(FLOWS)
    module = importlib.import_module(f"flows.{stage}")
    request, more = (module.SweepRequest, {"grid": ("train.lr=1,2",)}) if stage == "sweep" else (Request, {})
    before = set(inside.parent.rglob("*"))
    for path, overrides in ((micro_experiment, ()), (inside, ("draft.init_from=/etc",)), (inside, ("data.files=[/etc/*]",))):
        with pytest.raises(ConfigError, match="leads outside the folders allowed here"):
            getattr(module, stage).fn(request(experiment=str(path), overrides=overrides, **more))
    with pytest.raises(ConfigError, match=r"task_runner_address: tcp://example\.org:1: not on this machine"):
        runner = {"task_runner": "dask", "task_runner_address": "tcp://example.org:1"}
        getattr(module, stage).fn(request(experiment=str(inside), **runner, **more))
    assert set(inside.parent.rglob("*")) == before


def test_a_grid_points_nowhere_else_either(inside: Path) -> None:
    from flows.sweep import SweepRequest, sweep

    for line in ("draft.init_from=/etc,/usr", "target.path=/etc,/usr", "draft.init_from=null,../../etc"):
        with pytest.raises(ConfigError, match="leads outside"):
            sweep.fn(SweepRequest(experiment=str(inside), overrides=("analyze.allow_different=true",), grid=(line,)))
