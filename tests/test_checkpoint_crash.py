"""A checkpoint is written or it is not: killed, or refused by the disk, at every single file operation.

The children are forked from this process, which has torch loaded, and count what they do to files by an audit hook, so a new
way of writing is covered without a word here. A kill is a real SIGKILL.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_core.errors import CheckpointError
from dflash_core.provenance import digest_file
from dflash_core.training.checkpoint import CheckpointStore, check_checkpoint, newest_checkpoint
from dflash_core.training.hashed_file import HashedFile
from dflash_core.training.retention import Retention, by_step
from tests.test_checkpoint_files import flip_in, names, snapshot_of, write

Fate = Callable[[int, str, str], None]
AUDITED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
EVERY_WRITE = 60  # the optimizer alone is written in hundreds of pieces; some are places to die
OK, UNEXPECTED, WENT_ON = 0, 70, 71
TIMEOUT_S = 20.0


def watch_files(root: Path, fate: Fate) -> None:
    """Call `fate(number, operation, path)` before each operation on files below `root`; for good, so in a child only."""
    counts = {"all": 0, "write": 0}

    def met(what: str, path: str) -> None:
        counts["all"] += 1
        fate(counts["all"] - 1, what, path)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in AUDITED or isinstance(arguments[0], int):
            return
        path = os.fspath(arguments[0])
        relative = isinstance(path, str) and not path.startswith("/")  # inside rmtree, which works by descriptors
        if relative or str(path).startswith(str(root)):
            met(event, str(path))

    real_write = HashedFile._file_write

    def sync(descriptor: int) -> None:
        met("fsync", str(Path(f"/proc/self/fd/{descriptor}").readlink()))  # no process that dies loses what is not synced

    def write_piece(file: HashedFile, piece: memoryview) -> int:
        counts["write"] += 1
        if counts["write"] % EVERY_WRITE == 0 and len(piece) > 1:
            written = real_write(file, piece[: len(piece) // 2])
            met("write", file.name)
            return written
        return real_write(file, piece)

    os.fsync = sync  # type: ignore[assignment]
    HashedFile._file_write = write_piece  # type: ignore[method-assign]
    sys.addaudithook(hook)


def forked(body: Callable[[], int]) -> int:
    """Run `body` in a forked child; its result is the exit status, as `os.waitstatus_to_exitcode` gives it."""
    child = os.fork()
    if child == 0:
        status = UNEXPECTED
        try:
            status = body()
        finally:
            os._exit(status)
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child did not end")


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here looks at what a power cut would leave, and hundreds of syncs take their time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two good checkpoints, a damaged later one, and what an earlier crash has left."""
    root = tmp_path_factory.mktemp("crash") / "checkpoints"
    write(root, 4, 8, 12)
    flip_in("model.safetensors")(root / "step-000012")
    shutil.copytree(root / "step-000004", root / ".tmp-step-000012")
    shutil.copytree(root / "step-000004", root / ".old-step-000012")
    return root


SNAPSHOT = snapshot_of(12, 1.0)


def write_it(root: Path) -> int:
    CheckpointStore(root, Retention(1)).write(SNAPSHOT)
    return OK


def record(before: Path, root: Path) -> list[tuple[str, str]]:
    """All operations of one write, in order."""
    shutil.copytree(before, root)
    log = root.with_suffix(".log").open("w", buffering=1)

    def note(number: int, what: str, path: str) -> None:
        log.write(f"{what}\t{path}\n")

    def body() -> int:
        watch_files(root, note)
        return write_it(root)

    assert forked(body) == OK
    log.close()
    return [tuple(line.split("\t")) for line in root.with_suffix(".log").read_text().splitlines()]  # type: ignore[misc]


def copies(before: Path, parent: Path, count: int) -> Iterator[tuple[int, Path]]:
    for number in range(count):
        root = parent / str(number)
        shutil.copytree(before, root)
        yield number, root
        shutil.rmtree(root)


def assert_whole(root: Path, number: int, operation: tuple[str, str]) -> int:
    """Nothing half has a checkpoint's name, and the newest good one is the one before or the new one; returns its step."""
    newest = newest_checkpoint(root)
    assert newest is not None, (number, operation)
    step = int(newest[1]["next_step"])
    assert step in (8, 12), (number, operation)
    for folder in by_step(root):
        if folder.name == "step-000012" and step == 8:  # the damaged one, as it was
            assert len(list(folder.iterdir())) == 4
            with pytest.raises(CheckpointError):
                check_checkpoint(folder)
        else:
            check_checkpoint(folder)
    return step


