"""A folder that is built aside and then takes its place as a whole.

The new folder grows as a hidden sibling `.NAME.building`. When it is complete and on disk, the old one is renamed to
`.NAME.old`, the new one to `NAME`, and the old one is deleted. A job that fails or is killed leaves `.NAME.building`
behind, in which the next one finds what is done; if the kill fell between the two renames, the next job puts the old
folder back. A lock file keeps two jobs from building the same folder at once; the kernel releases it with the process.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_core.errors import DataError
from dflash_core.provenance import sync_to_disk


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder and clean up after killed jobs; raises `DataError` if another job holds it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _sibling(folder, "lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"{folder}: another process is preparing it") from error
        _clean_up(folder)
        yield


@contextmanager
def shared_building(folder: Path) -> Iterator[Path]:
    """Yield the hidden folder in which `folder` is being built, to add files whose names follow from their content.

    Any number of processes may be inside at once, on any node that shares the folder, but none while `folder_lock` is held.

    Raises:
        DataError: another job holds that lock.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _sibling(folder, "lock").open("a+b") as file:  # a shared lock on NFS needs a file that can be read
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"{folder}: another process is preparing it") from error
        yield building_folder(folder)


def building_folder(folder: Path) -> Path:
    """The hidden folder in which `folder` is built, made if it is not there. To be used under one of the locks."""
    new = _sibling(folder, "building")
    new.mkdir(exist_ok=True)
    return new


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Yield the folder that replaces `folder` when the block ends, and stays hidden as it is if the block raises.

    It holds what an earlier job left there. To be used under `folder_lock`.
    """
    new, old = building_folder(folder), _sibling(folder, "old")
    try:
        yield new
        _flush_to_disk(new)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    except BaseException:
        _clean_up(folder)
        raise
    sync_to_disk(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sibling(folder: Path, ending: str) -> Path:
    return folder.with_name(f".{folder.name}.{ending}")


def _clean_up(folder: Path) -> None:
    old = _sibling(folder, "old")
    if old.exists() and not folder.exists():
        old.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _flush_to_disk(folder: Path) -> None:
    """A rename may reach the disk before the data it names; after this it cannot."""
    for path in [*folder.rglob("*"), folder]:
        sync_to_disk(path)
