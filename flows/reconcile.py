"""What Prefect shows of flow runs that did not end by themselves.

Flow runs whose process was killed stay RUNNING (or PAUSED, or CANCELLING) for Prefect; this marks them as crashed. Each flow
run gets tags with its host and its process (id and creation time, because ids are used again) as soon as it runs. At the next
start on that host the runs without a living process are found by them. They are not given by Prefect's `tags(...)`: task runs
would have them, too, and for each that has any Prefect asks for concurrency slots, which makes its SQLite database refuse
the request now and then (503), and then the task waits for 2 s.

A training that a signal stopped with its state saved raises an error, which Prefect would show as a failure; nothing failed. And
it would show as crashed what Ctrl-C or SIGTERM has ended, as if the process had been killed; what was done is kept.
"""

from __future__ import annotations

import logging
import socket
from typing import Any

import psutil
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import TerminationSignal
from prefect.flows import Flow
from prefect.states import Cancelled, Crashed

from dflash_core.errors import StoppedBySignal
from dflash_core.experiment import workspace
from flows import child, server

log = logging.getLogger(__name__)
PROCESS = "process:"
INTERRUPTED = (KeyboardInterrupt, TerminationSignal)
UNDER_WAY = (StateType.RUNNING, StateType.PAUSED, StateType.CANCELLING)


def own_tags() -> list[str]:
    """The tags of a flow run of this process."""
    process = psutil.Process()
    return [_host(), f"{PROCESS}{process.pid}:{process.create_time():.2f}"]


def mark_dead_runs() -> int:
    """Set runs of this host to CRASHED if their process is gone; returns how many there were."""
    wanted = FlowRunFilter(
        tags=FlowRunFilterTags(all_=[_host()]), state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(UNDER_WAY)))
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


def record_process(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Hook of every flow that begins to run: give its run the tags of its process; of a worker's, keep the server for it."""
    if flow_run.deployment_id is not None:
        server.hold(workspace())
    if not set(own_tags()) <= set(flow_run.tags):
        others = [tag for tag in flow_run.tags if not tag.startswith(PROCESS)]  # of an earlier attempt
        with get_client(sync_client=True) as client:
            client.update_flow_run(flow_run.id, tags=sorted({*others, *own_tags()}))


def show_as_cancelled(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Hook of every flow that fails or crashes: one that a signal has ended was cancelled."""
    if f"{StoppedBySignal.__name__}: " in (state.message or ""):
        message = state.message
    elif isinstance(state.data, INTERRUPTED):
        message = f"Ended by {'SIGTERM' if isinstance(state.data, TerminationSignal) else 'Ctrl-C'}; what was done is kept."
    else:
        return
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run.id, Cancelled(message=message), force=True)


HOOKS: dict[str, Any] = {  # of every flow
    "on_running": [record_process],
    "on_failure": [show_as_cancelled],
    "on_crashed": [show_as_cancelled],
}


def _host() -> str:
    return f"host:{socket.gethostname()}"


def _lives(tag: str) -> bool:
    pid, _, created = tag.removeprefix(PROCESS).partition(":")
    try:
        process = psutil.Process(int(pid))
        return child.runs(process) and abs(process.create_time() - float(created)) < 0.1
    except (psutil.NoSuchProcess, ValueError):
        return False
