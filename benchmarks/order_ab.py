"""What the order of batches does to training, over seeds: `python benchmarks/order_ab.py RUN_FOLDER...`

Takes the run folders of `flows/experiments/order_ab.yaml` (or of `order_ab_single.yaml`), one for each order and seed, and prints
Markdown tables. A seed is one draw of batches, anchors and initial weights; all orders of a seed share them, which is checked. So
orders are compared seed by seed, and the interval is Student's over the differences: with three seeds it is 2.5 standard
deviations of a difference wide to each side. What the metrics are:

- loss scatter: standard deviation of the steps' loss around its running median, behind the first tenth of the steps, in nats.
  `beside composition`: what is left of it when the loss is regressed on the shares of the step's loss weight by bucket;
- gradient norm (before clipping): mean and scatter of the same steps, spikes above the running median by 6 MADs in a thousand
  steps, and the share of steps that was clipped;
- lag-1: correlation of one value with the next, of the batches' mean lengths and of the steps' scattered loss;
- final loss: of the last tenth of the steps. Orders that end an epoch on different buckets end on different losses, so what was
  learned is told by the acceptance length on held-out prompts (tokens, +1 included), which is the same measurement for all.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any, get_args

import numpy as np

from dflash_core.analysis.reader import numbers
from dflash_core.analysis.run_tables import acceptance, last_part, settled
from dflash_core.analysis.runs import Run, load_run
from dflash_core.analysis.series import FloatArray, detrended, spikes
from dflash_core.bucketing.order_stats import lag1_correlation, run_lengths
from dflash_core.config import Order
from dflash_core.errors import DFlashError

# Student's t at 97.5 %, by degrees of freedom from 1.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
NUM_MADS = 6.0


def weight_shares(run: Run) -> FloatArray:
    """Share of each bucket in the loss weight of each step, [steps, buckets]."""
    step, buckets = numbers(run.batches, "step").astype(np.int64), run.num_buckets
    place = np.searchsorted(numbers(run.steps, "step"), step)
    flat = np.bincount(
        place * buckets + run.buckets(), weights=numbers(run.batches, "weight_sum", missing=0), minlength=len(run.steps) * buckets
    )
    weights = flat.reshape(-1, buckets)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def beside(values: FloatArray, shares: FloatArray) -> FloatArray:
    """What a linear regression on the shares leaves, scaled up for the degrees of freedom that it took."""
    used = shares[:, shares.any(axis=0)]
    residual = values - used @ np.linalg.lstsq(used, values, rcond=None)[0]
    return np.asarray(residual * sqrt((len(values) - 1) / max(1, len(values) - np.linalg.matrix_rank(used))))


def describe(run: Run) -> dict[str, float | None]:
    """All metrics of one run, by the name that heads their row."""
    loss, norm = numbers(run.steps, "loss"), numbers(run.steps, "grad_norm")
    scatter, norms = detrended(settled(loss)), settled(norm)
    shares = weight_shares(run)[-len(scatter) :]
    return {
        "acceptance length, tokens": acceptance(run, "trained"),
        "loss scatter, nats": float(scatter.std()),
        "loss scatter beside composition, nats": float(beside(scatter, shares).std()),
        "final loss, nats": float(last_part(loss).mean()),
        "gradient norm, mean": float(norms.mean()),
        "gradient norm, scatter": float(detrended(norms).std()),
        "gradient spikes per 1000 steps": 1000 * float(spikes(norm, NUM_MADS)[0].mean()),
        "clipped share of steps": float(numbers(run.steps, "clipped", missing=0).mean()),
        "longest bucket run, batches": float(run_lengths(run.buckets())[1].max()),
        "lag-1 of batches' mean length": lag1_correlation(numbers(run.batches, "mean_seq_len")),
        "lag-1 of steps' scattered loss": lag1_correlation(scatter),
    }


def same_work(runs: Mapping[str, Run]) -> list[str]:
    """What the orders of one seed do not share, of what they must share for a comparison; none when all is well."""

    def work(run: Run) -> tuple[Any, ...]:
        columns = ("epoch", "bucket", "num_sequences", "num_tokens", "num_anchors", "num_supervised")
        return tuple(sorted(zip(*(numbers(run.batches, name).tolist() for name in columns), strict=True)))

    kinds: dict[str, Callable[[Run], Any]] = {
        "batches and anchors": work,
        "dataset": lambda run: run.manifest.get("dataset_fingerprint"),
        "initial weights and rates": lambda run: repr(run.setting("train")),
    }
    return [kind for kind, of in kinds.items() if len({of(run) for run in runs.values()}) > 1]


def paired(first: Sequence[float], second: Sequence[float]) -> str:
    """Mean difference of pairs and its 95 % interval (Student)."""
    differences = [b - a for a, b in zip(first, second, strict=True)]
    middle = statistics.mean(differences)
    if len(differences) < 2:
        return f"{middle:+.3f} (one seed)"
    reach = T_975[min(len(differences) - 1, len(T_975)) - 1] * statistics.stdev(differences) / sqrt(len(differences))
    sign = " *" if abs(middle) > reach else ""
    return f"{middle:+.3f} [{middle - reach:+.3f}, {middle + reach:+.3f}]{sign}"


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation between seeds."""
    return f"{statistics.mean(values):.3f}" + (f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else "")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def acceptance_table(by_seed: Mapping[int, Mapping[str, Run]], orders: Sequence[str]) -> str:
    """Acceptance length of every run with its interval over prompts."""

    def cell(run: Run) -> str:
        rows = {
            row["metric"]: row["value"] for row in run.evals.to_pylist() if row["kind"] == "trained" and row["source"] == "all"
        }
        low, high = rows.get("acceptance_length_low"), rows.get("acceptance_length_high")
        value = acceptance(run, "trained")
        return "-" if value is None else f"{value:.2f}" + ("" if low is None else f" [{low:.2f}, {high:.2f}]")

    rows = [[str(seed), *(cell(runs[order]) for order in orders)] for seed, runs in sorted(by_seed.items())]
    return table(["seed", *orders], rows)


