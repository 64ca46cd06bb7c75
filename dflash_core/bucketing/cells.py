"""Which cell trains which batch of a step."""

from __future__ import annotations

import numpy as np

from dflash_core.bucketing.lengths import IntArray


def assign_cells(cost: IntArray, batches_per_step: int, num_cells: int) -> IntArray:
    """Cell of every batch, in training order.

    Inside a step the dearest batch goes first, to the cell with the least load so far, and loads carry over from step to
    step, so that what one step leaves uneven the next evens out. A step's batches are counted out as evenly as possible:
    every cell gets the same number where it divides, else some get one more. A step with fewer batches than cells leaves
    cells without one.

    Args:
        cost: modelled cost of every batch (its padded tokens), in training order.
        batches_per_step: batches of a full step, over all cells.
        num_cells: number of cells.
    """
    cell = np.zeros(len(cost), dtype=np.int64)
    if num_cells == 1:
        return cell
    load = [0] * num_cells
    for start in range(0, len(cost), batches_per_step):
        costs = cost[start : start + batches_per_step].tolist()
        each, one_more = divmod(len(costs), num_cells)
        held = [0] * num_cells
        for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
            room = [c for c in range(num_cells) if held[c] < each or (held[c] == each and one_more > 0)]
            chosen = min(room, key=load.__getitem__)
            if held[chosen] == each:
                one_more -= 1
            held[chosen] += 1
            load[chosen] += costs[i]
            cell[start + i] = chosen
    return cell
