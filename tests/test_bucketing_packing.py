"""Sorted windows and packed rows: against plain versions, how full they are, and that they stay random."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.bucketing import plan_epoch
from dflash_core.bucketing.forming import batch_sizes
from dflash_core.bucketing.limits import Limits
from dflash_core.bucketing.packing import best_fit
from dflash_core.bucketing.windows import count_windows, grouped, sorted_windows

EDGES = (336, 629, 1021, 1629, 2719, 8192)


def log_normal(num: int, seed: int = 0) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).lognormal(6.5, 1.0, num), 16, 8192).astype(np.int64)


def plain_best_fit(shares: list[int], budget: int, most: int | None) -> list[int]:
    rows: list[list[int]] = []
    found = []
    for share in shares:
        fitting = [r for r, row in enumerate(rows) if sum(row) + share <= budget and len(row) != most]
        chosen = max(fitting, key=lambda r: (sum(rows[r]), -r), default=len(rows))
        if chosen == len(rows):
            rows.append([])
        rows[chosen].append(share)
        found.append(chosen)
    return found


@given(
    st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=40), min_size=1, max_size=5),
    st.integers(30, 90),
    st.none() | st.integers(1, 5),
    st.sampled_from([1, 2**19, 2**25]),
)
@settings(max_examples=200, deadline=None)
def test_best_fit_is_that_of_the_plain_rule(windows: list[list[int]], budget: int, most: int | None, unit: int) -> None:
    windows = [sorted(w, reverse=True) for w in windows]
    width = max(map(len, windows))
    shares = np.array([w + [0] * (width - len(w)) for w in windows]) * unit  # a large unit needs 64-bit numbers
    rows = best_fit(shares, Limits(budget * unit, most))
    for found, window in zip(rows.tolist(), windows, strict=True):
        assert found[: len(window)] == plain_best_fit(window, budget, most)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=60), st.integers(1, 8), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_windows_cut_sort_and_group_as_lists_do(size: list[int], num_windows: int, random: Any) -> None:
    num_windows = min(num_windows, len(size))
    windows = sorted_windows(np.array(size), num_windows)
    bounds = [i * len(size) // num_windows for i in range(num_windows + 1)]
    parts = [sorted(range(a, b), key=lambda i: (-size[i], i)) for a, b in pairwise(bounds)]
    position = windows.position()
    assert [p[here].tolist() for p, here in zip(position, windows.present, strict=True)] == parts
    assert set(position[~windows.present].tolist()) <= set(range(len(size)))

    group = np.array([[random.randrange(4) for _ in range(position.shape[1])] for _ in range(num_windows)])
    order, starts = grouped(windows, group)
    expected, begins = [], []
    for part, groups in zip(parts, group.tolist(), strict=True):
        for g in range(4):
            members = sorted(i for i, own in zip(part, groups, strict=False) if own == g)
            begins += [len(expected)] if members else []
            expected += members
    assert (order.tolist(), starts.tolist()) == (expected, begins)


def test_there_are_two_windows_where_there_are_two_batches() -> None:
    assert [count_windows(n, 8) for n in (0, 1, 2, 16, 24, 30, 100)] == [1, 1, 2, 2, 3, 4, 12]
    assert count_windows(5, 1) == 5


@pytest.mark.parametrize("order", ["diverse", "sorted"])
def test_sorted_windows_pad_little_and_lose_little_room(order: Any) -> None:
    lengths = log_normal(40_000)
    plans = {w: plan_epoch(lengths, EDGES, token_budget=8192, batches_per_step=8, sort_window=w, order=order) for w in (0, 8, 32)}
    padding = {w: p.num_tokens.sum() / p.num_padded_tokens.sum() for w, p in plans.items()}
    assert padding[0] < 0.9 and padding[8] > 0.97 and padding[32] > 0.985
    assert plans[0].num_batches > plans[8].num_batches >= plans[32].num_batches


def test_a_batch_of_a_sorted_window_holds_neighbours_in_length_and_as_many_as_fit() -> None:
    """With one bucket and one sequence length per rank, what a window holds can be read off the plan."""
    lengths = np.random.default_rng(0).permutation(np.arange(1, 401))
    plan = plan_epoch(lengths, [400], token_budget=1600, batches_per_step=4, sort_window=10, max_sequences=20, order="sorted")
    num_windows = count_windows(Limits(1600, 20).fewest_batches(lengths), 10)
    short = 0
    for i in range(plan.num_batches):
        held = np.sort(lengths[plan.samples(i)])
        # One more would not have fitted, save at the end of a window.
        short += len(held) < min(1600 // held[-1], 20)
        # A window of 400 / num_windows of the lengths has gaps of about num_windows between neighbours.
        assert np.diff(held).max(initial=0) <= 12 * num_windows
    assert short <= num_windows


def test_sorted_windows_stay_random() -> None:
    lengths = log_normal(4000)
    plans = [plan_epoch(lengths, EDGES, token_budget=8192, batches_per_step=8, sort_window=16, epoch=e) for e in range(2)]
    neighbours = [{frozenset(p.samples(i).tolist()) for i in range(p.num_batches) if p.num_sequences[i] > 1} for p in plans]
    assert len(neighbours[0] & neighbours[1]) < len(neighbours[0]) / 50


def test_packed_rows_are_full_and_mixed() -> None:
    lengths = log_normal(40_000)
    plan = plan_epoch(lengths, EDGES, token_budget=8192, batches_per_step=8, strategy="packed")
    assert plan.packed and plan.budget_fill >= 0.98
    assert (plan.num_padded_tokens == plan.num_tokens).all()
    # The longest stands first about as often as any other.
    several = [lengths[plan.samples(i)] for i in np.flatnonzero(plan.num_sequences >= 4)]
    first = np.mean([held.argmax() == 0 for held in several])
    assert first == pytest.approx(np.mean([1 / len(held) for held in several]), abs=0.03)
    # Longest first brings sequences of like length together, but most rows still hold several buckets' sequences.
    assert np.mean([np.ptp(np.searchsorted(EDGES, held)) > 0 for held in several]) > 0.6


def test_rows_of_very_many_sequences_and_dear_ones() -> None:
    tiny = plan_epoch(np.full(20_000, 3), [3], token_budget=6000, batches_per_step=2, strategy="packed", pack_window=9)
    assert tiny.num_batches == 10 and (tiny.num_sequences == 2000).all()
    # 50 + 2500 / 25 = 150 is more than a budget of 100: such sequences stand alone; 10 + 100 / 25 = 14 go by sevens.
    dear = plan_epoch([50] * 3 + [10] * 14, [50], token_budget=100, batches_per_step=2, strategy="packed", quadratic_length=25)
    found = sorted((n, c) for n, c in zip(dear.num_sequences.tolist(), dear.cost.tolist(), strict=True))
    assert found[-3:] != [] and found.count((1, 150)) == 3
    assert sum(c for n, c in found if c != 150) == 14 * 14 and max(c for n, c in found if c != 150) <= 100


@given(st.integers(1, 200), st.integers(1, 40))
def test_random_batches_are_as_few_and_as_even_as_whole_numbers_allow(num: int, most: int) -> None:
    sizes = batch_sizes(num, most)
    assert sizes.sum() == num and len(sizes) == -(-num // most)
    assert 1 <= sizes.min() <= sizes.max() <= min(most, sizes.min() + 1)


def test_batches_are_at_least_as_many_as_either_bound_asks_for() -> None:
    shares = np.full(10, 8)
    assert [Limits(40, most).fewest_batches(shares) for most in (None, 5, 4, 1)] == [2, 2, 3, 10]
    assert Limits(39).fewest_batches(shares) == 3
