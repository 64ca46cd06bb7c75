"""What is known of a workspace's server: the file `prefect/server.json`, and the processes that it speaks of.

Nothing here starts or stops one; that is `flows.server`.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from flows import child

FOLDER = "prefect"  # below the workspace


@dataclass(frozen=True)
class Server:
    """A server as its state file describes it. `create_time` tells its process from a later one with the same id."""

    pid: int
    create_time: float
    port: int
    keep: bool

    @property
    def url(self) -> str:
        return api_url(self.port)


def api_url(port: object) -> str:
    """Where a server on that port of this machine is asked."""
    return f"http://127.0.0.1:{port}/api"


def server_folder(workspace: Path) -> Path:
    """The folder of the workspace's server, for its owner alone: the database holds all parameters, logs and Secret blocks."""
    folder = workspace / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_mode & 0o077 and found.st_uid == os.geteuid():  # of somebody else's only its owner decides
        folder.chmod(0o700)
    return folder


def is_ours(server: Server) -> bool:
    """True if it is the recorded process itself that listens on the recorded port."""
    try:
        process = psutil.Process(server.pid)
        family = [process, *process.children(recursive=True)] if is_same(process, server) else []
        return any(
            connection.status == psutil.CONN_LISTEN and connection.laddr.port == server.port
            for member in family
            for connection in member.net_connections(kind="inet")
        )
    except psutil.Error:
        return False


def read_state(folder: Path) -> dict[str, object]:
    """The state file's content; empty where there is none that can be read."""
    try:
        state = json.loads((folder / "server.json").read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def write_state(folder: Path, state: dict[str, object]) -> None:
    """Replace the state file as a whole."""
    temporary = folder / ".server.json.tmp"  # one writer at a time, see `_exclusive`
    temporary.write_text(json.dumps(state) + "\n")
    temporary.replace(folder / "server.json")


def recorded(folder: Path) -> Server | None:
    """The recorded server if its process lives, answering or not."""
    try:
        server = Server(**read_state(folder))  # type: ignore[arg-type]  # a file with other keys is a TypeError, as below
        process = psutil.Process(server.pid)
        return server if is_same(process, server) and child.runs(process) else None
    except (TypeError, psutil.Error):
        return None


def is_same(process: psutil.Process, server: Server) -> bool:
    """True if the process is the recorded one and no later one with its id."""
    return abs(process.create_time() - server.create_time) < 0.01


def family(server: Server) -> list[psutil.Process]:
    """The server's process, its children, and whatever else is in its session."""
    members: dict[int, psutil.Process] = {}
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(server.pid)
        if is_same(process, server):
            members = {member.pid: member for member in [process, *process.children(recursive=True)]}
    if members:  # the server leads its session, so the session's id is its own
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if os.getsid(process.pid) == server.pid:
                    members.setdefault(process.pid, process)
    return list(members.values())
