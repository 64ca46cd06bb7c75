"""The plan of an epoch: what every plan keeps, whatever lengths, edges, order and cells it is made for."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.bucketing import EpochPlan, choose_boundaries, order_statistics, plan_epoch
from dflash_core.bucketing.cells import assign_cells
from dflash_core.errors import ConfigError, DataError

ORDERS = ["diverse", "shuffle", "grouped", "clustered", "sorted"]


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], dict[str, Any]]:
    """Lengths, and the arguments of a valid plan for them; edges may leave buckets empty."""
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=120))
    inner = draw(st.sets(st.integers(1, max(lengths) - 1), max_size=5)) if max(lengths) > 1 else set()
    arguments = {
        "edges": (*sorted(inner), max(lengths) + draw(st.integers(0, 3))),
        "token_budget": max(lengths) + draw(st.integers(0, 150)),
        "batches_per_step": draw(st.integers(1, 9)),
        "num_cells": draw(st.integers(1, 4)),
        "order": draw(st.sampled_from(ORDERS)),
        "seed": draw(st.integers(0, 2**40)),
        "epoch": draw(st.integers(0, 5)),
        "strategy": draw(st.sampled_from(["padded", "packed"])),
        "max_sequences": draw(st.none() | st.integers(1, 9)),
        "quadratic_length": draw(st.none() | st.integers(1, 90)),
        "sort_window": draw(st.sampled_from([0, 1, 3, 50])),
        "pack_window": draw(st.integers(1, 9)),
    }
    return lengths, arguments


@given(requests())
@settings(max_examples=250, deadline=None)
def test_every_sequence_is_in_one_batch_within_all_limits(request: tuple[list[int], dict[str, Any]]) -> None:
    lengths, arguments = request
    plan = plan_epoch(lengths, **arguments)
    batches = batches_of(plan)
    assert sorted(itertools.chain(*batches)) == list(range(len(lengths)))
    assert plan.packed == (arguments["strategy"] == "packed")
    bounds, budget, quadratic = (0, *plan.edges), arguments["token_budget"], arguments["quadratic_length"]
    for i, batch in enumerate(batches):
        held = [lengths[s] for s in batch]
        costs = [n if quadratic is None else n + math.ceil(n * n / quadratic) for n in held]
        in_bucket = [bounds[plan.bucket[i]] < n <= bounds[plan.bucket[i] + 1] for n in held]
        assert in_bucket[held.index(max(held))] and (plan.packed or all(in_bucket))
        assert plan.num_sequences[i] == len(held) > 0
        assert plan.num_tokens[i] == sum(held)
        assert plan.max_length[i] == max(held)
        assert plan.mean_length[i] == pytest.approx(sum(held) / len(held))
        assert plan.num_padded_tokens[i] == (sum(held) if plan.packed else len(held) * max(held)) <= budget
        assert plan.cost[i] == (sum(costs) if plan.packed else len(held) * max(costs))
        assert plan.cost[i] <= budget or len(held) == 1
        assert len(held) <= (arguments["max_sequences"] or len(held))
    assert plan.budget_fill == pytest.approx(sum(lengths) / (plan.num_batches * budget))


@given(requests())
@settings(max_examples=100, deadline=None)
def test_steps_are_consecutive_batches_shared_out_evenly(request: tuple[list[int], dict[str, Any]]) -> None:
    lengths, arguments = request
    plan = plan_epoch(lengths, **arguments)
    per_step, num_cells = arguments["batches_per_step"], arguments["num_cells"]
    assert plan.step.tolist() == [i // per_step for i in range(plan.num_batches)]
    assert plan.num_steps == -(-plan.num_batches // per_step)
    for step in range(plan.num_steps):
        held = np.bincount(plan.cell[plan.step == step], minlength=num_cells)
        assert len(held) == num_cells and held.max() - held.min() <= 1
    assert plan.cell.tolist() == assign_cells(plan.cost, per_step, num_cells).tolist()


@given(requests())
@settings(max_examples=60, deadline=None)
def test_a_plan_is_a_function_of_its_arguments_and_orders_share_their_batches(request: tuple[list[int], dict[str, Any]]) -> None:
    lengths, arguments = request
    plan = plan_epoch(lengths, **arguments)
    assert plan_epoch(np.array(lengths, dtype=np.int32), **arguments).fingerprint() == plan.fingerprint()
    sets = {frozenset(map(tuple, batches_of(plan_epoch(lengths, **arguments | {"order": order})))) for order in ORDERS}
    assert len(sets) == 1


def batches_of(plan: EpochPlan) -> list[list[int]]:
    return [plan.samples(i).tolist() for i in range(plan.num_batches)]


def example(**changes: Any) -> EpochPlan:
    lengths = np.random.default_rng(0).integers(1, 500, 400)
    edges = choose_boundaries(lengths, 4)
    return plan_epoch(lengths, edges, **{"token_budget": 1200, "batches_per_step": 6, "num_cells": 2} | changes)


@pytest.mark.parametrize("how", [{}, {"sort_window": 8}, {"strategy": "packed", "pack_window": 16}])
@pytest.mark.parametrize("order", ORDERS)
def test_seed_and_epoch_change_batches(order: str, how: dict[str, Any]) -> None:
    plans = [example(order=order, **change, **how) for change in ({}, {"seed": 1}, {"epoch": 1})]
    assert len({p.fingerprint() for p in plans}) == 3
    contents = [{frozenset(batch) for batch in batches_of(p) if len(batch) > 1} for p in plans]
    for first, second in itertools.combinations(contents, 2):
        assert len(first & second) < len(first) / 10
    if not how:
        assert len({p.num_batches for p in plans}) == 1


@pytest.mark.parametrize(
    "change",
    [{"strategy": "packed"}, {"max_sequences": 900}, {"quadratic_length": 10**9}, {"sort_window": 1}, {"pack_window": 9}],
)
def test_the_fingerprint_sees_how_batches_were_formed(change: dict[str, Any]) -> None:
    assert example(**change).fingerprint() != example().fingerprint()


@pytest.mark.parametrize("field", ["bucket", "step", "cell", "num_tokens", "max_length", "cost", "sample_index", "offsets"])
def test_the_fingerprint_sees_every_array(field: str) -> None:
    plan = example()
    changed = getattr(plan, field).copy()
    changed[-1] += 1
    assert dataclasses.replace(plan, **{field: changed}).fingerprint() != plan.fingerprint()


def test_a_plan_cannot_be_changed() -> None:
    plan = example()
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.bucket = plan.step  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        plan.bucket[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        plan.samples(0)[0] = 1
    with pytest.raises(IndexError):
        plan.samples(plan.num_batches)
    assert (plan.order, plan.seed, plan.epoch, plan.num_buckets) == ("diverse", 0, 0, 4)


def test_sorted_order_ascends() -> None:
    plan = example(order="sorted")
    assert (np.diff(plan.mean_length) >= 0).all()
    assert (np.diff(plan.bucket) >= 0).all()


def test_grouped_steps_hold_one_bucket_as_far_as_counts_allow() -> None:
    plan = example(order="grouped")
    counts = np.bincount(plan.bucket)
    pure = [len(set(plan.bucket[plan.step == s].tolist())) == 1 for s in range(plan.num_batches // 6)]
    assert sum(pure) >= (counts // 6).sum() > 3
    assert plan.bucket.tolist() != sorted(plan.bucket.tolist())


@pytest.mark.parametrize("strategy", ["padded", "packed"])
@pytest.mark.parametrize("sort_window", [0, 4])
@pytest.mark.parametrize("order", ORDERS)
def test_one_and_two_sequences(order: Any, sort_window: int, strategy: Any) -> None:
    how: dict[str, Any] = {
        "batches_per_step": 8,
        "num_cells": 4,
        "order": order,
        "sort_window": sort_window,
        "strategy": strategy,
    }
    one = plan_epoch([7], [7], token_budget=7, **how)
    assert (one.num_batches, one.num_steps, one.samples(0).tolist()) == (1, 1, [0])
    two = plan_epoch([3, 9], [4, 5, 9], token_budget=12, **how)
    assert two.num_batches == (1 if strategy == "packed" else 2) and two.sample_index.max() == 1


@pytest.mark.parametrize("order", ORDERS)
def test_small_epochs(order: Any) -> None:
    one = plan_epoch([7], [7], token_budget=7, batches_per_step=8, num_cells=4, order=order)
    assert (one.num_batches, one.num_steps, one.cell.tolist()) == (1, 1, [0])
    two = plan_epoch([3, 9], [4, 5, 9], token_budget=9, batches_per_step=8, num_cells=4, order=order)
    assert sorted(two.bucket.tolist()) == [0, 2] and sorted(two.cell.tolist()) == [0, 1]
    assert two.num_buckets == 3
    same = plan_epoch([5] * 10, [5], token_budget=10, batches_per_step=2, order=order)
    assert same.num_batches == 5 and same.step.tolist() == [0, 0, 1, 1, 2]
    stats = order_statistics(same.bucket, step=same.step, mean_length=same.mean_length, num_buckets=1)
    assert stats.longest_run == stats.shortest_possible_longest_run == 5


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"lengths": [3, 50, 60, 4]}, DataError, "sequence 2 has 60 tokens, more than bucketing.token_budget = 40"),
        ({"lengths": []}, DataError, "no sequences"),
        ({"edges": [5, 29]}, ConfigError, "bucketing.boundaries: the last edge, 29"),
        ({"token_budget": 0}, ConfigError, "bucketing.token_budget: 0"),
        ({"batches_per_step": 0}, ConfigError, "bucketing.batches_per_step: 0"),
        ({"num_cells": 0}, ConfigError, "topology.cells: 0"),
        ({"seed": -1}, ConfigError, "train.seed: -1"),
        ({"epoch": -1}, ConfigError, "epoch: -1"),
        ({"max_sequences": 0}, ConfigError, "bucketing.max_sequences: 0"),
        ({"quadratic_length": 0}, ConfigError, "bucketing.quadratic_length: 0"),
        ({"sort_window": -1}, ConfigError, "bucketing.sort_window: -1"),
        ({"pack_window": 0}, ConfigError, "bucketing.pack_window: 0"),
        ({"strategy": "dense"}, ConfigError, "bucketing.strategy: 'dense' is none of padded, packed"),
        ({"order": "random"}, ConfigError, "bucketing.order: 'random'"),
        ({"token_budget": 10**30}, ConfigError, f"bucketing.token_budget: {10**30} is above {2**32}"),
        ({"max_sequences": 10**30}, ConfigError, f"bucketing.max_sequences: {10**30} is above {2**32}"),
        ({"quadratic_length": 10**30}, ConfigError, f"bucketing.quadratic_length: {10**30} is above {2**32}"),
        ({"batches_per_step": 2**62}, ConfigError, f"bucketing.batches_per_step: {2**62} is above {2**32}"),
        ({"num_cells": 1024}, ConfigError, "topology.cells: 1024 is above 1023"),
        ({"edges": [5, 10**30]}, ConfigError, f"bucketing.boundaries: {10**30} is above {2**32}"),
        ({"lengths": np.array([3, 2**63], dtype=np.uint64)}, DataError, f"sequence 1 has length {2**63}; no sequence may"),
        (
            {"lengths": [3, 2**28], "edges": [2**28], "token_budget": 2**30, "quadratic_length": 1},
            DataError,
            f"2 sequences of up to {2**28} tokens cost more with bucketing.quadratic_length = 1 than can be counted",
        ),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments: dict[str, Any] = {"lengths": [3, 30], "edges": [5, 60], "token_budget": 40, "batches_per_step": 2} | changes
    with pytest.raises(error) as caught:
        plan_epoch(**arguments)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("strategy", ["padded", "packed"])
def test_costs_as_large_as_they_may_be_are_still_balanced(strategy: Any) -> None:
    """Costs are kept together with numbers of cells, rows and columns; at the limits none of it leaves 64 bits."""
    budget = 2**32
    plan = plan_epoch([budget] * 1023 + [budget - 1], [budget], token_budget=budget, batches_per_step=2, num_cells=1023)
    assert np.bincount(plan.cell, weights=plan.cost).max() < 3 * budget
    quadratic = 2**22
    dear = plan_epoch(
        [2**26] * 2 + [2**20] * 4000, [2**26], token_budget=2**31, batches_per_step=2, num_cells=2, strategy=strategy,
        quadratic_length=quadratic, sort_window=3,
    )  # fmt: skip
    assert int(dear.cost.max()) <= 2**31 and dear.cost.min() > 0
    assert np.ptp(np.bincount(dear.cell, weights=dear.cost)) <= dear.cost.max()
