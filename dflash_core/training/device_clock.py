"""How long a device was busy with a piece of work: what a model of the pipeline needs, and wall time is not.

On a CPU several devices share the cores, so wall time holds the waiting for a core too; the thread's own processor time
does not. With several arithmetic threads a device, the calling thread works as long as any of them. On a GPU kernels run
behind the thread that launched them, so two events on its stream are read once they have passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

Seconds = Callable[[], float]


def start_clock(device: torch.device) -> Callable[[], Seconds]:
    """Start measuring on `device`; call the result to stop, and what that returns to read the seconds.

    Reading on a GPU waits until the work is done. Start and stop belong into one thread.
    """
    if device.type != "cuda":
        started = time.thread_time()

        def stop() -> Seconds:
            seconds = time.thread_time() - started
            return lambda: seconds

        return stop
    event: Any = torch.cuda.Event  # its constructor has no types
    first, last = event(enable_timing=True), event(enable_timing=True)
    first.record(torch.cuda.current_stream(device))

    def stop_on_gpu() -> Seconds:
        last.record(torch.cuda.current_stream(device))

        def seconds() -> float:
            last.synchronize()
            return float(first.elapsed_time(last)) / 1000.0

        return seconds

    return stop_on_gpu
