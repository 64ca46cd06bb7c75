"""Simple arithmetic of a cell: what a topology would do with the costs that a run has measured.

A step of a cell takes as long as its slower side: n batches at the targets, n t / k, or at the drafter, n d + f, where n =
ceil(batches of a step / cells), t and d are seconds a batch, k is the number of targets, and f is what a step costs once. It
knows nothing of queues, memory, links and uneven batches: `dflash simulate` does, and is named wherever this gives advice.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class Costs:
    """Measured seconds: `target` a batch on one target, `draft` a batch on the drafter, `step` once a step on the drafter."""

    target: float
    draft: float
    step: float
    batches_per_step: int

    def batches_of(self, cells: int) -> int:
        """Batches of a step in the fullest cell."""
        return max(1, ceil(self.batches_per_step / cells))

    def drafter_s(self, cells: int) -> float:
        """What a drafter takes for a batch, its share of the step's end included."""
        return self.draft + self.step / self.batches_of(cells)

    def supply(self, cells: int, targets: int) -> float:
        """Batches that the targets of a cell make per batch that its drafter takes."""
        return targets * self.drafter_s(cells) / self.target

    def step_s(self, layout: Layout) -> float:
        """Seconds of one step."""
        n = self.batches_of(layout.cells)
        if layout.colocated:
            return n * (self.target + self.draft) + self.step
        return max(n * self.target / layout.targets, n * self.draft + self.step)


@dataclass(frozen=True)
class Layout:
    """Cells of `targets` targets and a drafter each; colocated ones have one card for both."""

    cells: int
    targets: int
    colocated: bool = False

    @property
    def cards(self) -> int:
        return self.cells if self.colocated else self.cells * (self.targets + 1)

    def keys(self) -> str:
        """The lines for the experiment file."""
        if self.colocated:
            return f"topology.cells: {self.cells}, topology.colocated: true"
        return f"topology.cells: {self.cells}, topology.targets_per_cell: {self.targets}"


@dataclass(frozen=True)
class Better:
    """A layout, and how many times faster it is than the run's."""

    layout: Layout
    gain: float


def best_layout(costs: Costs, cards: int, *, colocated: bool, now: Layout) -> Better | None:
    """The fastest layout on at most `cards` cards; of equally fast ones that with the fewest cards. None where none fits."""
    most_cells = min(cards, costs.batches_per_step)
    if colocated:
        found = [Layout(cells, 1, colocated=True) for cells in range(1, most_cells + 1)]
    else:
        found = [Layout(cells, targets) for cells in range(1, most_cells + 1) for targets in range(1, cards // cells)]
    if not found:
        return None
    best = min(found, key=lambda layout: (round(costs.step_s(layout), 9), layout.cards))
    return Better(best, costs.step_s(now) / costs.step_s(best))


def targets_that_suffice(costs: Costs, cells: int) -> int:
    """Targets per cell with which the drafter need not wait."""
    return max(1, ceil(costs.target / costs.drafter_s(cells) - 1e-9))