def compare(folders: Sequence[Path]) -> list[str]:
    """The tables of one experiment, as blocks of text."""
    by_seed: dict[int, dict[str, Run]] = defaultdict(dict)
    for folder in folders:
        run = load_run(folder)
        by_seed[int(run.setting("train.seed"))][str(run.setting("bucketing.order"))] = run
    known = {order for runs in by_seed.values() for order in runs}
    orders = [order for order in get_args(Order) if order in known]
    for seed in [seed for seed, runs in by_seed.items() if len(runs) < len(orders)]:
        sys.stderr.write(f"seed {seed} is left out: it has not all of {', '.join(orders)}\n")
        del by_seed[seed]
    seeds = sorted(by_seed)
    for seed in seeds:
        if different := same_work(by_seed[seed]):
            raise SystemExit(f"error: the runs of seed {seed} differ in more than order: {', '.join(different)}")
    found = {order: [describe(by_seed[seed][order]) for seed in seeds] for order in orders}
    summary, differences = [], []
    for metric in found[orders[0]][0]:
        values = {order: [float(one[metric] or 0.0) for one in found[order]] for order in orders}
        summary.append([metric, *(spread(values[order]) for order in orders)])
        differences.append([metric, *(paired(values[orders[0]], values[order]) for order in orders[1:])])
    one = by_seed[seeds[0]][orders[0]]
    size, steps, anchors = one.setting("bucketing.batches_per_step"), len(one.steps), int(numbers(one.steps, "num_anchors").sum())
    return [
        f"{len(seeds)} seeds; {steps} steps of {size} batches, {anchors:,} anchors in the first run; mean ± sd between seeds\n",
        table(["", *orders], summary),
        f"less {orders[0]}, paired by seed; 95 % interval over seeds, * where it leaves out zero\n",
        table(["", *orders[1:]], differences),
        "acceptance length of every run, with its 95 % interval over prompts\n",
        acceptance_table(by_seed, orders),
    ]


def main(arguments: Sequence[str]) -> None:
    if not arguments:
        raise SystemExit(__doc__)
    try:
        print("\n".join(compare([Path(argument) for argument in arguments])))
    except DFlashError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main(sys.argv[1:])
