"""Cells: every step is counted out evenly, and loads stay level over the epoch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from dflash_core.bucketing import plan_epoch, plan_levels
from dflash_core.bucketing.cells import assign_cells

costs_of_batches = st.lists(st.integers(1, 100) | st.sampled_from([1, 1000]), min_size=1, max_size=120)


def plain_split(costs: list[int], num_cells: int) -> list[list[int]]:
    """The shares of one step, as lists of its batches: the dearest first, to the least share that may have one more."""
    each, num_larger = divmod(len(costs), num_cells)
    shares: list[list[int]] = [[] for _ in range(num_cells)]
    for batch in sorted(range(len(costs)), key=lambda i: -costs[i]):
        larger = sum(len(share) > each for share in shares)
        room = [c for c in range(num_cells) if len(shares[c]) < each + (larger < num_larger)]
        shares[min(room, key=lambda c: sum(costs[i] for i in shares[c]))].append(batch)
    return shares


@given(costs_of_batches, st.integers(1, 9), st.integers(2, 5))
@settings(max_examples=150, deadline=None)
@example([1000, 10, 1, 1, 1, 1, 1], 7, 3)
def test_steps_are_split_as_by_the_plain_rule(costs: list[int], per_step: int, num_cells: int) -> None:
    cell = assign_cells(np.array(costs), per_step, num_cells).tolist()
    for begin in range(0, len(costs), per_step):
        step = costs[begin : begin + per_step]
        found = [{i for i in range(len(step)) if cell[begin + i] == c} for c in range(num_cells)]
        assert sorted(map(sorted, found)) == sorted(map(sorted, plain_split(step, num_cells)))
        sizes = [len(f) for f in found]
        assert max(sizes) - min(sizes) <= 1


@given(costs_of_batches, st.integers(1, 9), st.integers(1, 5))
@settings(max_examples=200, deadline=None)
@example([1000] + [1] * 119, 1, 3)
def test_loads_stay_within_one_batch_in_the_end_and_two_on_the_way(costs: list[int], per_step: int, num_cells: int) -> None:
    cell = assign_cells(np.array(costs), per_step, num_cells)
    assert len(cell) == len(costs) and cell.min() >= 0 and cell.max() < num_cells
    for end in [*range(per_step, len(costs), per_step), len(costs)]:
        load = np.bincount(cell[:end], weights=costs[:end], minlength=num_cells)
        assert np.ptp(load) <= max(costs[:end]) * (1 if end == len(costs) else 2)


def test_dearest_batches_go_first_to_the_least_loaded_cell() -> None:
    # Step 1: 9 + 1 | 5 + 4. Step 2 starts from loads 10 and 9, so its dearer share, 7 + 2, goes to the cell of 5 + 4.
    cell = assign_cells(np.array([1, 4, 5, 9, 2, 3, 7, 2]), 4, 2)
    assert (cell == cell[3]).tolist() == [True, False, False, True, True, True, False, False]
    # A step of one batch goes to the cell with less.
    assert assign_cells(np.array([5, 3, 1]), 2, 2).tolist() == [0, 1, 1]


@given(
    lengths=st.builds(
        lambda seed, middle, spread: np.clip(np.random.default_rng(seed).lognormal(middle, spread, 20_000), 4, 1600).astype(int),
        st.integers(0, 2**32),
        st.floats(4.5, 6.0),
        st.floats(0.2, 1.5),
    ),
    how=st.sampled_from([{}, {"sort_window": 16}, {"strategy": "packed"}, {"quadratic_length": 700}]),
    num_cells=st.integers(2, 8),
    each=st.integers(1, 3),
    seed=st.integers(0, 99),
)
@settings(max_examples=50, deadline=None)
def test_the_cost_of_an_epoch_is_shared_within_a_hundredth(
    lengths: Any, how: dict[str, Any], num_cells: int, each: int, seed: int
) -> None:
    plan = plan_epoch(
        lengths,
        [75, 150, 300, 600, 1600],
        token_budget=1600,
        batches_per_step=num_cells * each,
        num_cells=num_cells,
        seed=seed,
        **how,
    )
    spread, dearest = plan_levels(plan).steps.cell_cost_spread, int(plan.cost.max())
    share = int(plan.cost.sum()) / num_cells
    assert spread is not None and spread * share <= dearest, "a last step that is not full leaves no more than a batch"
    assume(share >= 100 * dearest)  # in a shorter epoch that one batch may be more than a hundredth
    assert spread < 0.01


@pytest.mark.parametrize("how", [{}, {"sort_window": 16}, {"strategy": "packed"}, {"quadratic_length": 700}])
@pytest.mark.parametrize(("per_step", "num_cells"), [(8, 8), (12, 8), (48, 8), (6, 2)])
def test_an_epoch_gives_all_cells_the_same_work(how: dict[str, Any], per_step: int, num_cells: int) -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1, 25_000), 4, 1600).astype(int)
    plan = plan_epoch(
        lengths, [75, 150, 300, 600, 1600], token_budget=1600, batches_per_step=per_step, num_cells=num_cells, **how
    )
    steps = plan_levels(plan).steps
    assert steps.num_steps >= 50
    assert steps.cell_cost_spread is not None and steps.cell_cost_spread < 0.01
