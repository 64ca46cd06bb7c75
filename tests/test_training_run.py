"""Whole runs on the micro target: what threads, topology, interruption and resuming must not change."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_core import experiment as root
from dflash_core.data import Dataset
from dflash_core.errors import CheckpointError, ConfigError, StageError, StoppedBySignal, TrainingError, UserError
from dflash_core.model.anchors import slot_weights
from dflash_core.model.draft import embed_blocks
from dflash_core.model.loss import block_loss
from dflash_core.records import PlannedBatch
from dflash_core.training import assembly as assembly_module
from dflash_core.training import loop as loop_module
from dflash_core.training.cell import is_complete
from dflash_core.training.checkpoint import check_checkpoint, newest_checkpoint
from dflash_core.training.collate import Collator
from dflash_core.training.run_folder import RunFolder


def start(path: Path, name: str, *overrides: str) -> Path:
    config = root.load_experiment(path, overrides)
    root.prepare(config)
    return root.create_run(config, name)


def train(path: Path, name: str, *overrides: str) -> Path:
    run_dir = start(path, name, *overrides)
    root.train_run(root.load_experiment(run_dir / "config.yaml"), run_dir)
    return run_dir


def rows(run_dir: Path, stream: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics" / f"{stream}.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> list[float]:
    last: dict[int, dict[str, Any]] = {}
    for row in rows(run_dir, "steps"):
        if row["step"] not in last or row["attempt"] >= last[row["step"]]["attempt"]:
            last[row["step"]] = row
    return [last[step]["loss"] for step in sorted(last)]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    from dflash_core.model.weights import load_draft

    found = newest_checkpoint(run_dir / "checkpoints")
    assert found is not None
    return dict(load_draft(found[0]).state_dict())


def assert_same_run(a: Path, b: Path) -> None:
    assert losses(a) == losses(b)
    for name, tensor in weights(a).items():
        assert torch.equal(tensor, weights(b)[name]), name


@pytest.fixture
def reference(micro_experiment: Path) -> Path:
    return train(micro_experiment, "reference")


def test_a_run_leaves_the_files_that_others_read(reference: Path) -> None:
    manifest = RunFolder(reference).read_manifest()
    assert (manifest["state"], manifest["num_steps"], manifest["checkpoint"]) == ("completed", 10, "checkpoints/step-000010")
    steps, batches = rows(reference, "steps"), rows(reference, "batches")
    assert [row["step"] for row in steps] == list(range(10))
    assert all(row["grad_norm"] > 0 and row["lr"] > 0 and not row["skipped"] for row in steps)
    for row in steps:
        mine = [b for b in batches if b["step"] == row["step"]]
        assert row["num_batches"] == len(mine)
        for key in ("num_tokens", "num_padded_tokens", "num_anchors", "num_sequences", "num_supervised"):
            assert row[key] == sum(b[key] for b in mine), key
        assert row["loss"] == pytest.approx(sum(b["loss_sum"] for b in mine) / sum(b["weight_sum"] for b in mine), rel=1e-5)
        assert sum(row["bucket_counts"]) == row["num_batches"]
    assert [b["seq_no"] for b in batches] == list(range(len(batches)))
    assert [row["step"] for row in rows(reference, "stats")] == [0, 2, 4, 6, 8]
    assert [e["step"] for e in rows(reference, "events") if e["kind"] == "checkpoint_end"] == [4, 8, 10]
    provenance = json.loads((reference / "provenance.json").read_text())
    assert len(provenance["fingerprints"]["dataset"]) == 64 and provenance["packages"]["torch"]
    assert sorted(p.name for p in (reference / "checkpoints").iterdir()) == ["step-000008", "step-000010"]


def test_bytes_are_reserved_for_the_states_too(reference: Path) -> None:
    """They are most of what a batch holds until it is trained: two taps of 32 numbers of 4 bytes for every position."""
    largest = max(row["num_padded_tokens"] for row in rows(reference, "batches"))
    assert max(row["max_reserved_bytes"] for row in rows(reference, "stats")) >= largest * 2 * 32 * 4


def test_training_lowers_the_loss(micro_experiment: Path) -> None:
    trained = losses(train(micro_experiment, "longer", "train.max_steps=40", "train.num_epochs=40"))
    assert sum(trained[-5:]) < 0.8 * sum(trained[:5])


def test_a_step_is_the_weighted_mean_over_all_its_batches(micro_experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient that the optimizer sees is that of (sum of losses) / (sum of weights) of the whole step."""
    run_dir = start(micro_experiment, "mean", "train.max_steps=2", "train.clip_norm=1e9", "train.scale_features=false")
    real, seen = loop_module.DraftTrainer.end, []

    def end(self: Any, step: int, totals: Any, stop: bool) -> Any:
        self.optimizer.step = lambda: None  # the weights stay, so that the same step can be computed again
        row = real(self, step, totals, stop)
        loss = weight = torch.zeros(())
        for ready, *_ in totals.batches:
            batch = ready.loaded.payload
            blocks = embed_blocks(self._embedding_VD, batch.anchor_tokens_RA, self.draft.spec)
            final = self.draft(ready.features_RSF.clone(), blocks, batch.anchors_RA)
            parts = block_loss(final, self._head_VD, batch.labels_RAK, batch.weights_RAK)
            loss, weight = loss + parts.loss_sum, weight + parts.weight_sum
        expected = torch.autograd.grad(loss / weight, self.parameters)
        for parameter, gradient in zip(self.parameters, expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)
        assert row["loss"] == pytest.approx(float((loss / weight).detach()), rel=1e-5)
        seen.append(step)
        return row

    monkeypatch.setattr(loop_module.DraftTrainer, "end", end)
    root.train_run(root.load_experiment(run_dir / "config.yaml"), run_dir)
    assert seen == [0, 1]


