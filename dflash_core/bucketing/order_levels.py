"""An order of batches looked at from three levels: all batches in a row, each cell's own, and the optimizer steps.

Only the composition of a step reaches the gradient (docs/field.md 2), so the steps are the level that counts. The flat
order says how well the plan mixes, a cell's order what its device sees. All take plain arrays, so a plan and the
batches that a run has consumed are described by the same code.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike

from dflash_core.bucketing.lengths import FloatArray, IntArray
from dflash_core.bucketing.order_stats import OrderStatistics, lag1_correlation, order_statistics, run_lengths
from dflash_core.bucketing.plan import EpochPlan


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """Description of the optimizer steps of an order. `None` stands where a number is undefined; there is never a NaN.

    A full step has as many batches as the fullest.

    Attributes:
        num_steps: number of steps.
        num_full_steps: number of full steps.
        step_share_sd: as in `OrderStatistics`.
        mean_buckets_per_step: mean number of different buckets in a step; None without steps.
        quota_deviation: greatest |count so far - quota| in batches at the ends of steps, over all buckets; the quota is the
            batches so far times the bucket's share of all batches. None without steps.
        lag1_correlation: autocorrelation at lag 1 of the step's mean sequence length (tokens over sequences); None with
            one step or constant lengths, or where tokens or sequences are not given.
        longest_run: most consecutive steps with the same majority bucket (the first such bucket).
        cell_cost_spread: (max - min) / mean of the cells' total cost; None where costs are not given or zero.
        step_efficiency: mean over steps of mean / max of the cells' cost: the share of the time in which cells do not wait
            for the dearest; None as above.
    """

    num_steps: int
    num_full_steps: int
    step_share_sd: float | None
    mean_buckets_per_step: float | None
    quota_deviation: float | None
    lag1_correlation: float | None
    longest_run: int
    cell_cost_spread: float | None
    step_efficiency: float | None

    def as_dict(self) -> dict[str, int | float | None]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class OrderLevels:
    """An order at three levels: all batches, the batches of each cell (entry c is cell c), and the steps."""

    flat: OrderStatistics
    cells: tuple[OrderStatistics, ...]
    steps: StepStatistics

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def plan_levels(plan: EpochPlan) -> OrderLevels:
    """`order_levels` of a planned epoch."""
    return order_levels(
        plan.bucket,
        step=plan.step,
        cell=plan.cell,
        mean_length=plan.mean_length,
        num_buckets=plan.num_buckets,
        num_sequences=plan.num_sequences,
        num_tokens=plan.num_tokens,
        num_padded_tokens=plan.num_padded_tokens,
        cost=plan.cost,
        num_cells=plan.settings.num_cells,
    )


def order_levels(
    bucket: ArrayLike,
    *,
    step: ArrayLike,
    cell: ArrayLike,
    mean_length: ArrayLike,
    num_buckets: int,
    num_sequences: ArrayLike | None = None,
    num_tokens: ArrayLike | None = None,
    num_padded_tokens: ArrayLike | None = None,
    cost: ArrayLike | None = None,
    num_cells: int | None = None,
) -> OrderLevels:
    """Describe an order of batches at three levels. All arrays have one entry per batch, in the order of training.

    Args:
        bucket: length bucket.
        step: optimizer step; numbers that ascend in the order of training.
        cell: cell that trains the batch, from 0.
        mean_length: mean sequence length.
        num_buckets: number of buckets; some may have no batch.
        num_sequences: sequences.
        num_tokens: real tokens.
        num_padded_tokens: padded tokens.
        cost: modelled cost; without it padded tokens stand for it.
        num_cells: number of cells; without it as many as have batches.

    Raises:
        ValueError: arrays differ in length, or a bucket or cell is out of range.
    """
    arrays = {
        name: np.asarray(a) for name, a in (("bucket", bucket), ("step", step), ("cell", cell), ("mean_length", mean_length))
    }
    given = {"num_sequences": num_sequences, "num_tokens": num_tokens, "num_padded_tokens": num_padded_tokens, "cost": cost}
    arrays |= {name: np.asarray(array) for name, array in given.items() if array is not None}
    shapes = {name: array.shape for name, array in arrays.items()}
    if len(set(shapes.values())) != 1:
        raise ValueError(f"arrays of an order differ in shape: {shapes}")
    cells = arrays["cell"].astype(np.int64)
    found = int(cells.max(initial=-1)) + 1
    num_cells = found if num_cells is None else num_cells
    if cells.min(initial=0) < 0 or found > num_cells:
        raise ValueError(f"cells from {cells.min()} to {cells.max()} in an order of {num_cells} cells")

    flat_names = ("bucket", "step", "mean_length", "num_tokens", "num_padded_tokens")
    flat = {name: arrays[name] for name in flat_names if name in arrays}

    def described(chosen: IntArray | slice) -> OrderStatistics:
        return order_statistics(num_buckets=num_buckets, **{name: array[chosen] for name, array in flat.items()})

    whole = described(slice(None))
    # The batches of the only cell are all batches.
    by_cell = (whole,) if num_cells == 1 else tuple(described(np.flatnonzero(cells == c)) for c in range(num_cells))
    return OrderLevels(whole, by_cell, _step_statistics(arrays, cells, num_buckets, num_cells, whole.step_share_sd))


def _step_statistics(
    arrays: dict[str, np.ndarray], cells: IntArray, num_buckets: int, num_cells: int, step_share_sd: float | None
) -> StepStatistics:
    buckets = arrays["bucket"].astype(np.int64)
    _, step = np.unique(arrays["step"], return_inverse=True)
    size = np.bincount(step)
    variety, majority, deviation = _composition(buckets, step, size, num_buckets)
    spread, efficiency = _balance(arrays.get("cost", arrays.get("num_padded_tokens")), step, cells, num_cells)
    return StepStatistics(
        num_steps=len(size),
        num_full_steps=int((size == size.max(initial=0)).sum()),
        step_share_sd=step_share_sd,
        mean_buckets_per_step=float(variety.mean()) if len(size) else None,
        quota_deviation=deviation,
        lag1_correlation=_length_correlation(arrays.get("num_tokens"), arrays.get("num_sequences"), step),
        longest_run=int(run_lengths(majority)[1].max(initial=0)),
        cell_cost_spread=spread,
        step_efficiency=efficiency,
    )


def _composition(buckets: IntArray, step: IntArray, size: IntArray, num_buckets: int) -> tuple[IntArray, IntArray, float | None]:
    """Number of buckets and first majority bucket of each step, and the quota deviation. One bucket at a time, so that
    many buckets times many steps never lie in memory at once."""
    variety, majority, most = np.zeros_like(size), np.zeros_like(size), np.zeros_like(size)
    total, done = len(buckets), np.cumsum(size)
    worst = 0
    for bucket in range(num_buckets):
        counts = np.bincount(step[buckets == bucket], minlength=len(size))
        variety += counts > 0
        majority[counts > most] = bucket
        most = np.maximum(most, counts)
        # Whole numbers up to the last division, so that a deviation of 0 is 0.
        worst = max(worst, int(np.abs(np.cumsum(counts) * total - done * counts.sum()).max(initial=0)))
    return variety, majority, worst / total if total else None


def _length_correlation(num_tokens: ArrayLike | None, num_sequences: ArrayLike | None, step: IntArray) -> float | None:
    if num_tokens is None or num_sequences is None:
        return None
    sequences = np.bincount(step, weights=np.asarray(num_sequences))
    if not sequences.all():
        return None
    mean_length: FloatArray = np.bincount(step, weights=np.asarray(num_tokens)) / sequences
    return lag1_correlation(mean_length)


def _balance(cost: ArrayLike | None, step: IntArray, cells: IntArray, num_cells: int) -> tuple[float | None, float | None]:
    if cost is None or not np.any(cost):
        return None, None
    num_steps = int(step.max()) + 1
    held = np.bincount(step * num_cells + cells, weights=np.asarray(cost), minlength=num_steps * num_cells)
    of_step = held.reshape(num_steps, num_cells)
    of_cell = of_step.sum(axis=0)
    busy = of_step[of_step.any(axis=1)]
    return float(np.ptp(of_cell) / of_cell.mean()), float((busy.mean(axis=1) / busy.max(axis=1)).mean())
