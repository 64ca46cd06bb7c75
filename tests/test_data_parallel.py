"""Tokenizing in several processes: the same result, and nothing left behind whoever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dflash_core.data import PrepareProgress, expand_files, files
from dflash_core.data import progress as progress_module
from dflash_core.data.pool import OrderedWork
from dflash_core.data.sources import RawChunk
from dflash_core.data.worker import EncodeSettings, PartJob
from dflash_core.errors import DataError
from dflash_core.processes import default_num_processes
from tests.test_data_prepare import content, parts, prepare, row, visible, write
from tests.test_data_tokenizer import byte_tokenizer

ROWS = [row("answer " * (1 + n % 9), id=f"s{n}") for n in range(60)]
SETTINGS = {"shard_sequences": 3, "num_workers": 2}


def is_worker(process: psutil.Process) -> bool:
    """Whether a process is a child of the standard library's fork server."""
    try:
        parent = process.parent()
        return parent is not None and "multiprocessing.forkserver" in " ".join(parent.cmdline())
    except psutil.NoSuchProcess:
        return False


def workers() -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if is_worker(process)]


def wait_until(met: Callable[[], Any], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def all_progress(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(progress_module, "EVERY_S", 0.0)
    yield
    wait_until(lambda: not workers(), 5.0)


@pytest.mark.usefixtures("all_progress")
def test_several_processes_make_the_same_parts_as_one(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", [*ROWS, "{oops", row("again", id="s0")])
    here, seen = [], []

    def look(progress: PrepareProgress) -> None:
        seen.append(progress)
        here.append(len(workers()))
        if len(seen) == 12:  # Ctrl-C reaches the whole group, but is the parent's business
            for worker in workers():
                worker.send_signal(signal.SIGINT)

    several = prepare(tmp_path, [file], name="a", progress=look, **SETTINGS)
    assert max(here) == 2 and workers() == []
    one = prepare(tmp_path, [file], name="b", shard_sequences=3)
    assert {**several, "name": ""} == {**one, "name": "", "config_sha256": several["config_sha256"]}
    for name in (path.name for path in (tmp_path / "b" / "tokens").iterdir()):
        assert (tmp_path / "a" / "tokens" / name).read_bytes() == (tmp_path / "b" / "tokens" / name).read_bytes()
    rows = [progress.num_rows for progress in seen]
    assert rows == sorted(rows) and rows[-1] == 62 and seen[-1].num_rejected == 1
    done = [progress.bytes_done for progress in seen]
    assert done == sorted(done) and done[-1] == Path(file).stat().st_size


@pytest.mark.usefixtures("all_progress")
def test_a_worker_that_is_killed_is_one_clear_line_and_its_work_is_done_again(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", ROWS)
    killed: list[int] = []

    def kill(progress: PrepareProgress) -> None:
        if not killed:
            killed.append(workers()[0].pid)
            os.kill(killed[0], signal.SIGKILL)

    with pytest.raises(DataError, match=r"^a tokenizing process was killed .* start again to continue$"):
        prepare(tmp_path, [file], progress=kill, **SETTINGS)
    assert killed and visible(tmp_path) == {"x.jsonl", ".ds.building"}
    wait_until(lambda: not workers(), 5.0)
    left = parts(tmp_path / ".ds.building")
    prepare(tmp_path, [file], **SETTINGS)
    assert left and left.items() <= parts(tmp_path / "ds").items()
    prepare(tmp_path, [file], name="whole", shard_sequences=3)
    assert content(tmp_path / "ds") == content(tmp_path / "whole")


@pytest.mark.usefixtures("all_progress")
def test_an_end_in_the_middle_ends_all_processes_and_keeps_what_is_done(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", ROWS)

    def fail(progress: PrepareProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path, [file], progress=fail, **SETTINGS)
    assert workers() == [], "shutting down waits for the processes"
    assert 1 <= len(parts(tmp_path / ".ds.building")) < 20


@pytest.mark.usefixtures("all_progress")
def test_the_first_bad_row_is_the_same_with_any_number_of_processes(tmp_path: Path) -> None:
    rows: list[Any] = [*ROWS]
    for number in (13, 14, 50):
        rows[number] = "{oops"
    file = write(tmp_path / "x.jsonl", rows)
    with pytest.raises(DataError, match="row 14: not JSON"):
        prepare(tmp_path, [file], on_bad_row="error", **SETTINGS)


@pytest.mark.slow
def test_a_script_that_cannot_be_imported_gets_a_hint(tmp_path: Path) -> None:
    write(tmp_path / "x.jsonl", ROWS)
    byte_tokenizer().save_pretrained(tmp_path / "target")
    script = tmp_path / "script.py"
    script.write_text(CHILD)
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "DataError: a tokenizing process ended before it had done anything (a script must prepare under" in done.stderr


def ends_with_its_parent(
    parent: subprocess.Popen[bytes], how: signal.Signals, find_family: Callable[[], list[psutil.Process]]
) -> None:
    """End a parent, which gives 77 for Ctrl-C, once it has two workers; no process of its family may be left behind."""
    try:
        family = find_family()
        assert sum(is_worker(process) for process in family) == 2
        if how == signal.SIGINT:
            os.killpg(parent.pid, how)  # as the terminal does it
        else:
            parent.send_signal(how)
        _, errors = parent.communicate(timeout=20)
    finally:
        if parent.poll() is None:
            parent.kill()
            parent.communicate()
    assert parent.returncode == (77 if how == signal.SIGINT else -how) and b"Traceback" not in errors
    wait_until(lambda: not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family), 10.0)


CHILD = """
import pathlib, sys
from dflash_core.config import DataConfig
from dflash_core.data import load_tokenizer, prepare_dataset
root = pathlib.Path(sys.argv[1])
config = DataConfig(name="ds", files=(str(root / "x.jsonl"),), shard_sequences=3, num_workers=2)
try:
    prepare_dataset(config, load_tokenizer(root / "target"), target="models/t", folder=root / "ds")
except KeyboardInterrupt:
    sys.exit(77)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_a_parent_that_is_killed(tmp_path: Path, how: signal.Signals) -> None:
    rows = [row("answer " * (1 + n % 9) * 20, id=f"s{n}") for n in range(300)]
    file = write(tmp_path / "x.jsonl", rows)
    byte_tokenizer().save_pretrained(tmp_path / "target")
    parent = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stderr=subprocess.PIPE, start_new_session=True)

    def find_family() -> list[psutil.Process]:
        tokens = tmp_path / ".ds.building"
        wait_until(lambda: tokens.exists() and len(parts(tokens)) >= 3)
        return psutil.Process(parent.pid).children(recursive=True)

    ends_with_its_parent(parent, how, find_family)
    left = parts(tmp_path / ".ds.building")
    assert 3 <= len(left) < 100
    assert prepare(tmp_path, [file], shard_sequences=3)["num_sequences"] == 300
    assert left.items() < parts(tmp_path / "ds").items()


class Recorder:
    """Stands for `Processes`."""

    started = 0

    def __init__(self, *arguments: Any) -> None:
        Recorder.started += 1

    def submit(self, work: Any, job: PartJob, chunk: RawChunk) -> Any:
        from concurrent.futures import Future

        future: Future[str] = Future()
        future.set_result(job.name)
        return future

    def close(self, at_once: bool) -> None:
        pass


@pytest.mark.parametrize(("num_workers", "num_chunks", "started"), [(1, 9, 0), (4, 3, 0), (4, 4, 1), (3, 20, 1)])
def test_results_come_in_order_and_little_work_starts_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int, num_chunks: int, started: int
) -> None:
    monkeypatch.setattr("dflash_core.data.pool.Processes", Recorder)
    monkeypatch.setattr("dflash_core.data.pool.write_part", lambda encoder, settings, job, chunk: job.name)
    monkeypatch.setattr(Recorder, "started", 0)
    settings = EncodeSettings(100, "truncate", {}, {}, "reject")
    results: list[Any] = []
    most = 0
    with OrderedWork[int](num_workers, byte_tokenizer(), settings) as work:
        for number in range(num_chunks):
            while work.full():
                results.append(work.take())
            work.submit(number, PartJob(tmp_path, f"p{number}", "x", "x", "x"), RawChunk(1, 1, "jsonl", b"", 0))
            work.add(-number)
            most = max(most, len(work))
        while len(work):
            results.append(work.take())
    assert results == [item for number in range(num_chunks) for item in ((number, f"p{number}"), (-number, None))]
    assert Recorder.started == started and most <= 4 * num_workers + 1


def test_the_default_is_one_process_for_each_core_that_may_be_used() -> None:
    assert default_num_processes() == len(os.sched_getaffinity(0))


def test_small_files_get_small_chunks_and_other_chunks_are_other_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [files.chunk_bytes(size) for size in (0, 2**20, 2**27, 2**28, 2**40)]
    assert sizes == [2**20, 2**20, 2**21, 2**22, 2**23] and files.chunk_bytes(None) == 2**23
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(b"{}\n" * 2**20)

    def key() -> str:
        return files.take_files(expand_files([str(corpus)]), {})[0][0].key

    before = key()
    assert key() == before
    monkeypatch.setattr(files, "FEWEST_CHUNK_BYTES", 2**19)
    assert key() != before, "a part of another size must not be taken for one of this"
