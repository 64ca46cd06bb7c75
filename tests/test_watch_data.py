"""The folder watcher: each complete file once, whatever happens to it, to the server, or to the watcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.errors import UserError
from flows import watch_data
from flows.watch_data import Memory, Watcher
from tests.conftest import REPOSITORY

SETTLE_S = 10.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def looked(watcher: Watcher, *times: float) -> list[str]:
    """Names that are new at the last of these times; they are announced."""
    for now in times:
        new = watcher.look(now)
    watcher.announce(new)
    return list(new)


def test_a_file_is_announced_once_it_has_been_left_alone(folder: Path) -> None:
    watcher = Watcher(folder, Memory(), SETTLE_S)
    (folder / "a.jsonl").write_text("1")
    assert looked(watcher, 0) == [] and watcher.waiting()
    (folder / "a.jsonl").write_text("12")  # still being written
    assert looked(watcher, 10) == [] and looked(watcher, 19.9) == []
    assert looked(watcher, 20) == ["a.jsonl"] and not watcher.waiting()
    assert looked(watcher, 30, 40) == []


def test_only_contents_count(folder: Path) -> None:
    watcher = Watcher(folder, Memory(), SETTLE_S)
    (folder / "a.jsonl").write_text("1")
    (folder / "copy.jsonl").write_text("1")
    assert looked(watcher, 0, 10) == ["a.jsonl"]
    (folder / "a.jsonl").rename(folder / "renamed.jsonl")
    os.utime(folder / "copy.jsonl", (5, 5))
    assert looked(watcher, 20, 30) == []
    (folder / "renamed.jsonl").write_text("2")
    os.utime(folder / "renamed.jsonl", (5, 5))
    assert looked(watcher, 40, 50) == ["renamed.jsonl"]


def test_what_is_no_data_file_is_left_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.jsonl").write_text("outside")
    (folder / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (folder / "dir.jsonl").mkdir()
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "empty.jsonl").touch()
    for name in (".a.jsonl", "_a.jsonl", "a.jsonl.part", "a.jsonl~", "a.jsonl.tmp", "a.txt", "a.gz", "a.crdownload"):
        (folder / name).write_text("x")
    for name in ("a.jsonl", "b.JSON.gz", "c.parquet", "d.jsonl.zst", "e.arrow"):
        (folder / name).write_text(name)
    assert looked(Watcher(folder, Memory(), SETTLE_S), 0, 10) == ["a.jsonl", "b.JSON.gz", "c.parquet", "d.jsonl.zst", "e.arrow"]


def test_what_was_not_taken_is_new_again(folder: Path) -> None:
    watcher = Watcher(folder, Memory(), SETTLE_S)
    (folder / "a.jsonl").write_text("1")
    watcher.look(0)
    assert list(watcher.look(10)) == list(watcher.look(20)) == ["a.jsonl"]


def test_a_file_that_changes_while_it_is_read_waits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watcher, path = Watcher(folder, Memory(), SETTLE_S), folder / "a.jsonl"
    path.write_text("1")
    read = watch_data._digest

    def grow(*words: Any) -> str | None:
        with path.open("a") as file:
            file.write("more")
        return read(*words)

    watcher.look(0)
    with monkeypatch.context() as patch:
        patch.setattr(watch_data, "_digest", grow)
        assert looked(watcher, 10) == []
    assert looked(watcher, 20, 30) == ["a.jsonl"]


STEPS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["write", "remove", "restart", "look"]), st.integers(0, 3)), max_size=25
)


@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_each_content_is_announced_at_most_once_and_at_last_at_least_once(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str, int]]
) -> None:
    folder, memory_file = tmp_path_factory.mktemp("watch"), tmp_path_factory.mktemp("memory") / "m.json"
    watcher, announced, now = Watcher(folder, Memory(), SETTLE_S), [], 0.0

    def look(seconds: float) -> None:
        nonlocal now
        now += seconds
        new = watcher.look(now)
        announced.extend((folder / name).read_text() for name in new)
        watcher.announce(new)
        watcher.memory.save(memory_file)

    for name, step, value in steps:
        path = folder / f"{name}.jsonl"
        if step == "write":
            path.write_text(f"content {value}")
        elif step == "remove":
            path.unlink(missing_ok=True)
        elif step == "restart":
            watcher = Watcher(folder, Memory.load(memory_file), SETTLE_S)
        else:
            look(4.0)
    for _ in range(5):
        look(4.0)
    assert len(announced) == len(set(announced))
    assert {path.read_text() for path in folder.iterdir()} <= set(announced)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"announced": [], "stamps": {}}', '{"announced": {}, "stamps": {"a": 1}}'])
def test_a_damaged_memory_is_an_error_and_no_flood(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(UserError, match=r"m\.json: damaged"):
        Memory.load(tmp_path / "m.json")


def test_memory_and_folder_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_data, "MOST_REMEMBERED", 2)
    monkeypatch.setattr(watch_data, "MOST_FILES", 4)
    watcher = Watcher(folder, Memory(), SETTLE_S)
    for number in range(4):
        (folder / f"{number}.jsonl").write_text(str(number))
    looked(watcher, 0, 10)
    assert list(watcher.memory.announced.values()) == ["2.jsonl", "3.jsonl"]
    (folder / "4.jsonl").write_text("4")
    with pytest.raises(UserError, match="more than 4 data files"):
        watcher.look(20)


@pytest.fixture
def events() -> Iterator[tuple[str, list[Any]]]:
    """A server that takes events."""
    taken: list[Any] = []

    class Api(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            taken.append((self.path, self.headers.get("Authorization"), body))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{listener.server_address[1]}/api", taken
    listener.shutdown()
    thread.join(timeout=30)
    listener.server_close()


def test_the_event_names_what_arrived(events: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    url, taken = events
    monkeypatch.setenv("PREFECT_API_KEY", "k")
    watch_data.send(watch_data.event(Path("/data/in"), [f"{n}.jsonl" for n in range(300)], "my.yaml"), url)
    [(path, key, [event])] = taken
    assert (path, key, event["event"]) == ("/api/events", "Bearer k", "dflash.dataset.arrived")
    assert event["payload"]["num_files"] == 300 and len(event["payload"]["files"]) == watch_data.MOST_NAMED
    assert (event["payload"]["path"], event["payload"]["experiment"]) == ("/data/in", "my.yaml")


def start(folder: Path, url: str | None, *words: str) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    environment |= {"DFLASH_HOME": str(folder.parent / "workspace"), "PYTHONPATH": str(REPOSITORY)}
    environment |= {} if url is None else {"PREFECT_API_URL": url}
    return subprocess.Popen(
        [sys.executable, "-m", "flows.watch_data", str(folder), "--settle", "0.2", "--every", "0.1", *words],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, err = process.communicate(timeout=60)
    return process.returncode, err


def test_once_as_a_program(folder: Path, events: tuple[str, list[Any]]) -> None:
    url, taken = events
    (folder / "a.jsonl").write_text("1")
    code, err = end(start(folder, None, "--once"))
    assert code == 2 and err.endswith("error: no server runs that could take the event; start one: dflash serve\n")
    for expected in ("announced 1 new file: a.jsonl", "nothing new"):
        code, err = end(start(folder, url, "--once"))
        assert code == 0 and err.rstrip().endswith(expected), err
    assert len(taken) == 1


def test_a_watcher_announces_what_comes_and_ends_with_a_signal(folder: Path, events: tuple[str, list[Any]]) -> None:
    url, taken = events
    process = start(folder, url)
    try:
        deadline = time.monotonic() + 60
        for number in (1, 2):
            (folder / ".tmp").write_text(str(number))
            (folder / ".tmp").rename(folder / f"{number}.jsonl")
            while len(taken) < number and time.monotonic() < deadline:
                time.sleep(0.05)
        second = end(start(folder, url, "--once"))
        assert second[0] == 2 and "is being watched already" in second[1]
    finally:
        process.send_signal(signal.SIGTERM)
        code, err = end(process)
    assert code == 0, err
    assert [body["payload"]["files"] for _, _, [body] in taken] == [["1.jsonl"], ["2.jsonl"]]
