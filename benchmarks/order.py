"""Compare the orders of batches, and measure what planning costs: `python benchmarks/order.py`.

The case: 6 buckets with 300, 500, 900, 1300, 1800 and 5200 batches, steps of 6 batches over 2 cells. Planning time is
given as a multiple of one numpy shuffle of 100,000 numbers in the same run, so that it means the same on any machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from dflash_core.bucketing import choose_boundaries, order_statistics, padding_efficiency_table, plan_epoch
from dflash_core.config import Order

COUNTS = (300, 500, 900, 1300, 1800, 5200)
EDGES = (512, 1024, 1536, 2048, 3072, 4096)
TOKEN_BUDGET = 8192
BATCHES_PER_STEP = 6
NUM_CELLS = 2
NUM_SEQUENCES = 100_000


def lengths_for_counts(rng: np.random.Generator) -> NDArray[np.int64]:
    """Lengths that give exactly `COUNTS` full batches: uniform inside each bucket, with one sequence at its edge."""
    parts = []
    for lower, upper, count in zip((0, *EDGES), EDGES, COUNTS, strict=False):
        part = rng.integers(lower + 1, upper + 1, count * (TOKEN_BUDGET // upper))
        part[0] = upper
        parts.append(part)
    return rng.permutation(np.concatenate(parts))


def compare_orders(lengths: NDArray[np.int64]) -> None:
    print(
        f"{'order':8} {'longest run':>11} {'R*':>3} {'mean run':>8} {'prefix dev.':>11} {'step sd':>8} {'lag-1':>7} {'runs z':>8}"
    )
    for order in get_args(Order):
        plan = plan_epoch(
            lengths, EDGES, token_budget=TOKEN_BUDGET, batches_per_step=BATCHES_PER_STEP, num_cells=NUM_CELLS, order=order
        )
        assert tuple(np.bincount(plan.bucket)) == COUNTS
        s = order_statistics(plan.bucket, step=plan.step, mean_length=plan.mean_length, num_buckets=plan.num_buckets)
        print(
            f"{order:8} {s.longest_run:11} {s.shortest_possible_longest_run:3} {s.mean_run:8.2f} {s.prefix_deviation:11.2f} "
            f"{s.step_share_sd:8.3f} {s.lag1_correlation:7.3f} {s.runs_z:8.1f}"
        )


def seconds(work: Callable[[], object], repeats: int = 7) -> float:
    """Median time of one call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_planning(rng: np.random.Generator) -> None:
    lengths = np.clip(np.exp(rng.normal(6.3, 0.9, NUM_SEQUENCES)), 8, 4096).astype(np.int64)
    numbers = np.arange(NUM_SEQUENCES)
    unit = seconds(lambda: rng.shuffle(numbers))
    print(f"\nPlanning {NUM_SEQUENCES:,} sequences; one numpy shuffle of as many numbers takes {unit * 1e3:.2f} ms")
    edges = choose_boundaries(lengths, 6, token_budget=TOKEN_BUDGET)
    choosing = seconds(lambda: choose_boundaries(lengths, 6, token_budget=TOKEN_BUDGET))
    print(f"{'choose_boundaries':20} {choosing / unit:8.1f} shuffles")
    for order in get_args(Order):
        arguments = {"token_budget": TOKEN_BUDGET, "batches_per_step": 8, "num_cells": NUM_CELLS, "order": order}
        spent = seconds(lambda arguments=arguments: plan_epoch(lengths, edges, **arguments))  # type: ignore[misc]
        batches = plan_epoch(lengths, edges, **arguments).num_batches
        print(f"{order:20} {spent / unit:8.1f} shuffles   ({spent * 1e3:.0f} ms, {batches:,} batches)")
    print("\nModelled padding efficiency by number of buckets")
    rows = padding_efficiency_table(lengths, TOKEN_BUDGET, "min_padding")
    print("  ".join(f"{row.num_buckets}: {row.padding_efficiency:.3f}" for row in rows))
    print("Modelled cost (what the boundaries minimise), in token budgets")
    print("  ".join(f"{row.num_buckets}: {row.modelled_cost:,.0f}" for row in rows))


def main() -> None:
    rng = np.random.default_rng(0)
    compare_orders(lengths_for_counts(rng))
    measure_planning(rng)


if __name__ == "__main__":
    main()
