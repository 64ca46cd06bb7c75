"""Threads, queues and the prefetcher of a cell. Standard library only; knows nothing of models or files."""

from dflash_core.pipeline.channel import ByteBudget, Channel, Closed, ReorderBuffer
from dflash_core.pipeline.prefetcher import BatchPrefetcher, Loaded, PrefetchSettings
from dflash_core.pipeline.threads import Stopped, Supervisor
from dflash_core.pipeline.watchdog import watchdog

__all__ = [
    "BatchPrefetcher",
    "ByteBudget",
    "Channel",
    "Closed",
    "Loaded",
    "PrefetchSettings",
    "ReorderBuffer",
    "Stopped",
    "Supervisor",
    "watchdog",
]
