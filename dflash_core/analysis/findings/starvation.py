"""Who waits for whom: targets for batches, the drafter for states, targets for the drafter.

In every pipeline somebody waits, so a wait alone is no finding. Throughput is lost where the drafter waits, for it is the end
of the pipeline; why it waits is then read from what stands before it. Where the drafter never waits, idle targets cost
throughput only if the same cards, arranged otherwise, would do more.

Threshold: 15 % of the step time with the lower end of the interval above 10 %. Single runs of one topology differ by up to
10 % from each other (docs/results), and a topology moves in whole targets, so less than that can neither be shown nor mended.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np

from dflash_core.analysis.findings.costs import by_step, drafter_idle, measured_costs
from dflash_core.analysis.findings.finding import Context, Finding, Strength
from dflash_core.analysis.findings.pipeline_rows import (
    Share,
    Stretch,
    cell_waits,
    column,
    counted_steps,
    devices_shared,
    plain,
    share_of,
    stretches,
)
from dflash_core.analysis.findings.topology import Better, Costs, Layout, best_layout, targets_that_suffice
from dflash_core.analysis.runs import Run
from dflash_core.analysis.series import BoolArray

THRESHOLD = 0.15
LOW_THRESHOLD = 0.10
# What waits for bytes, or for room in a queue, for half of the time, while targets and drafter wait too, waits for a limit.
LIMIT_SHARE = 0.5
# In-order dispatch lets a loader wait for its turn now and then, so a loader at its limit is not busy all the time.
BUSY_LOADERS = 0.6
# Part of the drafter's wait during which targets idle, from which on the cause stands before the targets.
CAUSE_BEFORE_TARGETS = 0.5
# Where one target idles for so much more of the time than another, the line waits for the slow one (`unequal_dispatch`).
UNEQUAL_IDLE = 0.15
# How many times faster another arrangement of the same cards must be.
MIN_GAIN = 1.15
# Both models on one card need its memory, and disturb each other: this arrangement must promise more.
MIN_GAIN_COLOCATED = 1.3
STRONG_GAIN, MODERATE_GAIN = 1.5, 1.25
# A wait so long is worth more cards, too.
MODERATE_WAIT = 0.4
# Processor time of the pipeline over what its cores have, from which on threads wait for a core and not for the disk.
CORES_FULL = 0.7


@dataclass(frozen=True)
class Waits:
    """Waiting in the counted steps. `drafter`, `targets`: shares of the time of cell `cell`; `cells`: counters of all."""

    cell: int
    drafter: Share
    targets: Share
    cells: list[Stretch]
    first_step: int
    last_step: int

    @property
    def counters(self) -> Stretch | None:
        """The cell's own; None without snapshots."""
        return next((one for one in self.cells if one.cell == self.cell), None)

    @property
    def place(self) -> str:
        """What a text begins with where there are several cells."""
        return f"In cell {self.cell}: " if len(self.cells) > 1 else ""

    @property
    def rows(self) -> str:
        return f"step BETWEEN {self.first_step} AND {self.last_step}"


def find_starvation(run: Run, context: Context) -> list[Finding]:
    """`starved_by_loader`, `starved_by_target` or `starved_by_drafter`: at most one, for a pipeline has one slowest stage.

    Nothing where step times were not recorded, for fewer than 20 steps in which the pipeline ran full, and where target and
    drafter share a device or nothing says whether they do (a slow loader is found there too, if the cores are not full).
    """
    shared = devices_shared(run)
    if shared is None:
        return []
    counted = counted_steps(run)
    waits = measured_waits(run, context, counted)
    if waits is None:
        return []
    if is_above(waits.drafter):
        found = _starved_before_targets(run, waits, counted, shared)
        if found is not None:
            return [found]
        return [] if shared else _starved_by_target(run, waits, counted)
    return _starved_by_drafter(run, waits, counted) if is_above(waits.targets) and not shared else []


def is_above(share: Share) -> bool:
    return share.value >= THRESHOLD and share.low >= LOW_THRESHOLD


