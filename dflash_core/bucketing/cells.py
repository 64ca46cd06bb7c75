"""Which cell trains which batch of a step."""

from __future__ import annotations

from math import isqrt

import numpy as np

from dflash_core.bucketing.lengths import IntArray


def assign_cells(cost: IntArray, batches_per_step: int, num_cells: int) -> IntArray:
    """Cell of every batch, in training order.

    Inside a step the dearest batches go first, to the share with the least cost so far: one to each share, then one more
    to each, until none is left. So a step's batches are counted out as evenly as possible, and where they do not divide,
    the cheapest are the ones too many. Then the step's shares go to the cells, the dearest to the cell with the least
    load so far. Loads carry over from step to step, so that what one step leaves uneven the next evens out; after any
    step the loads of two cells differ by no more than one batch has ever cost.

    Args:
        cost: modelled cost of every batch, in training order; positive.
        batches_per_step: batches of a full step, over all cells.
        num_cells: number of cells.
    """
    if num_cells == 1:
        return np.zeros(len(cost), dtype=np.int64)
    num_steps = -(-len(cost) // batches_per_step)
    # [steps, batches]; what the last step lacks costs nothing.
    costs = np.zeros(num_steps * batches_per_step, dtype=np.int64)
    costs[: len(cost)] = cost
    share, load = _split_steps(costs.reshape(num_steps, batches_per_step), num_cells)
    cell_of_share = _carry(load)
    return np.asarray(np.take_along_axis(cell_of_share, share, axis=1).ravel()[: len(cost)])


def _split_steps(costs: IntArray, num_cells: int) -> tuple[IntArray, IntArray]:
    """The share of every batch, [steps, batches], and the cost of every share, [steps, cells]; all steps at once."""
    num_steps, num = costs.shape
    step = np.arange(num_steps)[:, None]
    dearest = np.argsort(-costs, axis=1, kind="stable")
    share = np.empty_like(costs)
    load = np.zeros((num_steps, num_cells), dtype=np.int64)
    for begin in range(0, num, num_cells):
        batch = dearest[:, begin : begin + num_cells]
        least = np.argsort(load, axis=1, kind="stable")[:, : batch.shape[1]]
        share[step, batch] = least
        load[step, least] += costs[step, batch]
    return share, load


def _carry(load: IntArray) -> IntArray:
    """The cell that takes each share of each step, [steps, cells].

    The epoch is cut into about as many stretches as each has steps. Loads are carried through all stretches at once, each
    from zero, and then from stretch to stretch, by exchanging the cells of whole stretches.
    """
    num_steps, num_cells = load.shape
    per_stretch = isqrt(num_steps - 1) + 1
    num_stretches = -(-num_steps // per_stretch)
    padded = np.zeros((num_stretches * per_stretch, num_cells), dtype=np.int64)
    padded[:num_steps] = load
    within, carried = _even_out(padded.reshape(num_stretches, per_stretch, num_cells))
    between, _ = _even_out(carried[None])
    cell_of_share = np.take_along_axis(np.broadcast_to(between[0, :, None], within.shape), within, axis=2)
    return cell_of_share.reshape(-1, num_cells)[:num_steps]


def _even_out(load: IntArray) -> tuple[IntArray, IntArray]:
    """Dearest share to the cell with the least load, place by place, in all rows at once.

    Args:
        load: cost of the shares, [rows, places, cells].

    Returns:
        The cell that takes each share, [rows, places, cells], and the loads in the end, [rows, cells].
    """
    dearest = np.argsort(-load, axis=2, kind="stable")
    carried = np.zeros_like(load[:, 0])
    cell_of_share = np.empty_like(load)
    for place in range(load.shape[1]):
        shares, takers = dearest[:, place], np.argsort(carried, axis=1, kind="stable")
        np.put_along_axis(cell_of_share[:, place], shares, takers, axis=1)
        np.put_along_axis(
            carried,
            takers,
            np.take_along_axis(carried, takers, axis=1) + np.take_along_axis(load[:, place], shares, axis=1),
            axis=1,
        )
    return cell_of_share, carried
