"""Threads, queues and the prefetcher of a cell. Standard library only; knows nothing of models or files."""

from dflash_core.pipeline.budget import ByteBudget
from dflash_core.pipeline.channel import Channel, ChannelStats, Closed
from dflash_core.pipeline.prefetcher import BatchPrefetcher, Loaded, PrefetchSettings
from dflash_core.pipeline.reorder import GivenUp, ReorderBuffer, ReorderStats
from dflash_core.pipeline.threads import Stopped, Supervisor
from dflash_core.pipeline.watchdog import watchdog

__all__ = [
    "BatchPrefetcher",
    "ByteBudget",
    "Channel",
    "ChannelStats",
    "Closed",
    "GivenUp",
    "Loaded",
    "PrefetchSettings",
    "ReorderBuffer",
    "ReorderStats",
    "Stopped",
    "Supervisor",
    "watchdog",
]
