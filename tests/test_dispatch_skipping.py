"""The historic dispatch fault, made again: private counters that also count what was skipped, beside the shared counter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.pipeline import BatchPrefetcher, Channel, Closed, Loaded, PrefetchSettings, ReorderBuffer, Supervisor
from dflash_core.pipeline.dispatch import PRIVATE, SKIPPED_SHARE, Policy, PrivateCounter, make_dispatch
from dflash_core.records import BatchShape, PlannedBatch
from dflash_core.simulation import BatchWork, CellSettings, Machine, StepWork, simulate

WAIT_S = 5.0
TARGETS, WORKERS = 6, 4


def choices(policy: Policy, num_batches: int, turn: Callable[[int], int] = lambda i: i % WORKERS) -> list[int]:
    """The targets of so many batches; `turn` says which worker brings which."""
    with Supervisor("test") as supervisor:
        queues = [Channel[int](str(t), num_batches, supervisor, WAIT_S) for t in range(TARGETS)]
        choose = make_dispatch(policy, queues, WORKERS)
        return [choose(turn(i)) for i in range(num_batches)]


def spread(targets: list[int]) -> int:
    """Most batches of a target less the fewest."""
    counts = Counter(targets)
    return max(counts[t] for t in range(TARGETS)) - min(counts[t] for t in range(TARGETS))


def test_skips_of_a_worker_are_its_own_and_the_same_every_time() -> None:
    counters = {worker: PrivateCounter(worker, skips=True) for worker in range(WORKERS)}
    drawn = {worker: [counter.draw() for _ in range(400)] for worker, counter in counters.items()}
    assert len({tuple(numbers) for numbers in drawn.values()}) == WORKERS
    again = PrivateCounter(2, skips=True)
    assert [again.draw() for _ in range(400)] == drawn[2]
    for numbers in drawn.values():
        assert numbers == sorted(set(numbers))  # every item is drawn once, in turn
        assert 1 - 400 / (numbers[-1] + 1) == pytest.approx(SKIPPED_SHARE, abs=0.08)
    honest = PrivateCounter(2, skips=False)
    assert [honest.draw() for _ in range(20)] == list(range(20))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, WORKERS - 1), min_size=1, max_size=200))
def test_counts_differ_by_at_most_one_or_by_the_number_of_workers(workers: list[int]) -> None:
    """Whichever worker brings a batch: one, with the shared counter; the number of workers, with honest private ones."""
    turn = workers.__getitem__
    for end in range(1, len(workers) + 1):
        assert spread(choices("round_robin", len(workers), turn)[:end]) <= 1
        if end == len(workers):
            assert spread(choices("per_worker", end, turn)) <= WORKERS


def test_skipping_drives_the_counts_apart_like_a_random_walk() -> None:
    """The spread grows with the root of the number of batches: sixteen times as many, four times as far. Mean of 24 stretches,
    the start of each in another place of the walk."""
    length, parts = 150, 24
    targets = choices("per_worker_skipping", 16 * length * parts)
    short = mean(spread(targets[i * 16 * length :][:length]) for i in range(parts))
    long = mean(spread(targets[i * 16 * length :][: 16 * length]) for i in range(parts))
    assert 3.0 < long / short < 5.3
    assert long > 4 * WORKERS


def trained_with(policy: Policy, num_batches: int = 300) -> tuple[list[int], list[int], list[int]]:
    """The real prefetcher, and targets that do nothing: positions as trained, counts, depths before any target runs."""
    batches = [
        PlannedBatch(seq_no=i, position=i, epoch=0, step=i, cell=0, bucket=0, samples=(i,), ends_step=True)
        for i in range(num_batches)
    ]
    bounds = PrefetchSettings(TARGETS, 1, WORKERS, policy, queue_batches=num_batches, stall_timeout_s=WAIT_S)
    trained: list[int] = []

    def forward(queue: Channel[Loaded], ready: ReorderBuffer[Loaded]) -> None:
        while True:
            try:
                loaded = queue.get()
            except Closed:
                return
            ready.put(loaded.planned.position, loaded)

    with Supervisor("test") as supervisor:
        prefetcher = BatchPrefetcher(batches, lambda _: (BatchShape(0, 1, 1, 1, 1, 1, 1), None), lambda _: 1, bounds, supervisor)
        ready: ReorderBuffer[Loaded] = ReorderBuffer("ready buffer", 0, supervisor, WAIT_S)
        prefetcher.start()
        for thread in [t for t in supervisor._threads if "loader" in t.name]:
            thread.join(WAIT_S)
        depths = prefetcher.depths()
        for target, queue in enumerate(prefetcher.queues):
            supervisor.start(f"target {target}", forward, queue, ready, done=queue.is_drained)
        for _ in batches:
            trained.append(ready.get()[0].planned.position)
            prefetcher.budget.release(1)
    return trained, prefetcher.get_batch_stats()["dispatched_per_target"], depths


def test_queues_stand_unequal_and_training_does_not_notice() -> None:
    fair, faulty = trained_with("round_robin"), trained_with("per_worker_skipping")
    assert fair[0] == faulty[0] == list(range(300))
    assert fair[1] == fair[2] == [50] * TARGETS
    assert sum(faulty[1]) == 300 and faulty[1] == faulty[2]
    # Which worker brings which batch is up to the threads, and so is the spread; 0 would take all walks to end together.
    assert max(faulty[1]) - min(faulty[1]) >= 2


@pytest.mark.parametrize("policy", PRIVATE)
def test_the_simulation_draws_from_the_same_counters(policy: Policy) -> None:
    """One worker, so that who brings a batch is certain; a target that gets more batches ends later."""
    works = [BatchWork(step, 1, 1, 0.0, 1.0, 0.0) for step in range(40)]
    found = simulate([works], CellSettings(TARGETS, 1, 40, 10**9, policy), StepWork(), Machine(), first_step=0, last_step=39)
    with Supervisor("test") as supervisor:
        choose = make_dispatch(policy, [Channel[int](str(t), 40, supervisor, WAIT_S) for t in range(TARGETS)], 1)
        counts = Counter(choose(0) for _ in range(40))
    assert found.step_ends_s[-1] == pytest.approx(max(counts.values()))
