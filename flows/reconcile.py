"""Flow runs whose process was killed stay RUNNING for Prefect; this marks them as crashed.

Each flow that a command of ours starts carries tags with its host and its process (id and creation time, because ids are
used again). At the next start on that host the runs without a living process are found by them.
"""

from __future__ import annotations

import logging
import socket

import psutil
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType, FlowRunFilterTags
from prefect.client.schemas.objects import StateType
from prefect.states import Crashed

from flows import child

log = logging.getLogger(__name__)
PROCESS = "process:"


def own_tags() -> list[str]:
    """The tags of a flow run of this process."""
    process = psutil.Process()
    return [_host(), f"{PROCESS}{process.pid}:{process.create_time():.2f}"]


def mark_dead_runs() -> int:
    """Set runs of this host to CRASHED if their process is gone; returns how many there were."""
    wanted = FlowRunFilter(
        tags=FlowRunFilterTags(all_=[_host()]), state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING]))
    )
    count = 0
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_run_filter=wanted):
            if not any(_lives(tag) for tag in run.tags if tag.startswith(PROCESS)):
                client.set_flow_run_state(run.id, Crashed(message="Its process was killed."), force=True)
                count += 1
    if count:
        log.info("%d earlier flow runs were killed; marked as crashed", count)
    return count


def _host() -> str:
    return f"host:{socket.gethostname()}"


def _lives(tag: str) -> bool:
    pid, _, created = tag.removeprefix(PROCESS).partition(":")
    try:
        process = psutil.Process(int(pid))
        return child.runs(process) and abs(process.create_time() - float(created)) < 0.1
    except (psutil.NoSuchProcess, ValueError):
        return False