def measured_waits(run: Run, context: Context, counted: BoolArray) -> Waits | None:
    """The waits of the cell whose drafter waits longest; None where too few steps say so.

    The steps tell of the first cell. Another one is looked at by its snapshots, and only where it waits clearly longer: then the
    first waits for it when gradients are joined.
    """
    step = column(run.steps, "step")[counted]
    seconds = column(run.steps, "step_s")[counted]
    drafter = share_of(drafter_idle(run)[counted], seconds, context.rng)
    targets = share_of(column(run.steps, "data_wait_s")[counted], seconds, context.rng)
    if drafter is None or targets is None:
        return None
    cells, cell = stretches(run, counted), 0
    slowest = max(cells, key=lambda one: np.nan_to_num(one.share("ready_wait")), default=None)
    if slowest is not None and slowest.cell != 0 and slowest.share("ready_wait") > drafter.value + LOW_THRESHOLD:
        passed, waited, idle = cell_waits(run, counted, slowest.cell)
        its_drafter, its_targets = share_of(waited, passed, context.rng), share_of(idle, passed, context.rng)
        if its_drafter is not None and its_targets is not None:
            drafter, targets, cell = its_drafter, its_targets, slowest.cell
    return Waits(cell, drafter, targets, cells, int(step[0]), int(step[-1]))


def _now(run: Run) -> Layout:
    topology = run.setting("topology")
    return Layout(int(topology.get("cells", 1)), int(topology.get("targets_per_cell", 1)))


def _strength(gain: float) -> Strength:
    return "strong" if gain >= STRONG_GAIN else "moderate" if gain >= MODERATE_GAIN else "weak"


def _starved_before_targets(run: Run, waits: Waits, counted: BoolArray, shared: bool) -> Finding | None:
    """The drafter waits, and so do the targets: the byte budget, the queues or the loaders hold them up."""
    cell = waits.counters
    if cell is None or waits.targets.value < CAUSE_BEFORE_TARGETS * waits.drafter.value:
        return None
    if cell.least_idle < CAUSE_BEFORE_TARGETS * cell.ready_wait:
        return None
    for key, name in (("prefetch.max_bytes", "budget_wait"), ("prefetch.queue_batches", "put_wait")):
        if cell.share(name) >= LIMIT_SHARE:
            return None if shared else _by_limit(run, waits, cell, key)
    workers = run.setting("prefetch.num_workers")
    load = column(run.batches, "load_s")[column(run.batches, "cell", 0.0) == waits.cell]
    load_s = float(np.nanmean(load)) if np.isfinite(load).any() else float("nan")
    if not isinstance(workers, int) or not np.isfinite(load_s) or (shared and _cores_full(run)):
        return None
    step_s = float(np.nansum(column(run.steps, "step_s")[counted]))
    batches = float(by_step(run, np.ones(len(run.batches)))[counted].sum())
    busy = load_s * batches / (step_s * workers)
    return _by_loader(run, waits, workers, load_s, busy, counted) if busy >= BUSY_LOADERS else None


def _cores_full(run: Run) -> bool:
    """Whether target and drafter use nearly all processor time there is, so that loading threads wait for a core like them."""
    cores = run.provenance.get("num_cpus")
    if any(not str(name).startswith("cpu") for name in run.provenance["devices"]):
        return False
    busy = column(run.batches, "target_busy_s") + column(run.batches, "draft_busy_s")
    if not isinstance(cores, int) or not np.isfinite(busy).any():
        return True
    return bool(np.nansum(busy) > CORES_FULL * cores * np.nansum(column(run.steps, "step_s")))


def _evidence(waits: Waits, **more: object) -> dict[str, object]:
    names = ("target_idle", "least_idle", "most_idle", "put_wait", "budget_wait", "loader_idle", "ready_wait", "held_up")
    cells = [{"cell": cell.cell, **{f"{name}_share": cell.share(name) for name in names}} for cell in waits.cells]
    return dict(
        plain(
            {
                "cell": waits.cell,
                "drafter_wait_share": waits.drafter.value,
                "target_idle_share": waits.targets.value,
                "cells": cells,
                **more,
            }
        )
    )


