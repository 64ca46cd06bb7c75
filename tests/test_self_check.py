"""Self-checks of whole runs, and of the mask row: what a run says, what stops it, and that it can be told not to look."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_core import experiment as root
from dflash_core.errors import ConfigError, DFlashError, TrainingError
from dflash_core.model.target import FrozenTarget
from dflash_core.training.assembly import CellParts, load_target, make_trainer
from dflash_core.training.cell import run_cell
from dflash_core.training.loop import DraftTrainer
from dflash_core.training.run_folder import RunFolder
from dflash_core.training.self_check_mask import check_mask
from dflash_core.training.self_check_report import Report
from tests.test_self_check_draft import Inclusive
from tests.test_training_run import losses, rows
from tests.test_training_run import start as start_as_configured

PAD, END, MASK, SPARE = 256, 260, 261, 262


def slow(*values: Any) -> Any:
    """One more case of the same, for the whole suite only."""
    return pytest.param(*values, marks=pytest.mark.slow)


def start(experiment: Path, name: str, *overrides: str) -> Path:
    """A run with the self-checks, which the micro experiment leaves out."""
    return start_as_configured(experiment, name, "train.self_checks=true", *overrides)


def checked(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in rows(run_dir, "events") if row["kind"] == "self_check"]


def run(run_dir: Path, parts: CellParts | None = None) -> None:
    run_cell(root.training_job(root.load_experiment(run_dir / "config.yaml"), run_dir), parts or CellParts())


@pytest.mark.parametrize("strategy", ["padded", slow("packed")])
def test_a_healthy_run_passes_says_so_and_trains_the_same(
    micro_experiment: Path, strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With two target loops that share a device, which is looked at once; how long it takes is printed (pytest -s)."""
    changes = ("train.max_steps=1", f"bucketing.strategy={strategy}", "topology.targets_per_cell=2")
    run_dir = start(micro_experiment, "checked", *changes)
    started = time.monotonic()
    job = root.training_job(root.load_experiment(run_dir / "config.yaml"), run_dir)
    load_target(job, "cpu")
    loaded_s = time.monotonic() - started
    with caplog.at_level(logging.INFO, "dflash_core"):
        run(run_dir)
    (row,) = checked(run_dir)
    both = {"embedding", "head", "logits", "taps", "rows", "mask", "leaks", "reference", "export"}
    assert set(row["checks"]) == both | ({"packed"} if strategy == "packed" else {"batching"})
    assert (row["step"], row["cell"], row["skipped_checks"], row["mask_sequences"]) == (0, 0, [], 40)
    assert len(row["check_s"]) == len(row["checks"]) == len(set(row["checks"])) and len(row["tap_rms"]) == 2
    assert row["reference_difference"] < 1e-5 and row["tap_difference"] < 1e-5 and row["reference_layers"] == 2
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("self-checks passed in ")]
    assert line.endswith("s: " + ", ".join(row["checks"]))
    sys.stdout.write(f"{strategy}: self-checks {sum(row['check_s']):.2f} s, loading the target {loaded_s:.2f} s\n")
    unchecked = start(micro_experiment, "unchecked", *changes, "train.self_checks=false")
    run(unchecked)
    assert checked(unchecked) == [] and losses(unchecked) == losses(run_dir)


def failing(error: type[DFlashError], run_dir: Path, parts: CellParts | None = None) -> str:
    """The one line that stops the run before its first step."""
    with pytest.raises(error) as caught:
        run(run_dir, parts)
    manifest = RunFolder(run_dir).read_manifest()
    assert (manifest["state"], manifest["error"]) == ("failed", str(caught.value)) and "\n" not in str(caught.value)
    assert not (run_dir / "metrics" / "steps.jsonl").exists()
    return str(caught.value)


def shifted_target(job: Any, device: str) -> FrozenTarget:
    """Its hooks stand one layer further on than it says."""
    target = FrozenTarget(job.target_folder, tuple(i + 1 for i in job.spec.target_layer_ids), "float32", "sdpa", device)
    target.layer_ids = job.spec.target_layer_ids
    return target


def zero_target(job: Any, device: str) -> FrozenTarget:
    target = load_target(job, device)
    real = target.features
    target.features = lambda *args, **more: torch.zeros_like(real(*args, **more))  # type: ignore[method-assign]
    return target


def trainer_with(*, head: Callable[[Tensor], Tensor] = lambda x: x, embedding: Callable[[Tensor], Tensor] = lambda x: x) -> Any:
    def make(job: Any, group: Any, device: str, target: FrozenTarget, num_steps: int) -> DraftTrainer:
        made = make_trainer(job, group, device, target, num_steps)
        return DraftTrainer(
            made.draft, embedding(target.embedding_VH), head(target.head_VH), job.train, num_steps, len(job.edges), group
        )

    return make


def leaky_trainer(job: Any, group: Any, device: str, target: FrozenTarget, num_steps: int) -> DraftTrainer:
    draft = Inclusive(job.spec).initialise(0)
    return DraftTrainer(draft, target.embedding_VH, target.head_VH, job.train, num_steps, len(job.edges), group)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (CellParts(load_target=shifted_target), "taps: captured states of layer 1 are not its own: the output of layer 2 is"),
        (CellParts(load_target=zero_target), "taps: captured states of layer 1 are all zero; a draft trained on such states"),
        (CellParts(make_trainer=leaky_trainer), "leaks: a block sees the context at its anchor, whose state tells the next"),
        (CellParts(make_trainer=trainer_with(head=torch.randn_like)), "rows: the head that the draft is trained with is not"),
        slow(CellParts(make_trainer=trainer_with(head=lambda x: x.flip(0))), "rows: the head that the draft is trained wi"),
        slow(CellParts(make_trainer=trainer_with(embedding=lambda x: 5 * x)), "rows: the embedding that the draft is tr"),
        slow(CellParts(make_trainer=trainer_with(head=lambda x: x[:-1])), "rows: the draft's head is [263, 32] and the"),
    ],
)
def test_what_could_not_be_served_is_not_trained(micro_experiment: Path, parts: CellParts, words: str) -> None:
    assert failing(TrainingError, start(micro_experiment, "faulty"), parts).startswith(f"self-check {words}")


