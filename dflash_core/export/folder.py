"""The folder of an export: it appears whole or not at all, and never takes the place of what is no export."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_core.data.replace_folder import folder_lock, replaced_folder
from dflash_core.errors import DataError
from dflash_core.model.weight_files import WEIGHTS_FILE
from dflash_core.model.weights import CONFIG_FILE
from dflash_core.provenance import read_json

CARD_FILE = "README.md"
# All that an export holds, in any format; a folder with anything else in it is somebody's.
EXPORTED_FILES = frozenset({CONFIG_FILE, WEIGHTS_FILE, CARD_FILE})


@contextmanager
def export_folder(folder: Path) -> Iterator[Path]:
    """Yield a hidden sibling that replaces `folder` as a whole when the block ends; if the block raises, it is removed.

    A kill leaves the hidden folder, which the next export sweeps up. An engine that has the old files open keeps them. Some
    engines read more than our files (vLLM 0.32 takes a `mask_embedding.pt`), so nothing of an earlier folder may stay.

    Raises:
        DataError: the folder holds what no export writes, is a file, cannot be written, or another process is at it.
    """
    try:
        folder = folder.resolve()  # a link to a folder stays one
        _refuse_what_is_not_ours(folder)
        with folder_lock(folder), replaced_folder(folder) as new:
            try:
                _empty(new)
                yield new
            except BaseException:
                shutil.rmtree(new, ignore_errors=True)
                raise
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error.strerror or error})") from error


def _refuse_what_is_not_ours(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder}: is a file; an export is a folder")
    if folder.is_dir():
        foreign = sorted(path.name for path in folder.iterdir() if path.name not in EXPORTED_FILES or path.is_dir())
        if foreign:
            raise DataError(
                f"{folder}: holds {foreign[0]}, which no export writes and which would be lost; name another folder with --out"
            )
        if (folder / CONFIG_FILE).exists() and not _is_a_drafts(folder / CONFIG_FILE):
            raise DataError(f"{folder}: holds another model, which would be lost; name another folder with --out")


def _is_a_drafts(config: Path) -> bool:
    """Whether the file is the config of a draft, in any format; of a damaged one nobody knows."""
    try:
        content = read_json(config)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("architectures") == ["DFlashDraftModel"]


def _empty(folder: Path) -> None:
    """What an export that was killed has left."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
