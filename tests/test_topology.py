"""Topology changes no trajectory: targets, workers and dispatch decide when something is done, never what."""

from __future__ import annotations

from itertools import product

import pytest

from tests.harness.bench import Bench, assert_same_run, rows

pytest_plugins = ["tests.harness.fixtures"]

TOPOLOGIES = [*product((1, 3, 6), (1, 4), ("round_robin", "least_loaded"))]
# In the default run the one that differs most; private counters are the historic fault, which makes queues uneven and no more.
PRIVATE = [(3, 4, "per_worker"), (6, 4, "per_worker_skipping")]
FIRST = {(6, 4, "round_robin")}


@pytest.mark.parametrize(
    ("targets", "workers", "dispatch"),
    [pytest.param(*one, marks=() if one in FIRST else pytest.mark.slow) for one in [*TOPOLOGIES, *PRIVATE]],
)
def test_topology_does_not_change_the_loss_trajectory(bench: Bench, targets: int, workers: int, dispatch: str) -> None:
    run_dir = bench.make(
        f"{targets}-{workers}-{dispatch}",
        f"topology.targets_per_cell={targets}",
        f"prefetch.num_workers={workers}",
        f"prefetch.dispatch={dispatch}",
        "prefetch.queue_batches=1",
        "prefetch.max_bytes=100000",
    )
    assert bench.train(run_dir) == [0]
    assert_same_run(bench.reference(), run_dir)
    served = len({row["target"] for row in rows(run_dir, "batches")})
    # Counters that pass targets over may leave one without any of so few batches.
    assert served == targets or (dispatch == "per_worker_skipping" and served > 1)


@pytest.mark.slow
@pytest.mark.parametrize("targets", (3, 6))
def test_topology_may_change_between_attempts(bench: Bench, targets: int) -> None:
    """What a resume may change freely: the second half of the run is trained by another topology."""
    run_dir = bench.make(f"changed-to-{targets}", "prefetch.num_workers=1")
    patch = ("tests.harness.breaks:signal_at_step", {"step": 6, "number": 9})
    assert bench.train(run_dir, patch) == [-9]
    bench.change(run_dir, f"topology.targets_per_cell={targets}", "prefetch.dispatch=least_loaded", "prefetch.num_workers=4")
    assert bench.train(run_dir) == [0]
    assert_same_run(bench.reference(), run_dir)
