"""Exported drafters as files: their identity, and the copies that a registry keeps.

A copy is made aside, compared with its digests, flushed, made read-only, and takes its name by a rename. It is never written
again: a drafter's folder is there as a whole or not at all, and its id stands for its content.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_core.errors import DataError
from dflash_core.provenance import digest_file, digest_json, sync_to_disk

ID_DIGITS = 12
CONFIG_FILE, WEIGHTS_ENDING = "config.json", ".safetensors"
READ_ONLY = 0o444


@dataclass(frozen=True)
class Export:
    """An exported drafter. `drafter` is its id, made of config and weights; `files` are SHA-256 digests by name."""

    folder: Path
    drafter: str
    files: dict[str, str]


def read_export(folder: Path) -> Export:
    """Digest an exported folder.

    Raises:
        DataError: it holds no drafter, or something that no export writes: a folder, a link, a hidden file.
    """
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror or error})") from None
    for path in paths:
        if path.is_symlink() or not path.is_file() or path.name.startswith("."):
            raise DataError(f"{path}: an exported drafter is a folder of plain files; this is none")
    try:
        files = {path.name: digest_file(path) for path in paths}
    except OSError as error:
        raise DataError(f"{error.filename or folder}: cannot be read ({error.strerror or error})") from None
    decisive = {name: digest for name, digest in files.items() if name == CONFIG_FILE or name.endswith(WEIGHTS_ENDING)}
    if CONFIG_FILE not in decisive or len(decisive) < 2:
        raise DataError(f"{folder}: holds no exported drafter ({CONFIG_FILE} and weights are needed)")
    return Export(folder, digest_json(decisive)[:ID_DIGITS], files)


def damage(folder: Path, files: Mapping[str, str]) -> str | None:
    """What is wrong with a kept drafter, in one line; None if each file is there and has its digest."""
    try:
        found = read_export(folder).files
    except DataError as error:
        return str(error)
    for name in sorted({*found, *files}):
        if found.get(name) != files.get(name):
            what = "is missing" if name not in found else "does not belong to it" if name not in files else "has changed"
            return f"{folder / name}: {what}; the drafter is damaged"
    return None


def keep_copy(export: Export, folder: Path) -> dict[str, str]:
    """Copy an export to `folder`; returns the digests of the copy's files.

    A copy of the same drafter that is there, of a registration that was killed or of an earlier one, stays as it is.

    Raises:
        DataError: the export has changed since it was read, or another content lies under that name.
        OSError: the copy cannot be written.
    """
    if folder.exists():
        found = read_export(folder)
        if found.drafter != export.drafter:
            raise DataError(f"{folder}: its files have changed; the drafter is damaged")
        return found.files
    building = folder.with_name(f".{folder.name}.building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    for name in export.files:
        shutil.copyfile(export.folder / name, building / name)
        sync_to_disk(building / name)
        (building / name).chmod(READ_ONLY)
    if damage(building, export.files) is not None:
        shutil.rmtree(building, ignore_errors=True)
        raise DataError(f"{export.folder}: its files changed after they were measured")
    sync_to_disk(building)
    building.rename(folder)
    sync_to_disk(folder.parent)
    return dict(export.files)


def remove_leftovers(drafters: Path) -> None:
    """Delete half-made copies of processes that were killed."""
    for path in drafters.glob(".*.building"):
        shutil.rmtree(path, ignore_errors=True)
