"""Runs cells in simulated time and sums up what they did in the steady steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_core.simulation.cell import BatchWork, CellPools, CellSettings, SimulatedCell, StepWork
from dflash_core.simulation.clock import Clock, Pool

DRAFTER_STATES = ("draft", "wait", "barrier", "reduce", "optimizer")


@dataclass(frozen=True)
class Machine:
    """Which devices the cells have.

    Attributes:
        cores: cores that loaders, targets and drafters of all cells share; None: every target and every drafter has a
            device of its own and loaders a core each, as on a machine with GPUs.
        colocated: target and drafter of a cell share one device (only without `cores`).
        crowded: share of the cores that is left when more devices than cores want to run (`Pool`).
    """

    cores: float | None = None
    colocated: bool = False
    crowded: float = 1.0

    def pools(self, clock: Clock, num_cells: int, settings: CellSettings) -> list[CellPools]:
        """The devices of every cell."""
        if self.cores is not None:
            shared = Pool(clock, self.cores, self.crowded)
            return [CellPools(shared, [shared] * settings.num_targets, shared)] * num_cells
        cells = []
        for _ in range(num_cells):
            draft = Pool(clock, 1)
            own = [draft if self.colocated else Pool(clock, 1) for _ in range(settings.num_targets)]
            cells.append(CellPools(Pool(clock, settings.num_workers), own, draft))
        return cells


@dataclass(frozen=True)
class CellTimes:
    """What one cell did in the counted steps, in seconds; the drafter's five states add up to `total_s`.

    Attributes:
        draft_s: forward and backward.
        wait_s: waiting for states.
        barrier_s: waiting for other cells at the end of a step.
        reduce_s, optimizer_s: the join, and optimizer and logging.
        target_busy_s: of all targets together.
        budget_s: the feed was waiting for bytes.
        card_s: the drafter's device was at work for anybody.
        draft_work_s, optimizer_work_s: of the drafter, on a device of its own.
    """

    total_s: float
    draft_s: float
    wait_s: float
    barrier_s: float
    reduce_s: float
    optimizer_s: float
    target_busy_s: float
    budget_s: float
    card_s: float
    draft_work_s: float
    optimizer_work_s: float


@dataclass(frozen=True)
class Simulated:
    """A simulated run.

    Attributes:
        duration_s: of the counted steps, from the first cell's start of them to the last one's end.
        num_steps: counted steps.
        cells: what each cell did.
        step_ends_s: end of every step, in the slowest cell.
        trained: the cells' batches in the order in which they were trained.
        mean_bytes: reserved bytes of a cell, averaged over the batches trained.
        cores_busy: share of the shared cores that was busy over the whole run; None without shared cores.
        colocated: target and drafter of a cell shared one card.
    """

    duration_s: float
    num_steps: int
    num_targets: int
    cells: list[CellTimes]
    step_ends_s: list[float]
    trained: list[list[int]]
    mean_bytes: float
    cores_busy: float | None
    colocated: bool = False

    def share(self, *names: str) -> float:
        """Mean over cells of the named times of the drafter, as a share of the whole."""
        return float(sum(getattr(c, f"{n}_s") / c.total_s for c in self.cells for n in names) / len(self.cells))

    @property
    def target_busy(self) -> float:
        """Busy share of the targets, mean over cells; of a shared card what the drafter does not use of its busy time."""
        if self.colocated:
            return max(0.0, self.share("card") - self.share("draft_work", "optimizer_work"))
        return sum(c.target_busy_s / c.total_s for c in self.cells) / len(self.cells) / self.num_targets


def simulate(
    cells: Sequence[Sequence[BatchWork]],
    settings: CellSettings,
    step_work: StepWork,
    machine: Machine,
    *,
    first_step: int = 0,
    last_step: int | None = None,
) -> Simulated:
    """Run the cells until all have done `last_step`, and count from the end of the step before `first_step`.

    Args:
        cells: each cell's batches in plan order; steps count from 0.
        first_step: steps before it fill the pipeline and are not counted.
        last_step: the last one counted, by default the last that there is. Later ones keep the targets busy to the end.
    """
    num_steps = 1 + max(work.step for works in cells for work in works)
    last = num_steps - 1 if last_step is None else last_step
    if not 0 <= first_step <= last < num_steps:
        raise ValueError(f"steps {first_step} to {last} of {num_steps}")
    clock = Clock()
    simulated: list[SimulatedCell] = []
    arrived = 0

    def arrive() -> None:
        nonlocal arrived
        arrived += 1
        if arrived == len(simulated):
            arrived = 0
            for cell in simulated:
                cell.joined()

    pools = machine.pools(clock, len(cells), settings)
    simulated += [
        SimulatedCell(clock, works, num_steps, settings, own, arrive, step_work) for works, own in zip(cells, pools, strict=True)
    ]
    for cell in simulated:
        cell.start()
    first_going = 0

    def done() -> bool:
        nonlocal first_going
        while first_going < len(simulated) and simulated[first_going].step > last:
            first_going += 1
        return first_going == len(simulated)

    clock.run(done)
    begins = [cell.step_ends[first_step - 1] if first_step else 0.0 for cell in simulated]
    return Simulated(
        duration_s=max(cell.step_ends[last] for cell in simulated) - min(begins),
        num_steps=last - first_step + 1,
        num_targets=settings.num_targets,
        cells=[_times(cell, works, step_work, first_step, last) for cell, works in zip(simulated, cells, strict=True)],
        step_ends_s=[max(cell.step_ends[step] for cell in simulated) for step in range(last + 1)],
        trained=[cell.trained for cell in simulated],
        mean_bytes=sum(cell.bytes_seen for cell in simulated) / max(1, sum(cell.num_seen for cell in simulated)),
        cores_busy=None if machine.cores is None else pools[0].draft.settle() / (clock.now * machine.cores),
        colocated=machine.colocated and machine.cores is None,
    )


def _times(cell: SimulatedCell, works: Sequence[BatchWork], step_work: StepWork, first_step: int, last_step: int) -> CellTimes:
    end, begin = cell.snapshots[last_step], cell.snapshots[first_step - 1] if first_step else {}

    def passed(name: str) -> float:
        return max(0.0, end.get(name, 0.0) - begin.get(name, 0.0))  # of two equal sums one may be rounded down

    draft, wait, barrier, reduce, optimizer = (passed(name) for name in DRAFTER_STATES)
    return CellTimes(
        passed("now"), draft, wait, barrier, reduce, optimizer, passed("target_busy"), passed("budget"), passed("card"),
        draft_work_s=sum(work.draft_s for work in works if first_step <= work.step <= last_step),
        optimizer_work_s=step_work.optimizer_s * (last_step - first_step + 1),
    )  # fmt: skip