def assert_goes_on(root: Path) -> None:
    """The next write succeeds and leaves nothing of the crash."""
    CheckpointStore(root, Retention(1)).write(SNAPSHOT)
    assert names(root) == ["step-000012"]
    check_checkpoint(root / "step-000012")


def test_killed_at_any_operation(before: Path, tmp_path: Path) -> None:
    operations = record(before, tmp_path / "recorded")
    kinds = {what for what, _ in operations}
    assert kinds == {*AUDITED, "fsync", "write"} and len(operations) > 40
    found = []
    for number, root in copies(before, tmp_path, len(operations)):

        def body(number: int = number, root: Path = root) -> int:
            watch_files(root, lambda n, *_: os.kill(os.getpid(), signal.SIGKILL) if n == number else None)
            write_it(root)
            return WENT_ON

        assert forked(body) == -signal.SIGKILL, operations[number]
        found.append(assert_whole(root, number, operations[number]))
        assert_goes_on(root)
    assert found == sorted(found) and set(found) == {8, 12}  # at one moment the new one is there, and from then on


@pytest.mark.slow
def test_refused_by_the_disk_at_any_operation(before: Path, tmp_path: Path) -> None:
    """A failing operation is told, its temporary folder is gone, and what was there before is intact."""
    operations = record(before, tmp_path / "recorded")
    for number, root in copies(before, tmp_path, len(operations)):

        def body(number: int = number, root: Path = root) -> int:
            def refuse(met: int, *_: str) -> None:
                if met == number:
                    raise OSError(errno.ENOSPC, "No space left on device")

            watch_files(root, refuse)
            try:
                write_it(root)
            except OSError as error:
                return OK if error.errno == errno.ENOSPC else UNEXPECTED
            return WENT_ON

        # That the folder of all checkpoints is there already is as good as having made it.
        assert forked(body) == (WENT_ON if operations[number] == ("os.mkdir", str(tmp_path / "recorded")) else OK), number
        step = assert_whole(root, number, operations[number])
        created = operations.index(("os.mkdir", str(tmp_path / "recorded" / ".tmp-step-000012")))
        if number > created:
            assert not list(root.glob(".tmp-*")), operations[number]
        if step == 8:
            assert digest_file(root / "step-000004" / "state.json") == digest_file(before / "step-000004" / "state.json")
        assert_goes_on(root)


def test_everything_is_on_the_disk_before_the_name_and_the_name_before_anything_goes(before: Path, tmp_path: Path) -> None:
    """A power cut cannot be tried here; what survives one is what was synced before, so the order is what counts."""
    root = tmp_path / "recorded"
    operations = record(before, root)
    named = operations.index(("os.rename", str(root / ".tmp-step-000012")))
    files = {str(root / ".tmp-step-000012" / name) for name in ("config.json", "model.safetensors", "optimizer.pt", "state.json")}
    for path in (*files, str(root / ".tmp-step-000012")):
        last_write = max(
            (n for n, (what, p) in enumerate(operations[:named]) if p == path and what in ("open", "write")), default=0
        )
        synced = [n for n, operation in enumerate(operations) if operation == ("fsync", path)]
        assert path not in files or last_write < synced[-1]
        assert synced and synced[-1] < named
    folder_synced = operations.index(("fsync", str(root / ".tmp-step-000012")))
    assert all(operations.index(("fsync", path)) < folder_synced for path in files)
    after = operations[named + 1 :]
    assert after[0][0] in ("open", "fsync") and ("fsync", str(root)) in after[:2]
    hidden = [
        n
        for n, (what, path) in enumerate(operations)
        if what == "os.rename" and Path(path).name in ("step-000004", "step-000008")
    ]
    assert len(hidden) == 2 and min(hidden) > named + 1
    removed = [n for n, (what, _) in enumerate(operations) if what in ("os.remove", "os.rmdir") and n > named + 2]
    assert ("fsync", str(root)) in operations[max(hidden) : next(n for n in removed if n > max(hidden))]
