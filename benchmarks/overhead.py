"""What the pipeline itself costs: real threads, queues, plans, metrics and cells around devices that only take their time.

    python benchmarks/overhead.py [--steps N] [--only NAME]

Targets and drafter are stand-ins that sleep, outside the interpreter's lock, for a fixed time per padded token; all else is
the pipeline as it trains. So the throughput is known beforehand: the smaller one of what the targets can supply and what
the drafters can take. Prints the share of it that was reached, the share of a step that logging took (all sinks: JSONL,
console, W&B offline), and the spread of the targets' queue depths when every batch costs the same (lock-step).
Throughput is taken between the ends of two steps in the middle of the run. Works in a temporary workspace.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from dflash_core import experiment as root
from dflash_core.experiment import ExperimentConfig
from dflash_core.model.target import FrozenTarget
from dflash_core.training.assembly import CellParts, load_target, make_trainer
from dflash_core.training.cell import run_cell
from dflash_core.training.distributed import CellGroup
from dflash_core.training.job import TrainingJob
from dflash_core.training.loop import DraftTrainer, StepTotals
from dflash_core.training.target_loop import Ready

REPOSITORY = Path(__file__).resolve().parents[1]
TOKEN_BUDGET = 6144


@dataclass(frozen=True)
class Case:
    """One topology, and what a padded token costs its devices in microseconds.

    With `lock_step_ms` a batch costs a target that much and no more, and the drafter two thirds of what would keep it busy.
    """

    name: str
    cells: int
    targets: int
    target_us: float
    draft_us: float
    dispatch: str = "round_robin"
    lock_step_ms: float = 0.0

    def bound(self, batch_tokens: float, slack_s: float) -> float:
        """Most padded tokens per second, for batches of so many: the lesser of what targets supply and drafters take."""
        if self.lock_step_ms:
            return self.cells * self.targets * batch_tokens / (self.lock_step_ms / 1e3 + slack_s)
        target_s, draft_s = (us * batch_tokens / 1e6 + slack_s for us in (self.target_us, self.draft_us))
        return self.cells * batch_tokens * min(self.targets / target_s, 1 / draft_s)


# Batches of about 6000 tokens: 180 ms a target, 30 ms a drafter. On an H200 at 40 % of its peak, such a batch takes an 8B
# target 240 ms, so real devices leave the pipeline more time than these do.
CASES = [
    Case("6 + 1, target-bound", 1, 6, 30.0, 30.0 / 6 / 1.5),
    Case("6 + 1, draft-bound", 1, 6, 30.0 / 1.5, 30.0 / 6),
    Case("6 + 1, balanced", 1, 6, 30.0, 30.0 / 6),
    Case("6 + 1, balanced, least loaded", 1, 6, 30.0, 30.0 / 6, "least_loaded"),
    Case("2 x (3 + 1), target-bound", 2, 3, 30.0, 30.0 / 3 / 1.5),
    Case("2 x (3 + 1), draft-bound", 2, 3, 30.0 / 1.5, 30.0 / 3),
    Case("2 x (3 + 1), balanced", 2, 3, 30.0, 30.0 / 3),
    Case("lock-step, round robin", 1, 6, 0.0, 0.0, "round_robin", 180.0),
    Case("lock-step, least loaded", 1, 6, 0.0, 0.0, "least_loaded", 180.0),
]


class StandInTarget:
    """The tiny target's figures and embedding around a forward pass that is a sleep."""

    def __init__(self, real: FrozenTarget, case: Case) -> None:
        self.layer_ids, self.shape, self.device = real.layer_ids, real.shape, real.device
        self.embedding_VH, self.head_VH = real.embedding_VH, real.head_VH
        self.case = case

    def features(self, input_ids_BS: Tensor, *rest: Any, **more: Any) -> Tensor:
        time.sleep(self.case.lock_step_ms / 1e3 + input_ids_BS.numel() * self.case.target_us / 1e6)
        return torch.ones(1).expand(*input_ids_BS.shape, len(self.layer_ids) * self.shape.hidden_size)


class StandInTrainer(DraftTrainer):
    """Its batches are a sleep; the end of a step (reduction, clipping, AdamW of a small draft) is real."""

    case: Case

    def add(self, totals: StepTotals, ready: Ready) -> None:
        started = time.monotonic()
        tokens = ready.loaded.shape.num_padded_tokens
        time.sleep(self.case.lock_step_ms / 1e3 / self.case.targets / 1.5 + tokens * self.case.draft_us / 1e6)
        one = torch.ones(())
        totals.batches.append((ready, one, one, lambda: 0.0))
        totals.forward_s += time.monotonic() - started


