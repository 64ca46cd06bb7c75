"""A retraining without the training: what is new, what it begins with, what is compared, and what becomes of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_core import experiment as root
from dflash_core import experiment_retrain as retrain
from dflash_core.data import load_tokenizer, read_prompts
from dflash_core.errors import ConfigError, DataError
from dflash_core.experiment_data import draft_spec, target_folder
from dflash_core.experiment_retrain import Look
from dflash_core.model.draft import DFlashDraft
from dflash_core.model.weights import load_draft, save_draft
from dflash_core.registry import Entry, Registry
from dflash_core.registry import store as store_module
from dflash_core.training.run_folder import RunFolder
from tests.conftest import write_corpus, write_micro_experiment
from tests.test_cli import dflash, only_line

CHANGES = ["data.num_workers=1", "evaluate.max_prompts=6", "retrain.min_prompts=4", "evaluate.bootstrap_samples=100"]


class Place:
    """An experiment whose data grow. A training makes random weights, and a drafter makes so many tokens a round as is said."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.folder, self.tau = path, path.parent, 2
        self.measured: dict[str, int] = {}
        self.lossless = True
        self.num_trained = self.num_runs = 0
        monkeypatch.setattr(retrain, "evaluate_run", self.evaluate_run)
        monkeypatch.setattr(retrain, "evaluate_folder", self.evaluate_folder)
        monkeypatch.setattr(store_module, "_git_commit", lambda: "c" * 40)

    def config(self, *changes: str) -> root.ExperimentConfig:
        files = f"data.files=['{self.folder}/train*.jsonl']"
        return root.load_experiment(self.path, [*CHANGES, files, *changes])

    def more_data(self, name: str) -> None:
        rows = [json.loads(line) for line in write_corpus(self.folder / f"train-{name}.jsonl", 4).read_text().splitlines()]
        text = "".join(json.dumps({**row, "id": f"{name}-{row['id']}"}) + "\n" for row in rows)
        (self.folder / f"train-{name}.jsonl").write_text(text)

    def train(self, config: root.ExperimentConfig) -> Path:
        """Stands for the stages prepare and train."""
        root.prepare(config)
        run_dir = root.create_run(config, retrain.RUN_NAME)
        export = RunFolder(run_dir).export
        if not export.exists():
            self.num_trained += 1
            spec = draft_spec(config)
            save_draft(export, spec, dict(DFlashDraft(spec).initialise(self.num_trained).state_dict()))
        return run_dir

    def evaluate_run(self, run_dir: Path, progress: Any = None) -> dict[str, Any]:
        self.num_runs += 1
        config = root.load_experiment(run_dir / "config.yaml")
        weights = load_draft(run_dir / "export").fc.weight
        tau = self.measured.setdefault(str(weights.sum().item()), self.tau)
        return {**self.write(config, run_dir, tau), "checkpoint": "checkpoints/step-000010"}

    def evaluate_folder(self, config: Any, draft: Path, progress: Any = None, out: Path = Path()) -> dict[str, Any]:
        assert config.evaluate.speed_prompts == 0 and config.evaluate.untrained_prompts == 0
        return self.write(config, out, self.measured[str(load_draft(draft).fc.weight.sum().item())])

    def write(self, config: root.ExperimentConfig, folder: Path, tau: int) -> dict[str, Any]:
        prompts = read_prompts(str(config.data.held_out), load_tokenizer(target_folder(config)), config.evaluate.max_prompts)
        folder.mkdir(parents=True, exist_ok=True)
        rows = [{"id": p.id, "prompt_ids": list(p.input_ids), "accepted": [tau - 1] * 5} for p in prompts]
        (folder / "evaluation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        mismatches = [] if self.lossless else [prompts[0].id]
        return {"num_prompts": len(rows), "lossless": self.lossless, "mismatches": mismatches}

    def retrain(self, *changes: str) -> tuple[Look, Entry | None]:
        config = self.config(*changes)
        found = retrain.look(config)
        if found.nothing_new is not None:
            return found, None
        begun = retrain.begin(config, found)
        return found, retrain.conclude(begun, found, retrain.compare(begun, found, self.train(begun)))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, micro_target: Path) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("retrain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_HOME", str(folder / "workspace"))
        path = write_micro_experiment(folder, micro_target)
        root.prepare(root.load_experiment(path, CHANGES))
        yield path