def test_the_drafter_is_given_the_taps_that_its_checkpoint_names(micro_experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    run_dir = start(micro_experiment, "taps", "train.max_steps=1")
    config = root.load_experiment(run_dir / "config.yaml")
    model = AutoModelForCausalLM.from_pretrained(config.target.path, dtype=torch.float32)
    got: list[tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]] = []
    real = loop_module.DraftTrainer.add

    def add(self: Any, totals: Any, ready: Any) -> None:
        tokens, ids = ready.loaded.payload.tokens_RS, self.draft.spec.target_layer_ids
        hook = self.draft.register_forward_pre_hook(lambda _, args: got.append((args[0].detach().clone(), tokens, ids)))
        try:
            real(self, totals, ready)
        finally:
            hook.remove()

    monkeypatch.setattr(loop_module.DraftTrainer, "add", add)
    root.train_run(config, run_dir)
    assert got
    for features, tokens, ids in got:
        with torch.no_grad():
            states = model(input_ids=tokens, output_hidden_states=True).hidden_states
        torch.testing.assert_close(features, torch.cat([states[i + 1] for i in ids], -1), rtol=1e-4, atol=1e-4)


def test_anchors_change_with_the_epoch_and_with_nothing_else(micro_experiment: Path) -> None:
    run_dir = start(micro_experiment, "anchors")
    dataset = Dataset.open(Path(RunFolder(run_dir).read_manifest()["dataset"]))
    longest = int(dataset.lengths.argmax())

    def anchors(epoch: int, together_with: tuple[int, ...] = ()) -> list[int]:
        collate = Collator(dataset, seed=0, num_anchors=8, weights_K=slot_weights(4, 4.0), pad_token_id=256, pin=False)
        samples = (*together_with, longest)
        _, batch = collate(PlannedBatch(epoch, 0, epoch, 0, 0, 0, samples, True))
        return batch.anchors_RA[-1].tolist()

    assert anchors(0) == anchors(0) == anchors(0, (1, 2))
    assert anchors(0) != anchors(1)


def test_an_exchanged_target_is_noticed_on_resume(micro_experiment: Path, micro_target: Path, tmp_path: Path) -> None:
    copy = tmp_path / "target"
    shutil.copytree(micro_target, copy)
    run_dir = train(micro_experiment, "exchanged", f"target.path={copy}", "train.max_steps=4")
    tensors = load_file(copy / "model.safetensors")
    save_file({name: tensor * 1.3 for name, tensor in tensors.items()}, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="target_weights"):
        root.train_run(root.load_experiment(run_dir / "config.yaml", ["train.max_steps=6"]), run_dir)


