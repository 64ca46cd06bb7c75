"""Checkpoints inside whole runs: nothing random is lost, scores and events are right, and a disk that fails stops the run."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch

from dflash_core import experiment as root
from dflash_core.analysis.checkpoints import checkpoint_rows, checkpoints_of, step_times
from dflash_core.analysis.runs import load_run
from dflash_core.errors import StageError
from dflash_core.pipeline import Supervisor
from dflash_core.training import checkpoint_writer
from dflash_core.training import loop as loop_module
from dflash_core.training.checkpoint import check_checkpoint, restore
from dflash_core.training.checkpoint_writer import CheckpointWriter
from dflash_core.training.hashed_file import HashedFile
from dflash_core.training.retention import Retention
from dflash_core.training.run_folder import RunFolder
from tests.test_checkpoint_files import a_file, flip_in, names, trained
from tests.test_training_run import assert_same_run, rows, start, train, train_until_it_breaks

KEEP_ALL = "train.keep_last=9"


def scramble() -> None:
    """Put all global generators into a state of their own."""
    seed = int.from_bytes(os.urandom(4), "little")
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the global generator is the point
    torch.manual_seed(seed)


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in rows(run_dir, "events") if row["kind"] == kind]


def scores(run_dir: Path) -> dict[int, float]:
    folders = sorted((run_dir / "checkpoints").iterdir())
    return {(state := check_checkpoint(folder))["next_step"]: state["score"] for folder in folders}


def test_no_global_generator_is_part_of_the_state(micro_experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scrambled before every batch and every step, broken, and resumed: the same run, so there is nothing to keep.

    The scores are the same too: a checkpoint is the border of what they are made of.
    """
    reference = train(micro_experiment, "reference", KEEP_ALL)
    for name in ("add", "end"):
        real = getattr(loop_module.DraftTrainer, name)

        def scrambled(self: Any, *args: Any, real: Any = real) -> Any:
            scramble()
            return real(self, *args)

        monkeypatch.setattr(loop_module.DraftTrainer, name, scrambled)
    run_dir = start(micro_experiment, "scrambled", KEEP_ALL)
    scramble()
    train_until_it_breaks(run_dir, monkeypatch)
    scramble()
    root.train_run(root.load_experiment(run_dir / "config.yaml"), run_dir)
    assert [event["step"] for event in events(run_dir, "resume")] == [4]
    assert_same_run(reference, run_dir)
    lengths = [row["expected_acceptance_length"] for row in rows(reference, "steps")]
    assert scores(reference) == {4: fmean(lengths[:4]), 8: fmean(lengths[4:8]), 10: fmean(lengths[8:])} == scores(run_dir)


def test_events_tell_when_a_checkpoint_begins_and_what_it_became(micro_experiment: Path) -> None:
    run_dir = train(micro_experiment, "told", "train.keep_last=1", "train.keep_every=4", "train.checkpoint_every=2")
    begun, ended = events(run_dir, "checkpoint_begin"), events(run_dir, "checkpoint_end")
    assert [event["step"] for event in begun] == [event["step"] for event in ended] == [2, 4, 6, 8, 10]
    for first, last in zip(begun, ended, strict=True):
        assert first["snapshot_s"] > 0 and first["wait_s"] >= 0 and last["write_s"] > 0
        assert first["time"] <= last["time"] and (first["cell"], first["attempt"]) == (0, 0)
        assert last["folder"] == f"step-{last['step']:06d}"
    assert [event["kept"] for event in ended] == [[2], [4], [4, 6], [4, 8], [4, 8, 10]]
    assert names(run_dir / "checkpoints") == ["step-000004", "step-000008", "step-000010"]
    size = sum(path.stat().st_size for path in (run_dir / "checkpoints" / "step-000010").iterdir())
    assert ended[-1]["num_bytes"] == size
    # The analysis finds them, and the steps that were trained while they were written.
    analysed = checkpoint_rows(load_run(run_dir))
    assert [(row["step"], row["num_bytes"]) for row in analysed] == [(event["step"], event["num_bytes"]) for event in ended]
    assert {int(step) for step in np.flatnonzero(step_times(load_run(run_dir), checkpoints_of(load_run(run_dir))).overlaps)} >= {
        2,
        4,
        6,
        8,
    }


