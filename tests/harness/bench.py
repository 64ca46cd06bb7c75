"""A place to make whole runs in: one dataset and one target, many runs in forked processes, and how runs are compared."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from dflash_core import experiment as root
from dflash_core.training.checkpoint import check_checkpoint, newest_checkpoint
from dflash_core.training.run_folder import RunFolder
from tests.harness.client import Child, ForkServer, Patch, free_port

KILLED = -9


@dataclass
class Bench:
    """Runs of one experiment below one folder. `DFLASH_HOME` must point into it while runs are made."""

    folder: Path
    experiment: Path
    server: ForkServer
    _references: dict[tuple[str, ...], Path] = field(default_factory=dict)
    _durations_s: dict[tuple[str, ...], float] = field(default_factory=dict)

    def make(self, name: str, *overrides: str) -> Path:
        """A new run folder, its data prepared."""
        # The self-checks call the stages, too, which are broken and counted here.
        config = root.load_experiment(self.experiment, ("train.self_checks=false", "train.scale_features=false", *overrides))
        root.prepare(config)
        return root.create_run(config, name, self.folder / name)

    def start(
        self, run_dir: Path, patch: Patch | None = None, patched_cells: Sequence[int] = (0, 1), out: Path | None = None
    ) -> list[Child]:
        """Train or resume a run: one process, or one for each cell, as `torchrun` would start them."""
        cells = root.load_experiment(run_dir / "config.yaml").topology.cells
        argv = ["train", str(run_dir / "config.yaml"), "--run-dir", str(run_dir)]
        if cells == 1:
            return [self.server.start(argv, out or run_dir / "out-0.txt", patch)]
        shared = {"WORLD_SIZE": str(cells), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        return [
            self.server.start(
                argv,
                run_dir / f"out-{cell}.txt",
                patch if cell in patched_cells else None,
                RANK=str(cell),
                LOCAL_RANK=str(cell),
                **shared,
            )
            for cell in range(cells)
        ]

    def train(self, run_dir: Path, patch: Patch | None = None) -> list[int]:
        """Train or resume a run to its end; returns the exit codes."""
        return [child.wait() for child in self.start(run_dir, patch)]

    def change(self, run_dir: Path, *overrides: str) -> None:
        """Change keys of a run between two attempts."""
        config = root.load_experiment(run_dir / "config.yaml", overrides)
        root.create_run(config, "changed", run_dir)

    def reference(self, *overrides: str) -> Path:
        """The uninterrupted run with these overrides; made once."""
        if overrides not in self._references:
            run_dir = self.make(f"reference-{len(self._references)}", *overrides)
            children = self.start(run_dir)
            assert {child.wait() for child in children} == {0}, children[0].output()
            self._references[overrides] = run_dir
            self._durations_s[overrides] = children[0].ended - children[0].started
        return self._references[overrides]

    def duration_s(self, *overrides: str) -> float:
        """How long the uninterrupted run took, from its start to the end of its process."""
        self.reference(*overrides)
        return self._durations_s[overrides]


def rows(run_dir: Path, stream: str) -> list[dict[str, Any]]:
    """The rows of a stream as a reader meets them: a torn last line does not count, any other must be whole."""
    path = run_dir / "metrics" / f"{stream}.jsonl"
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    return [json.loads(line) for line in lines[:-1]]


TIMES = ("time", "run_id", "attempt", "target", "prefetch_depths", "ready_depth")


def _facts(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.endswith("_s") and key not in TIMES}


def last_attempts(found: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of each step the rows of its last attempt, in the order of steps."""
    newest: dict[int, int] = {}
    for row in found:
        newest[row["step"]] = max(newest.get(row["step"], -1), row["attempt"])
    yield from (row for row in sorted(found, key=lambda row: row["step"]) if row["attempt"] == newest[row["step"]])


def trained_steps(run_dir: Path) -> list[dict[str, Any]]:
    """What each step was: all of its row but times, from its last attempt."""
    return [_facts(row) for row in last_attempts(rows(run_dir, "steps"))]


def trained_batches(run_dir: Path) -> list[dict[str, Any]]:
    """What was trained on, in the order of the plan, from the last attempt of each step."""
    return sorted((_facts(row) for row in last_attempts(rows(run_dir, "batches"))), key=lambda row: row["seq_no"])


def final_state(run_dir: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights and optimizer state of the newest checkpoint."""
    found = newest_checkpoint(run_dir / "checkpoints")
    assert found is not None
    return load_file(found[0] / "model.safetensors"), torch.load(found[0] / "optimizer.pt", weights_only=True)


def assert_same_state(a: Any, b: Any, where: str = "state") -> None:
    """Bit for bit."""
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same_state(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for number, (one, other) in enumerate(zip(a, b, strict=True)):
            assert_same_state(one, other, f"{where}[{number}]")
    else:
        assert a == b, where


def assert_same_run(reference: Path, run_dir: Path) -> None:
    """The same batches, losses, gradient norms and learning rates in the same steps, and the same final state."""
    assert trained_steps(run_dir) == trained_steps(reference)
    assert trained_batches(run_dir) == trained_batches(reference)
    assert_same_state(final_state(run_dir), final_state(reference))


def assert_whole(run_dir: Path, killed: bool = False) -> None:
    """What must hold after any end: rows readable, no row twice in an attempt, attempts in order, checkpoints undamaged."""
    for stream in ("steps", "batches"):
        key = "step" if stream == "steps" else "seq_no"
        found = [(row["attempt"], row[key]) for row in rows(run_dir, stream)]
        assert len(set(found)) == len(found), f"{stream}: a row is there twice in one attempt"
    attempts = [row["attempt"] for row in rows(run_dir, "steps")]
    assert attempts == sorted(attempts)
    newest = newest_checkpoint(run_dir / "checkpoints")
    for folder in (run_dir / "checkpoints").glob("step-*"):
        # One that was being dropped when its process was killed may be half there, but only if there is a newer one.
        if not killed or newest is None or newest[0].name <= folder.name:
            check_checkpoint(folder)
    RunFolder(run_dir).read_manifest()


def is_writing(run_dir: Path) -> bool:
    """Whether a checkpoint is being written, or was when its writer was killed."""
    folder = run_dir / "checkpoints"
    return folder.exists() and any(path.name.startswith(".") for path in folder.iterdir())


def delays(seed: int, longest_s: float) -> Iterator[float]:
    """Moments to interrupt at, in seconds after the start."""
    generator = random.Random(seed)
    while True:
        yield generator.uniform(0.0, longest_s)
