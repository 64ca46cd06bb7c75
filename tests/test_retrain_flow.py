"""The retraining as a user starts it: what a person is asked, what Prefect shows, and the real thing with a real drafter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from dflash_core import experiment as root
from dflash_core import experiment_retrain as retrain
from dflash_core.errors import ConfigError, UserError
from dflash_core.registry import Entry, Registry
from flows import command, server
from tests import test_flows
from tests.conftest import REPOSITORY
from tests.test_flows import NOISE, Workplace, home_of, last_line, wait_for


def test_a_mistake_is_found_before_a_server_is_started(micro_experiment: Path) -> None:
    runs = "runs=[{name: a, set: {}}, {name: b, set: {}}]"
    with pytest.raises(UserError, match="a retraining is one run; choose one with --run: a, b"):
        command._check("retrain", str(micro_experiment), [runs], None)
    with pytest.raises(ConfigError, match=r"data\.held_out: names no file"):
        command._check("retrain", str(micro_experiment), [runs, "data.held_out=null"], "b")


class RetrainPlace(Workplace):
    """Flows on top of `fake_retrain`."""

    def write(self, tau: int, sources: list[str], **retrain: Any) -> str:
        return self.experiment("weekly", runs={"a": {"steps": 2}}, tau=tau, sources=sources, retrain=retrain)

    @property
    def registry(self) -> Registry:
        return Registry(self.home / "registry" / "target")

    def latest_run(self) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("flow_runs/filter", sort="START_TIME_DESC", limit=1)[0]
        return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RetrainPlace]:
    monkeypatch.setattr(test_flows, "FAKE", Path(__file__).with_name("fake_retrain.py"))
    workplace = RetrainPlace(tmp_path)
    try:
        started = workplace.run("server", "start")
        assert started.code == 0, started.err
        yield workplace
    finally:
        server.stop(workplace.home, force=True)
    assert not [process for process in psutil.process_iter() if home_of(process) == str(workplace.home / "prefect")]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_is_promoted_kept_and_asked(place: RetrainPlace) -> None:
    first = place.run("retrain", place.write(2, ["a"]))
    assert first.code == 0, first.err
    assert not [noise for noise in NOISE if noise in first.err], first.err
    assert "promoted: 2.000 tokens per target forward against 1 of decoding without a drafter" in first.out
    assert last_line(first.out) == f"registry: {place.registry.folder}"
    assert (place.latest_run()["state"]["type"], place.latest_run()["state"]["name"]) == ("COMPLETED", "Promoted")
    artifact = place.ask("artifacts/filter", artifacts={"key": {"any_": ["retraining-weekly"]}})[0]["data"]
    assert "**promoted**: 2.000 tokens" in artifact and "| difference | +1.000 | +1.000 to +1.000 |" in artifact

    nothing = place.run("retrain", place.write(2, ["a"]))
    assert nothing.code == 0 and nothing.out.startswith("nothing new: all of it is known\n")
    assert "train" not in nothing.err and place.latest_run()["state"]["name"] == "Nothing new"

    late = place.run("retrain", place.write(3, ["a", "late"], approval=True, approval_timeout_s=1))
    assert late.code == 0 and "kept: nobody approved it within 1 s (3.000 tokens" in late.out, late.err
    assert not [noise for noise in NOISE if noise in late.err], late.err
    assert place.latest_run()["state"]["name"] == "Kept"

    for promote, note in ((False, "not on a Friday"), (True, "looks good")):
        asked = place.start("retrain", place.write(4, ["a", note], approval=True, approval_timeout_s=90))
        wait_for(lambda: place.latest_run()["state"]["type"] == "PAUSED")
        answer = {"promote": promote, "note": note}
        assert place.ask(f"flow_runs/{place.latest_run()['id']}/resume", run_input=answer)["status"] == "ACCEPT"
        outcome = Workplace.end(asked)
        assert outcome.code == 0, outcome.err
        words = "promoted: 4.000 tokens" if promote else "kept: a person declined it: not on a Friday (4.000 tokens"
        assert words in outcome.out
    entries = place.registry.entries()
    assert [entry.decision for entry in entries] == ["promoted", "kept", "kept", "promoted"]
    assert [entry.approval for entry in entries[1:]] == ["no answer", "no: not on a Friday", "yes: looks good"]
    assert entries[-1].previous == entries[0].drafter


def write_weekly(folder: Path) -> Path:
    """The demo, made small: the tiny target, short sequences, blocks of four."""
    values = yaml.safe_load((REPOSITORY / "flows/experiments/demo.yaml").read_text())
    del values["runs"]
    values["data"] |= {"files": [str(folder / "week*.jsonl")], "max_length": 256, "num_workers": 1}
    values["bucketing"] |= {"token_budget": 512, "batches_per_step": 2}
    values["draft"]["block_size"] = 4
    values["train"] |= {"max_steps": 25, "num_anchors": 16, "self_checks": False}
    values |= {"topology": {"device": "cpu"}, "metrics": {"wandb": "disabled"}}
    values["evaluate"] = {"max_prompts": 8, "max_new_tokens": 24, "untrained_prompts": 0, "speed_prompts": 0}
    values["retrain"] = {"min_prompts": 8}
    path = folder / "weekly.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_weeks_with_a_real_drafter_of_which_the_last_makes_it_worse(
    tmp_path: Path, home: Path, in_repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = (REPOSITORY / "data/demo/train.jsonl").read_text().splitlines(True)
    path = write_weekly(tmp_path)

    def week(number: int, *changes: str) -> Entry:
        (tmp_path / f"week{number}.jsonl").write_text("".join(rows[100 * number : 100 * number + 100]))
        config = root.load_experiment(path, changes)
        found = retrain.look(config)
        assert found.num_new == 1 and found.nothing_new is None
        begun = retrain.begin(config, found)
        root.prepare(begun)
        run_dir = root.create_run(begun, retrain.RUN_NAME)
        root.train_run(begun, run_dir)
        entry = retrain.conclude(begun, found, retrain.compare(begun, found, run_dir))
        assert retrain.look(config).nothing_new is not None
        return entry

    first = week(0)
    assert first.decision == "promoted" and first.lossless is True and first.parent is None
    parts = {file.name: file.stat().st_ino for file in home.glob("datasets/demo/tokens/part-*.arrow")}
    second = week(1)
    assert second.parent == second.compared_with == first.drafter
    assert second.old_acceptance_length == first.acceptance_length, "the same prompts under the same settings"
    assert second.decision == "promoted" and second.current == second.drafter
    kept = {file.name: file.stat().st_ino for file in home.glob("datasets/demo/tokens/part-*.arrow")}
    assert parts.items() < kept.items(), "only the new file was tokenized"
    worse = week(2, "train.max_steps=2", "train.lr=0.5", "train.warmup_fraction=0")
    assert worse.decision == "kept" and worse.current == second.drafter
    assert "all of it below 0: it is worse" in worse.reason and second.drafter in worse.reason
    registry = Registry(next(home.glob("registry/*")))
    assert registry.current_link.resolve().name == second.drafter
    assert json.loads((registry.current_link / "config.json").read_text())["architectures"] == ["DFlashDraftModel"]
    assert registry.roll_back().current == first.drafter and registry.check(first.drafter) is None
