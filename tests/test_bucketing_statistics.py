"""Order statistics against their definitions, written down naively."""

from __future__ import annotations

import json
import math
from itertools import groupby, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.bucketing import order_statistics, run_lengths
from dflash_core.bucketing.order_stats import OrderStatistics

orders = st.lists(st.integers(0, 4), min_size=1, max_size=60)


def describe(bucket: list[int], per_step: int = 4, mean_length: list[float] | None = None) -> OrderStatistics:
    means = [10.0 * b + 5 for b in bucket] if mean_length is None else mean_length
    return order_statistics(bucket, step=[i // per_step for i in range(len(bucket))], mean_length=means, num_buckets=5)


@given(st.lists(st.integers(0, 4), max_size=60))
@settings(max_examples=100, deadline=None)
def test_runs_are_those_of_groupby(bucket: list[int]) -> None:
    values, lengths = run_lengths(bucket)
    assert list(zip(values.tolist(), lengths.tolist(), strict=True)) == [(b, len(list(run))) for b, run in groupby(bucket)]


@given(orders, st.integers(1, 7))
@settings(max_examples=150, deadline=None)
def test_against_the_definitions(bucket: list[int], per_step: int) -> None:
    stats, total = describe(bucket, per_step), len(bucket)
    runs = [len(list(run)) for _, run in groupby(bucket)]
    assert (stats.num_batches, stats.longest_run) == (total, max(runs))
    assert stats.mean_run == pytest.approx(sum(runs) / len(runs))
    counts = [bucket.count(i) for i in range(5)]
    deviation = max(abs(bucket[:t].count(i) - t * counts[i] / total) for t in range(1, total + 1) for i in range(5))
    assert stats.prefix_deviation == pytest.approx(deviation, abs=1e-12)

    largest = counts.index(max(counts))
    steps = [bucket[i : i + per_step] for i in range(0, total, per_step)]
    shares = [s.count(largest) / len(s) for s in steps if len(s) == len(steps[0])]
    if len(shares) < 2:
        assert stats.step_share_sd is None
    else:
        mean = sum(shares) / len(shares)
        assert stats.step_share_sd == pytest.approx(math.sqrt(sum((x - mean) ** 2 for x in shares) / len(shares)), abs=1e-12)

    values = [10.0 * b + 5 for b in bucket]
    mean = sum(values) / total
    variance = sum((x - mean) ** 2 for x in values)
    if len(set(values)) == 1:
        assert stats.lag1_correlation is None
    else:
        covariance = sum((values[i] - mean) * (values[i + 1] - mean) for i in range(total - 1))
        assert stats.lag1_correlation == pytest.approx(covariance / variance, abs=1e-9)


@pytest.mark.parametrize("bucket", [[0, 0, 1, 1, 1], [0, 1, 2, 2, 3, 0], [0, 0, 0, 4], [1, 1, 2, 2, 3, 3]])
def test_runs_z_uses_the_mean_and_variance_over_all_orders(bucket: list[int]) -> None:
    runs = np.array([len(list(groupby(p))) for p in permutations(bucket)])
    expected = (len(list(groupby(bucket))) - runs.mean()) / runs.std()
    assert describe(bucket).runs_z == pytest.approx(expected)


def test_runs_z_is_negative_for_clusters_and_positive_for_mixing() -> None:
    clustered, mixed = describe([0] * 40 + [1] * 40).runs_z, describe([0, 1] * 40).runs_z
    assert clustered is not None and mixed is not None and clustered < -8 and mixed > 8


@given(orders)
@settings(max_examples=100, deadline=None)
def test_a_description_has_no_nan_and_is_json(bucket: list[int]) -> None:
    stats = describe(bucket, mean_length=[7.25] * len(bucket))
    json.dumps(stats.as_dict(), allow_nan=False)
    assert stats.lag1_correlation is None
    assert stats.padding_efficiency is None
    assert stats.longest_run >= stats.shortest_possible_longest_run


def test_what_is_undefined_is_none() -> None:
    one_bucket = describe([2] * 12)
    assert one_bucket.runs_z is None
    assert (one_bucket.longest_run, one_bucket.shortest_possible_longest_run) == (12, 12)
    assert (one_bucket.prefix_deviation, one_bucket.step_share_sd) == (0, 0)
    assert describe([0, 1]).runs_z is None  # both orders have two runs
    nothing = describe([])
    assert nothing.as_dict() == {
        "num_batches": 0,
        "longest_run": 0,
        "shortest_possible_longest_run": 0,
        "mean_run": None,
        "runs_z": None,
        "lag1_correlation": None,
        "prefix_deviation": None,
        "step_share_sd": None,
        "padding_efficiency": None,
    }


def test_partial_steps_and_step_numbers_do_not_matter() -> None:
    bucket = [0, 1, 1, 1, 0, 1, 1]
    first = order_statistics(bucket, step=[5, 5, 5, 8, 8, 8, 9], mean_length=bucket, num_buckets=2)
    assert first.step_share_sd == 0  # two full steps with 2 of 3 each; the last is not full


def test_padding_efficiency_is_real_over_padded() -> None:
    arguments = {"step": [0, 0], "mean_length": [1.0, 2.0], "num_buckets": 2}
    stats = order_statistics([0, 1], **arguments, num_tokens=[30, 50], num_padded_tokens=[40, 60])  # type: ignore[arg-type]
    assert stats.padding_efficiency == pytest.approx(0.8)
    assert order_statistics([0, 1], **arguments, num_tokens=[30, 50]).padding_efficiency is None  # type: ignore[arg-type]


def test_arrays_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in shape"):
        order_statistics([0, 1], step=[0], mean_length=[1, 2], num_buckets=2)
    with pytest.raises(ValueError, match="in an order of 2 buckets"):
        order_statistics([0, 2], step=[0, 0], mean_length=[1, 2], num_buckets=2)


def test_large_counts_do_not_overflow() -> None:
    bucket = np.arange(200_000) % 2
    stats = order_statistics(bucket, step=bucket, mean_length=bucket, num_buckets=2)
    # Strictly alternating: N runs where N / 2 + 1 are expected, with sd sqrt(N) / 2.
    assert stats.runs_z == pytest.approx(200_000**0.5, rel=1e-3)