@pytest.mark.slow
def test_order_and_seed_do_change_it(micro_experiment: Path, reference: Path) -> None:
    assert losses(train(micro_experiment, "shuffled", "bucketing.order=shuffle")) != losses(reference)
    assert losses(train(micro_experiment, "seeded", "train.seed=1")) != losses(reference)


def train_until_it_breaks(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train a run whose step 7 fails, and leave training whole again."""
    original = loop_module.DraftTrainer.end

    def break_at_seven(self: Any, step: int, *rest: Any) -> Any:
        if step == 7:
            raise OSError("the disk is gone")
        return original(self, step, *rest)

    monkeypatch.setattr(loop_module.DraftTrainer, "end", break_at_seven)
    with pytest.raises(StageError, match="disk is gone"):
        root.train_run(root.load_experiment(run_dir / "config.yaml"), run_dir)
    monkeypatch.setattr(loop_module.DraftTrainer, "end", original)


def test_a_run_that_failed_midway_resumes_exactly(
    micro_experiment: Path, reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = start(micro_experiment, "broken")
    config = root.load_experiment(run_dir / "config.yaml")
    train_until_it_breaks(run_dir, monkeypatch)
    manifest = RunFolder(run_dir).read_manifest()
    assert manifest["state"] == "failed" and "disk is gone" in manifest["error"]
    root.train_run(config, run_dir)
    assert_same_run(reference, run_dir)
    steps = [(row["attempt"], row["step"]) for row in rows(run_dir, "steps")]
    assert steps == [(0, s) for s in range(7)] + [(1, s) for s in range(4, 10)]
    assert [e["step"] for e in rows(run_dir, "events") if e["kind"] == "resume"] == [4]


def test_a_damaged_checkpoint_is_passed_over(micro_experiment: Path, reference: Path) -> None:
    newest = reference / "checkpoints" / "step-000010"
    data = bytearray((newest / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged"):
        check_checkpoint(newest)
    found = newest_checkpoint(reference / "checkpoints")
    assert found is not None and found[0].name == "step-000008"
    before = losses(reference)
    root.train_run(root.load_experiment(reference / "config.yaml"), reference)
    assert losses(reference) == before
    check_checkpoint(newest)


def test_resuming_with_another_config_is_refused_with_the_difference(micro_experiment: Path, reference: Path) -> None:
    config = root.load_experiment(micro_experiment, ["train.lr=0.5"])
    with pytest.raises(CheckpointError, match=r"train\.lr: 0\.003 in the checkpoint, 0\.5 now"):
        root.train_run(config, reference)


def test_a_run_from_before_there_were_losses_and_scales_to_choose_resumes_as_it_was_trained(
    micro_experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = root._identity

    def as_then(*args: Any) -> dict[str, Any]:
        later = ("train.loss", "train.dpace_alpha", "train.scale_features", "train.calibrate_norm")
        return {key: value for key, value in real(*args).items() if key not in later}

    monkeypatch.setattr(root, "_identity", as_then)
    run_dir = train(micro_experiment, "old", "train.max_steps=2", "train.scale_features=false")
    monkeypatch.setattr(root, "_identity", real)
    with pytest.raises(ConfigError) as caught:
        root.create_run(root.load_experiment(micro_experiment), "old", run_dir)
    assert "another train.scale_features (train.scale_features: False there, True now)" in str(caught.value)
    same = root.load_experiment(micro_experiment, ["train.scale_features=false", "train.max_steps=2"])
    root.create_run(same, "old", run_dir)
    assert is_complete(root.training_job(same, run_dir))
    more = root.load_experiment(micro_experiment, ["train.scale_features=false", "train.max_steps=3"])
    assert root.train_run(more, run_dir)["num_steps"] == 3 and len(losses(run_dir)) == 3


def test_resuming_with_a_plan_made_otherwise_is_refused(
    micro_experiment: Path, reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration is the same and the planner is another: as after an update of the program."""
    monkeypatch.setattr("dflash_core.bucketing.plan.EpochPlan.trained_fingerprint", lambda self: "another")
    more = root.load_experiment(reference / "config.yaml", ["train.max_steps=12", "train.num_epochs=12"])
    with pytest.raises(CheckpointError, match=r"another plan \(plan: \w{64} in the checkpoint, another now\)"):
        root.train_run(more, reference)


def test_a_run_is_trained_by_one_process_at_a_time(micro_experiment: Path) -> None:
    run_dir = start(micro_experiment, "owned")
    with RunFolder(run_dir).owned(), pytest.raises(UserError, match="another process is training this run"):
        root.train_run(root.load_experiment(run_dir / "config.yaml"), run_dir)
    assert root.run_state(run_dir) == "created"


def test_a_stop_in_the_middle_of_a_step_leaves_the_step_for_the_resume(
    micro_experiment: Path, reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long step need not be finished: what it had added up is dropped."""
    run_dir = start(micro_experiment, "halfway")
    config = root.load_experiment(run_dir / "config.yaml")
    real = loop_module.DraftTrainer.add
    added: list[int] = []

    def add_then_signal(self: Any, totals: Any, ready: Any) -> None:
        real(self, totals, ready)
        added.append(ready.loaded.planned.step)
        if added.count(4) == 1 and added[-1] == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(loop_module.DraftTrainer, "add", add_then_signal)
    with pytest.raises(StoppedBySignal, match="stopped by SIGTERM after step 4 of 10"):
        root.train_run(config, run_dir)
    assert added.count(4) == 1 and root.run_state(run_dir) == "stopped"
    monkeypatch.setattr(loop_module.DraftTrainer, "add", real)
    root.train_run(config, run_dir)
    assert_same_run(reference, run_dir)


@pytest.mark.parametrize("stage", ["loader", "target", "drafter"])
def test_the_error_names_stage_and_batch(micro_experiment: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    run_dir = start(micro_experiment, f"fail-{stage}", "train.scale_features=false")  # which would run the target before

    def explode(*_: Any, **__: Any) -> Any:
        raise RuntimeError("boom")

    if stage == "loader":
        monkeypatch.setattr("dflash_core.training.collate.draw_anchors", explode)
    elif stage == "target":
        monkeypatch.setattr("dflash_core.model.target.FrozenTarget.features", explode)
    else:
        monkeypatch.setattr(loop_module, "block_loss", explode)
    started = time.monotonic()
    with pytest.raises((StageError, RuntimeError)) as caught:
        root.train_run(root.load_experiment(run_dir / "config.yaml"), run_dir)
    assert time.monotonic() - started < 10
    if stage != "drafter":
        assert isinstance(caught.value, StageError) and caught.value.batch is not None
        assert f"stage '{stage} " in str(caught.value) and "boom" in str(caught.value)
    assert RunFolder(run_dir).read_manifest()["state"] == "failed"


def test_all_zero_states_stop_the_run(micro_experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = start(micro_experiment, "zeros", "train.self_checks=false")  # they would find it earlier
    real = assembly_module.FrozenTarget.features
    monkeypatch.setattr(assembly_module.FrozenTarget, "features", lambda self, *rest: real(self, *rest) * 0)
    with pytest.raises(StageError, match="all zero"):
        root.train_run(root.load_experiment(run_dir / "config.yaml"), run_dir)


def test_non_finite_steps_are_skipped_counted_and_finally_stop_the_run(
    micro_experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = start(micro_experiment, "nan", "train.max_skipped_in_a_row=3")
    real = loop_module.block_loss

    def poisoned(*args: Any) -> Any:
        parts = real(*args)
        return parts._replace(loss_sum=parts.loss_sum * float("nan"))

    monkeypatch.setattr(loop_module, "block_loss", poisoned)
    with pytest.raises(TrainingError, match=r"3 steps in a row.*batches of step 2: \[4, 5\], of which \[4, 5\] have a loss"):
        root.train_run(root.load_experiment(run_dir / "config.yaml"), run_dir)
    skips = [e for e in rows(run_dir, "events") if e["kind"] == "skip"]
    assert [e["batches"] for e in skips] == [e["not_finite"] for e in skips] == [[0, 1], [2, 3], [4, 5]]
    assert [row["skipped"] for row in rows(run_dir, "steps")] == [True] * 3


def test_skipped_steps_are_counted_across_a_resume(micro_experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = start(micro_experiment, "nan-again", "train.max_skipped_in_a_row=3", "train.checkpoint_every=1")
    config = root.load_experiment(run_dir / "config.yaml")
    real_loss, real_end = loop_module.block_loss, loop_module.DraftTrainer.end

    def poisoned(*args: Any) -> Any:
        parts = real_loss(*args)
        return parts._replace(loss_sum=parts.loss_sum * float("nan"))

    def break_at_two(self: Any, step: int, *rest: Any) -> Any:
        if step == 2:
            raise OSError("gone")
        return real_end(self, step, *rest)

    monkeypatch.setattr(loop_module, "block_loss", poisoned)
    monkeypatch.setattr(loop_module.DraftTrainer, "end", break_at_two)
    with pytest.raises(StageError, match="gone"):
        root.train_run(config, run_dir)
    monkeypatch.setattr(loop_module.DraftTrainer, "end", real_end)
    with pytest.raises(TrainingError, match="3 steps in a row"):
        root.train_run(config, run_dir)
    assert [row["step"] for row in rows(run_dir, "steps")] == [0, 1, 2]


def child(run_dir: Path, *more: str) -> subprocess.Popen[str]:
    command = [*root.train_command(run_dir), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ))


def wait_for_step(run_dir: Path, step: int, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    path = run_dir / "metrics" / "steps.jsonl"
    while time.monotonic() < deadline:
        if path.exists() and sum(1 for _ in path.open()) >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached in {timeout_s:.0f} s")


LONG = ("train.max_steps=400", "train.num_epochs=400", "train.checkpoint_every=5")


@pytest.mark.slow
def test_sigterm_saves_and_exits_4_and_kill_9_loses_nothing_that_a_resume_needs(micro_experiment: Path) -> None:
    run_dir = start(micro_experiment, "signalled", *LONG)
    process = child(run_dir)
    try:
        wait_for_step(run_dir, 7)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 4, output
        assert output.strip().splitlines()[-1].startswith("error: stopped by SIGTERM after step")
        manifest = RunFolder(run_dir).read_manifest()
        assert manifest["state"] == "stopped"
        found = newest_checkpoint(run_dir / "checkpoints")
        assert found is not None and found[1]["next_step"] == manifest["num_steps"]
        process = child(run_dir)
        wait_for_step(run_dir, manifest["num_steps"] + 12)
        assert root.run_state(run_dir) == "running"
        process.kill()
        process.communicate(timeout=30)
        assert root.run_state(run_dir) == "failed"
    finally:
        process.kill()
    reached = len(losses(run_dir))
    uninterrupted = start(micro_experiment, "uninterrupted", *LONG)
    original = loop_module.DraftTrainer.end

    def end_early(self: Any, step: int, *rest: Any) -> Any:
        if step >= reached:
            raise TrainingError("far enough")
        return original(self, step, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_module.DraftTrainer, "end", end_early)
        with pytest.raises(TrainingError, match="far enough"):
            root.train_run(root.load_experiment(uninterrupted / "config.yaml"), uninterrupted)
    assert losses(run_dir) == losses(uninterrupted)


@pytest.mark.slow
def test_two_cells_train_what_one_cell_trains(micro_experiment: Path) -> None:
    one = train(micro_experiment, "one")
    two = start(micro_experiment, "two", "topology.cells=2")
    done = subprocess.run(root.train_command(two), capture_output=True, text=True, timeout=110, env=dict(os.environ), check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert sys.executable in root.train_command(two)[0]
    # Only the order of summation differs.
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    batches = rows(two, "batches")
    assert sorted(b["seq_no"] for b in batches) == [b["seq_no"] for b in rows(one, "batches")]
    assert {b["cell"] for b in batches} == {0, 1}


def test_a_complete_run_is_left_as_it_is_and_goes_on_with_more_steps(micro_experiment: Path, reference: Path) -> None:
    config = root.load_experiment(reference / "config.yaml")
    before = (reference / "manifest.json").read_bytes()
    assert root.train_run(config, reference)["state"] == "completed"
    assert (reference / "manifest.json").read_bytes() == before
    more = root.load_experiment(reference / "config.yaml", ["train.max_steps=12", "train.num_epochs=12"])
    assert root.train_run(more, reference)["num_steps"] == 12
