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
    """`cpu` or `cuda`, with `auto` decided by what is listed, or else by what there is."""
    if topology.device != "auto":
        return topology.device
    if topology.devices is not None:
        return "cuda"
    return "cuda" if torch.cuda.is_available() else "cpu"


def gpus_per_cell(topology: TopologyConfig) -> int:
    """GPUs that one cell takes."""
    return 1 if topology.colocated else topology.targets_per_cell + 1


def gpus_needed(topology: TopologyConfig) -> int:
    """GPUs that a topology takes on one node."""
    return topology.cells * gpus_per_cell(topology)


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


def _usable_gpus(topology: TopologyConfig, existing: int) -> list[str]:
    """The GPUs that cells may take, in order; raises ConfigError where a listed one does not exist or stands twice."""
    if topology.devices is None:
        return [f"cuda:{number}" for number in range(existing)]
    for position, name in enumerate(topology.devices):
        if name in topology.devices[:position]:
            raise ConfigError(f"topology.devices: {name} stands twice")
        if int(name.removeprefix("cuda:")) >= existing:
            raise ConfigError(f"topology.devices: {name} does not exist; there are {existing} GPUs, from cuda:0")
    return list(topology.devices)


def cell_devices(topology: TopologyConfig, cell: int, num_gpus: int | None = None) -> CellDevices:
    """The devices of cell number `cell` of this node.

    Args:
        num_gpus: GPUs of the node; None asks torch.

    Raises:
        ConfigError: there are fewer GPUs than the topology takes, and the message says what would fit; or a listed GPU
            does not exist, or is listed for a run on the CPU.
    """
    if device_kind(topology) == "cpu":
        if topology.devices is not None:
            raise ConfigError("topology.devices: lists GPUs, but topology.device is cpu")
        return CellDevices("cpu", ("cpu",) * topology.targets_per_cell)
    usable = _usable_gpus(topology, torch.cuda.device_count() if num_gpus is None else num_gpus)
    needed = gpus_needed(topology)
    if needed > len(usable):
        exist = "exist" if topology.devices is None else "are listed in topology.devices"
        raise ConfigError(f"topology: {needed} GPUs are needed and {len(usable)} {exist}; {what_fits(len(usable))}")
    size = gpus_per_cell(topology)
    *targets, draft = usable[cell * size : (cell + 1) * size]
    return CellDevices(draft, tuple(targets) or (draft,) * topology.targets_per_cell)
