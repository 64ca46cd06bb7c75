"""Orders: the diverse order reaches the shortest possible longest run and keeps every prefix near its quota."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby, product
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflash_core.bucketing import order_statistics, plan_epoch, shortest_possible_longest_run
from dflash_core.bucketing.diverse import _Filling, diverse, diverse_buckets, pressing_bucket
from dflash_core.bucketing.orders import STRETCH, clustered, grouped

multisets = st.lists(st.integers(1, 60), min_size=1, max_size=8)
with_majority = st.builds(
    lambda rest, k, d: [max(1, k * sum(rest) // 2 + d), *rest], multisets, st.integers(1, 8), st.integers(-2, 3)
)


def longest_run(sequence: Sequence[int]) -> int:
    return max(len(list(run)) for _, run in groupby(sequence))


def prefix_deviation(sequence: Sequence[int], counts: list[int]) -> float:
    done, worst = [0] * len(counts), 0.0
    for place, bucket in enumerate(sequence, 1):
        done[bucket] += 1
        worst = max(worst, *(abs(d - place * n / len(sequence)) for d, n in zip(done, counts, strict=True)))
    return worst


@given(multisets | with_majority, st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
@example([2, 1, 2], 0)  # R* = 1 with two largest buckets
@example([102, 50], 0)  # R* = 2 without any slack
@example([1, 1, 1, 1, 1, 1], 0)
@example([60], 0)
def test_diverse_reaches_the_bound_and_keeps_every_prefix_near_its_quota(counts: list[int], seed: int) -> None:
    bucket = np.repeat(np.arange(len(counts)), counts)
    order = diverse(bucket, np.random.default_rng(seed))
    assert sorted(order.tolist()) == list(range(len(bucket)))
    sequence = bucket[order].tolist()
    assert longest_run(sequence) == shortest_possible_longest_run(counts)
    # Less than one from the quota is its floor or its ceiling, or the quota itself where it is whole.
    assert prefix_deviation(sequence, counts) < 1


def plain_diverse_buckets(counts: list[int], ties: Iterator[float]) -> list[int]:
    """Earliest deadline first under the cap R*, place by place and without any shortcut."""
    total, cap = sum(counts), shortest_possible_longest_run(counts)
    left, last, run = list(counts), -1, 0
    tie = [[next(ties) for _ in range(n)] for n in counts]
    sequence: list[int] = []
    for place in range(total):
        chosen = next((i for i, n in enumerate(left) if (cap + 1) * n > cap * sum(left)), -1)
        if chosen < 0:
            due = {}
            for i, n in enumerate(left):
                number = counts[i] - n
                if n > 0 and not (i == last and run == cap):
                    release = number * total // counts[i]
                    deadline = -(-(number + 1) * total // counts[i]) + tie[i][number]
                    due[i] = (release, float(i)) if release > place else (0, deadline)
            chosen = min(due, key=due.__getitem__)
        run = run + 1 if chosen == last else 1
        last = chosen
        sequence.append(chosen)
        left[chosen] -= 1
    return sequence


@given(multisets | with_majority, st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_the_fast_sequence_is_that_of_the_plain_rule(counts: list[int], seed: int) -> None:
    ties = np.random.default_rng(seed).random(sum(counts)).tolist()
    found = diverse_buckets(counts, np.random.default_rng(seed)).tolist()
    assert found == plain_diverse_buckets(counts, iter(ties))


@cache
def best_longest_run(counts: tuple[int, ...]) -> int:
    """By trying all sequences."""
    total = sum(counts)
    sequences = product(range(len(counts)), repeat=total)
    return min(longest_run(s) for s in sequences if all(s.count(i) == n for i, n in enumerate(counts)))


@given(st.lists(st.integers(0, 8), min_size=1, max_size=3).filter(lambda c: 0 < sum(c) <= 8))
@settings(max_examples=60, deadline=None)
def test_the_bound_is_the_best_of_all_orders(counts: list[int]) -> None:
    assert shortest_possible_longest_run(counts) == best_longest_run(tuple(sorted(counts)))


@cache
def can_finish(left: tuple[int, ...], last: int, run: int, cap: int) -> bool:
    """Whether some order of the batches left keeps all runs within the cap, by trying all."""
    if sum(left) == 0:
        return True
    return any(can_finish(*after_move(left, last, run, i), cap) for i in moves(left, last, run, cap))


def moves(left: tuple[int, ...], last: int, run: int, cap: int) -> list[int]:
    return [i for i, n in enumerate(left) if n > 0 and not (i == last and run == cap)]


def after_move(left: tuple[int, ...], last: int, run: int, i: int) -> tuple[tuple[int, ...], int, int]:
    return tuple(n - (j == i) for j, n in enumerate(left)), i, run + 1 if i == last else 1


def test_the_cap_rule_allows_exactly_the_moves_that_can_be_finished() -> None:
    pressed = free = 0
    for left, cap, last in product(product(range(6), repeat=3), (1, 2, 3), (0, 1, 2)):
        for run in range(1, cap + 1):
            if sum(left) == 0 or not can_finish(left, last, run, cap):
                continue
            good = [i for i in moves(left, last, run, cap) if can_finish(*after_move(left, last, run, i), cap)]
            pressing = pressing_bucket(left, sum(left), cap, range(3))
            assert good == ([pressing] if pressing >= 0 else moves(left, last, run, cap)), (left, cap, last, run)
            pressed, free = pressed + (pressing >= 0), free + (pressing < 0)
    assert pressed > 100 and free > 100


@pytest.mark.parametrize("careful", [1, 64])
@pytest.mark.parametrize("counts", [[40, 20, 21], [160, 20, 20], [90, 4, 5], [102, 50], [300, 200, 101]])
def test_a_pressing_bucket_is_never_overlooked(monkeypatch: pytest.MonkeyPatch, counts: list[int], careful: int) -> None:
    monkeypatch.setattr("dflash_core.bucketing.diverse.CAREFUL_PLACES", careful)
    found: list[int] = []

    def spy(*arguments: Any) -> int:
        found.append(pressing_bucket(*arguments))
        return found[-1]

    monkeypatch.setattr("dflash_core.bucketing.diverse.pressing_bucket", spy)
    left, cap = list(counts), shortest_possible_longest_run(counts)
    pressing = []
    for bucket in diverse_buckets(counts, np.random.default_rng(0)).tolist():
        pressing.append(pressing_bucket(left, sum(left), cap, range(len(left))))
        assert pressing[-1] in (-1, bucket)
        left[bucket] -= 1
    assert [i for i in found if i >= 0] == [i for i in pressing if i >= 0] != []


@given(st.lists(st.integers(1, 12), min_size=2, max_size=5), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_whatever_is_forced_comes_and_every_batch_comes_once(counts: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    forced: list[tuple[int, int]] = []

    def force(left: list[int], num_left: int, cap: int, among: list[int]) -> int:
        chosen = int(rng.choice([i for i, n in enumerate(left) if n] + [-1]))
        forced.append((sum(counts) - num_left, chosen))
        return chosen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash_core.bucketing.diverse.pressing_bucket", force)
        patch.setattr("dflash_core.bucketing.diverse.CAREFUL_PLACES", 10**6)
        patch.setattr("dflash_core.bucketing.diverse.shortest_possible_longest_run", lambda _: 10**3)
        sequence = diverse_buckets(counts, np.random.default_rng(seed)).tolist()
    assert [sequence.count(i) for i in range(len(counts))] == counts
    assert len(forced) == len(sequence) and all(chosen in (-1, sequence[place]) for place, chosen in forced)


def test_the_bound_without_batches() -> None:
    assert shortest_possible_longest_run([]) == shortest_possible_longest_run([0, 0]) == 0


@given(multisets | with_majority, st.integers(1, 13), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_at_every_step_end_every_bucket_has_its_quota_rounded_down_or_up(counts: list[int], per_step: int, seed: int) -> None:
    bucket = np.repeat(np.arange(len(counts)), counts)
    sequence = bucket[diverse(bucket, np.random.default_rng(seed))]
    for end in range(per_step, len(sequence) + 1, per_step):
        held = np.bincount(sequence[:end], minlength=len(counts)).tolist()
        for count, had in zip(counts, held, strict=True):
            assert had in (end * count // sum(counts), -(-end * count // sum(counts)))


def test_diverse_orders_differ_by_seed_and_spread_the_batches_of_a_bucket() -> None:
    bucket = np.repeat(np.arange(4), [5, 20, 30, 45])
    found = [diverse(bucket, np.random.default_rng(seed)) for seed in range(200)]
    assert len({tuple(bucket[order]) for order in found}) == 200
    # The first place goes to various buckets, and each batch of a bucket is anywhere in the epoch.
    assert {int(bucket[order[0]]) for order in found} >= {2, 3}
    places = np.array([np.flatnonzero(order == 99)[0] for order in found])
    assert places.min() < 15 and places.max() > 85 and abs(places.mean() - 49.5) < 8


def test_ties_are_drawn() -> None:
    first = [diverse_buckets([10, 10, 10], np.random.default_rng(seed))[0] for seed in range(300)]
    assert (np.bincount(first, minlength=3) > 60).all()


def test_what_is_taken_out_of_turn_leaves_a_heap() -> None:
    rng = np.random.default_rng(0)
    counts = np.array([9, 14, 3, 20, 11, 17, 6])
    filling, left = _Filling(counts, rng), counts.copy()
    while left.any():
        filling._force(int(rng.choice(np.flatnonzero(left))))
        left[filling.sequence[-1]] -= 1
        waiting = filling._waiting
        assert all(waiting[(i - 1) // 2] <= waiting[i] for i in range(1, len(waiting)))


def test_grouped_draws_the_batches_of_a_step_and_the_order_of_the_rests() -> None:
    bucket = np.repeat(np.arange(4), [5, 5, 5, 5])
    orders = [grouped(bucket, 4, np.random.default_rng(s)) for s in range(30)]
    firsts = {frozenset(order[i : i + 4].tolist()) for order in orders for i in range(0, 20, 4)}
    assert {part for part in firsts if len(set(bucket[list(part)])) == 1} >= {frozenset({0, 1, 2, 4}), frozenset({0, 1, 2, 3})}
    rests = {tuple(bucket[order[i : i + 4]].tolist()) for order in orders for i in range(0, 20, 4)}
    assert len([rest for rest in rests if len(set(rest)) == 4]) > 5


def test_grouped_puts_the_partial_step_last_and_shuffles_the_steps() -> None:
    bucket = np.repeat(np.arange(3), [9, 13, 8])
    order = grouped(bucket, 4, np.random.default_rng(0))
    assert sorted(order.tolist()) == list(range(30))
    steps = [tuple(bucket[order[i : i + 4]]) for i in range(0, 30, 4)]
    assert sum(len(set(s)) == 1 for s in steps[:-1]) == 9 // 4 + 13 // 4 + 8 // 4
    assert len(steps[-1]) == 2
    assert len({tuple(bucket[grouped(bucket, 4, np.random.default_rng(s))]) for s in range(20)}) > 10


COUNTS = (300, 500, 900, 1300, 1800, 5200)
EDGES = (512, 1024, 1536, 2048, 3072, 4096)
BUDGET = 8192


@pytest.fixture(scope="module")
def lengths_of_the_wide_case() -> np.ndarray:
    """Lengths that give exactly `COUNTS` batches in the buckets of `EDGES`: full batches, each bucket up to its edge."""
    rng = np.random.default_rng(0)
    parts = []
    for lower, upper, count in zip((0, *EDGES), EDGES, COUNTS, strict=False):
        part = rng.integers(lower + 1, upper + 1, count * (BUDGET // upper))
        part[0] = upper
        parts.append(part)
    return rng.permutation(np.concatenate(parts))


@pytest.mark.parametrize("seed", [0, 1])
def test_half_of_ten_thousand_batches_in_one_bucket(lengths_of_the_wide_case: np.ndarray, seed: int) -> None:
    found = {}
    for order in ("diverse", "shuffle", "grouped"):
        plan = plan_epoch(lengths_of_the_wide_case, EDGES, token_budget=BUDGET, batches_per_step=6, order=order, seed=seed)
        assert np.bincount(plan.bucket).tolist() == list(COUNTS)
        found[order] = order_statistics(plan.bucket, step=plan.step, mean_length=plan.mean_length, num_buckets=6)
    diverse_found, shuffled = found["diverse"], found["shuffle"]
    assert diverse_found.longest_run == diverse_found.shortest_possible_longest_run == 2
    assert diverse_found.prefix_deviation is not None and diverse_found.prefix_deviation < 1
    assert diverse_found.step_share_sd is not None and diverse_found.step_share_sd <= 0.09
    assert diverse_found.lag1_correlation is not None and diverse_found.lag1_correlation < 0
    # Plain shuffling: runs of 11 to 17 are usual; the share of a 6-batch step has sd sqrt(0.52 * 0.48 / 6) = 0.204.
    assert shuffled.longest_run >= 9
    assert shuffled.step_share_sd == pytest.approx(0.204, abs=0.015)
    assert shuffled.runs_z is not None and abs(shuffled.runs_z) < 4
    # One bucket per step is the worst composition: sd sqrt(0.52 * 0.48) = 0.5.
    assert found["grouped"].step_share_sd == pytest.approx(0.5, abs=0.01)


@given(multisets | with_majority, st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_clustered_comes_in_stretches_whatever_the_step(counts: list[int], seed: int) -> None:
    """All stretches but those of the rests are of one bucket; with steps of one batch as with any other."""
    bucket = np.repeat(np.arange(len(counts)), counts)
    order = clustered(bucket, np.random.default_rng(seed))
    assert sorted(order.tolist()) == list(range(len(bucket)))
    stretches = [set(bucket[order[i : i + STRETCH]].tolist()) for i in range(0, len(bucket) // STRETCH * STRETCH, STRETCH)]
    assert sum(len(held) == 1 for held in stretches) >= sum(n // STRETCH for n in counts)
    lengths = np.repeat([8, 16, 24], [80, 60, 60])
    plans = [plan_epoch(lengths, [8, 16, 24], token_budget=24, batches_per_step=g, order="clustered", seed=seed) for g in (1, 4)]
    assert plans[0].bucket.tolist() == plans[1].bucket.tolist()
