"""What a run's batches cost a target and the drafter, in seconds, and how long the drafter had nothing to do."""

from __future__ import annotations

import numpy as np

from dflash_core.analysis.findings.pipeline_rows import column
from dflash_core.analysis.findings.topology import Costs
from dflash_core.analysis.runs import Run
from dflash_core.analysis.series import BoolArray, FloatArray


def drafter_idle(run: Run) -> FloatArray:
    """Seconds of each step in which the drafter had nothing to do.

    On a GPU the thread waits for the next states while the card still computes the batch before, so the card's busy time
    bounds what the wait can have cost.
    """
    wait, seconds = column(run.steps, "target_wait_s"), column(run.steps, "step_s")
    on_gpu = any(not str(name).startswith("cpu") for name in run.provenance.get("devices") or [])
    busy = by_step(run, column(run.batches, "draft_busy_s")) + np.nan_to_num(column(run.steps, "optimizer_busy_s"))
    if not on_gpu or np.isnan(busy).all():
        return wait
    return np.asarray(np.fmin(wait, np.maximum(seconds - busy, 0.0)))


def by_step(run: Run, values: FloatArray) -> FloatArray:
    """Sum over the batches of cell 0 in each row of `run.steps`."""
    first = column(run.batches, "cell", 0.0) == 0
    at = np.searchsorted(column(run.steps, "step"), column(run.batches, "step")[first])
    inside = at < len(run.steps)
    return np.bincount(at[inside], weights=values[first][inside], minlength=len(run.steps)).astype(np.float64)


def measured_costs(run: Run, counted: BoolArray, cell: int = 0) -> Costs | None:
    """Seconds a batch of a target of `cell` and of the first cell's drafter in the counted steps; None where not recorded.

    A target serves one batch after the other, so its cost is the wall time of its pass. The drafter's is the time of the
    step without waiting: for states, and for other cells in the reduction (all above its 5 % quantile). Of this the batches'
    part is that of forward and backward, or on a GPU, which runs behind the thread, the card's busy time.
    """
    steps = run.steps
    batches = by_step(run, np.ones(len(run.batches)))[counted]
    forward = column(run.batches, "target_forward_s")[column(run.batches, "cell", 0.0) == cell]
    wall = column(steps, "forward_s")[counted] + column(steps, "backward_s")[counted]
    busy = by_step(run, column(run.batches, "draft_busy_s"))[counted]
    reduce = np.nan_to_num(column(steps, "reduce_s")[counted])
    seconds = column(steps, "step_s")[counted] - drafter_idle(run)[counted] - (reduce - np.quantile(reduce, 0.05))
    known = np.isfinite(wall) & np.isfinite(seconds) & (batches > 0)
    if not known.any() or not np.isfinite(forward).any():
        return None
    num_batches = batches[known].sum()
    draft = max(wall[known].sum(), np.nan_to_num(busy[known]).sum()) / num_batches
    at_end = max(0.0, seconds[known].sum() / known.sum() - draft * num_batches / known.sum())
    of_step = run.setting("bucketing.batches_per_step")
    if not isinstance(of_step, int):
        of_step = round(float(np.median(column(steps, "num_batches")[counted])))
    target = float(np.nanmean(forward))
    if target <= 0 or draft + at_end <= 0:
        return None
    return Costs(target=target, draft=float(draft), step=float(at_end), batches_per_step=of_step)
