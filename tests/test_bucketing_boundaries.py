"""Boundaries: the dynamic program against enumeration, the padding model against real plans, and users' mistakes."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.bucketing import BATCH_OVERHEAD, choose_boundaries, padding_efficiency_table, plan_epoch, validate_boundaries
from dflash_core.bucketing.batch_cost import CostModel
from dflash_core.bucketing.boundaries import MAX_FINE_BINS
from dflash_core.bucketing.lengths import check_lengths, count_lengths
from dflash_core.bucketing.limits import Limits
from dflash_core.errors import ConfigError, DataError

few_lengths = st.lists(st.integers(1, 12), min_size=1, max_size=40)


def padded_to_longest(lengths: list[int], edges: tuple[int, ...]) -> int:
    """The model of `min_padding`, written down naively: everyone is padded to the longest of the bucket."""
    total = 0
    for lower, upper in zip((0, *edges), edges, strict=False):
        members = [n for n in lengths if lower < n <= upper]
        total += len(members) * max(members, default=0)
    return total


@given(few_lengths, st.integers(1, 6))
@settings(max_examples=150, deadline=None)
def test_min_padding_is_as_good_as_the_best_of_all_choices(lengths: list[int], num_buckets: int) -> None:
    distinct = sorted(set(lengths))
    edges = choose_boundaries(lengths, num_buckets)
    choices = combinations(distinct[:-1], min(num_buckets, len(distinct)) - 1)
    assert padded_to_longest(lengths, edges) == min(padded_to_longest(lengths, (*c, distinct[-1])) for c in choices)


@given(few_lengths, st.integers(1, 20), st.sampled_from(["min_padding", "equal_tokens"]))
@settings(max_examples=150, deadline=None)
def test_edges_ascend_to_the_longest_and_no_bucket_is_empty(lengths: list[int], num_buckets: int, strategy: str) -> None:
    edges = choose_boundaries(lengths, num_buckets, strategy)  # type: ignore[arg-type]
    assert edges == validate_boundaries(edges, lengths)
    assert edges[-1] == max(lengths)
    assert len(edges) == min(num_buckets, len(set(lengths)))
    assert set(edges) <= set(lengths)


def test_equal_tokens_cuts_at_equal_parts() -> None:
    # 10 sequences each of 1..100 tokens: a k-th part of the tokens lies below about 100 * sqrt(k / 4).
    edges = choose_boundaries(np.repeat(np.arange(1, 101), 10), 4, "equal_tokens")
    assert edges == (50, 71, 87, 100)


def test_equal_tokens_keeps_a_length_for_every_bucket() -> None:
    assert choose_boundaries([1, 2, 3] + [4] * 1000, 3, "equal_tokens") == (2, 3, 4)
    assert choose_boundaries([1, 2] + [4] * 1000 + [5, 6], 4, "equal_tokens") == (2, 4, 5, 6)
    assert choose_boundaries([1000, 1001, 1002, 1003] + [1] * 10, 3, "equal_tokens") == (1000, 1002, 1003)


def test_coarse_bins_cost_little_against_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    lengths = np.clip(np.exp(rng.normal(6.3, 0.9, 6000)), 8, 4096).astype(int)
    assert len(set(lengths.tolist())) > 2 * MAX_FINE_BINS
    coarse = padded_to_longest(lengths.tolist(), choose_boundaries(lengths, 6))
    monkeypatch.setattr("dflash_core.bucketing.boundaries.MAX_FINE_BINS", 4096)
    exact = padded_to_longest(lengths.tolist(), choose_boundaries(lengths, 6))
    assert exact <= coarse <= 1.002 * exact


def test_coarse_bins_leave_enough_edges_when_one_length_has_nearly_all_tokens() -> None:
    lengths = np.concatenate((np.full(200_000, 700), np.arange(1, 1500)))
    edges = choose_boundaries(lengths, 16)
    assert len(edges) == 16 and edges[-1] == 1499 and 700 in edges


@pytest.mark.parametrize(
    ("edges", "words"),
    [
        ((), "0 edges"),
        ((10, 10, 20), "10 follows 10"),
        ((10, 5, 20), "5 follows 10"),
        ((10, 19), "the last edge, 19, is below the longest sequence of 20 tokens"),
        ((0, 20), "0 is not a positive whole number"),
        ((10.5, 20), "10.5 is not a positive whole number"),
        ((True, 20), "True is not a positive whole number"),
    ],
)
def test_wrong_boundaries_are_named(edges: tuple[int, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=r"bucketing\.boundaries") as error:
        validate_boundaries(edges, [3, 20])
    assert words in str(error.value)


def test_edges_above_the_longest_and_numpy_edges_are_fine() -> None:
    assert validate_boundaries(list(np.array([5, 64])), [3, 20]) == (5, 64)


@pytest.mark.parametrize(
    ("lengths", "words"),
    [([], "no sequences"), ([4, 0, 2], "sequence 1 has length 0"), ([1.5], "whole numbers"), ([[1, 2]], "one row")],
)
def test_wrong_lengths_are_named(lengths: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        choose_boundaries(lengths, 2)


def test_wrong_number_or_strategy_is_named() -> None:
    for wrong in (0, 257):
        with pytest.raises(ConfigError, match=rf"bucketing\.num_buckets: {wrong}"):
            choose_boundaries([1, 2], wrong)
        with pytest.raises(ConfigError, match=rf"bucketing\.num_buckets: {wrong}"):
            padding_efficiency_table([1, 2], 8, "min_padding", wrong)
    with pytest.raises(ConfigError, match=r"bucketing\.boundaries: 'widest'"):
        choose_boundaries([1, 2], 2, "widest")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"bucketing\.max_sequences: 0"):
        choose_boundaries([1, 2], 2, token_budget=9, max_sequences=0)
    with pytest.raises(DataError, match="sequence 1 has 12 tokens"):
        choose_boundaries([1, 12], 2, token_budget=9)


limits_given = st.sampled_from([{}, {"max_sequences": 3}, {"quadratic_length": 7}, {"max_sequences": 2, "quadratic_length": 30}])


def plain_cost(lengths: list[int], edges: tuple[int, ...], budget: int, limits: dict[str, int]) -> float:
    """The objective with a budget, from its definition: every draw of every batch, by combinations."""
    quadratic = limits.get("quadratic_length")
    total = 0.0
    for lower, upper in zip((0, *edges), edges, strict=False):
        members = sorted(n for n in lengths if lower < n <= upper)
        if not members:
            continue
        costs = [n if quadratic is None else n + math.ceil(n * n / quadratic) for n in members]
        most = min(max(1, budget // costs[-1]), limits.get("max_sequences", len(members)))
        num_batches = math.ceil(len(members) / most)
        for i in range(num_batches):
            size = (i + 1) * len(members) // num_batches - i * len(members) // num_batches
            # The longest of a draw is number k (from 0) in comb(k, size - 1) of comb(n, size) draws.
            ways = [math.comb(k, size - 1) for k in range(len(members))]
            total += size * sum(w * c for w, c in zip(ways, costs, strict=True)) / math.comb(len(members), size)
        total += BATCH_OVERHEAD * budget * num_batches
    return total


@given(few_lengths, st.integers(1, 5), st.integers(12, 60), limits_given)
@settings(max_examples=120, deadline=None)
def test_with_a_budget_too_it_is_the_best_of_all(lengths: list[int], num: int, budget: int, limits: dict[str, int]) -> None:
    distinct = sorted(set(lengths))
    choices = [(*c, distinct[-1]) for k in range(num) for c in combinations(distinct[:-1], k)]
    edges = choose_boundaries(lengths, num, token_budget=budget, **limits)
    best = min(plain_cost(lengths, c, budget, limits) for c in choices)
    assert plain_cost(lengths, edges, budget, limits) == pytest.approx(best, rel=1e-9)
    row = padding_efficiency_table(lengths, budget, max_buckets=num, **limits)[-1]
    assert row.edges == edges and row.modelled_cost == pytest.approx(best / budget, rel=1e-9)


def test_skipping_what_is_unlikely_leaves_the_cost_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.clip(np.exp(np.random.default_rng(3).normal(4, 1, 4000)), 1, 300).astype(int)
    histogram = count_lengths(check_lengths(lengths))
    found = CostModel(histogram, Limits(4000)).matrix()
    monkeypatch.setattr("dflash_core.bucketing.batch_cost.NEGLIGIBLE", 0.0)
    monkeypatch.setattr("dflash_core.bucketing.batch_cost.LOWER_EDGES_AT_ONCE", 7)
    np.testing.assert_allclose(found, CostModel(histogram, Limits(4000)).matrix(), rtol=1e-9)


def test_the_known_case() -> None:
    """Log-normal lengths: the edges that a separate sketch found, with draws with replacement."""
    lengths = np.clip(np.random.default_rng(0).lognormal(6.5, 1.0, 100_000), 16, 8192).astype(int)
    edges = choose_boundaries(lengths, 6, token_budget=8192)
    assert edges == pytest.approx((336, 629, 1021, 1629, 2719, 8192), rel=0.03)
    table = padding_efficiency_table(lengths, 8192, max_buckets=8)
    assert table[5].edges == edges and table[5].padding_efficiency == pytest.approx(0.877, abs=0.005)
    costs = [row.modelled_cost for row in table]
    assert costs == sorted(costs, reverse=True) and len(set(costs)) == 8
    equal = padding_efficiency_table(lengths, 8192, "equal_tokens", max_buckets=6)[5]
    assert equal.padding_efficiency < 0.85 and equal.modelled_cost > costs[5] and equal.budget_fill < table[5].budget_fill
    # Padding alone would ask for one bucket of single sequences.
    assert table[0].padding_efficiency > table[5].padding_efficiency and table[0].budget_fill < 0.2


@pytest.mark.parametrize("limits", [{}, {"max_sequences": 9, "quadratic_length": 400}])
def test_the_modelled_efficiency_is_the_mean_of_real_plans(limits: dict[str, int]) -> None:
    rng = np.random.default_rng(2)
    lengths = np.clip(np.exp(rng.normal(4.5, 0.8, 800)), 3, 600).astype(int)
    for row in padding_efficiency_table(lengths, 1500, "min_padding", 8, **limits)[::3]:
        arguments: dict[str, Any] = {"token_budget": 1500, "batches_per_step": 4, "order": "shuffle", **limits}
        plans = [plan_epoch(lengths, row.edges, epoch=e, **arguments) for e in range(60)]
        padded = np.array([p.num_padded_tokens.sum() for p in plans])
        expected = lengths.sum() / row.padding_efficiency
        # The model is the exact mean, so the sample mean lies within a few of its own standard errors.
        assert abs(padded.mean() - expected) < 4 * padded.std() / np.sqrt(len(padded)) + 1e-6
        cost = np.array([p.cost.sum() for p in plans])
        modelled = (row.modelled_cost - BATCH_OVERHEAD * row.num_batches) * 1500
        assert abs(cost.mean() - modelled) < 4 * cost.std() / np.sqrt(len(cost)) + 1e-6
        assert {p.num_batches for p in plans} == {row.num_batches}
        assert plans[0].budget_fill == pytest.approx(row.budget_fill)


def test_one_length_per_bucket_needs_no_padding() -> None:
    table = padding_efficiency_table([2, 3, 3, 5, 5, 5], 20, "min_padding", 5)
    assert [row.num_buckets for row in table] == [1, 2, 3, 4, 5]
    # A third bucket would save one token of padding and cost one batch, which counts as four.
    assert [row.edges for row in table] == [(5,)] + [(3, 5)] * 4
    # One bucket, 6 sequences, longest 5: two batches of 3, and the longest of three drawn is 5 unless it is 2, 3, 3.
    padded = 2 * 3 * (5 * 19 / 20 + 3 * 1 / 20)
    assert table[0].padding_efficiency == pytest.approx(23 / padded)
    assert table[0].modelled_cost == pytest.approx(padded / 20 + 2 * BATCH_OVERHEAD)
    assert table[0].as_dict()["num_batches"] == 2 and table[0].budget_fill == pytest.approx(23 / 40)
    equal = padding_efficiency_table([2, 3, 3, 5, 5, 5], 20, "equal_tokens", 5)
    assert equal[-1].edges == (2, 3, 5) and equal[-1].padding_efficiency == pytest.approx(1.0)
    with pytest.raises(DataError, match="sequence 3 has 5 tokens"):
        padding_efficiency_table([2, 3, 3, 5], 4, "equal_tokens")
