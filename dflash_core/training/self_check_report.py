"""What the self-checks share: how one is run, what it says when it fails, and what all of them leave behind.

A check is a function that returns figures, or `Skipped` with the reason, or raises. A mistake of the user (a mask that is
used, a target that cannot be followed) is a `ConfigError` that names the key; a fault of this program or of the weights is
a `TrainingError`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from dflash_core.errors import DFlashError, TrainingError

Figures = dict[str, Any]


class Skipped(NamedTuple):
    """A check that does not apply here, and why."""

    reason: str


@dataclass
class Report:
    """What the checks of one cell found.

    Attributes:
        passed, skipped: names, the latter with reasons.
        times_s: seconds of each check that ran.
        figures: what they measured, by name.
    """

    passed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    figures: Figures = field(default_factory=dict)

    def run(self, name: str, check: Callable[..., Figures | Skipped], *args: Any) -> None:
        """Run one check; its name is put before whatever it raises.

        Raises:
            ConfigError, TrainingError: the check failed, or could not be made.
        """
        started = time.monotonic()
        try:
            found = check(*args)
        except DFlashError as error:
            raise type(error)(f"self-check {name}: {error}") from error
        except (RuntimeError, ValueError, TypeError, LookupError, OSError) as error:  # such as memory that does not suffice
            what = " ".join(str(error).split())[:300]
            raise TrainingError(f"self-check {name}: it could not be made: {type(error).__name__}: {what}") from error
        if isinstance(found, Skipped):
            self.skipped.append(f"{name}: {found.reason}")
            return
        self.passed.append(name)
        self.times_s.append(round(time.monotonic() - started, 4))
        self.figures.update(found)

    def fields(self) -> dict[str, Any]:
        """The fields of the `self_check` event. Figures of equal name are those of the last device."""
        return {"checks": self.passed, "check_s": self.times_s, "skipped_checks": self.skipped, **self.figures}

    def line(self) -> str:
        """One line for the log."""
        left_out = f"; left out: {'; '.join(self.skipped)}" if self.skipped else ""
        return f"self-checks passed in {sum(self.times_s):.1f} s: {', '.join(self.passed)}{left_out}"


def share_apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Distance of two tensors as a share of the expected one's norm; NaN if either is not finite."""
    expected = expected.float()
    return float((found.float() - expected).norm() / expected.norm().clamp(min=1e-12))
