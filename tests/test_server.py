"""The background server: one per workspace, ours or not taken for ours, and gone when nobody needs it.

A small stand-in serves the same health page and has a child process. That Prefect's real server fits is tested where
the flows are.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from dflash_core.errors import TrainingError, UserError
from flows import server

PATIENCE_S = 60.0
STAND_IN = """
import http.server, subprocess, sys
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/api/health" else 404); self.end_headers(); self.wfile.write(b"true")
    def log_message(self, *_): pass
listener = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Page)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
listener.serve_forever()
"""


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def family(pid: int) -> list[int]:
    return [pid, *(process.pid for process in psutil.Process(pid).children(recursive=True))]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`session` writes to the environment of its process; no test must leave that behind."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A workspace whose server is the stand-in."""
    monkeypatch.setattr(server, "server_command", lambda port: [sys.executable, "-c", STAND_IN, str(port)])
    yield tmp_path
    server.stop(tmp_path, force=True)


@pytest.fixture
def foreign_port() -> Iterator[int]:
    """Somebody else's server, which answers the health check as ours would."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"true")

        def log_message(self, *_: object) -> None:
            return

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield listener.server_address[1]
    listener.shutdown()
    thread.join(timeout=PATIENCE_S)
    listener.server_close()


def test_a_server_started_by_an_experiment_ends_with_it(folder: Path) -> None:
    with server.session(folder) as url:
        running = server.find(folder)
        assert running is not None and running.url == url
        members = family(running.pid)
        assert len(members) == 2
        assert os.environ["PREFECT_API_URL"] == url
        assert os.environ["PREFECT_HOME"] == str(folder / "prefect")
    assert server.find(folder) is None
    assert not any(alive(pid) for pid in members)


def test_the_last_of_two_users_stops_it(folder: Path) -> None:
    with server.session(folder) as first:
        with server.session(folder) as second:
            assert first == second
        assert server.find(folder) is not None
    assert server.find(folder) is None


def test_a_failed_experiment_stops_it_too(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError), server.session(folder):
        raise ZeroDivisionError
    assert server.find(folder) is None


@pytest.mark.parametrize("asked_by", ["command", "keep", "command later"])
def test_a_server_that_was_asked_for_stays(folder: Path, asked_by: str) -> None:
    if asked_by == "command":
        server.start(folder)
    with server.session(folder, keep=asked_by == "keep"):
        if asked_by == "command later":
            server.start(folder)
    running = server.find(folder)
    assert running is not None
    members = family(running.pid)
    assert server.stop(folder)
    assert not any(alive(pid) for pid in members)
    assert not server.stop(folder)


def test_stop_does_not_pull_it_from_under_an_experiment(folder: Path) -> None:
    with server.session(folder):
        with pytest.raises(UserError, match="in use"):
            server.stop(folder)
        assert server.find(folder) is not None
        assert server.stop(folder, force=True)


def test_it_comes_back_on_the_same_port(folder: Path) -> None:
    first = server.start(folder)
    server.stop(folder)
    second = server.start(folder)
    assert first.port == second.port and first.pid != second.pid


def test_a_killed_server_is_replaced(folder: Path) -> None:
    first = server.start(folder)
    children = family(first.pid)[1:]
    os.kill(first.pid, signal.SIGKILL)
    second = server.start(folder)
    assert second.pid != first.pid and server.find(folder) == second
    for pid in children:  # the stand-in's child knows nothing of its parent's death
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("keep", [False, True])
def test_a_server_that_dies_in_use_comes_back_on_its_port(folder: Path, monkeypatch: pytest.MonkeyPatch, keep: bool) -> None:
    monkeypatch.setattr(server, "WATCH_S", 0.05)
    with server.session(folder, keep=keep) as url:
        first = server.find(folder)
        assert first is not None
        children = family(first.pid)[1:]
        os.kill(first.pid, signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE_S
        while (second := server.find(folder)) is None or second.pid == first.pid:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert second.url == url and second.keep == keep
    assert (server.find(folder) is not None) == keep
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def test_a_server_that_somebody_stops_in_use_stays_stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WATCH_S", 0.02)
    with server.session(folder):
        server.stop(folder, force=True)
        time.sleep(0.3)
        assert server.find(folder) is None


def test_a_server_that_was_to_stay_stays_also_after_it_was_killed(folder: Path) -> None:
    first = server.start(folder)
    children = family(first.pid)[1:]
    os.kill(first.pid, signal.SIGKILL)
    with server.session(folder):
        pass
    assert server.find(folder) is not None
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def test_a_server_that_hangs_is_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEALTH_S", 0.3)
    monkeypatch.setattr(server, "STOP_S", 0.5)  # a stopped process does not react to SIGTERM
    first = server.start(folder)
    os.kill(first.pid, signal.SIGSTOP)
    second = server.start(folder)
    assert second.pid != first.pid and not alive(first.pid)


@pytest.fixture
def bystander() -> Iterator[psutil.Process]:
    """A process of somebody else's."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]) as process:
        yield psutil.Process(process.pid)
        process.kill()


