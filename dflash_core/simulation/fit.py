"""Costs of batches and steps, fitted to what a run has measured.

A cost is a sum of a few physical terms with coefficients that are not negative (a constant, tokens, tokens squared; for
the draft blocks and what they see). Times are device-busy seconds, so that a run on a busy machine can be used, too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_core.errors import DataError
from dflash_core.simulation.cell import StepWork
from dflash_core.simulation.workload import Shapes

FloatArray = NDArray[np.float64]
# Steps at the start of a run that are left out: memory is being claimed and kernels are chosen.
WARM_UP_STEPS = 4
FEWEST_BATCHES = 8


@dataclass(frozen=True)
class Terms:
    """What the costs of batches are made of, one entry a batch: see `Shapes`; `anchor_reach` is the context of each anchor.

    Anchors stand for blocks: a row with fewer anchors than another is filled up with empty blocks, but how many is not
    logged, and nearly all rows have the cap.
    """

    sequences: FloatArray
    padded_tokens: FloatArray
    squares: FloatArray
    anchors: FloatArray
    anchor_reach: FloatArray
    labelled: FloatArray

    @classmethod
    def of(cls, shapes: Shapes) -> Terms:
        reach = shapes.block_reach * shapes.anchors / shapes.blocks
        columns = (shapes.sequences, shapes.padded_tokens, shapes.squares, shapes.anchors, reach, shapes.labelled)
        return cls(*(np.asarray(column, dtype=np.float64) for column in columns))

    def table(self, names: Sequence[str]) -> FloatArray:
        """[batches, terms], with a column of ones for `constant`."""
        ones = np.ones(len(self.sequences))
        return np.stack([ones if name == "constant" else getattr(self, name) for name in names], axis=1)


LOAD_TERMS = ("constant", "sequences", "padded_tokens")
TARGET_TERMS = ("constant", "padded_tokens", "squares")
DRAFT_TERMS = ("constant", "padded_tokens", "anchors", "anchor_reach", "labelled")


@dataclass(frozen=True)
class Fitted:
    """A cost in seconds: a coefficient for each term, and how well it fits.

    Attributes:
        explained: share of the variance that the terms explain (R squared).
        typical_error: median of |fitted - measured| / measured.
    """

    coefficients: dict[str, float]
    explained: float
    typical_error: float

    def seconds(self, terms: Terms) -> FloatArray:
        """The cost of each batch."""
        return np.asarray(terms.table(tuple(self.coefficients)) @ np.array(list(self.coefficients.values())))


@dataclass(frozen=True)
class Crowding:
    """How many devices wanted to run at once, and how much of the cores they got, both as means over the run.

    On GPUs neither says anything: each device has its own.
    """

    devices_active: float
    cores_used: float

    def left(self, cores: float) -> float:
        """The share of `cores` that is left when more devices than that want to run; 1 where the run cannot tell."""
        return min(1.0, self.cores_used / cores) if self.devices_active > cores else 1.0


@dataclass(frozen=True)
class MeasuredCosts:
    """What a run says of its costs.

    Attributes:
        step: the end of a step; `optimizer_s` has logging and all else that the main thread does once a step.
        crowding: what the devices got of the cores.
        num_batches: batches that were fitted.
    """

    load: Fitted
    target: Fitted
    draft: Fitted
    step: StepWork
    crowding: Crowding
    num_batches: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def least_squares(table: FloatArray, values: FloatArray) -> FloatArray:
    """Coefficients, none below 0, with the least sum of squared errors.

    Tries every subset of columns; the best solution without a bound that keeps to it is the one with it. For the handful
    of terms here this is exact and quick.
    """
    num = table.shape[1]
    scale = np.abs(table).max(axis=0)
    scaled = table / np.where(scale > 0, scale, 1.0)
    best, least = np.zeros(num), float(values @ values)
    for size in range(1, num + 1):
        for columns in combinations(range(num), size):
            chosen = list(columns)
            found = np.linalg.lstsq(scaled[:, chosen], values, rcond=None)[0]
            error = float(((scaled[:, chosen] @ found - values) ** 2).sum())
            if (found >= 0).all() and error < least * (1 - 1e-9):
                best, least = np.zeros(num), error
                best[chosen] = found
    return best / np.where(scale > 0, scale, 1.0)


def fit(terms: Terms, names: Sequence[str], seconds: FloatArray) -> Fitted:
    """Fit measured seconds, one entry a batch, and scale the fit so that all batches together take what they took."""
    table = terms.table(names)
    coefficients = least_squares(table, seconds)
    total = float((table @ coefficients).sum())
    coefficients *= float(seconds.sum()) / total if total > 0 else 0.0
    fitted = table @ coefficients
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    explained = 1.0 - float(((seconds - fitted) ** 2).sum()) / spread if spread > 0 else 1.0
    error = float(np.median(np.abs(fitted - seconds) / np.maximum(seconds, 1e-9)))
    return Fitted(dict(zip(names, coefficients.tolist(), strict=True)), explained, error)


def read_costs(run_dir: Path) -> MeasuredCosts:
    """Fit the costs of a finished or running run.

    Args:
        run_dir: run folder with `metrics/batches.jsonl` and `metrics/steps.jsonl`.

    Raises:
        DataError: a file is missing, a row is not readable or lacks a key, or there are too few batches.
    """
    batches, steps = (_rows(run_dir / "metrics" / f"{stream}.jsonl") for stream in ("batches", "steps"))
    batches = [row for row in batches if row["step"] >= WARM_UP_STEPS]
    if len(batches) < FEWEST_BATCHES:
        path = run_dir / "metrics" / "batches.jsonl"
        raise DataError(f"{path}: {len(batches)} batches behind the first {WARM_UP_STEPS} steps; {FEWEST_BATCHES} are needed")
    columns = {name: _column(run_dir, batches, name) for name in BATCH_KEYS}
    terms = Terms(
        sequences=columns["num_sequences"],
        padded_tokens=columns["num_padded_tokens"],
        squares=columns["num_padded_tokens"] * columns["max_seq_len"],
        anchors=columns["num_anchors"],
        anchor_reach=columns["num_anchors"] * columns["max_seq_len"],
        labelled=columns["num_supervised"],
    )
    return MeasuredCosts(
        load=fit(terms, LOAD_TERMS, columns["load_s"]),
        target=fit(terms, TARGET_TERMS, columns["target_busy_s"]),
        draft=fit(terms, DRAFT_TERMS, columns["draft_busy_s"]),
        step=_step_work(run_dir, steps),
        crowding=_crowding(run_dir, batches, steps),
        num_batches=len(batches),
    )


BATCH_KEYS = (
    "num_sequences", "num_padded_tokens", "max_seq_len", "num_anchors", "num_supervised", "load_s", "target_busy_s",
    "draft_busy_s",
)  # fmt: skip


def _crowding(run_dir: Path, batches: list[dict[str, Any]], steps: list[dict[str, Any]]) -> Crowding:
    """From wall and busy seconds of all devices. Of the steps, which only the first cell logs, each cell has the like."""
    kept = [row for row in steps if row["step"] >= WARM_UP_STEPS]
    num_cells = len({row.get("cell", 0) for row in batches})

    def of_steps(*names: str) -> float:
        return num_cells * float(sum(_column(run_dir, kept, name, "steps").sum() for name in names))

    def of_batches(*names: str) -> float:
        return float(sum(_column(run_dir, batches, name).sum() for name in names))

    seconds = of_steps("step_s") / num_cells
    active = of_batches("target_forward_s") + of_steps("forward_s", "backward_s", "optimizer_s")
    used = of_batches("target_busy_s", "draft_busy_s") + of_steps("optimizer_busy_s")
    return Crowding(active / seconds, used / seconds)


def _step_work(run_dir: Path, steps: list[dict[str, Any]]) -> StepWork:
    """Medians over the steps behind the warm-up."""
    kept = [row for row in steps if row["step"] >= WARM_UP_STEPS]
    if not kept:
        raise DataError(f"{run_dir / 'metrics' / 'steps.jsonl'}: no step behind the first {WARM_UP_STEPS}")
    names = ("step_s", "target_wait_s", "forward_s", "backward_s", "reduce_s", "optimizer_s", "optimizer_busy_s", "log_s")
    column = {name: _column(run_dir, kept, name, "steps") for name in names}
    known = sum(column[name] for name in ("target_wait_s", "forward_s", "backward_s", "reduce_s", "optimizer_s"))
    rest = np.maximum(column["step_s"] - known, 0.0)
    work = column["optimizer_busy_s"] + column["log_s"] + rest
    # The join's time holds the wait for the slowest cell, but not in the quickest steps.
    return StepWork(reduce_s=float(np.quantile(column["reduce_s"], 0.1)), optimizer_s=float(np.median(work)))


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a stream, of a step that was trained twice only those of the last attempt."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            row["step"], row["attempt"] = int(row["step"]), int(row["attempt"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            if number == len(lines):  # a run that is being written, or that was killed
                break
            raise DataError(f"{path}: row {number}: not a row of a run's metrics") from None
        rows.append(row)
    newest: dict[int, int] = {}
    for row in rows:
        newest[row["step"]] = max(newest.get(row["step"], 0), row["attempt"])
    return [row for row in rows if row["attempt"] == newest[row["step"]]]


def _column(run_dir: Path, rows: list[dict[str, Any]], name: str, stream: str = "batches") -> FloatArray:
    try:
        values = np.array([float(row[name]) for row in rows])
    except (KeyError, TypeError, ValueError, OverflowError):
        path = run_dir / "metrics" / f"{stream}.jsonl"
        raise DataError(f"{path}: no numbers under {name}; the run was made before this was measured") from None
    if not np.isfinite(values).all():
        raise DataError(f"{run_dir / 'metrics' / (stream + '.jsonl')}: a value of {name} is not finite")
    return values