def _by_limit(run: Run, waits: Waits, cell: Stretch, key: str) -> Finding:
    """Too little may be in flight, by `prefetch.max_bytes` or `prefetch.queue_batches`."""
    drafter, idle, limit = waits.drafter, waits.targets, run.setting(key)
    if key == "prefetch.max_bytes":
        name, share = "byte budget", cell.share("budget_wait")
        most = f"{limit / 2**20:,.0f} MiB of batches" if isinstance(limit, int) else "the bytes"
        reason = f"for {share:.0%} of the time the next batch was not even begun, because no more than {most} may be in flight"
        advice = "Raise prefetch.max_bytes; it should hold several batches for every target and for the drafter."
    else:
        name, share = "queue limit", cell.share("put_wait")
        reason = f"for {share:.0%} of the time a loaded batch waited for room in a queue of at most {limit} batches"
        advice = f"Raise prefetch.queue_batches (now {limit}), so that uneven batches even out in the queues."
    return Finding(
        kind="starved_by_loader",
        run_id=run.run_id,
        strength=_strength(1 / max(0.05, 1 - drafter.value)),
        title=f"The {name} keeps targets and drafter waiting: the drafter for {drafter.value:.0%} of its time",
        text=(
            f"{waits.place}The drafter waits for {drafter} of the step time and the targets "
            f"for {idle.value:.0%}. Loading is not the reason: {reason}. So the stages cannot work at the same time."
        ),
        advice=advice,
        measure="time the drafter waits",
        value=100 * drafter.value,
        unit="% of the step time",
        low=100 * drafter.low,
        high=100 * drafter.high,
        threshold=100 * THRESHOLD,
        table="stats",
        rows=waits.rows,
        evidence=_evidence(waits, cause=key),
    )


def _by_loader(run: Run, waits: Waits, workers: int, load_s: float, busy: float, counted: BoolArray) -> Finding:
    drafter, idle = waits.drafter, waits.targets
    gain = 1 / max(0.05, 1 - drafter.value)
    costs, layout = measured_costs(run, counted, waits.cell), _now(run)
    enough = ceil(workers * gain)
    if costs is not None:  # as many as the slower of drafter and targets can take
        fastest = costs.batches_of(layout.cells) / costs.step_s(layout)
        enough = max(workers + 1, ceil(load_s * fastest / 0.9))
    return Finding(
        kind="starved_by_loader",
        run_id=run.run_id,
        strength=_strength(gain),
        title=f"Loading is too slow: targets wait for batches for {idle.value:.0%} of the time",
        text=(
            f"{waits.place}The targets wait for batches for {idle} of the step time, and behind "
            f"them the drafter for {drafter.value:.0%}. A batch takes {_ms(load_s)} to load; the {workers} loading threads are "
            f"busy for {min(busy, 1.0):.0%} of the time. The byte budget is not what holds them up."
        ),
        advice=f"Raise prefetch.num_workers from {workers} to about {enough}, or put the dataset on a faster disk.",
        measure="time the targets wait for batches",
        value=100 * idle.value,
        unit="% of the step time",
        low=100 * idle.low,
        high=100 * idle.high,
        threshold=100 * THRESHOLD,
        table="stats",
        rows=waits.rows,
        evidence=_evidence(waits, cause="loading", load_s=load_s, loader_busy_share=busy, enough_workers=enough),
    )


def _starved_by_target(run: Run, waits: Waits, counted: BoolArray) -> list[Finding]:
    costs, layout, drafter = measured_costs(run, counted, waits.cell), _now(run), waits.drafter
    if costs is None:
        return []
    supply, cell = costs.supply(layout.cells, layout.targets), waits.counters
    if cell is not None and (cell.most_idle - cell.least_idle) / cell.seconds >= UNEQUAL_IDLE:
        return []
    if supply >= 1 or waits.targets.value >= CAUSE_BEFORE_TARGETS * drafter.value:
        return []
    better, shared = _better_layouts(costs, layout)
    gain = max([1.0, *(found.gain for found in (better, shared) if found is not None)])
    enough = targets_that_suffice(costs, layout.cells)
    if waits.cell and (slower := _slower_cell(run, waits.cell)) >= MIN_GAIN:
        first = f"look at the devices of cell {waits.cell}, whose targets take {slower:.1f} times as long as those of cell 0"
    else:
        first = ""
    more = f"with more cards set topology.targets_per_cell: {enough}, which keeps the drafter busy"
    return [
        Finding(
            kind="starved_by_target",
            run_id=run.run_id,
            strength="moderate" if gain < STRONG_GAIN and drafter.value >= MODERATE_WAIT else _strength(gain),
            title=f"The drafter waits for target states for {drafter.value:.0%} of its time",
            text=(
                f"{waits.place}The drafter waits for {drafter} of the step time, while the "
                f"targets idle for only {waits.targets.value:.0%}: they are the slow side. {_supply_text(costs, layout, supply)}"
            ),
            advice=_advice(layout, better, shared, more, first),
            measure="time the drafter waits for target states",
            value=100 * drafter.value,
            unit="% of the step time",
            low=100 * drafter.low,
            high=100 * drafter.high,
            threshold=100 * THRESHOLD,
            table="steps",
            rows=waits.rows,
            evidence=_evidence(waits, **_cost_evidence(costs, layout, better, shared), targets_that_suffice=enough),
        )
    ]


