"""By how much checkpoints lengthen the steps of the demo.

    python benchmarks/checkpoint.py [repetitions] [steps]

Trains the demo (tiny target, its own shapes) with a checkpoint every 5 steps and with none but the last, in turns. Both train
the same batches to the same losses, bit for bit, so a step of one is compared with the same step of the other: the median of
its wall times over the repetitions, from the end of the step before to its own end, with snapshot and all. Active are the steps
during which a snapshot was taken or the writer was busy in any repetition; the others, compared in the same way, show what
noise alone does. Asked is that no active step is lengthened by more than a tenth.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_core import experiment as root

REPOSITORY = Path(__file__).resolve().parents[1]
EVERY, NEVER = 5, 1_000_000
WARM_UP_STEPS = 5  # the targets fill the buffers
LIMIT = 1.10


@dataclass
class Trained:
    """One run: the wall time and loss of each step, and which steps a checkpoint was active in."""

    seconds: np.ndarray
    losses: list[float]
    active: np.ndarray
    begun: list[dict[str, Any]]
    ended: list[dict[str, Any]]


def rows(run_dir: Path, stream: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics" / f"{stream}.jsonl").read_text().splitlines()]


def train(name: str, every: int, num_steps: int) -> Trained:
    overrides = [f"train.max_steps={num_steps}", f"train.checkpoint_every={every}", "metrics.wandb=disabled"]
    config = root.load_experiment(REPOSITORY / "flows" / "experiments" / "demo.yaml", overrides)
    root.prepare(config)
    run_dir = root.create_run(config, name)
    root.train_run(root.load_experiment(run_dir / "config.yaml"), run_dir)
    steps, events = rows(run_dir, "steps"), rows(run_dir, "events")
    begun = [event for event in events if event["kind"] == "checkpoint_begin" and event["step"] < num_steps]
    ended = [event for event in events if event["kind"] == "checkpoint_end" and event["step"] < num_steps]
    times = np.array([row["time"] for row in steps])
    active = np.zeros(len(times) - 1, dtype=bool)
    for begin, end in zip(begun, ended, strict=True):
        active |= (times[1:] > begin["time"] - begin["snapshot_s"]) & (times[:-1] < end["time"])
    return Trained(np.diff(times), [row["loss"] for row in steps], active, begun, ended)


def compare(ratios: np.ndarray, chosen: np.ndarray) -> str:
    found = ratios[chosen]
    if not len(found):
        return "no such step"
    low, high = np.quantile(found, [0.25, 0.75])
    return (
        f"{len(found):3d} steps: median {np.median(found) - 1:+7.1%}, quarters {low - 1:+.1%} to {high - 1:+.1%}, "
        f"worst {found.max() - 1:+.1%}, above a tenth: {np.count_nonzero(found > LIMIT)}"
    )


def main() -> None:
    given = [int(word) for word in sys.argv[1:]]
    repetitions, num_steps = (*given, *(5, 60)[len(given) :])
    with tempfile.TemporaryDirectory() as workspace:
        os.chdir(REPOSITORY)
        os.environ["DFLASH_HOME"] = workspace
        train("warm-up", NEVER, WARM_UP_STEPS)
        with_them, without = [], []
        for repetition in range(repetitions):
            pair = [(with_them, EVERY), (without, NEVER)]
            for into, every in pair if repetition % 2 == 0 else reversed(pair):
                into.append(train(f"every-{every}-{repetition}", every, num_steps))
    runs = [*with_them, *without]
    assert all(run.losses == runs[0].losses for run in runs), "the runs did not train the same"
    settled = np.arange(num_steps - 1) >= WARM_UP_STEPS - 1
    active = np.any([run.active for run in with_them], axis=0)
    medians = [np.median([run.seconds for run in arm], axis=0) for arm in (with_them, without)]
    ratios = medians[0] / medians[1]
    begun, ended = ([event for run in with_them for event in getattr(run, name)] for name in ("begun", "ended"))
    print(
        f"{repetitions} x {num_steps} steps, {len(begun)} checkpoints of {ended[0]['num_bytes'] / 1e6:.1f} MB; "
        f"median step {np.median(medians[1]) * 1e3:.0f} ms"
    )
    for name, values in (
        ("snapshot", [event["snapshot_s"] for event in begun]),
        ("wait", [event["wait_s"] for event in begun]),
        ("write", [event["write_s"] for event in ended]),
    ):
        print(f"{name:9s} median {np.median(values) * 1e3:7.2f} ms, worst {max(values) * 1e3:7.2f} ms")
    print(f"active    {compare(ratios, active & settled)}")
    print(f"others    {compare(ratios, ~active & settled)}")
    # The same arm against itself: even repetitions against odd ones.
    if repetitions > 1:
        halves = [np.median([run.seconds for run in without[start::2]], axis=0) for start in (0, 1)]
        print(f"noise     {compare(halves[0] / halves[1], settled)} (runs without checkpoints against each other)")


if __name__ == "__main__":
    main()
