"""What a user asks a simulation for, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from dflash_core.errors import ConfigError
from dflash_core.simulation.flops import Assumptions

MOST_GPUS = 1024
SWEEP = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class SimulationRequest:
    """What to simulate, besides the experiment. See `dflash simulate --help`."""

    measured: Path | None = None
    gpus: tuple[int, ...] = ()
    cores: int | None = None
    card: str = "H200"
    target_model: str | None = None
    mean_length: float | None = None
    lengths_file: Path | None = None
    length_sigma: float = 0.8
    supervised_share: float = 0.6
    steps: int = 16
    assumptions: Assumptions = field(default_factory=Assumptions)

    def check(self) -> None:
        """Raise `ConfigError`, naming the option, where a value makes no sense."""
        for name, value in (("--mean-length", self.mean_length), ("--length-sigma", self.length_sigma)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name}: {value} is not above 0")
        for name, share in (("--supervised-share", self.supervised_share), ("--peak-share", self.assumptions.peak_share)):
            if not 0 < share <= 1:
                raise ConfigError(f"{name}: {share} is not above 0 and at most 1")
        if self.gpus and self.cores is not None:
            raise ConfigError("--cores: is for a machine without GPUs; leave out --gpus")
        if self.target_model is not None and self.measured is not None:
            raise ConfigError("--target-model: --measured has the costs of the experiment's own target; leave out one of them")
        if self.cores is not None and self.measured is None:
            raise ConfigError("--cores: what a core does is in no table; name a run of this target with --measured")
        for gpus in self.gpus:
            if not 1 <= gpus <= MOST_GPUS:
                raise ConfigError(f"--gpus: {gpus} is not from 1 to {MOST_GPUS}")
        if self.cores is not None and not 1 <= self.cores <= MOST_GPUS:
            raise ConfigError(f"--cores: {self.cores} is not from 1 to {MOST_GPUS}")


def parse_gpus(text: str) -> tuple[int, ...]:
    """`8`, a list `4,8`, or a range `1..1024`, of which powers of two and 3, 6, 12, 24 are taken.

    Raises:
        ConfigError: it is none of these.
    """
    try:
        if ".." in text:
            low, high = (int(part) for part in text.split(".."))
            found = tuple(n for n in SWEEP if low <= n <= high)
        else:
            found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--gpus {text}: expected a number, a list such as 4,8, or a range such as 1..1024") from None
    if not found:
        raise ConfigError(f"--gpus {text}: no number in this range")
    twice = [number for place, number in enumerate(found) if number in found[:place]]
    if twice:
        raise ConfigError(f"--gpus {text}: {twice[0]} stands twice")
    return found
