"""The launcher: exit codes, relayed lines, one training per node, and above all: nobody survives.

The trees are real processes: a command that saves its state on SIGTERM, with a helper in a session of its own that
ignores SIGTERM, as the ranks of `torchrun` are out of reach of a process group.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dflash_core.errors import DFlashError, StoppedBySignal, TrainingError, UserError
from flows.launch import Relay, last_error_line, launch, node_lock, raise_for_exit

PATIENCE_S = 40.0  # the machine may be busy; what is measured is far below

# Arguments: folder, whether the command itself ignores SIGTERM, whether it ends by itself after starting its helper.
TREE = """
import os, pathlib, signal, subprocess, sys, time
folder, stubborn, ends = pathlib.Path(sys.argv[1]), sys.argv[2] == "1", sys.argv[3] == "1"
def save(*_):
    (folder / "saved").write_text("yes"); print("error: stopped and saved"); sys.exit(4)
signal.signal(signal.SIGTERM, signal.SIG_IGN if stubborn else save)
helper = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(300)"
process = subprocess.Popen([sys.executable, "-c", helper], start_new_session=True, stdout=subprocess.PIPE)
process.stdout.readline()
(folder / "pids.tmp").write_text(f"{os.getpid()} {process.pid} {os.getppid()}")
os.replace(folder / "pids.tmp", folder / "pids")
print("ready", flush=True)
if not ends:
    time.sleep(300)
"""

# A process that launches the tree. `how`: what SIGTERM does to it; `fail`: its relay raises on the first line.
LAUNCHER = """
import json, os, pathlib, signal, sys
from flows.launch import launch
folder, options = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
def quit(*_): raise SystemExit(77)
if options.get("term") == "raises":
    signal.signal(signal.SIGTERM, quit)
def on_line(line):
    if options.get("fail"): raise ValueError("relay")
command = [sys.executable, "-c", pathlib.Path(folder / "tree.py").read_text(), str(folder), options.get("stubborn", "0"), "0"]
sys.exit(launch(command, log_file=folder / "log", on_line=on_line, grace_s=options.get("grace_s", 60.0)))
"""


def wait_for(condition: Callable[[], Any], timeout_s: float = PATIENCE_S) -> float:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, "waited in vain"
        time.sleep(0.02)
    return time.monotonic() - started


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Tree:
    """A launcher process with its tree; `pids` are command, helper and supervisor."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        (folder / "tree.py").write_text(TREE)
        command = [sys.executable, "-c", LAUNCHER, str(folder), json.dumps(options)]
        self.launcher = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        wait_for((folder / "pids").exists)
        self.pids = [int(word) for word in (folder / "pids").read_text().split()]

    def gone(self) -> bool:
        return not any(runs(pid) for pid in self.pids)

    def close(self) -> None:
        self.launcher.kill()
        self.launcher.wait(timeout=PATIENCE_S)
        for pid in filter(runs, self.pids):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Callable[..., Tree]]:
    trees: list[Tree] = []

    def start(**options: Any) -> Tree:
        folder = tmp_path / str(len(trees))
        folder.mkdir()
        trees.append(Tree(folder, **options))
        return trees[-1]

    yield start
    for one in trees:
        one.close()


def run(code: str, folder: Path, **options: Any) -> int:
    return launch([sys.executable, "-c", code], log_file=folder / "logs" / "log", **options)


def test_nobody_survives_whatever_ends_the_launcher(tree: Callable[..., Tree]) -> None:
    ways: dict[str, tuple[int | None, dict[str, Any]]] = {
        "ctrl-c": (signal.SIGINT, {}),
        "SIGTERM that raises, as Prefect's does": (signal.SIGTERM, {"term": "raises"}),
        "SIGTERM that kills": (signal.SIGTERM, {}),
        "SIGKILL": (signal.SIGKILL, {}),
        "an exception in the relay": (None, {"fail": True}),
    }
    trees = {way: tree(**options) for way, (_, options) in ways.items()}
    for way, (number, _) in ways.items():
        if number is not None:
            trees[way].launcher.send_signal(number)
    for way, one in trees.items():
        assert wait_for(one.gone) < 30, way
        assert (one.folder / "saved").exists(), f"{way}: the command was not given the time to save"
        one.launcher.wait(timeout=PATIENCE_S)
    assert trees["SIGTERM that raises, as Prefect's does"].launcher.returncode == 77


