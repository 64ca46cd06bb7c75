"""Which cell trains which batch of a step."""

from __future__ import annotations

from math import isqrt

import numpy as np

from dflash_core.bucketing.lengths import IntArray

# Cells whose number fits below the cost of a whole epoch in 64 bits (`limits.MOST_COST`).
MOST_CELLS = 2**10 - 1


def assign_cells(cost: IntArray, batches_per_step: int, num_cells: int) -> IntArray:
    """Cell of every batch, in training order.

    First every step is split into as many shares as there are cells: the dearest batch goes first, to the share with the
    least cost so far. A step's batches are counted out as evenly as possible: every share gets the same number where it
    divides, else some get one more. Then the shares go to the cells, the dearest to the cell with the least load. Loads
    carry over from step to step, so that what one step leaves uneven the next evens out: in the end the loads of two
    cells differ by no more than the shares of a step do (which has not been seen to be more than its dearest batch), and
    on the way by twice that. A step with fewer batches than cells leaves cells without one.

    Args:
        cost: modelled cost of every batch, in training order.
        batches_per_step: batches of a full step, over all cells.
        num_cells: number of cells.
    """
    if num_cells == 1:
        return np.zeros(len(cost), dtype=np.int64)
    num_full = len(cost) // batches_per_step * batches_per_step
    parts = [cost[:num_full].reshape(-1, batches_per_step), cost[None, num_full:]]
    split = [_split_steps(part, num_cells) for part in parts if part.size]
    cell_of_share = _carry(np.concatenate([load for _, load in split]))
    cells: list[IntArray] = []
    begin = 0
    for share, _ in split:
        cells.append(np.take_along_axis(cell_of_share[begin : begin + len(share)], share, axis=1).ravel())
        begin += len(share)
    return np.concatenate(cells)


def _split_steps(costs: IntArray, num_cells: int) -> tuple[IntArray, IntArray]:
    """The share of every batch, [steps, batches], and the cost of every share, [steps, shares]; all steps at once."""
    num_steps, num = costs.shape
    each, num_larger = divmod(num, num_cells)
    step = np.arange(num_steps)
    dearest = np.argsort(-costs, axis=1, kind="stable")
    share = np.empty_like(costs)
    # One number holds load and share, so that the least number says which share it is. Shares come first in these arrays,
    # as numpy takes the least of columns much faster than that of short rows.
    bits = num_cells.bit_length()
    load = np.repeat(np.arange(num_cells)[:, None], num_steps, axis=1)
    held = np.zeros_like(load)
    larger_left = np.full(num_steps, num_larger)
    for batch in dearest.T:
        room = held < each + (larger_left > 0)
        least = np.where(room, load, np.iinfo(np.int64).max).min(axis=0) & ((1 << bits) - 1)
        share[step, batch] = least
        load[least, step] += costs[step, batch] << bits
        larger_left -= held[least, step] == each
        held[least, step] += 1
    return share, (load >> bits).T


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
