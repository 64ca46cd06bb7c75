"""Statistics at three levels against their definitions, written down naively; from a plan and from plain arrays."""

from __future__ import annotations

import json
import math
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.bucketing import StepStatistics, order_levels, order_statistics, plan_epoch, plan_levels

batch = st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 5), st.integers(1, 50), st.integers(0, 20))
orders_of_batches = st.lists(batch, min_size=1, max_size=50)


def describe(rows: list[tuple[int, int, int, int, int]], per_step: int, **changes: Any) -> Any:
    bucket, cell, sequences, length, extra = (list(column) for column in zip(*rows, strict=True))
    tokens = [s * n for s, n in zip(sequences, length, strict=True)]
    arguments: dict[str, Any] = {
        "step": [7 + 2 * (i // per_step) for i in range(len(rows))],
        "cell": cell,
        "mean_length": length,
        "num_buckets": 4,
        "num_sequences": sequences,
        "num_tokens": tokens,
        "num_padded_tokens": [t + e for t, e in zip(tokens, extra, strict=True)],
        "cost": [t + 2 * e for t, e in zip(tokens, extra, strict=True)],
    }
    return order_levels(bucket, **arguments | changes)


@given(orders_of_batches, st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_steps_against_the_definitions(rows: list[tuple[int, int, int, int, int]], per_step: int) -> None:
    found: StepStatistics = describe(rows, per_step, num_cells=3).steps
    steps = [rows[i : i + per_step] for i in range(0, len(rows), per_step)]
    assert found.num_steps == len(steps)
    assert found.num_full_steps == sum(len(s) == len(steps[0]) for s in steps)
    assert found.mean_buckets_per_step == pytest.approx(sum(len({r[0] for r in s}) for s in steps) / len(steps))

    counts = [[r[0] for r in rows].count(b) for b in range(4)]
    worst, done = 0.0, [0] * 4
    for s in steps:
        for r in s:
            done[r[0]] += 1
        worst = max(worst, *(abs(d - sum(done) * c / len(rows)) for d, c in zip(done, counts, strict=True)))
    assert found.quota_deviation == pytest.approx(worst, abs=1e-12)

    majority = [max(range(4), key=lambda b: ([r[0] for r in s].count(b), -b)) for s in steps]
    assert found.longest_run == max(len(list(run)) for _, run in groupby(majority))

    means = [sum(r[2] * r[3] for r in s) / sum(r[2] for r in s) for s in steps]
    centred = [m - sum(means) / len(means) for m in means]
    if len(means) < 2 or max(means) == min(means):
        assert found.lag1_correlation is None
    else:
        covariance = sum(a * b for a, b in pairwise(centred))
        assert found.lag1_correlation == pytest.approx(covariance / sum(c * c for c in centred), abs=1e-6)

    def work(part: list[tuple[int, int, int, int, int]]) -> list[int]:
        return [sum(r[2] * r[3] + 2 * r[4] for r in part if r[1] == c) for c in range(3)]

    total = work(rows)
    assert found.cell_cost_spread == pytest.approx((max(total) - min(total)) / (sum(total) / 3))
    shares = [sum(work(s)) / 3 / max(work(s)) for s in steps]
    assert found.step_efficiency == pytest.approx(sum(shares) / len(shares))


@given(orders_of_batches, st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_flat_and_cells_are_the_flat_statistics_of_their_batches(
    rows: list[tuple[int, int, int, int, int]], per_step: int
) -> None:
    found = describe(rows, per_step)
    assert len(found.cells) == max(r[1] for r in rows) + 1
    for chosen, stats in [(rows, found.flat)] + [([r for r in rows if r[1] == c], s) for c, s in enumerate(found.cells)]:
        steps = [7 + 2 * (i // per_step) for i, r in enumerate(rows) if chosen is rows or r[1] == chosen[0][1]] if chosen else []
        tokens = [r[2] * r[3] for r in chosen]
        assert stats == order_statistics(
            [r[0] for r in chosen],
            step=steps,
            mean_length=[r[3] for r in chosen],
            num_buckets=4,
            num_tokens=tokens,
            num_padded_tokens=[t + r[4] for t, r in zip(tokens, chosen, strict=True)],
        )
    assert found.steps.step_share_sd == found.flat.step_share_sd
    json.dumps(found.as_dict(), allow_nan=False)


def test_what_is_undefined_is_none() -> None:
    nothing = order_levels([], step=[], cell=[], mean_length=[], num_buckets=2)
    assert nothing.cells == () and nothing.flat.num_batches == 0
    assert nothing.steps.as_dict() == {
        "num_steps": 0,
        "num_full_steps": 0,
        "step_share_sd": None,
        "mean_buckets_per_step": None,
        "quota_deviation": None,
        "lag1_correlation": None,
        "longest_run": 0,
        "cell_cost_spread": None,
        "step_efficiency": None,
    }
    bare = order_levels([0, 1], step=[0, 1], cell=[0, 0], mean_length=[1.5, 2], num_buckets=2).steps
    assert (bare.lag1_correlation, bare.cell_cost_spread, bare.step_efficiency) == (None, None, None)
    assert bare.num_steps == bare.num_full_steps == 2 and bare.quota_deviation == 0.5


def test_padded_tokens_stand_for_the_cost() -> None:
    rows = [(0, 0, 2, 10, 0), (1, 1, 2, 5, 0)]
    found = describe(rows, 2, cost=None).steps
    assert found.step_efficiency == pytest.approx(15 / 20) and found.cell_cost_spread == pytest.approx(10 / 15)


def test_a_step_that_costs_nothing_keeps_nobody_waiting() -> None:
    found = order_levels([0] * 3, step=[0, 1, 1], cell=[0, 0, 1], mean_length=[1] * 3, num_buckets=1, cost=[4, 0, 0], num_cells=2)
    assert found.steps.step_efficiency == 0.5 and found.steps.cell_cost_spread == 2


def test_arrays_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in shape"):
        describe([(0, 0, 1, 1, 0)] * 3, 1, cost=[1])
    with pytest.raises(ValueError, match="in an order of 1 cells"):
        describe([(0, 1, 1, 1, 0)], 1, num_cells=1)
    with pytest.raises(ValueError, match="cells from -1"):
        describe([(0, -1, 1, 1, 0)], 1)


@pytest.mark.parametrize("strategy", ["padded", "packed"])
def test_a_plan_and_its_consumed_batches_read_the_same(strategy: Any) -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 3000)
    plan = plan_epoch(lengths, [100, 250, 500], token_budget=1200, batches_per_step=6, num_cells=3, strategy=strategy)
    planned = plan_levels(plan)
    consumed = order_levels(
        plan.bucket.tolist(),
        step=(plan.step + 40).tolist(),
        cell=plan.cell.tolist(),
        mean_length=[lengths[plan.samples(i)].mean() for i in range(plan.num_batches)],
        num_buckets=3,
        num_sequences=[len(plan.samples(i)) for i in range(plan.num_batches)],
        num_tokens=[int(lengths[plan.samples(i)].sum()) for i in range(plan.num_batches)],
        num_padded_tokens=plan.num_padded_tokens.tolist(),
    )
    assert planned == consumed
    assert len(planned.cells) == 3 and sum(c.num_batches for c in planned.cells) == planned.flat.num_batches
    assert planned.flat.padding_efficiency is not None and (planned.flat.padding_efficiency == 1) == (strategy == "packed")
    assert planned.steps.quota_deviation is not None and planned.steps.quota_deviation < 1
    assert planned.steps.step_efficiency is not None and math.isclose(planned.steps.step_efficiency, 0.97, abs_tol=0.03)
    # A cell without any batch is one of the cells.
    lonely = plan_levels(plan_epoch([5], [5], token_budget=5, batches_per_step=4, num_cells=4))
    assert [c.num_batches for c in lonely.cells] == [1, 0, 0, 0]
    assert lonely.steps.step_efficiency == pytest.approx(0.25) and lonely.steps.cell_cost_spread == pytest.approx(4)
