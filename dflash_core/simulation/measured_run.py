"""Whether the costs that a run has measured are those of the experiment: target, draft, number formats and kind of device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_core.errors import ConfigError, DataError


def device_kind(run_dir: Path) -> str:
    """`CPU` or `GPU`, from the devices in the run's `provenance.json`.

    Raises:
        DataError: the file cannot be read, or names no devices.
    """
    path = run_dir / "provenance.json"
    try:
        devices = json.loads(path.read_text(encoding="utf-8"))["devices"]
        kinds = {"CPU" if name.partition(":")[0] == "cpu" else "GPU" for name in devices}
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        kinds = set()
    if len(kinds) != 1:
        raise DataError(f"{path}: does not say on which devices the run was")
    return kinds.pop()


def costs_depend_on(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of an experiment, as mappings of plain values, on which the costs of its batches depend."""
    target, draft = config["target"], config["draft"]
    return {
        "target.path": target["path"],
        "target.dtype": target["dtype"],
        "target.feature_dtype": target["feature_dtype"] or target["dtype"],
        "target.attn_implementation": target["attn_implementation"],
        **{f"draft.{key}": value for key, value in draft.items()},
        "train.compute_dtype": config["train"]["compute_dtype"],
    }


def check_same(run_dir: Path, run: Mapping[str, Any], asked: Mapping[str, Any], kind: str) -> None:
    """Refuse a run of other costs than those asked for.

    Args:
        run, asked: the experiments of the run and of the user, as mappings of plain values.
        kind: `CPU` or `GPU`, as the user wants it.

    Raises:
        ConfigError: one line with all keys that differ and both values of each.
        DataError: see `device_kind`.
    """
    theirs = {**costs_depend_on(run), "devices": device_kind(run_dir)}
    ours = {**costs_depend_on(asked), "devices": kind}
    different = [key for key in ours if theirs[key] != ours[key] and not (key == "target.path" and _same(theirs[key], ours[key]))]
    if different:
        told = "; ".join(f"{key} is {theirs[key]} there and {ours[key]} here" for key in different)
        raise ConfigError(f"--measured {run_dir}: its costs are others: {told}")


def _same(one: str, other: str) -> bool:
    """Whether two names of a target are one folder."""
    return not one.startswith("package:") and Path(one).absolute().resolve() == Path(other).absolute().resolve()