def test_nobody_survives_the_death_of_the_supervisor(tree: Callable[..., Tree]) -> None:
    one = tree(grace_s=1.0)
    time.sleep(1.5)  # the launcher records descendants once a second
    os.kill(one.pids[2], signal.SIGKILL)
    wait_for(one.gone)
    assert (one.folder / "saved").exists()
    assert one.launcher.wait(timeout=PATIENCE_S) == 128 + signal.SIGKILL


def test_a_command_that_ignores_the_request_is_killed_after_the_grace(tree: Callable[..., Tree]) -> None:
    one = tree(stubborn="1", grace_s=1.0)
    one.launcher.send_signal(signal.SIGINT)
    assert 1.0 <= wait_for(one.gone) < 30


def test_a_second_signal_cuts_the_grace_short(tree: Callable[..., Tree]) -> None:
    one = tree(stubborn="1", grace_s=300.0)
    one.launcher.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert not one.gone()
    one.launcher.send_signal(signal.SIGINT)
    assert wait_for(one.gone) < 30


@pytest.mark.slow
def test_a_helper_that_outlives_its_command_is_ended(tmp_path: Path) -> None:
    code = launch([sys.executable, "-c", TREE, str(tmp_path), "0", "1"], log_file=tmp_path / "log")
    assert code == 0
    assert not any(runs(int(pid)) for pid in (tmp_path / "pids").read_text().split())


@pytest.mark.parametrize("code", [0, 2, 3, 4, 77])
def test_the_exit_code_is_the_commands(tmp_path: Path, code: int) -> None:
    assert run(f"raise SystemExit({code})", tmp_path) == code


def test_death_by_a_signal_gives_128_and_its_number(tmp_path: Path) -> None:
    assert run("import os; os.kill(os.getpid(), 9)", tmp_path) == 128 + 9


def test_a_command_that_cannot_start_is_named(tmp_path: Path) -> None:
    log_file = tmp_path / "log"
    code = launch(["/nowhere/program"], log_file=log_file)
    with pytest.raises(TrainingError, match="cannot start /nowhere/program"):
        raise_for_exit(code, log_file)


def test_launch_works_in_another_thread(tmp_path: Path) -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(run("raise SystemExit(5)", tmp_path)))
    thread.start()
    thread.join(timeout=PATIENCE_S)
    assert codes == [5]


def test_lines_arrive_whole_in_order_and_in_the_log(tmp_path: Path) -> None:
    lines: list[str] = []
    code = """
import sys, time
sys.stdout.write("one\\ntw"); sys.stdout.flush(); time.sleep(0.4)
sys.stdout.write("o\\n\\n10%\\r20%\\r\\n"); sys.stdout.flush()
sys.stderr.write("three"); sys.exit(3)
"""
    assert run(code, tmp_path, on_line=lines.append) == 3
    assert lines == ["one", "two", "20%", "three"]
    assert "one\ntwo\n" in (tmp_path / "logs" / "log").read_text()


def test_environment_and_folder_of_the_command(tmp_path: Path) -> None:
    lines: list[str] = []
    environment = {**os.environ, "DFLASH_TEST_WORD": "here"}
    run(
        "import os; print(os.environ['DFLASH_TEST_WORD'], os.getcwd())",
        tmp_path,
        env=environment,
        cwd=tmp_path,
        on_line=lines.append,
    )
    assert lines == [f"here {tmp_path}"]


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        (2, UserError, "target: no mask token"),
        (4, StoppedBySignal, "target: no mask token"),
        (3, TrainingError, "training ended with exit code 3: target: no mask token; see "),
        (1, TrainingError, "training ended with exit code 1: target: no mask token; see "),
        (
            137,
            TrainingError,
            "training was ended by SIGKILL (the system does this when memory runs out): target: no mask token; see ",
        ),
    ],
)
def test_exit_codes_become_errors_that_quote_the_child(tmp_path: Path, code: int, kind: type[DFlashError], text: str) -> None:
    log_file = tmp_path / "logs" / "log"
    run("print('error: of an earlier launch')", tmp_path)
    run("print('[rank1]: error: target: no mask token'); print('W1 torch.distributed: sending SIGTERM')", tmp_path)
    with pytest.raises(kind) as caught:
        raise_for_exit(code, log_file)
    assert type(caught.value) is kind
    assert str(caught.value).startswith(text)


def test_exit_code_0_is_no_error(tmp_path: Path) -> None:
    raise_for_exit(0, tmp_path / "not read")


def test_what_is_quoted_without_an_error_line(tmp_path: Path) -> None:
    log_file = tmp_path / "logs" / "log"
    run("print('a'); raise KeyError('x')", tmp_path)
    assert last_error_line(log_file) == "KeyError: 'x'"
    run("print('a'); print('b')", tmp_path)
    assert last_error_line(log_file) == "b"
    run("pass", tmp_path)
    assert last_error_line(log_file) is None