def test_where_nothing_was_measured_the_score_is_the_mean_estimate_without_skipped_steps(
    micro_experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = {0: 9.0, 1: 2.0, 2: 3.0, 3: 3.0, 4: 1.0, 5: 1.0, 6: 1.0, 7: 1.0}
    real = loop_module.DraftTrainer.end

    def end(self: Any, step: int, *rest: Any) -> Any:
        return {**real(self, step, *rest), "expected_acceptance_length": lengths[step], "skipped": step in (0, 6, 7)}

    monkeypatch.setattr(loop_module.DraftTrainer, "end", end)
    run_dir = train(micro_experiment, "scored", KEEP_ALL, "train.checkpoint_every=2", "train.max_steps=8")
    assert scores(run_dir) == {2: 2.0, 4: 3.0, 6: 1.0, 8: None}
    assert RunFolder(run_dir).read_manifest()["best"] is None  # estimates make no best


def test_what_was_passed_over_is_told_and_trained_again(micro_experiment: Path) -> None:
    run_dir = train(micro_experiment, "damaged", KEEP_ALL)
    reference = run_dir.with_name("untouched")
    shutil.copytree(run_dir, reference)
    checkpoints = run_dir / "checkpoints"
    flip_in("optimizer.pt")(checkpoints / "step-000010")
    a_file(checkpoints / "step-000008")
    config = root.load_experiment(run_dir / "config.yaml")
    root.train_run(config, run_dir)
    told = events(run_dir, "resume")
    assert [(event["step"], event["passed_over"]) for event in told] == [(4, ["step-000008", "step-000010"])]
    assert_same_run(reference, run_dir)
    for folder in checkpoints.iterdir():
        flip_in("state.json")(folder)
    root.train_run(config, run_dir)
    assert (events(run_dir, "resume")[-1]["step"], len(events(run_dir, "resume")[-1]["passed_over"])) == (0, 3)
    assert_same_run(reference, run_dir)
    assert scores(run_dir) == scores(reference)


@pytest.mark.parametrize("step", [8, 10])
@pytest.mark.parametrize("operation", ["write", "fsync", "rename"])
def test_a_checkpoint_that_cannot_be_written_stops_the_run(
    micro_experiment: Path, monkeypatch: pytest.MonkeyPatch, step: int, operation: str
) -> None:
    """In the middle of the run, and at its end, where only the writer is left."""
    run_dir = start(micro_experiment, "full")
    config = root.load_experiment(run_dir / "config.yaml")
    writing = f".tmp-step-{step:06d}"
    refused = OSError(errno.ENOSPC, "No space left on device")
    real_write, real_sync, real_rename = HashedFile._file_write, os.fsync, Path.rename

    def file_write(file: HashedFile, piece: memoryview) -> int:
        if writing in file.name and file.name.endswith("optimizer.pt"):
            raise refused
        return real_write(file, piece)

    def fsync(descriptor: int) -> None:
        if writing in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise refused
        real_sync(descriptor)

    def rename(path: Path, target: Path) -> Path:
        if path.name == writing:
            raise refused
        return real_rename(path, target)

    with monkeypatch.context() as patch:
        {
            "write": lambda: patch.setattr(HashedFile, "_file_write", file_write),
            "fsync": lambda: patch.setattr(os, "fsync", fsync),
            "rename": lambda: patch.setattr(Path, "rename", rename),
        }[operation]()
        with pytest.raises(StageError, match=f"stage 'checkpoint of step {step}': OSError: .*No space left on device"):
            root.train_run(config, run_dir)
    manifest = RunFolder(run_dir).read_manifest()
    assert manifest["state"] == "failed" and f"checkpoint of step {step}" in manifest["error"]
    earlier = [f"step-{number:06d}" for number in (4, 8) if number < step]
    assert names(run_dir / "checkpoints") == earlier
    for name in earlier:
        check_checkpoint(run_dir / "checkpoints" / name)
    assert [event["step"] for event in events(run_dir, "checkpoint_end")] == [int(name[5:]) for name in earlier]
    if operation == "write" and step == 10:
        assert root.train_run(config, run_dir)["checkpoint"] == "checkpoints/step-000010"


def test_a_disk_that_cannot_keep_up_makes_the_loop_wait(micro_experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one snapshot waits while one is written; none is lost, and how long the loop waited is told."""
    alive: list[int] = []
    real_write, real_take = checkpoint_writer.CheckpointStore.write, checkpoint_writer.take_snapshot
    taken, written = [0], [0]

    def slow(self: Any, snapshot: Any) -> Any:
        checkpoint_writer.time.sleep(0.3)
        done = real_write(self, snapshot)
        written[0] += 1
        return done

    def take(*args: Any, **more: Any) -> Any:
        taken[0] += 1
        alive.append(taken[0] - written[0])
        return real_take(*args, **more)

    monkeypatch.setattr(checkpoint_writer.CheckpointStore, "write", slow)
    monkeypatch.setattr(checkpoint_writer, "take_snapshot", take)
    run_dir = train(micro_experiment, "slow", "train.checkpoint_every=1", "train.max_steps=6", KEEP_ALL)
    assert max(alive) == 2 and len(alive) == 6
    assert list(scores(run_dir)) == [1, 2, 3, 4, 5, 6]
    assert max(event["wait_s"] for event in events(run_dir, "checkpoint_begin")) > 0


def test_what_a_killed_writer_left_is_swept_though_nothing_is_written_any_more(tmp_path: Path) -> None:
    """Killed while older checkpoints were dropped behind the last one: the resume has nothing to train."""
    for name in (".tmp-step-000010", ".old-step-000008", "step-000010"):
        (tmp_path / name).mkdir()
    with Supervisor("test") as supervisor:
        CheckpointWriter(tmp_path, Retention(9), supervisor, lambda *_, **__: None).finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000010"]


def test_a_snapshot_that_waits_is_written_though_the_run_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    real = checkpoint_writer.CheckpointStore.write

    def write_when_told(self: Any, snapshot: Any) -> Any:
        assert held.wait(10)
        return real(self, snapshot)

    monkeypatch.setattr(checkpoint_writer.CheckpointStore, "write", write_when_told)
    draft, optimizer = trained()
    with Supervisor("test") as supervisor:
        earlier = tmp_path / "step-000001"
        writer = CheckpointWriter(tmp_path, Retention(9), supervisor, lambda *_, **__: None, earlier)
        assert writer.last_written == earlier
        writer.save(2, draft, optimizer, {})
        writer.save(3, draft, optimizer, {})
        supervisor.stop()
        held.set()
    assert names(tmp_path) == ["step-000002", "step-000003"]
    assert writer.last_written == tmp_path / "step-000003"
    for folder in tmp_path.iterdir():
        check_checkpoint(folder)


def test_each_checkpoint_is_of_its_own_step_and_finish_waits_for_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is used again, but never that of a snapshot which is not on disk yet."""
    real = checkpoint_writer.CheckpointStore.write

    def slow(self: Any, snapshot: Any) -> Any:
        checkpoint_writer.time.sleep(0.05)
        return real(self, snapshot)

    monkeypatch.setattr(checkpoint_writer.CheckpointStore, "write", slow)
    draft, optimizer = trained()
    with Supervisor("test") as supervisor:
        writer = CheckpointWriter(tmp_path, Retention(9), supervisor, lambda *_, **__: None)
        for step in range(1, 6):
            with torch.no_grad():
                draft.fc.weight.fill_(step)
            optimizer.state[draft.fc.weight]["exp_avg"].fill_(step)
            writer.save(step, draft, optimizer, {})
        writer.finish()
        assert names(tmp_path) == [f"step-{step:06d}" for step in range(1, 6)]
    for step in range(1, 6):
        other, other_optimizer = trained()
        restore(tmp_path / f"step-{step:06d}", other, other_optimizer)
        assert (other.fc.weight == step).all() and (other_optimizer.state[other.fc.weight]["exp_avg"] == step).all()
