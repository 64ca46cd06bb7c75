"""A small stand-in for `dflash_core.experiment`, with real files and real training children, for the tests of the flows.

Run as `python tests/fake_experiment.py MODULE ARGS...` it runs a module of `flows` as a program on top of itself. The
experiment file is JSON: `{"name", "runs": {name: what the training does}, "fail_prepare": text}`. A training counts to
`steps`, keeps its count in the run folder (so that resuming can be seen), and ends as `end` says.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import types
from pathlib import Path
from typing import Any

TRAINING = """
import json, os, pathlib, signal, sys, time
folder, plan = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
state = lambda text: (folder / "state").write_text(text)
def stop(*_):
    state("stopped"); print("error: stopped, saved at step", count); sys.exit(4)
signal.signal(signal.SIGTERM, stop)
state("running")
(folder / "pid").write_text(str(os.getpid()))
attempt = folder / "attempt"
attempt.write_text(str(int(attempt.read_text()) + 1 if attempt.exists() else 0))
saved = folder / "count"
count = int(saved.read_text()) if saved.exists() else 0
print("starting at step", count)
for count in range(count + 1, plan["steps"] + 1):
    saved.write_text(str(count)); print("step", count); time.sleep(plan.get("pace", 0.01))
if plan.get("end", "done") == "done":
    state("completed"); sys.exit(0)
state("failed"); print(plan["end"]); sys.exit(plan["code"])
"""


class Experiment:
    """What the flows use of an ExperimentConfig."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document, self.name = document, document["name"]
        self.data = types.SimpleNamespace(name="corpus")

    def variants(self) -> list[tuple[str, Experiment]]:
        return [(name, Experiment({**self.document, "plan": plan})) for name, plan in self.document["runs"].items()]


def load_experiment(path: str | Path, overrides: Any = ()) -> Experiment:
    from dflash_core.errors import ConfigError

    if not Path(path).exists():
        raise ConfigError(f"{path}: no such file")
    document = json.loads(Path(path).read_text())
    for override in overrides:
        key, _, value = override.partition("=")
        if key not in document:
            raise ConfigError(f"{path}: unknown key {key!r}")
        document[key] = json.loads(value)
    return Experiment(document)


def check(config: Experiment, num_gpus: int | None = None) -> dict[str, Any]:
    from dflash_core.errors import DataError

    if text := config.document.get("fail_check"):
        raise DataError(text)
    return {}


def workspace() -> Path:
    folder = Path(os.environ["DFLASH_HOME"])
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def prepare(config: Experiment, progress: Any = None) -> dict[str, Any]:
    from dflash_core.data import PrepareProgress
    from dflash_core.errors import DataError

    if text := config.document.get("fail_prepare"):
        raise DataError(text)
    if config.document.get("defect"):
        raise ZeroDivisionError("a defect of ours")
    progress(PrepareProgress(2, 0, 20, 1, 1, 1, 1, 0))
    return {"path": str(workspace() / "datasets"), "num_sequences": 2, "num_tokens": 20, "num_rejected": 0, "reused": False}


def describe_dataset(config: Experiment) -> list[str]:
    return ["0-8 tokens #####"]


def plan(config: Experiment) -> dict[str, Any]:
    return {"edges": [8, 16], "padding_efficiency": 0.875, "orders": {}}


def create_run(config: Experiment, run_name: str) -> Path:
    folder = workspace() / "runs" / f"{config.name}-{run_name}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(config.document["plan"]))
    return folder


def run_state(run_dir: Path) -> str:
    state = run_dir / "state"
    return state.read_text() if state.exists() else "created"


def run_attempt(run_dir: Path) -> int:
    attempt = run_dir / "attempt"
    return int(attempt.read_text()) if attempt.exists() else -1


def train_command(run_dir: Path) -> list[str]:
    return [sys.executable, "-c", TRAINING, str(run_dir), (run_dir / "plan.json").read_text()]


def evaluate_run(run_dir: Path, progress: Any = None) -> dict[str, Any]:
    steps = int((run_dir / "count").read_text())
    return {"acceptance_length": 1 + steps / 10, "acceptance_length_untrained": 1.0, "lossless": True, "num_prompts": 3}


def analyze(config: Experiment, run_dirs: list[Path]) -> dict[str, Any]:
    folder = workspace() / "reports" / config.name
    folder.mkdir(parents=True, exist_ok=True)
    table = [{"run": run.name, "acceptance length": evaluate_run(run)["acceptance_length"]} for run in run_dirs]
    paths = {"report_html": str(folder / "report.html"), "report_md": str(folder / "report.md"), "path": str(folder)}
    Path(paths["report_md"]).write_text("# Runs compared\n\n## Summary\n\n- nothing stood out.\n")
    return {**paths, "table": table}


if __name__ == "__main__":
    sys.modules["dflash_core.experiment"] = sys.modules["__main__"]
    module, sys.argv = sys.argv[1], sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
