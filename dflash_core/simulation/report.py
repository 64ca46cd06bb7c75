"""Says what bounds a simulated topology, and what to change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_core.simulation.simulate import Simulated

# Shares of the time from which something counts as busy, or as worth a word.
BUSY, NOTABLE = 0.93, 0.05
# Topologies of a machine that are shown; all are in the result.
SHOWN = 4


def explain(run: Simulated, *, batches_in_budget: float, batches_per_cell: float, cost_spread: float) -> str:
    """One or two sentences: which stage bounds the throughput, and what would help.

    Args:
        batches_in_budget: mean batches that the byte budget of a cell holds.
        batches_per_cell: batches of a cell in a step.
        cost_spread: how far the drafter's costs are from padded tokens, by which cells are balanced.
    """
    wait, barrier, joined = run.share("wait"), run.share("barrier"), run.share("reduce")
    figures = f"drafters {run.share('draft_work' if run.colocated else 'draft'):.0%} busy, targets {run.target_busy:.0%}"
    if run.cores_busy is not None and run.cores_busy >= BUSY:
        what = f"core-bound: the cores are {run.cores_busy:.0%} busy ({figures}); more targets or cells would take turns"
    elif run.colocated and run.share("card") >= BUSY:
        what = _card_bound(run)
    elif wait >= NOTABLE and wait >= max(barrier, joined):
        what = _waiting(run, figures, batches_in_budget)
    elif barrier >= max(NOTABLE, joined):
        hint = _even(batches_per_cell, cost_spread)
        what = f"step-bound: cells wait {barrier:.0%} of the time for the dearest one ({figures}); {hint}"
    elif joined >= NOTABLE:
        what = f"join-bound: joining gradients takes {joined:.0%} of the time ({figures}); larger steps join less often"
    elif run.colocated:
        what = _card_bound(run)
    else:
        what = f"draft-bound: {figures}{_spare_targets(run)}"
    return what


def _card_bound(run: Simulated) -> str:
    drafting, optimizing = run.share("draft_work"), run.share("optimizer_work")
    return (
        f"card-bound: the shared card is {run.share('card'):.0%} busy, {run.target_busy:.0%} with the target, {drafting:.0%}"
        f" with drafting, {optimizing:.0%} with the optimizer; more cards or fewer anchors would help"
    )


def _even(batches_per_cell: float, cost_spread: float) -> str:
    """What would make cells more equal."""
    if cost_spread >= 2 * NOTABLE:
        return (
            f"they are balanced by padded tokens, and the drafter's cost of a token differs by {cost_spread:.0%} between batches;"
            f" with more than {batches_per_cell:.1f} batches a cell and step that evens out: raise bucketing.batches_per_step"
        )
    return f"with more than {batches_per_cell:.1f} batches a cell and step they come out even: raise bucketing.batches_per_step"


def _spare_targets(run: Simulated) -> str:
    needed = max(1, math.ceil(run.target_busy * run.num_targets / BUSY))
    if needed >= run.num_targets:
        return ""
    return f"; {needed} target{'s' if needed > 1 else ''} per cell would be enough"


def _waiting(run: Simulated, figures: str, batches_in_budget: float) -> str:
    wait = run.share("wait")
    bytes_wait = sum(cell.budget_s / cell.total_s for cell in run.cells) / len(run.cells)
    if run.target_busy >= BUSY and not run.colocated:
        wanted = math.ceil(run.num_targets / max(0.01, 1.0 - wait))
        return f"target-bound: {figures}; {wanted} targets per cell would keep the drafter busy"
    if bytes_wait >= 0.5:
        return f"the byte budget holds {batches_in_budget:.1f} batches ({figures}): prefetch.max_bytes is the bottleneck"
    return f"loader-bound: {figures}; batches come too slowly for both: prefetch.num_workers or the files are the bottleneck"


def shares(run: Simulated) -> dict[str, Any]:
    """Where the time goes, as shares from 0 to 1; the drafter's add up to 1.

    On a shared card the drafter and the optimizer count only as much as they would take alone; the rest of their time the
    card works for the target (`sharing_the_card`), so that shares of one card do not add up to more than it has.
    """
    names = {
        "busy": "draft",
        "waiting_for_states": "wait",
        "waiting_for_cells": "barrier",
        "joining_gradients": "reduce",
        "optimizer_and_logging": "optimizer",
    }
    budget = sum(cell.budget_s / cell.total_s for cell in run.cells) / len(run.cells)
    drafters = {name: run.share(state) for name, state in names.items()}
    if run.colocated:
        alone = {"busy": run.share("draft_work"), "optimizer_and_logging": run.share("optimizer_work")}
        drafters["sharing_the_card"] = sum(drafters[name] - share for name, share in alone.items())
        drafters |= alone
    return {
        "drafters": {name: round(share, 4) for name, share in drafters.items()},
        "card_busy": round(run.share("card"), 4) if run.colocated else None,
        "targets_busy": round(run.target_busy, 4),
        "targets_idle": round(1.0 - run.target_busy, 4),
        "feed_waiting_for_bytes": round(budget, 4),
        "cores_busy": None if run.cores_busy is None else round(run.cores_busy, 4),
    }


HEAD = (
    f"{'topology':26} {'idle':>4} {'steps/s':>9} {'tokens/s':>11} {'anchors/s':>11}  {'draft':>5} {'wait':>5} {'barr.':>5}"
    f" {'join':>5} {'opt.':>5}  {'target':>6}"
)
LEGEND = (
    "    idle: GPUs not used; tokens/s: with padding; of a drafter's time, draft: computing, wait: for states (or for its card),"
    " barr.: for other cells, join: of gradients, opt.: optimizer and logging; target: targets busy"
)
# A fit that explains less of the variance than this is told.
POOR_FIT = 0.5


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of a table, best first, and below each topology why it is as fast as it is."""
    lines = [HEAD, LEGEND]
    for row in rows:
        parts = row["drafters"]
        waiting = parts["waiting_for_states"] + parts.get("sharing_the_card", 0.0)
        lines.append(
            f"{row['topology']:26} {row['idle_gpus']:4} {row['steps_per_s']:9.3f} {row['padded_tokens_per_s']:11,.0f}"
            f" {row['anchors_per_s']:11,.0f}  {parts['busy']:5.0%} {waiting:5.0%}"
            f" {parts['waiting_for_cells']:5.0%} {parts['joining_gradients']:5.0%} {parts['optimizer_and_logging']:5.0%}"
            f"  {row['targets_busy']:6.0%}"
        )
        lines.append(f"    {row['why']}")
    return lines


