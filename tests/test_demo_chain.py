"""The demo's whole chain as a user starts it, shortened: real target, real server, real child processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_demo_chain_runs_twice_and_leaves_nothing_behind(tmp_path: Path, in_repository: Path) -> None:
    home = tmp_path / "workspace"
    command = [sys.executable, "-m", "flows.experiment", "flows/experiments/demo.yaml", "--set", "train.max_steps=6"]
    command += ["--set", "evaluate.max_prompts=2", "--set", "evaluate.max_new_tokens=24"]
    environment = {**os.environ, "DFLASH_HOME": str(home), "HOME": str(tmp_path)}

    def run() -> str:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=180, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + done.stderr

    output = run()
    report = home / "reports" / "demo" / "report.html"
    assert str(report) in output and "plotly" in report.read_text()
    manifests = [json.loads(path.read_text()) for path in home.glob("runs/*/manifest.json")]
    assert {m["name"] for m in manifests} == {"shuffle", "diverse"}
    assert all(m["state"] == "completed" and m["lossless"] is True and m["num_steps"] == 6 for m in manifests)
    assert all((home / "runs" / m["run_id"] / "wandb").is_dir() for m in manifests)
    before = {path: path.stat().st_mtime_ns for path in home.glob("runs/*/checkpoints/*/state.json")}
    assert "used again" in run()
    assert {path: path.stat().st_mtime_ns for path in home.glob("runs/*/checkpoints/*/state.json")} == before
    left = [p.pid for p in psutil.process_iter() if str(home) in _environment_of(p)]
    assert not left
    assert sorted(p.name for p in tmp_path.iterdir()) == ["workspace"]  # nothing written into the home folder


def _environment_of(process: psutil.Process) -> str:
    try:
        return process.environ().get("DFLASH_HOME", "")
    except psutil.Error:
        return ""
