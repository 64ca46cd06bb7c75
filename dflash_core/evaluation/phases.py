"""Where the time of decoding goes: seconds by phase.

`prefill` is the prompt's forward pass, `draft` what the draft does (context and proposals), `verify` the target's pass over a
round's tokens, which for plain decoding is its only one. `rounds` is the whole of all rounds behind the prompt: what draft and
verify leave of it is bookkeeping.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


class PhaseClock:
    """Adds up wall-clock seconds by phase. On a GPU each border of a phase waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._device = device

    def now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = self.now()
        yield
        self.seconds[name] += self.now() - started


def phase(clock: PhaseClock | None, name: str) -> AbstractContextManager[None]:
    """A phase of `clock`, or nothing where nobody measures."""
    return nullcontext() if clock is None else clock.phase(name)
