"""Simulated against measured throughput: `python benchmarks/simulation.py`.

Two tables, both over the steady steps of short runs.

`sleeping`: the pipeline with a target and a drafter that only sleep, so that no core is short. Costs are known, nothing is
fitted: this shows the queues, the byte budget and the order of the model.

`training`: real runs of the demo's experiment on the CPU, one arithmetic thread a device, every one in a process of its own
(several cells under torchrun). Costs, and what crowded cores lose, are fitted to the run with one cell and two targets; all
others are predicted with them and the number of cores. The rows take turns; a ratio is the median over the rounds. What
other programs took of the machine during a run is printed beside it: above a tenth of a core the ratio says little, and the
last column, predicted with the cores that they left, is a rough guide.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[1]
EXPERIMENT = REPOSITORY / "flows" / "experiments" / "demo.yaml"
# Cells, targets per cell; the first one is what costs are fitted to: more devices than cores, so that it tells what that costs.
TRAINING = ((1, 2), (1, 1), (1, 3), (2, 1), (2, 2))
# Targets, byte budget in MB, seconds a padded token of target and drafter.
SLEEPING = (
    (1, 64, 40e-6, 20e-6),
    (2, 64, 40e-6, 20e-6),
    (3, 64, 40e-6, 20e-6),
    (3, 64, 60e-6, 10e-6),
    (6, 64, 60e-6, 10e-6),
    (3, 6, 60e-6, 20e-6),
)
WARM_UP, BEHIND = 8, 4
# About eight batches in flight a cell: few enough that the pipeline is full, and the targets keep pace, in the counted steps.
IN_FLIGHT = 24 * 2**20


def load(overrides: list[str]) -> Any:
    from dflash_core import experiment as root

    fixed = ["runs=[]", "metrics.wandb=disabled", "train.checkpoint_every=100000", "topology.threads_per_device=1"]
    return root.load_experiment(EXPERIMENT, [*fixed, *overrides])


def throughput(run_dir: Path, first: int, last: int) -> float:
    """Padded tokens a second from the end of the step before `first` to the end of `last`."""
    lines = (run_dir / "metrics" / "steps.jsonl").read_text().splitlines()
    steps = {row["step"]: row for row in map(json.loads, lines)}
    seconds = steps[last]["time"] - steps[first - 1]["time"]
    return float(sum(steps[step]["num_padded_tokens"] for step in range(first, last + 1)) / seconds)


def predict(simulation: Any, layout: Any, window: tuple[int, int, int]) -> float:
    run, shapes = simulation.run(layout, window)
    return float(shapes.padded_tokens.sum() / run.duration_s)


def train(config: Any, run_dir: Path) -> float:
    """Train in a child; returns the cores that other programs used meanwhile."""
    from dflash_core import experiment as root

    root.create_run(config, "run", run_dir)
    before, started = psutil.cpu_times(), time.monotonic()
    own = os.times()
    subprocess.run(root.train_command(run_dir), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after, ours, seconds = psutil.cpu_times(), os.times(), time.monotonic() - started
    busy = sum(getattr(after, name) - getattr(before, name) for name in ("user", "system"))
    children = ours.children_user - own.children_user + ours.children_system - own.children_system
    return max(0.0, (busy - children) / seconds)


def compare_training(steps: int, rounds: int, cores: int, folder: Path) -> None:
    window = (WARM_UP, steps - BEHIND - 1, steps)
    found: dict[tuple[int, int], list[tuple[float, float, float, float]]] = {case: [] for case in TRAINING}
    for number in range(rounds):
        for cells, targets in TRAINING:
            shape = [f"topology.cells={cells}", f"topology.targets_per_cell={targets}", f"train.max_steps={steps}"]
            shape.append(f"prefetch.max_bytes={IN_FLIGHT}")
            config, run_dir = load(shape), folder / f"round{number}-{cells}x{targets}"
            others = train(config, run_dir)
            measured, costs = throughput(run_dir, *window[:2]), folder / f"round{number}-1x2"
            predicted, left = (predict_on(config, costs, (cells, targets), some, window) for some in (cores, cores - others))
            found[cells, targets].append((measured, predicted, left, others))
            print(f"  round {number}: {cells} x ({targets} + 1) {measured:,.0f}, predicted {predicted:,.0f}", flush=True)
    print(f"\ntraining, {steps} steps, {rounds} rounds, {cores} cores; costs from 1 cell x (2 + 1); padded tokens/s, medians")
    print(f"{'cells x (targets + 1)':22} {'measured':>9} {'predicted':>9} {'ratio':>6}   {'others':>6} {'on the cores left':>18}")
    for (cells, targets), rows in found.items():
        measured, predicted, _, others = (statistics.median(column) for column in zip(*rows, strict=True))
        ratio, on_left = (statistics.median(row[i] / row[0] for row in rows) for i in (1, 2))
        name = f"{cells} x ({targets} + 1)"
        print(f"{name:22} {measured:9,.0f} {predicted:9,.0f} {ratio:6.3f}   {others:6.2f} {on_left:18.3f}")


def predict_on(config: Any, costs: Path, shape: tuple[int, int], cores: float, window: tuple[int, int, int]) -> float:
    """Padded tokens a second on a number of cores, which need not be whole."""
    from dflash_core.experiment_simulation import Simulation
    from dflash_core.simulation import Layout, Machine, SimulationRequest

    class OnCores(Simulation):
        def machine(self, layout: Layout) -> Machine:
            return replace(super().machine(layout), cores=max(0.1, cores))

    request = SimulationRequest(measured=costs, cores=max(1, round(cores)))
    return predict(OnCores(config, request), Layout(0, 1, *shape), window)


class SleepingTarget:
    """Stands in for `FrozenTarget`: the same shape, a fixed time a token, states of ones."""

    def __init__(self, job: Any, seconds_per_token: float) -> None:
        import torch

        from dflash_core.model.target import read_target_shape

        self.shape, self.layer_ids = read_target_shape(job.target_folder), job.spec.target_layer_ids
        self.device, self._seconds = torch.device("cpu"), seconds_per_token
        self.embedding_VH = self.head_VH = torch.ones(self.shape.vocab_size, self.shape.hidden_size)

    def features(self, tokens_RS: Any, _should_stop: Any = None, _documents: Any = None) -> Any:
        import torch

        time.sleep(tokens_RS.numel() * self._seconds)
        return torch.ones(1, 1, len(self.layer_ids) * self.shape.hidden_size).expand(*tokens_RS.shape, -1)


def sleeping_parts(target_s: float, draft_s: float) -> Any:
    """How a cell gets the two sleepers."""
    import torch

    from dflash_core.training.assembly import CellParts, make_trainer

    def make(job: Any, group: Any, device: str, target: Any, num_steps: int) -> Any:
        trainer = make_trainer(job, group, device, target, num_steps)

        def add(totals: Any, ready: Any) -> None:
            time.sleep(ready.loaded.shape.num_padded_tokens * draft_s)
            totals.batches.append((ready, torch.ones(()), torch.ones(()), lambda: 0.0))

        def end(_step: int, totals: Any, stop: bool) -> dict[str, Any]:
            row = totals.unpack(totals.vector(trainer.device, stop))
            row.pop("weight_sum")
            return {**row, "grad_norm": 0.0, "lr": 0.0, "skipped": False}

        trainer.add, trainer.end = add, end
        return trainer

    return CellParts(load_target=lambda job, _device: SleepingTarget(job, target_s), make_trainer=make)  # type: ignore[arg-type,return-value]


def compare_sleeping(steps: int, folder: Path) -> None:
    from dflash_core import experiment as root
    from dflash_core.experiment_simulation import Simulation
    from dflash_core.simulation import Layout, SimulationRequest, StepWork
    from dflash_core.simulation.fit import Crowding, Fitted, MeasuredCosts
    from dflash_core.training.cell import run_cell

    print(f"\nsleeping, {steps} steps of 4 batches; padded tokens/s")
    print(f"{'targets':>7} {'budget':>7} {'target/draft':>12} {'measured':>10} {'predicted':>10} {'ratio':>6}")
    window = (WARM_UP, steps - BEHIND - 1, steps)
    for number, (targets, megabytes, target_s, draft_s) in enumerate(SLEEPING):
        sizes = [f"topology.targets_per_cell={targets}", f"prefetch.max_bytes={megabytes * 2**20}", f"train.max_steps={steps}"]
        config, run_dir = load(sizes), folder / f"sleeping{number}"
        root.create_run(config, "run", run_dir)
        run_cell(root.training_job(config, run_dir), sleeping_parts(target_s, draft_s))
        measured = throughput(run_dir, *window[:2])
        simulation = Simulation(config, SimulationRequest(gpus=(targets + 1,)))
        costs = [Fitted({"padded_tokens": seconds}, 1.0, 0.0) for seconds in (1e-6, target_s, draft_s)]
        simulation.measured = MeasuredCosts(*costs, step=StepWork(), crowding=Crowding(0.0, 0.0), num_batches=0)
        predicted = predict(simulation, Layout(targets + 1, 1, 1, targets), window)
        shape = f"{targets:7} {megabytes:4} MB {target_s / draft_s:12.1f}"
        print(f"{shape} {measured:10,.0f} {predicted:10,.0f} {predicted / measured:6.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=48, help="optimizer steps of a run")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of the real runs")
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="cores of this machine")
    parser.add_argument("--only", choices=("sleeping", "training"), help="one of the two tables")
    parser.add_argument("--workspace", type=Path, help="folder to work in; default: a temporary one")
    arguments = parser.parse_args()
    os.chdir(REPOSITORY)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    from dflash_core import experiment as root

    print(f"load average at the start: {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(dir=arguments.workspace) as name:
        folder = Path(name)
        os.environ["DFLASH_HOME"] = str(folder / "workspace")
        root.prepare(load([]))
        if arguments.only != "training":
            compare_sleeping(arguments.steps, folder)
        if arguments.only != "sleeping":
            compare_training(arguments.steps, arguments.rounds, arguments.cores, folder)


if __name__ == "__main__":
    main()