def stand_ins(case: Case) -> CellParts:
    """Parts of a cell for one case."""

    def load(job: TrainingJob, device: str) -> FrozenTarget:
        return cast(FrozenTarget, StandInTarget(load_target(job, device), case))

    def trainer(job: TrainingJob, group: CellGroup, device: str, target: FrozenTarget, num_steps: int) -> DraftTrainer:
        made = make_trainer(job, group, device, target, num_steps)
        made.__class__ = StandInTrainer
        made.case = case  # type: ignore[attr-defined]
        return made

    return CellParts(load, trainer)


def configured(case: Case, steps: int) -> ExperimentConfig:
    """The demo's data in large batches, with this case's topology."""
    return root.load_experiment(
        REPOSITORY / "flows" / "experiments" / "demo.yaml",
        [
            f"topology={{cells: {case.cells}, targets_per_cell: {case.targets}, device: cpu}}",
            f"bucketing={{token_budget: {TOKEN_BUDGET}, batches_per_step: {8 * case.cells}}}",
            f"train={{max_steps: {steps}, num_epochs: 1000, checkpoint_every: 100000, num_anchors: 24}}",
            f"prefetch={{dispatch: {case.dispatch}, stats_every_steps: {1 if case.lock_step_ms else 10}, max_bytes: 4000000000}}",
            "draft={num_layers: 1, intermediate_size: 16}",
            "runs=[]",
        ],
    )


def run_here(case: Case, run_dir: Path) -> None:
    """Train this process's cell with stand-ins."""
    run_cell(root.training_job(root.load_experiment(run_dir / "config.yaml"), run_dir), stand_ins(case))


def timer_slack() -> float:
    """Seconds that a sleep is too long in a process that does nothing else."""
    times = []
    for _ in range(40):
        started = time.monotonic()
        time.sleep(0.03)
        times.append(time.monotonic() - started - 0.03)
    return statistics.median(times)


def measure(case: Case, steps: int, slack_s: float) -> dict[str, float]:
    """Run one case in processes of its own."""
    config = configured(case, steps)
    root.prepare(config)
    run_dir = root.create_run(
        config, "-".join(case.name.replace("+", "").replace("(", "").replace(")", "").replace(",", "").split())
    )
    script = [str(Path(__file__).resolve()), "--cell", str(run_dir), "--case", case.name]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.cells}"]
    command = [sys.executable, *(torchrun if case.cells > 1 else []), *script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{case.name}: {done.stderr[-3000:]}")
    rows = [json.loads(line) for line in (run_dir / "metrics" / "steps.jsonl").read_text().splitlines()]
    stats = [json.loads(line) for line in (run_dir / "metrics" / "stats.jsonl").read_text().splitlines()]
    first, last = len(rows) // 4, len(rows) - max(6, len(rows) // 8)  # the end is left out: there the targets run dry
    steady = rows[first + 1 : last + 1]
    seconds = rows[last]["time"] - rows[first]["time"]
    tokens = sum(row["num_padded_tokens"] for row in steady)
    spreads = [max(row["prefetch_depths"]) - min(row["prefetch_depths"]) for row in stats if first < row["step"] <= last]
    bound = case.bound(tokens / sum(row["num_batches"] for row in steady), slack_s)
    return {
        "share": tokens / seconds / bound,
        "log_share": sum(row["log_s"] for row in steady) / seconds,
        "worst_spread": max(spreads),
        "mean_spread": statistics.mean(spreads),
        "end_ms": 1e3 * statistics.median(row["reduce_s"] + row["optimizer_s"] for row in steady),
        "step_ms": 1e3 * statistics.median(row["step_s"] for row in steady),
    }


def main() -> None:
    """Run the cases, or be a cell of one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", default="")
    parser.add_argument("--cell", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    os.chdir(REPOSITORY)
    if given.cell is not None:
        run_here(next(case for case in CASES if case.name == given.case), given.cell)
        return
    slack_s = timer_slack()
    print(f"load at the start: {os.getloadavg()[0]:.2f}")
    print(f"a sleep lasts {1e3 * slack_s:.2f} ms longer than asked, which counts as the device's time")
    print(f"{'case':32} {'of the bound':>12} {'logging':>8} {'depth spread':>13} {'step':>9} {'its end':>9}")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DFLASH_HOME"] = folder
        for case in CASES:
            if given.only in case.name:
                got = measure(case, given.steps, slack_s)
                spread = f"{got['mean_spread']:7.2f} ({got['worst_spread']:.0f})"
                print(
                    f"{case.name:32} {got['share']:12.1%} {got['log_share']:8.2%} {spread:>13} {got['step_ms']:6.1f} ms"
                    f" {got['end_ms']:6.2f} ms",
                    flush=True,
                )


if __name__ == "__main__":
    main()
