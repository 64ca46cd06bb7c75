"""Experiment files: every mistake is one line with file and key, and the shipped files are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from dflash_core import experiment as root
from dflash_core.errors import ConfigError, DataError
from dflash_core.model import target as target_module
from dflash_core.training.run_folder import RunFolder

SHIPPED = sorted((Path(__file__).parents[1] / "flows" / "experiments").glob("*.yaml"))
GPUS = {"qwen3_8b_8gpu": 8, "qwen3_27b_6x2": 8}


def edit(path: Path, **sections: object) -> Path:
    values = yaml.safe_load(path.read_text())
    for name, value in sections.items():
        values[name] = {**values[name], **value} if isinstance(value, dict) and name in values else value
    path.write_text(yaml.safe_dump(values))
    return path


def test_the_shipped_experiments_are_there() -> None:
    assert {"demo", "smollm2", *GPUS} <= {path.stem for path in SHIPPED}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_experiments_are_valid(path: Path, in_repository: Path) -> None:
    config = root.load_experiment(path)
    placed = root.check(config, GPUS.get(path.stem, 0))["runs"]
    assert set(placed) == {name for name, _ in config.variants()}
    if path.stem == "qwen3_8b_8gpu":
        assert [c["draft"] for c in placed["run"]] == [f"cuda:{i}" for i in range(8)]
    if path.stem == "qwen3_27b_6x2":
        assert [len(c["targets"]) for c in placed["run"]] == [3, 3]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"lrr": 1.0}}, r"train\.lrr: unknown key \(did you mean lr\?\)"),
        ({"trian": {}}, r"trian: unknown key \(did you mean train\?\)"),
        ({"train": {"lr": "fast"}}, r"train\.lr: .*not 'fast'"),
        ({"train": {"lr": -1}}, r"train\.lr: .*greater than 0"),
        ({"bucketing": {"order": "diversity"}}, r"bucketing\.order: .*'diverse'"),
        ({"bucketing": {"token_budget": 100}}, r"bucketing\.token_budget: smaller than data\.max_length"),
        ({"topology": {"cells": 3}}, r"bucketing\.batches_per_step: fewer batches than cells"),
        ({"runs": [{"name": "a"}, {"name": "a"}]}, "two runs have the same name"),
        ({"runs": [{"name": "a", "set": {"train.lrr": 1}}]}, r"run 'a'.*train\.lrr: unknown key"),
        ({"runs": [{"name": "a", "set": {"name": "b"}}]}, "cannot override"),
    ],
)
def test_mistakes_name_file_and_key(micro_experiment: Path, sections: dict[str, object], message: str) -> None:
    path = edit(micro_experiment, **sections)
    with pytest.raises(ConfigError, match=message) as caught:
        root.load_experiment(path)
    assert str(path) in str(caught.value) or "of experiment" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("? [1, 2]\n: 3\n", "not a plain value"),
        ("a: [1", "not YAML"),
        ("- 1\n- 2\n", "not a mapping"),
        ("name: x\nname: y\n", "key 'name' stands twice"),
        ("", "not a mapping"),
    ],
)
def test_files_that_are_no_experiment(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        root.load_experiment(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_yaml_anchors_and_merges_are_understood(micro_experiment: Path) -> None:
    text = micro_experiment.read_text() + "runs:\n- name: a\n  set: &base {train.lr: 0.1}\n- name: b\n  set: {<<: *base}\n"
    micro_experiment.write_text(text)
    assert [config.train.lr for _, config in root.load_experiment(micro_experiment).variants()] == [0.1, 0.1]


def test_a_missing_section_is_named(micro_experiment: Path) -> None:
    values = yaml.safe_load(micro_experiment.read_text())
    del values["target"]
    micro_experiment.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=r"target: Field required"):
        root.load_experiment(micro_experiment)


def test_overrides(micro_experiment: Path) -> None:
    config = root.load_experiment(micro_experiment, ["train.lr=0.01", "bucketing.boundaries=[64, 256]", "draft.num_layers=1"])
    assert (config.train.lr, config.bucketing.boundaries, config.draft.num_layers) == (0.01, (64, 256), 1)
    with pytest.raises(ConfigError, match=r"train\.nope: unknown key"):
        root.load_experiment(micro_experiment, ["train.nope=1"])
    with pytest.raises(ConfigError, match="expected key=value"):
        root.load_experiment(micro_experiment, ["train.lr"])


def test_a_section_given_as_a_mapping_keeps_its_other_keys(micro_experiment: Path) -> None:
    config = root.load_experiment(micro_experiment, ["train={lr: 0.01}"])
    assert (config.train.lr, config.train.max_steps, config.train.num_anchors) == (0.01, 10, 16)
    runs = [{"name": "a", "set": {"train": {"lr": 0.1}}}]
    varied = dict(root.load_experiment(edit(micro_experiment, runs=runs)).variants())["a"]
    assert (varied.train.lr, varied.train.max_steps) == (0.1, 10)


def test_runs_differ_in_what_they_set(micro_experiment: Path) -> None:
    runs = [{"name": "a", "set": {"bucketing.order": "shuffle", "train.seed": 3}}, {"name": "b"}]
    variants = dict(root.load_experiment(edit(micro_experiment, runs=runs)).variants())
    assert (variants["a"].bucketing.order, variants["a"].train.seed) == ("shuffle", 3)
    assert variants["b"].bucketing.order == "diverse" and not variants["a"].runs


def test_the_same_experiment_finds_its_run_again(micro_experiment: Path) -> None:
    config = root.load_experiment(micro_experiment)
    assert not root.prepare(config)["reused"]
    assert root.prepare(config)["reused"]
    first = root.create_run(config, "run")
    RunFolder(first).update_manifest(state="completed")
    assert root.create_run(root.load_experiment(micro_experiment, ["prefetch.num_workers=1"]), "run") == first
    assert root.run_state(first) == "completed"
    assert root.create_run(root.load_experiment(micro_experiment, ["train.lr=0.1"]), "run") != first
    assert root.load_experiment(first / "config.yaml") == root.load_experiment(micro_experiment, ["prefetch.num_workers=1"])


def test_plan_reports_every_order(micro_experiment: Path) -> None:
    config = root.load_experiment(micro_experiment)
    root.prepare(config)
    result = root.plan(config)
    assert set(result["orders"]) == {"diverse", "shuffle", "grouped", "clustered", "sorted"}
    diverse = result["orders"]["diverse"]
    assert diverse["longest_run"] == diverse["shortest_possible_longest_run"]
    assert sum(result["bucket_pct"]) == pytest.approx(100, abs=0.1)


def test_evaluation_and_export_of_a_trained_run(micro_experiment: Path) -> None:
    config = root.load_experiment(micro_experiment)
    root.prepare(config)
    run_dir = root.create_run(config, "run")
    with pytest.raises(DataError, match="no checkpoint to evaluate"):
        root.evaluate_run(run_dir)
    root.train_run(config, run_dir)
    result = root.evaluate_run(run_dir)
    assert result["lossless"] is True and result["num_prompts"] == 4
    assert 1.0 <= result["acceptance_length"] <= 4.0 and result["step"] == 10
    with pytest.MonkeyPatch.context() as patch:  # the taps are the checkpoint's
        taps: list[tuple[int, ...]] = []
        real = target_module.FrozenTarget.__init__

        def spy(self: target_module.FrozenTarget, folder: Path, layer_ids: tuple[int, ...], *rest: str) -> None:
            taps.append(layer_ids)
            real(self, folder, layer_ids, *rest)

        patch.setattr(target_module.FrozenTarget, "__init__", spy)
        (run_dir / "export" / "model.safetensors").unlink()  # an export that is gone is written again, without measuring
        assert root.evaluate_run(run_dir) == result and (run_dir / "export" / "model.safetensors").exists() and not taps
        RunFolder(run_dir).update_manifest(evaluation_digest=None)
        again = root.evaluate_run(run_dir)
        assert {**again, "speed": None} == {**result, "speed": None}
        result = again
        exported = json.loads((run_dir / "checkpoints" / "step-000010" / "config.json").read_text())
        assert taps == [tuple(exported["dflash_config"]["target_layer_ids"])]
    before = (run_dir / "metrics" / "evals.jsonl").read_text()
    assert root.evaluate_run(run_dir) == result  # the finished evaluation is used again
    assert (run_dir / "metrics" / "evals.jsonl").read_text() == before
    assert sorted(path.name for path in (run_dir / "export").iterdir()) == ["README.md", "config.json", "model.safetensors"]
    manifest = RunFolder(run_dir).read_manifest()
    assert manifest["acceptance_length"] == result["acceptance_length"] and manifest["export"] == "export"
    report = root.analyze(config, [run_dir])
    assert Path(report["report_html"]).is_file() and report["table"][0]["steps"] == 10


def test_the_demo_corpus_shows_what_the_demo_is_for(home: Path, in_repository: Path) -> None:
    """Six buckets, the longest with about half of the batches; diverse reaches the bound and shuffle does not."""
    config = root.load_experiment("flows/experiments/demo.yaml")
    root.prepare(config)
    result = root.plan(config)
    assert len(result["edges"]) == 6
    assert 40 <= result["bucket_pct"][-1] <= 60
    diverse, shuffle = result["orders"]["diverse"], result["orders"]["shuffle"]
    assert diverse["longest_run"] == diverse["shortest_possible_longest_run"]
    assert shuffle["longest_run"] >= shuffle["shortest_possible_longest_run"] + 3
