"""What the batches of a plan hold, as far as their costs depend on it; and lengths where no dataset is prepared yet.

Anchors and labelled slots are drawn when a batch is loaded. Here they are their means: an answer of n supervised tokens
in one piece has n - 1 places for an anchor, and an anchor i places before the last one labels min(block - 1, i + 1) slots.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_core.bucketing import EpochPlan
from dflash_core.errors import DataError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
# Sequences that a made-up dataset has at most: enough for any step, and a plan of them takes a tenth of a second.
MOST_DRAWN = 400_000
# Larger numbers in a file of lengths are mistakes.
MOST_IN_FILE = 10**12


@dataclass(frozen=True)
class Shapes:
    """Batches in training order; one entry a batch.

    Attributes:
        step, cell: where the plan puts it.
        rows: sequences, or 1 for a packed row.
        sequences: sequences.
        tokens, padded_tokens: real tokens, and rows times longest.
        squares: tokens squared, summed over rows (packed: over documents): what attention costs.
        blocks: blocks that the drafter computes: rows times the most anchors of a row.
        block_reach: context tokens, summed over those blocks: what the draft's attention sees.
        anchors: anchors drawn.
        labelled: slots that enter the loss.
        num_bytes: bytes in flight while the batch is.
    """

    step: IntArray
    cell: IntArray
    rows: IntArray
    sequences: IntArray
    tokens: IntArray
    padded_tokens: IntArray
    squares: FloatArray
    blocks: FloatArray
    block_reach: FloatArray
    anchors: FloatArray
    labelled: FloatArray
    num_bytes: IntArray

    def __len__(self) -> int:
        return len(self.step)

    def only(self, chosen: NDArray[np.bool_]) -> Shapes:
        """The chosen batches."""
        return Shapes(**{name: column[chosen] for name, column in _columns(self).items()})


@dataclass(frozen=True)
class Sequences:
    """The sequences to plan: tokens and supervised tokens of each, [N]."""

    length: IntArray
    supervised: IntArray


def mean_labelled(supervised: IntArray, num_anchors: int, block_size: int) -> tuple[FloatArray, FloatArray]:
    """Anchors of each sequence and the mean number of slots that they label together, [N] each."""
    places = np.maximum(supervised - 1, 0)
    anchors = np.minimum(places, num_anchors).astype(np.float64)
    full = block_size - 1
    cut = np.minimum(places, full)  # of `places` anchors those near the end label 1, 2, ... slots
    slots = cut * (cut + 1) / 2 + np.maximum(places - full, 0) * full
    return anchors, slots * np.divide(anchors, places, out=np.zeros(len(places)), where=places > 0)


def shapes_of(
    plan: EpochPlan,
    sequences: Sequences,
    *,
    num_anchors: int,
    block_size: int,
    size_of: Callable[[IntArray, bool], int],
    num_steps: int,
) -> Shapes:
    """The first `num_steps` steps of a plan.

    Args:
        sequences: those that were planned.
        num_anchors: most anchors of a sequence.
        block_size: slots of a block, the anchor's included.
        size_of: bytes in flight of a batch, from the lengths of its sequences and whether they are packed.
    """
    count = int(np.searchsorted(plan.step, num_steps))
    index = plan.sample_index[: plan.offsets[count]]
    starts = plan.offsets[:count]
    length = sequences.length[index]
    drawn, slots = (x[index] for x in mean_labelled(sequences.supervised, num_anchors, block_size))
    held = np.diff(plan.offsets[: count + 1])
    longest = plan.max_length[:count]
    anchors = np.add.reduceat(drawn, starts)
    if plan.packed:
        rows, squares = np.ones(count, dtype=np.int64), np.add.reduceat(length.astype(np.float64) ** 2, starts)
        blocks, reach = np.maximum(anchors, 1.0), np.add.reduceat(drawn * length, starts)
    else:
        rows, squares = held, held * longest.astype(np.float64) ** 2
        blocks = held * np.maximum(np.maximum.reduceat(drawn, starts), 1.0)
        reach = blocks * longest
    ends = plan.offsets[1 : count + 1]
    num_bytes = [size_of(length[begin:end], plan.packed) for begin, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    return Shapes(
        step=plan.step[:count],
        cell=plan.cell[:count],
        rows=rows,
        sequences=held,
        tokens=plan.num_tokens[:count],
        padded_tokens=plan.num_padded_tokens[:count],
        squares=squares,
        blocks=blocks,
        block_reach=reach,
        anchors=anchors,
        labelled=np.add.reduceat(slots, starts),
        num_bytes=np.array(num_bytes, dtype=np.int64),
    )


def join_epochs(plans: Iterator[EpochPlan], make: Callable[[EpochPlan, int], Shapes], num_steps: int) -> Shapes:
    """As many epochs as it takes, one after the other; `make` takes a plan and the steps still wanted."""
    parts: list[Shapes] = []
    done = 0
    while done < num_steps:
        plan = next(plans)
        part = make(plan, num_steps - done)
        parts.append(Shapes(**{**_columns(part), "step": part.step + done}))
        done += min(plan.num_steps, num_steps - done)
    return Shapes(**{name: np.concatenate([_columns(part)[name] for part in parts]) for name in _columns(parts[0])})


def _columns(shapes: Shapes) -> dict[str, NDArray[Any]]:
    return {field.name: getattr(shapes, field.name) for field in fields(shapes)}


def lognormal_lengths(mean: float, longest: int, sigma: float, count: int, seed: int) -> IntArray:
    """`count` lengths whose logarithm is normal with standard deviation `sigma`, cut at `longest`; `mean` is that of the
    uncut lengths, in tokens."""
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, min(count, MOST_DRAWN))
    return np.clip(np.rint(drawn), 2, longest).astype(np.int64)


def lengths_from_file(path: Path, longest: int, count: int, seed: int) -> IntArray:
    """`count` lengths drawn from a histogram: a CSV file with the columns `length` (tokens) and `count`.

    Lengths above `longest` are cut, as preparation cuts them.

    Raises:
        DataError: the file cannot be read, or a row is not two whole numbers; the row is named.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if not rows or [cell.strip() for cell in rows[0]] != ["length", "count"]:
        raise DataError(f"{path}: row 1: expected the columns length,count")
    found = []
    for number, row in enumerate(rows[1:], start=2):
        if not row:
            continue
        try:
            length, times = (int(cell) for cell in row)
        except ValueError:
            raise DataError(f"{path}: row {number}: {','.join(row)!r} is not a length and a count") from None
        if length < 1 or times < 0:
            raise DataError(f"{path}: row {number}: a length below 1, or a count below 0")
        if max(length, times) > MOST_IN_FILE:
            raise DataError(f"{path}: row {number}: a length or a count above {MOST_IN_FILE}")
        found.append((length, times))
    total = sum(times for _, times in found)
    if total == 0:
        raise DataError(f"{path}: holds no sequence")
    values = np.minimum(np.array([length for length, _ in found], dtype=np.int64), longest)
    shares = np.array([times / total for _, times in found])
    return np.random.default_rng(seed).choice(values, min(count, MOST_DRAWN), p=shares)
