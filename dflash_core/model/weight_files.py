"""Which safetensors files hold the weights of a model's folder, a target's or a draft's: one, or those that an index lists."""

from __future__ import annotations

import json
from pathlib import Path

from dflash_core.errors import DataError

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """`model.safetensors`, or the files that an index lists.

    Raises:
        DataError: there is neither, or the index cannot be followed (`indexed_files`).
    """
    single = folder / WEIGHTS_FILE
    if single.exists() or not (folder / INDEX_FILE).exists():
        return [single]
    return sorted(set(indexed_files(folder).values()))


def indexed_files(folder: Path) -> dict[str, Path]:
    """File of each tensor by name, as the index says it.

    Raises:
        DataError: the index is damaged, or lists a file that is not there or lies in another folder: for a model that came from
            somewhere else no file may be read that nobody named.
    """
    index = folder / INDEX_FILE
    try:
        placed: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(placed.values()))
        inside = all(name == Path(name).name for name in names)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{index}: not a readable index of weights ({type(error).__name__}: {error})") from None
    if not names or not inside:
        raise DataError(f"{index}: weight_map does not list files of this folder")
    for name in names:
        if not (folder / name).is_file():
            raise DataError(f"{index}: lists {name}, which is not there")
    return {tensor: folder / name for tensor, name in placed.items()}