@pytest.mark.parametrize(("code", "how"), [("-9", "was ended by SIGKILL"), ("7", "ended with exit code 7")])
def test_of_a_rank_that_says_nothing_torchrun_s_word_is_quoted(tmp_path: Path, code: str, how: str) -> None:
    """As torchrun writes it; its own traceback, which follows, says nothing of what happened."""
    lines = [
        "error: cell 0: another cell ended; its own error says why",
        f"E1130 08:33:57.6 30980 torch/api.py:1002] failed (exitcode: {code}) local_rank: 1 (pid: 30996) of binary: /bin/python",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
    ]
    run(f"print({chr(10).join(lines)!r})", tmp_path)
    assert last_error_line(tmp_path / "logs" / "log") == f"the process of cell 1 {how}"


def test_orphans_that_have_ended_are_collected(tmp_path: Path) -> None:
    """A `serve` runs for weeks, and each flow run of it that is killed leaves its helpers to the supervisor."""
    code = """
import os, psutil, subprocess, sys, time
orphan = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', ''])"
subprocess.run([sys.executable, "-c", orphan])
deadline = time.monotonic() + 30
while len(psutil.Process(os.getppid()).children()) > 1 and time.monotonic() < deadline: time.sleep(0.05)
sys.exit(len(psutil.Process(os.getppid()).children()))
"""
    assert run(code, tmp_path) == 1


def test_the_relay_limits_its_rate_and_keeps_the_last_line(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("test.relay")
    caplog.set_level(logging.INFO, logger="test.relay")
    relay = Relay(logger, interval_s=1000.0, burst=3)
    for number in range(10):
        relay(str(number))
    relay.finish()
    relay.credit = 1
    relay("12:30:00 INFO with a time of its own")
    assert caplog.messages.pop() == "with a time of its own"
    assert caplog.messages[:5] == ["0", "1", "2", "(6 more in the log file)", "9"]


HOLDER = """
import logging, pathlib, sys, time
from flows.launch import launch, node_lock
logging.basicConfig(level=logging.INFO, format="%(message)s")
folder, name, code = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
with node_lock(folder, f"run {name}", poll_s=0.05) as lock:
    (folder / f"{name}.begin").write_text(str(time.time()))
    launch([sys.executable, "-c", code], log_file=folder / name, keep_open=(lock,), grace_s=10.0)
    (folder / f"{name}.end").write_text(str(time.time()))
"""


def holder(folder: Path, name: str, code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", HOLDER, str(folder), name, code], stderr=subprocess.PIPE, text=True)


def moment(path: Path) -> float:
    return float(path.read_text())


def test_two_trainings_on_one_node_queue(tmp_path: Path) -> None:
    first = holder(tmp_path, "a", "import time; time.sleep(1)")
    wait_for((tmp_path / "a.begin").exists)
    second = holder(tmp_path, "b", "pass")
    assert second.communicate(timeout=PATIENCE_S)[1] == f"waiting: run a (process {first.pid}) trains on this node\n"
    assert first.communicate(timeout=PATIENCE_S)[1] == ""
    assert moment(tmp_path / "b.begin") >= moment(tmp_path / "a.end")


def test_the_lock_outlives_a_killed_flow_until_its_training_has_saved(tmp_path: Path) -> None:
    saving = f"""
import pathlib, signal, sys, time
def save(*_):
    time.sleep(1); pathlib.Path({str(tmp_path / "saved")!r}).write_text(str(time.time())); sys.exit(4)
signal.signal(signal.SIGTERM, save)
pathlib.Path({str(tmp_path / "up")!r}).touch()
time.sleep(300)
"""
    first = holder(tmp_path, "a", saving)
    wait_for((tmp_path / "up").exists)
    first.kill()
    first.communicate(timeout=PATIENCE_S)
    second = holder(tmp_path, "b", "pass")
    second.communicate(timeout=PATIENCE_S)
    assert moment(tmp_path / "b.begin") >= moment(tmp_path / "saved")


def test_waiting_for_the_node_can_be_interrupted(tmp_path: Path) -> None:
    with node_lock(tmp_path, "this test"):
        waiting = holder(tmp_path, "b", "pass")
        assert waiting.stderr is not None
        waiting.stderr.readline()
        waiting.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in waiting.communicate(timeout=PATIENCE_S)[1]
    assert not (tmp_path / "b.begin").exists()