def _starved_by_drafter(run: Run, waits: Waits, counted: BoolArray) -> list[Finding]:
    costs, layout, idle = measured_costs(run, counted), _now(run), waits.targets
    if costs is None:
        return []
    supply = costs.supply(layout.cells, layout.targets)
    better, shared = _better_layouts(costs, layout)
    if supply < MIN_GAIN or (better is None and shared is None):
        return []
    gain = max(found.gain for found in (better, shared) if found is not None)
    enough = targets_that_suffice(costs, layout.cells)
    spare = layout.cells * (layout.targets - enough)
    freed = f"set topology.targets_per_cell: {enough}, which is as fast and frees {spare} cards" if spare > 0 else ""
    return [
        Finding(
            kind="starved_by_drafter",
            run_id=run.run_id,
            strength=_strength(gain),
            title=f"Targets are idle for {idle.value:.0%} of the time: the drafter is the slow side",
            text=(
                f"{waits.place}The targets wait for {idle} of the step time with the drafter always "
                f"at work (it waits for {waits.drafter.value:.0%}). {_supply_text(costs, layout, supply)}"
            ),
            advice=_advice(layout, better, shared, freed),
            measure="time the targets are idle",
            value=100 * idle.value,
            unit="% of the step time",
            low=100 * idle.low,
            high=100 * idle.high,
            threshold=100 * THRESHOLD,
            table="steps",
            rows=waits.rows,
            evidence=_evidence(waits, **_cost_evidence(costs, layout, better, shared), targets_that_suffice=enough),
        )
    ]


def _better_layouts(costs: Costs, now: Layout) -> tuple[Better | None, Better | None]:
    """The best arrangement of the same cards with cards of their own for targets, and with shared ones; those worth it."""
    own = best_layout(costs, now.cards, colocated=False, now=now)
    shared = best_layout(costs, now.cards, colocated=True, now=now)
    if own is not None and own.gain < MIN_GAIN:
        own = None
    # Sharing is told only where it promises clearly more than cards of their own.
    if shared is not None and shared.gain < max(MIN_GAIN_COLOCATED, 1.1 * own.gain if own else 0.0):
        shared = None
    return own, shared


def _supply_text(costs: Costs, now: Layout, supply: float) -> str:
    many = f"{now.targets} targets supply" if now.targets > 1 else "1 target supplies"
    return (
        f"A batch takes a target {_ms(costs.target)} and the drafter {_ms(costs.drafter_s(now.cells))}, so {many} "
        f"{supply:.2g} times what the drafter takes."
    )


def _slower_cell(run: Run, cell: int) -> float:
    """How many times as long the targets of a cell take for a batch as those of the first cell."""
    of_cell, seconds = column(run.batches, "cell", 0.0), column(run.batches, "target_forward_s")
    return float(np.nanmean(seconds[of_cell == cell]) / np.nanmean(seconds[of_cell == 0]))


def _advice(now: Layout, own: Better | None, shared: Better | None, last: str, first: str = "") -> str:
    parts = [first] if first else []
    for found, how in ((own, ""), (shared, " (if both models fit one card)")):
        if found is not None:
            parts.append(f"set {found.layout.keys()}, which uses the same {now.cards} cards {found.gain:.1f} times better{how}")
    if last:
        parts.append(last)
    text = "; or ".join(parts)
    return f"{text[0].upper()}{text[1:]}. `dflash simulate --measured` on this run predicts it with memory and queues."


def _cost_evidence(costs: Costs, now: Layout, own: Better | None, shared: Better | None) -> dict[str, object]:
    return {
        "target_s_per_batch": costs.target,
        "drafter_s_per_batch": costs.drafter_s(now.cells),
        "supply": costs.supply(now.cells, now.targets),
        "cards": now.cards,
        **{
            name: None if found is None else {"keys": found.layout.keys(), "gain": found.gain}
            for name, found in (("better_layout", own), ("better_colocated", shared))
        },
    }


def _ms(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