def test_a_killed_server_s_port_is_waited_for(folder: Path) -> None:
    """It is taken a little longer than the process is there; flows that use the server know no other port."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        (folder / "prefect").mkdir()
        (folder / "prefect" / "server.json").write_text(json.dumps({"port": port}))
        given_back = threading.Timer(0.3, held.close)
        given_back.start()
        assert server.start(folder).port == port
        given_back.join(PATIENCE_S)


def test_a_foreign_server_on_the_port_is_not_taken_for_ours(
    folder: Path, foreign_port: int, bystander: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "PORT_S", 0.1)
    (folder / "prefect").mkdir()
    stale = server.Server(bystander.pid, bystander.create_time() - 5, foreign_port, True)
    (folder / "prefect" / "server.json").write_text(json.dumps(asdict(stale)))
    assert server.find(folder) is None
    assert not server.stop(folder)
    started = server.start(folder)
    assert started.port != foreign_port and server.is_ours(started)
    assert alive(bystander.pid), "the process that got our server's id must be left alone"


def test_a_process_that_listens_elsewhere_is_not_ours(folder: Path, foreign_port: int, bystander: psutil.Process) -> None:
    (folder / "prefect").mkdir()
    recorded = server.Server(bystander.pid, bystander.create_time(), foreign_port, True)
    (folder / "prefect" / "server.json").write_text(json.dumps(asdict(recorded)))
    assert server.find(folder) is None
    (folder / "prefect" / "server.json").unlink()


@pytest.mark.parametrize("text", ["", "not json", "[]", '{"pid": "x", "create_time": 0, "port": 1, "keep": true}', '{"pid": 1}'])
def test_a_damaged_state_file_counts_as_none(folder: Path, text: str) -> None:
    (folder / "prefect").mkdir()
    (folder / "prefect" / "server.json").write_text(text)
    assert server.find(folder) is None
    with server.session(folder):
        assert server.find(folder) is not None


def test_a_start_that_fails_once_does_not_cost_the_address(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Flows that use the server ask at the port they know, for a minute."""
    before = server.start(folder)
    failing = (
        "import pathlib, sys\nif not pathlib.Path('failed').exists():\n    pathlib.Path('failed').touch(); sys.exit('locked')\n"
    )
    monkeypatch.setattr(server, "server_command", lambda port: [sys.executable, "-c", failing + STAND_IN, str(port)])
    for process in map(psutil.Process, family(before.pid)):
        process.kill()
    after = server.start(folder)
    assert (folder / "prefect" / "failed").exists() and after.pid != before.pid
    assert after.port == before.port
    assert "ended while it was started: locked" in caplog.text
    assert (folder / "prefect" / "server.log").read_text() == "locked\n" and (folder / "prefect" / "server.log.1").exists()


def test_a_server_that_cannot_start_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "server_command", lambda _port: [sys.executable, "-c", "raise SystemExit('no room')"])
    with (
        pytest.raises(TrainingError, match=r"does not start: no room; see .*server\.log"),
        server.session(folder),
    ):
        pass