@pytest.fixture
def place(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    shutil.copytree(prepared.parent, tmp_path / "here")
    path = tmp_path / "here" / prepared.name
    path.write_text(prepared.read_text().replace(str(prepared.parent), str(path.parent)))
    monkeypatch.setenv("DFLASH_HOME", str(path.parent / "workspace"))
    return Place(path, monkeypatch)


def test_the_chain_of_several_weeks(place: Place) -> None:
    first_look, first = place.retrain()
    assert first is not None and first.decision == "promoted" and first.parent is None and first.compared_with is None
    assert first_look.num_new == 1 and first.sources == first_look.sources and first.num_prompts == 6
    again, nothing = place.retrain()
    assert nothing is None and place.num_runs == 1
    assert again.nothing_new == f"the current drafter {first.drafter} was trained on all 1 data files that there are"

    place.more_data("week2")
    place.tau = 3
    found, second = place.retrain()
    assert second is not None and second.decision == "promoted" and found.num_new == 1
    assert (second.parent, second.compared_with, second.previous) == (first.drafter,) * 3
    assert second.run_id != first.run_id and second.dataset_fingerprint != first.dataset_fingerprint
    run = root.load_experiment(RunFolder(root.workspace() / "runs" / second.run_id).config)
    assert run.draft.init_from == str(Registry(found.registry).drafter_folder(first.drafter))
    assert [Path(name).name for name in run.data.files] == ["train-week2.jsonl", "train.jsonl"]

    place.more_data("week3")
    place.tau = 2  # worse by construction
    found, worse = place.retrain()
    assert worse is not None and worse.decision == "kept" and worse.current == second.drafter
    assert worse.reason == (
        f"2.000 tokens per target forward against 3.000 of {second.drafter} on the same 6 held-out prompts:"
        " a difference of -1.000 with a 95 % interval of -1.000 to -1.000, all of it below 0: it is worse"
    )
    tried, nothing = place.retrain()
    assert nothing is None and tried.nothing_new is not None and tried.num_new == 1
    assert f"drafter {worse.drafter} was not promoted: 2.000 tokens" in tried.nothing_new
    assert retrain.look(place.config("retrain.force=true")).nothing_new is None
    assert retrain.look(place.config("train.lr=0.01")).nothing_new is None, "other settings may do better on these data"
    place.more_data("week4")
    assert retrain.look(place.config()).num_new == 2


def test_what_is_gone_is_not_new_and_a_new_name_is_none(place: Place) -> None:
    place.more_data("b")
    place.retrain()
    (place.folder / "train-b.jsonl").rename(place.folder / "train-c.jsonl")
    assert retrain.look(place.config()).nothing_new is not None
    (place.folder / "train-c.jsonl").unlink()
    found = retrain.look(place.config())
    assert found.nothing_new is not None and found.num_new == 0
    with (place.folder / "train.jsonl").open("a") as file:
        file.write((place.folder / "held_out.jsonl").read_text())
    assert retrain.look(place.config()).num_new == 1


def test_a_drafter_that_was_rolled_back_is_not_made_again_of_the_same_data(place: Place) -> None:
    _, first = place.retrain()
    place.more_data("b")
    place.tau = 3
    found, second = place.retrain()
    assert first is not None and second is not None
    Registry(found.registry).roll_back(reason="complaints")
    again = retrain.look(place.config())
    assert again.current == first.drafter and again.num_new == 1
    text = f"drafter {second.drafter} was rolled back: taken back by hand for {first.drafter}: complaints"
    assert again.nothing_new is not None and again.nothing_new.endswith(text)


@pytest.mark.parametrize("stage", ["train", "compare", "conclude"])
def test_a_retraining_that_was_killed_goes_on_with_what_is_finished(
    place: Place, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    class Killed(BaseException):
        pass

    def dies(*_: Any, **__: Any) -> Any:
        raise Killed

    broken = {"train": (root, "create_run"), "compare": (retrain, "decide"), "conclude": (Registry, "add")}[stage]
    with monkeypatch.context() as patch:
        patch.setattr(*broken, dies)
        with pytest.raises(Killed):
            place.retrain()
    found, entry = place.retrain()
    assert found.nothing_new is None, "nothing was decided yet"
    assert entry is not None and entry.decision == "promoted"
    assert place.num_trained == 1 and len(list((root.workspace() / "runs").iterdir())) == 1


def test_a_file_that_arrives_meanwhile_belongs_to_the_next_retraining(place: Place) -> None:
    config = place.config()
    found = retrain.look(config)
    begun = retrain.begin(config, found)
    place.more_data("late")
    entry = retrain.conclude(begun, found, retrain.compare(begun, found, place.train(begun)))
    assert len(entry.sources) == 1 and retrain.look(config).num_new == 1


def test_a_person_says_no_or_nobody_answers(place: Place) -> None:
    config = place.config()
    found = retrain.look(config)
    begun = retrain.begin(config, found)
    comparison = retrain.compare(begun, found, place.train(begun))
    entry = retrain.conclude(begun, found, comparison, "a person declined it: not on a Friday", "no: not on a Friday")
    assert entry.decision == "kept" and entry.current is None and entry.approval == "no: not on a Friday"
    assert entry.reason.startswith("a person declined it: not on a Friday (2.000 tokens per target forward against 1")
    assert retrain.conclude(begun, found, comparison, None, "yes").current == entry.drafter


@pytest.mark.slow
def test_without_a_warm_start_the_shape_may_change_and_the_block_size_must_be_allowed(place: Place) -> None:
    _, first = place.retrain()
    place.more_data("b")
    place.tau = 3
    changes = ["retrain.warm_start=false", "draft.block_size=6"]
    _, refused = place.retrain(*changes)
    assert first is not None and refused is not None and refused.parent is None
    assert refused.decision == "rejected" and "its block size is 6 and the current one's 4" in refused.reason
    _, second = place.retrain(*changes, "retrain.same_block_size=false")
    assert second is not None and second.decision == "promoted" and second.block_size == 6


def test_held_out_prompts_that_changed_while_they_were_decoded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    real = place.evaluate_run

    def changes(run_dir: Path, progress: Any = None) -> dict[str, Any]:
        result = real(run_dir)
        write_corpus(place.folder / "held_out.jsonl", 9)
        return result

    monkeypatch.setattr(retrain, "evaluate_run", changes)
    _, entry = place.retrain()
    assert entry is not None and entry.decision == "rejected" and entry.current is None
    assert "the held-out prompts have changed since" in entry.reason


def test_texts_that_differ_are_counted(place: Place) -> None:
    place.lossless = False
    _, entry = place.retrain()
    assert entry is not None and entry.decision == "rejected" and "not lossless: 1 of 6 texts differ" in entry.reason


def test_an_export_that_no_engine_could_serve(place: Place) -> None:
    config = place.config()
    found = retrain.look(config)
    begun = retrain.begin(config, found)
    run_dir = place.train(begun)
    file = run_dir / "export" / "config.json"
    shape = json.loads(file.read_text())
    shape["dflash_config"]["target_layer_ids"] = [1, 7]
    file.write_text(json.dumps(shape))
    verdict = retrain.compare(begun, found, run_dir).verdict
    assert verdict.decision == "rejected" and "no engine could serve it with" in verdict.reason
    assert "target_layer_ids is [1, 7] there" in verdict.reason


def test_damaged_or_missing_input_is_one_line(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"data\.held_out: names no file"):
        retrain.look(place.config("data.held_out=null"))
    with pytest.raises(DataError, match="no file matches"):
        retrain.look(place.config("data.files=[nowhere/*.jsonl]"))
    real = place.evaluate_run

    def tears(run_dir: Path, progress: Any = None) -> dict[str, Any]:
        result = real(run_dir)
        lines = (run_dir / "evaluation.jsonl").read_text().splitlines(True)
        (run_dir / "evaluation.jsonl").write_text("".join(lines[:4]))
        return result

    monkeypatch.setattr(retrain, "evaluate_run", tears)
    with pytest.raises(DataError, match=r"evaluation\.jsonl: holds 4 prompts where 6 were measured"):
        place.retrain()


LOOK = """
import sys
from dflash_core.experiment_file import load_experiment
from dflash_core.experiment_retrain import look
print(look(load_experiment(sys.argv[1])).num_new, "torch" in sys.modules, "transformers" in sys.modules)
"""


def test_looking_for_new_data_loads_no_torch(place: Place) -> None:
    done = subprocess.run([sys.executable, "-c", LOOK, place.path], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["1", "False", "False"]


def test_the_command(place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = dflash(monkeypatch, capsys, "registry", "list")
    assert code == 2 and "holds no registry; python -m flows.retrain EXPERIMENT makes one" in only_line(err)
    _, first = place.retrain()
    place.more_data("b")
    place.tau = 3
    found, second = place.retrain()
    assert first is not None and second is not None
    code, out, _ = dflash(monkeypatch, capsys, "registry", "list")
    assert code == 0 and out.startswith(f"{found.registry.name}: {second.drafter} is in use\n") and first.run_id in out
    code, out, _ = dflash(monkeypatch, capsys, "registry", "show", second.drafter[:5])
    assert code == 0 and f"parent                 {first.drafter}" in out and "all of it above 0" in out
    code, out, _ = dflash(monkeypatch, capsys, "registry", "rollback", "--reason", "x")
    assert code == 0 and out.startswith(f"{first.drafter} is in use, {second.drafter} no longer")
    assert torch.equal(
        load_draft(found.registry / "current").fc.weight, load_draft(found.registry / "drafters" / first.drafter).fc.weight
    )
    for words, text in [
        (["rollback"], "is the first drafter; there is none before it"),
        (["rollback", "zz"], "zz: no such drafter"),
        (["show", "zz"], "zz: no such drafter"),
        (["list", "--target", "other"], "--target other: no registry begins so; there are: micro_target"),
    ]:
        code, _, err = dflash(monkeypatch, capsys, "registry", *words)
        assert code == 2 and text in only_line(err)
    weights = found.registry / "drafters" / second.drafter / "model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(b"")
    code, out, err = dflash(monkeypatch, capsys, "registry", "show", second.drafter)
    assert code == 2 and "has changed; the drafter is damaged" in only_line(err)
    shutil.copytree(found.registry, found.registry.with_name("another-12345678"), symlinks=True)
    code, _, err = dflash(monkeypatch, capsys, "registry", "rollback")
    assert code == 2 and "choose one with --target: another-12345678, " in only_line(err)