@pytest.mark.slow
def test_without_the_checks_the_leak_would_be_trained(micro_experiment: Path) -> None:
    run_dir = start(micro_experiment, "leaky", "train.self_checks=false", "train.max_steps=1")
    run(run_dir, CellParts(make_trainer=leaky_trainer))
    assert RunFolder(run_dir).read_manifest()["state"] == "completed"


@pytest.mark.slow
def test_a_full_disk_at_the_event_is_the_runs_failure(micro_experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_core.metrics.sinks import JsonlSink

    real, closed = JsonlSink.log, []
    monkeypatch.setattr(JsonlSink, "close", lambda self, close=JsonlSink.close: (closed.append(1), close(self)))

    def full(self: JsonlSink, stream: str, row: Any) -> None:
        if row.get("kind") == "self_check":
            raise OSError(28, "No space left on device")
        real(self, stream, row)

    monkeypatch.setattr(JsonlSink, "log", full)
    message = failing(DFlashError, start(micro_experiment, "full"))  # type: ignore[type-abstract]
    assert "stage 'metrics of step 0': OSError: [Errno 28] No space left on device" in message and closed


class FakeDataset:
    """Two sequences; the first 4 tokens of each are the prompt."""

    def __init__(self, *sequences: list[int]) -> None:
        self.sequences = sequences

    def __len__(self) -> int:
        return len(self.sequences)

    def check_files(self, indices: Any) -> None:
        assert list(indices) == list(range(len(self)))

    def tokens(self, index: int) -> Any:
        tokens = np.array(self.sequences[index], dtype=np.int32)
        return tokens, np.arange(len(tokens)) >= 4


TEXT = list(range(20, 40))


@pytest.fixture
def target(micro_target: Path) -> FrozenTarget:
    return FrozenTarget(micro_target, (1, 2), "float32", "sdpa", "cpu")


def refused(target: FrozenTarget, folder: Path, mask: int, *sequences: list[int]) -> str:
    with pytest.raises(ConfigError) as caught:
        Report().run("mask", check_mask, target, folder, mask, FakeDataset(*(sequences or (TEXT,))))
    assert str(caught.value).startswith(f"self-check mask: target.mask_token_id: {mask} ") and "\n" not in str(caught.value)
    return str(caught.value)


def test_a_mask_that_means_something_is_refused_and_an_unused_one_named(target: FrozenTarget, micro_target: Path) -> None:
    assert check_mask(target, micro_target, MASK, FakeDataset(TEXT, TEXT)) == {"mask_sequences": 2}  # type: ignore[arg-type]
    assert "260 is the end token, so that masked slots would mean something else; id 261 is unused" in refused(
        target, micro_target, END
    )
    assert "256 is the padding token" in refused(target, micro_target, PAD)
    assert "264 is not a row of the target's embedding (0 to 263)" in refused(target, micro_target, 264)
    target.model.generation_config.eos_token_id = [END, SPARE]
    assert "262 is the end token" in refused(target, micro_target, SPARE)
    target.model.generation_config.bos_token_id = 263
    assert "263 is the beginning token" in refused(target, micro_target, 263)
    target.embedding_VH[MASK] = 0
    assert refused(target, micro_target, END).endswith("; choose an unused row of the embedding")  # no spare is left


def test_the_unknown_token_is_no_mask(target: FrozenTarget, micro_target: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(micro_target, tmp_path / "unknown"))
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"unk_token": "<|spare0|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "262 is the unknown token" in refused(target, folder, SPARE)


def test_a_mask_that_is_used_in_the_data_is_refused(target: FrozenTarget, micro_target: Path) -> None:
    message = refused(target, micro_target, MASK, TEXT, [*TEXT, MASK, 261, 5])
    assert "261 occurs in the supervised text of the dataset, so that the draft would be trained to propose its own m" in message
    assert message.endswith("; id 262 is unused")
    message = refused(target, micro_target, MASK, [MASK, *TEXT, SPARE], TEXT)
    assert "261 occurs in 50% of the dataset's sequences; id 263 is unused" in message
    quoted = FakeDataset([MASK, *TEXT], *[TEXT] * 199)  # a prompt that somebody has typed the mask into
    assert check_mask(target, micro_target, MASK, quoted) == {"mask_sequences": 200}  # type: ignore[arg-type]


def test_a_row_that_is_no_vector_is_no_mask(target: FrozenTarget, micro_target: Path) -> None:
    target.embedding_VH[MASK] = 0
    assert "261 is an all-zero row of the embedding; id 262 is unused" in refused(target, micro_target, MASK)
    target.embedding_VH[MASK, 3] = torch.nan
    assert "261 is a row of the embedding that is not finite; id 262 is unused" in refused(target, micro_target, MASK)


def test_a_mask_row_of_zeros_stops_a_run(micro_experiment: Path, micro_target: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(micro_target, tmp_path / "zero_mask"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][MASK] = 0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    message = failing(ConfigError, start(micro_experiment, "zero", f"target.path={folder}"))
    assert message == "self-check mask: target.mask_token_id: 261 is an all-zero row of the embedding; id 262 is unused"
