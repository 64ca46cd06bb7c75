"""The Weights & Biases sink, for real, offline: what it writes can be read back, and nothing of it stays."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dflash_core.metrics.panels import NAME_SPACES
from dflash_core.metrics.wandb_sink import WandbSink


def test_offline_run_is_complete_and_leaves_no_process_and_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")  # ours wins
    monkeypatch.delenv("WANDB_DIR", raising=False)
    before = dict(os.environ)
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    sink = WandbSink("offline", "project", "run-1", tmp_path / "wandb", {"train": {"lr": 1e-3}})
    try:
        for step in range(50):
            sink.log("steps", {"step": step, "loss": math.nan if step == 3 else 2.0, "step_s": 0.5, "num_tokens": 100})
            sink.log("stats", {"step": step - 1, "prefetch_depths": [1, 2]})  # late, and on another axis
            sink.log("batches", {"step": step, "seq_no": step})
        sink.log(
            "evals",
            {"step": 49, "kind": "trained", "source": "all", "position": None, "metric": "acceptance_length", "value": 2.5},
        )
        sink.flush()
    finally:
        sink.close()
        sink.close()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= children
    assert dict(os.environ) == before
    (written,) = (tmp_path / "wandb").rglob("*.wandb")
    history, axes = inspect(written, tmp_path)
    assert axes["train/loss"] == "train/step" and axes["queue/depth/target_1"] == "queue/step"
    assert set(axes) == {name for row in history for name in row} - {f"{space}/step" for space in NAME_SPACES} - {
        "_step", "_runtime", "_timestamp",
    }  # fmt: skip
    assert len(history) == 101
    assert sum("train/loss" in row for row in history) == 50 and sum("queue/depth/target_1" in row for row in history) == 50
    assert history[-1]["eval/trained/all/acceptance_length"] == 2.5
    assert {path.name for path in tmp_path.iterdir()} == {"wandb", "home"}


def inspect(path: Path, folder: Path) -> tuple[list[dict[str, object]], dict[str, str]]:
    """The logged rows of an offline file, and the step axis of each name, read by the client's own tool."""
    (folder / "home").mkdir()
    environment = {**os.environ, "HOME": str(folder / "home"), "WANDB_MODE": "offline"}
    command = [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment, cwd=folder)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    metrics = [record["metric"] for record in records if record["type"] == "metric"]
    axes = {metric["name"]: metric["step_metric"] for metric in metrics if "step_metric" in metric}
    return [flat(record["history"]) for record in records if record["type"] == "history"], axes


def flat(history: dict[str, object]) -> dict[str, object]:
    items = history.get("item", history)
    assert isinstance(items, dict)
    return items
