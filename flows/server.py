"""The background Prefect server of a workspace: `python -m flows.server start | stop | status | url`.

Prefect's own ephemeral server starts anew for each process and outlives an interrupted one. So the project runs a server
of its own, one per workspace, on a free loopback port and in a session of its own; `prefect/server.json` says where.

Who stops it: every experiment that uses it holds a shared lease (`flock`, so the kernel returns it whatever happens). A
server that an experiment started ends with the last one that uses it. One that `start` or `--keep-server` asked for
stays until `stop`. All changes happen under one exclusive lock, so two starters at once end with one server. One that dies
while somebody uses it is started again on its port, sooner than Prefect's clients give up.

A user's own `PREFECT_API_URL` wins: then nothing is started here. Nothing in this file imports Prefect, because
the environment (`client_environment`) must be complete before Prefect is first imported.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import psutil

from dflash_core.errors import DFlashError, TrainingError, UserError
from dflash_core.redaction import without_secrets
from flows import child
from flows.launch import last_lines, try_lock
from flows.loopback import check_address, check_reachable, free_port, healthy
from flows.server_state import FOLDER, Server, api_url, family, is_ours, read_state, recorded, server_folder, write_state

log = logging.getLogger(__name__)

START_S = 120.0  # a first start creates the database; about 9 s on two cores
STOP_S = 15.0
LOCK_S = 180.0  # longer than a start, which happens under the lock
HEALTH_S = 5.0
PORT_S = 5.0  # a killed process counts as gone some 50 ms before its last thread gives its port back
WATCH_S = 1.0  # Prefect's clients try again for a minute
EMBEDDED = "DFLASH_EMBEDDED_SERVER"  # marks a PREFECT_API_URL as ours, in this process and its children
QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_CLI_PROMPT": "false",
}


def external_url(workspace: Path) -> str | None:
    """The user's own PREFECT_API_URL, if there is one; raises UserError if it holds a password.

    The address of the workspace's server, exported from `dflash server url`, is none: who has it in his terminal uses that
    server like everybody else. So it is not stopped while he does, and is started again where it has been stopped since.
    """
    url = os.environ.get("PREFECT_API_URL")
    if not url or url == os.environ.get(EMBEDDED):
        return None
    check_address(url)
    folder = workspace / FOLDER
    if url.rstrip("/") != api_url(read_state(folder).get("port")):
        return url
    # The port of one that has ended may be somebody else's by now.
    return url if recorded(folder) is None and healthy(url.rstrip("/"), HEALTH_S) else None


def client_environment(folder: Path, url: str) -> dict[str, str]:
    """Environment variables for a process that uses the embedded server of `folder` at `url`."""
    no_proxy = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), "127.0.0.1,localhost"]))
    return {
        **QUIET,
        **quiet_logging(),
        EMBEDDED: url,
        "PREFECT_API_URL": url,
        "PREFECT_HOME": str(folder),
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
    }


def quiet_logging() -> dict[str, str]:
    """Our loggers reach Prefect, Prefect's own chatter does not reach the console; what the user has set stays."""
    wanted = {
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "dflash_core,flows",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    }
    return {key: os.environ.get(key, value) for key, value in wanted.items()}