def format_notes(target_dtype: str, compute_dtype: str) -> list[str]:
    """What the table, which is for bf16, does not say of an experiment in other number formats."""
    names = [
        name for name, dtype in (("target.dtype", target_dtype), ("train.compute_dtype", compute_dtype)) if dtype == "float32"
    ]
    if not names:
        return []
    told = " and ".join(f"{name} is float32" for name in names)
    return [f"the table is for bf16, and {told}: that is several times slower than told here, and takes more memory"]


def describe_simulation(result: dict[str, Any]) -> list[str]:
    """Lines for a reader: the best topologies of each machine, why, and what to put into the experiment file."""
    costs = result["costs"]
    if "measured" in costs:
        fits = ", ".join(f"{name} {costs[name]['explained']:.2f}" for name in ("load", "target", "draft"))
        lines = [f"costs of {costs['measured']}, {costs['num_batches']} batches; share of the variance explained: {fits}"]
        for name in ("load", "target", "draft"):
            if costs[name]["explained"] < POOR_FIT:
                lines.append(f"warning: the fit of {name} explains {costs[name]['explained']:.0%} of the variance of its batches")
    else:
        share = costs["assumptions"]["peak_share"]
        lines = [f"costs from the table of {costs['table']}, at an assumed {share:.0%} of its peak: shapes, not promises"]
    lines += [f"note: {note}" for note in result["notes"]]
    lines += [f"lengths: {result['lengths']}"]
    for machine in result["machines"]:
        name = f"{machine['cores']} cores" if "cores" in machine else f"{machine['gpus']} GPUs"
        lines += ["", f"{name}, best first by anchors per second"]
        rows = machine["topologies"][:SHOWN]
        lines += table(rows) if rows else ["nothing fits:"]
        lines += [f"    note: {note}" for note in dict.fromkeys(note for row in rows[:1] for note in row["notes"])]
        lines += [f"left out: {left['topology']}: {left['reason']}" for left in machine["left_out"]]
        if machine["experiment_lines"]:
            lines += ["for the experiment file:", *(f"    {line}" for line in machine["experiment_lines"])]
    return lines
