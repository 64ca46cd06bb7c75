"""Which devices the cells of a run use, checked against the devices that exist."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_core.config import TopologyConfig
from dflash_core.errors import ConfigError


@dataclass(frozen=True)
class CellDevices:
    """Devices of one cell; several targets may share one."""

    draft: str
    targets: tuple[str, ...]

    @property
    def is_cuda(self) -> bool:
        return self.draft.startswith("cuda")


def device_kind(topology: TopologyConfig) -> str:
    """`cpu` or `cuda`, with `auto` decided by what there is."""
    if topology.device != "auto":
        return topology.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def gpus_needed(topology: TopologyConfig) -> int:
    """GPUs that a topology takes on one node."""
    return topology.cells * (1 if topology.colocated else topology.targets_per_cell + 1)


def what_fits(num_gpus: int) -> str:
    """Topologies for a number of GPUs, in words."""
    if num_gpus == 0:
        return "there is no GPU; use topology.device: cpu"
    fits = [f"cells: {num_gpus}, colocated: true"]
    if num_gpus > 1:
        fits.append(f"cells: 1, targets_per_cell: {num_gpus - 1}")
    if num_gpus >= 4 and num_gpus % 2 == 0:
        fits.append(f"cells: 2, targets_per_cell: {num_gpus // 2 - 1}")
    return f"with {num_gpus} GPUs these fit: " + "; ".join(fits)


def cell_devices(topology: TopologyConfig, cell: int, num_gpus: int | None = None) -> CellDevices:
    """The devices of cell number `cell` of this node.

    Args:
        num_gpus: GPUs of the node; None asks torch.

    Raises:
        ConfigError: there are fewer GPUs than the topology takes; the message says what would fit.
    """
    if device_kind(topology) == "cpu":
        return CellDevices("cpu", ("cpu",) * topology.targets_per_cell)
    available = torch.cuda.device_count() if num_gpus is None else num_gpus
    needed = gpus_needed(topology)
    if needed > available:
        raise ConfigError(f"topology: {needed} GPUs are needed and {available} exist; {what_fits(available)}")
    if topology.colocated:
        return CellDevices(f"cuda:{cell}", (f"cuda:{cell}",) * topology.targets_per_cell)
    first = cell * (topology.targets_per_cell + 1)
    return CellDevices(
        f"cuda:{first + topology.targets_per_cell}", tuple(f"cuda:{first + t}" for t in range(topology.targets_per_cell))
    )