@contextlib.contextmanager
def session(workspace: Path, keep: bool = False) -> Iterator[str]:
    """Use the workspace's server, or the user's own, for the time of the block; yields its API address.

    Sets this process's environment, so it must come before the first `import prefect`.

    Args:
        workspace: the workspace folder.
        keep: leave the server running afterwards, whoever started it.

    Raises:
        UserError: the user's PREFECT_API_URL does not answer. TrainingError: the server does not start.
    """
    if url := external_url(workspace):
        check_reachable(url, 2 * HEALTH_S)
        os.environ.update(quiet_logging())
        yield url
        return
    folder = server_folder(workspace)
    users = os.open(folder / "server.users", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with _exclusive(folder):
            server = _ensure(folder, keep)
            fcntl.flock(users, fcntl.LOCK_SH)  # nobody holds it exclusively outside the exclusive section
        os.environ.update(client_environment(folder, server.url))
        with _kept_alive(folder):
            yield server.url
    finally:
        os.close(users)
        with _exclusive(folder):
            current = recorded(folder)
            if current is not None and not current.keep and not _in_use(folder):
                _stop(folder, current)


def hold(workspace: Path) -> None:
    """Count this process as a user of the workspace's server until it ends: the flow run of a worker, which has no `session`."""
    if external_url(workspace) is None:
        folder = server_folder(workspace)
        with _exclusive(folder):
            fcntl.flock(os.open(folder / "server.users", os.O_RDWR | os.O_CREAT, 0o600), fcntl.LOCK_SH)


@contextlib.contextmanager
def _kept_alive(folder: Path) -> Iterator[None]:
    """For the time of the block, start the server again if it dies; one that somebody has stopped stays so."""
    over = threading.Event()
    watch = threading.Thread(target=_start_again, args=(folder, over), name="server watch", daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join()


def _start_again(folder: Path, over: threading.Event) -> None:
    while not over.wait(WATCH_S):
        if not _has_died(folder):
            continue
        try:
            with _exclusive(folder):
                if _has_died(folder):  # nobody else has seen to it
                    log.warning("the background server was killed")
                    _ensure(folder, keep=False)
        except DFlashError as error:
            log.warning("%s", error)
            return


def _has_died(folder: Path) -> bool:
    return "pid" in read_state(folder) and recorded(folder) is None


def start(workspace: Path) -> Server:
    """Start the server, or find it running, and keep it until `stop`."""
    folder = server_folder(workspace)
    with _exclusive(folder):
        return _ensure(folder, keep=True)


def stop(workspace: Path, force: bool = False) -> bool:
    """Stop the server and everything it started; returns False if none runs.

    Raises:
        UserError: an experiment uses it and `force` is not given.
    """
    folder = server_folder(workspace)
    with _exclusive(folder):
        server = recorded(folder)
        if server is None:
            return False
        if not force and _in_use(folder):
            raise UserError("the server is in use by a running experiment; `stop --force` stops it all the same")
        _stop(folder, server)
        return True


def find(workspace: Path) -> Server | None:
    """The workspace's server if it runs and answers, else None. Starts nothing."""
    server = recorded(server_folder(workspace))
    return server if server is not None and is_ours(server) and healthy(server.url, HEALTH_S) else None


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Only one process at a time changes which server runs."""
    descriptor = os.open(folder / "server.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + LOCK_S
        while not try_lock(descriptor, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise TrainingError(f"another process has been starting the server of {folder} for {LOCK_S:.0f} s")
            time.sleep(0.1)
        yield
    finally:
        os.close(descriptor)


def _in_use(folder: Path) -> bool:
    """True if a process holds the shared lease. Called under `_exclusive`."""
    descriptor = os.open(folder / "server.users", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        return not try_lock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def _ensure(folder: Path, keep: bool) -> Server:
    server = recorded(folder)
    if server is not None and not (is_ours(server) and healthy(server.url, HEALTH_S)):
        log.warning("the server (process %d) does not answer; starting it anew", server.pid)
        _stop(folder, server)
        server = _start(folder, server.keep or keep)
    elif server is None:
        server = _start(folder, keep or read_state(folder).get("keep") is True)  # it was killed, nobody has stopped it
    elif keep and not server.keep:
        server = replace(server, keep=True)
        write_state(folder, asdict(server))
    return server


def _start(folder: Path, keep: bool) -> Server:
    log.info("starting the background Prefect server (some 10 s on an idle machine)")
    last, log_file = read_state(folder).get("port"), folder / "server.log"
    if log_file.exists():
        log_file.replace(folder / "server.log.1")  # what the one before said, which may have been killed
    for attempt in range(3):
        # The last port again, so that addresses stay valid, twice if the start failed for another reason; a free one if it is
        # taken or was lost to somebody meanwhile.
        port = free_port(last if attempt < 2 and isinstance(last, int) else 0, PORT_S)
        server = _start_on(folder, port, keep)
        if server is not None:
            return server
        log.warning("the server ended while it was started: %s", " | ".join(last_lines(log_file, 1)))
    reason = " | ".join(dict.fromkeys(last_lines(log_file, 3)))
    raise TrainingError(f"the background server does not start: {reason}; see {log_file}")


def _start_on(folder: Path, port: int, keep: bool) -> Server | None:
    """Start the server on a port and wait until it answers; None if it ended instead."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    environment = {
        **inherited, **QUIET,
        "PREFECT_HOME": str(folder),
        "PREFECT_SERVER_UI_API_URL": "/api",  # else the page calls Prefect's default port
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    }  # fmt: skip
    with (folder / "server.log").open("ab") as sink:
        process = subprocess.Popen(
            server_command(port),
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            umask=0o077,
        )
    server = Server(process.pid, psutil.Process(process.pid).create_time(), port, keep)
    try:
        write_state(folder, asdict(server))
        deadline = time.monotonic() + START_S
        while process.poll() is None:
            if is_ours(server) and healthy(server.url, HEALTH_S):
                process.returncode = 0  # it is nobody's child from here on: `_stop` finds it by its id
                return server
            if time.monotonic() > deadline:
                raise TrainingError(f"the background server does not answer after {START_S:.0f} s; see {folder / 'server.log'}")
            time.sleep(0.1)
    except BaseException:
        _stop(folder, server)
        raise
    return None


def server_command(port: int) -> list[str]:
    """The program that serves the API on a loopback port."""
    return [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]


def _stop(folder: Path, server: Server) -> None:
    """End the server's process, its children, and whatever is left in its session."""
    left = family(server)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in left:
            child.send(process, number)
        left = child.wait_gone(left, STOP_S)
    if left:
        raise TrainingError(f"processes {[process.pid for process in left]} of the background server do not end")
    write_state(folder, {"port": server.port})


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code. `status` and `url` end with 1 if no server runs."""
    parser = argparse.ArgumentParser(prog="dflash server", description="The background Prefect server of the workspace.")
    parser.add_argument("action", choices=["start", "stop", "status", "url"])
    parser.add_argument("--force", action="store_true", help="stop it even if an experiment uses it")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    from dflash_core.experiment import workspace

    try:
        text, code = _act(arguments.action, workspace(), arguments.force)
    except DFlashError as error:
        sys.stderr.write(f"error: {without_secrets(str(error))}\n")
        return error.exit_code
    # `export PREFECT_API_URL=$(dflash server url)` is to hold an address or nothing.
    (sys.stderr if arguments.action == "url" and code else sys.stdout).write(text + "\n")
    return code


def _act(action: str, workspace: Path, force: bool) -> tuple[str, int]:
    if action != "stop" and (url := external_url(workspace)):
        if action == "start":
            raise UserError(f"PREFECT_API_URL is set to {url}; that server is used, and none is started here")
        if action == "status":
            check_reachable(url, 2 * HEALTH_S)
        return (url if action == "url" else f"your own server (PREFECT_API_URL) is used: {url}"), 0
    if action == "start":
        return f"the server runs at {_page(start(workspace))}; stop it with: dflash server stop", 0
    if action == "stop":
        return ("stopped" if stop(workspace, force) else "no server runs"), 0
    server = find(workspace)
    if server is None:
        return "no server runs", 1
    return (server.url if action == "url" else f"the server runs at {_page(server)} (process {server.pid})"), 0


def _page(server: Server) -> str:
    return server.url.removesuffix("/api")


if __name__ == "__main__":
    sys.exit(main())
