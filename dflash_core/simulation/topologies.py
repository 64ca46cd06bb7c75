"""Which topologies a number of GPUs, or of cores, allows."""

from __future__ import annotations

from dataclasses import dataclass

GPUS_PER_NODE = 8
MOST_CELLS = 1023  # a plan with more is refused (bucketing.cells.MOST_CELLS)
# Targets of a cell that are tried where cores are shared; more only take turns.
TARGETS_ON_CORES = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Layout:
    """Cells on nodes that are all alike, as `torchrun` starts them.

    Attributes:
        num_gpus: what there is; 0 on a CPU.
        num_nodes: nodes of at most 8 GPUs.
        cells_per_node: `topology.cells`, which counts the cells of one node.
        colocated: the cell's target and drafter share one card.
    """

    num_gpus: int
    num_nodes: int
    cells_per_node: int
    targets_per_cell: int
    colocated: bool = False

    @property
    def num_cells(self) -> int:
        return self.num_nodes * self.cells_per_node

    @property
    def num_idle(self) -> int:
        """GPUs that are not used."""
        return self.num_gpus - self.num_cells * (1 if self.colocated else self.targets_per_cell + 1)

    def describe(self) -> str:
        """Such as `2 cells x (3 + 1)`."""
        cells = f"{self.num_cells} cell{'s' if self.num_cells > 1 else ''}"
        return f"{cells} colocated" if self.colocated else f"{cells} x ({self.targets_per_cell} + 1)"


def gpu_layouts(num_gpus: int) -> list[Layout]:
    """All layouts of a number of GPUs in which no further cell of the same kind would fit on a node.

    Some leave GPUs idle: 8 GPUs hold two cells of (2 + 1), and that may be better than one of (7 + 1).
    """
    num_nodes = -(-num_gpus // GPUS_PER_NODE)
    per_node = num_gpus // num_nodes
    colocated = [Layout(num_gpus, num_nodes, per_node, 1, colocated=True)]
    if num_nodes * per_node > MOST_CELLS:
        colocated.append(Layout(num_gpus, MOST_CELLS // per_node, per_node, 1, colocated=True))
    apart = [Layout(num_gpus, num_nodes, per_node // (t + 1), t) for t in range(1, per_node)]
    return colocated + apart


def core_layouts(num_cores: int) -> list[Layout]:
    """Cells and targets that take turns on the cores of one machine, with at most about two threads a core."""
    found = []
    cells = 1
    while cells <= num_cores:
        for targets in TARGETS_ON_CORES:
            if cells * (targets + 1) <= 2 * num_cores:
                found.append(Layout(0, 1, cells, targets))
        cells *= 2
    return found or [Layout(0, 1, 1, 1)]


def batches_per_step(configured: int, num_cells: int) -> int:
    """The configured number, or the smallest multiple of it that gives every cell a batch."""
    return configured * -(-num_cells // configured)