def test_the_users_own_server_wins(folder: Path, foreign_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = f"http://127.0.0.1:{foreign_port}/api"
    monkeypatch.setenv("PREFECT_API_URL", mine)
    with server.session(folder) as url:
        assert url == mine == os.environ["PREFECT_API_URL"]
        assert os.environ.get("PREFECT_HOME") != str(folder / "prefect")
    assert not (folder / "prefect").exists()


def test_the_users_own_server_must_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")  # the discard port
    with pytest.raises(UserError, match="PREFECT_API_URL: no server answers"), server.session(folder):
        pass


def test_an_exported_address_of_the_workspaces_server_uses_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`export PREFECT_API_URL=$(dflash server url)` in a second terminal: the server stays while it is used there."""
    first = server.session(folder)
    exported = first.__enter__()
    monkeypatch.delenv(server.EMBEDDED)  # as another terminal's environment has it
    monkeypatch.setenv("PREFECT_API_URL", exported + "/")
    with server.session(folder) as url:
        assert url == exported
        monkeypatch.delenv(server.EMBEDDED)
        first.__exit__(None, None, None)
        assert server.find(folder) is not None  # in use
    assert server.find(folder) is None

    monkeypatch.setenv("PREFECT_API_URL", exported)
    assert server.external_url(folder) is None
    with server.session(folder) as url:  # the terminal's address is good again
        assert url == exported
        assert server.find(folder) is not None


def test_the_flow_run_of_a_worker_is_a_user_of_its_server(folder: Path) -> None:
    running = server.start(folder)
    code = "import pathlib, sys; from flows import server; server.hold(pathlib.Path(sys.argv[1])); print(flush=True); input()"
    environment = {**os.environ, "PREFECT_API_URL": running.url}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as run:
        assert run.stdin is not None and run.stdout is not None and run.stdout.readline() == b"\n"
        with pytest.raises(UserError, match="in use by a running experiment"):
            server.stop(folder)
        run.stdin.write(b"\n")
        run.stdin.close()
        assert run.wait(PATIENCE_S) == 0
    assert server.stop(folder) and server.find(folder) is None


def test_the_status_of_the_users_own_server_is_asked(
    folder: Path, foreign_port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DFLASH_HOME", str(folder))
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{foreign_port}/api")
    assert server.main(["status"]) == 0
    assert f"your own server (PREFECT_API_URL) is used: http://127.0.0.1:{foreign_port}/api" in capsys.readouterr().out
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    assert server.main(["status"]) == UserError.exit_code
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: PREFECT_API_URL: no server answers at http://127.0.0.1:9/api")


def test_somebody_elses_server_on_our_last_port_is_the_users_own(
    folder: Path, foreign_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = f"http://127.0.0.1:{foreign_port}/api"
    (folder / "prefect").mkdir()
    (folder / "prefect" / "server.json").write_text(json.dumps({"port": foreign_port}))
    monkeypatch.setenv("PREFECT_API_URL", mine)
    with server.session(folder) as url:
        assert url == mine
    assert server.find(folder) is None


def test_the_address_of_no_server_is_no_text_to_export(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prefect's commands answer with a traceback where PREFECT_API_URL is a sentence."""
    monkeypatch.setenv("DFLASH_HOME", str(folder))
    assert server.main(["url"]) == 1
    assert capsys.readouterr() == ("", "no server runs\n")
    running = server.start(folder)
    assert server.main(["url"]) == 0
    assert capsys.readouterr().out == running.url + "\n"


PASSWORD = "pa55word-of-mine"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (f"http://user:{PASSWORD}@127.0.0.1:9/api", "set PREFECT_API_AUTH_STRING=user:password"),
        (f"http://user:{PASSWORD}/x@127.0.0.1:9/api", "set PREFECT_API_AUTH_STRING=user:password"),
        (f"http://{PASSWORD}@127.0.0.1:9/api", "set PREFECT_API_AUTH_STRING=user:password"),
        (f"http://user:{PASSWORD}", "not an address such as http://host:4200/api"),
        ("127.0.0.1:4200/api", "not an address such as http://host:4200/api"),
    ],
)
def test_an_address_with_a_password_is_refused_and_never_shown(
    folder: Path, url: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prefect's client would show it in its warnings, and lose its events."""
    monkeypatch.setenv("PREFECT_API_URL", url)
    monkeypatch.setenv("DFLASH_HOME", str(folder))
    with pytest.raises(UserError) as caught, server.session(folder):
        pass
    for action in ("start", "status", "url"):
        assert server.main([action]) == UserError.exit_code
    assert server.main(["stop"]) == 0  # the workspace's own
    out, err = capsys.readouterr()
    assert err.splitlines() == [f"error: {caught.value}"] * 3 and said in err
    assert PASSWORD not in out + err


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_the_server_keeps_is_for_its_owner_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its database holds parameters, logs and Secret blocks. Nobody else's folders are touched, and no umask but its own."""
    writing = "open('prefect.db', 'w').close()\n" + STAND_IN
    monkeypatch.setattr(server, "server_command", lambda port: [sys.executable, "-c", writing, str(port)])
    (folder / "prefect").mkdir()
    for path in (folder, folder / "prefect"):
        path.chmod(0o755)
    before = os.umask(0o022)
    try:
        with server.session(folder):
            assert mode(folder / "prefect") == 0o700
            assert mode(folder / "prefect" / "prefect.db") == 0o600
            (folder / "mine").touch()
    finally:
        os.umask(before)
    assert (mode(folder), mode(folder / "mine")) == (0o755, 0o644)


def test_settings_of_the_user_do_not_reach_the_embedded_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", "postgresql://somewhere/else")
    environment = psutil.Process(server.start(folder).pid).environ()
    assert "PREFECT_SERVER_DATABASE_CONNECTION_URL" not in environment
    assert environment["PREFECT_HOME"] == str(folder / "prefect")


def test_two_starters_end_with_one_server(folder: Path) -> None:
    code = f"""
import pathlib, sys
from flows import server
server.server_command = lambda port: [sys.executable, "-c", {STAND_IN!r}, str(port)]
print(server.start(pathlib.Path(sys.argv[1])).pid)
"""
    starters = [subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = {starter.communicate(timeout=PATIENCE_S)[0] for starter in starters}
    running = server.find(folder)
    assert running is not None and answers == {f"{running.pid}\n"}
    assert {process.pid for process in psutil.process_iter() if _home(process) == str(folder / "prefect")} == set(
        family(running.pid)
    )
    server.stop(folder)
    assert not [process for process in psutil.process_iter() if _home(process) == str(folder / "prefect")]


def _home(process: psutil.Process) -> str:
    try:
        return process.environ().get("PREFECT_HOME", "")
    except psutil.Error:
        return ""
