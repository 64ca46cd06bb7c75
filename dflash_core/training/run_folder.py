"""The folder of one run: where its files are, and its manifest (docs/design.md 4). Imports no torch."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dflash_core.errors import DataError, UserError
from dflash_core.provenance import read_json, write_json

SCHEMA_VERSION = 1
# What runs did before there was a key for it: their identities do not hold the key.
BEFORE_THE_KEY: dict[str, Any] = {
    "train.loss": "cross_entropy",
    "train.dpace_alpha": 0.5,
    "train.scale_features": False,
    "train.calibrate_norm": False,
}


def now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def identity_differences(saved: dict[str, Any], current: dict[str, Any], where: str) -> tuple[list[str], str]:
    """The keys in which two run identities differ, and both values in words; `where` says what `saved` was read from.

    A key that `saved` is too old to hold has the value by which such runs were trained.
    """
    saved = {**BEFORE_THE_KEY, **saved}
    current = {**BEFORE_THE_KEY, **current}
    different = sorted(key for key in {*saved, *current} if saved.get(key) != current.get(key))
    return different, "; ".join(f"{key}: {saved.get(key)} {where}, {current.get(key)} now" for key in different)


@dataclass(frozen=True)
class RunFolder:
    """Paths below one run folder, and its manifest."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def export(self) -> Path:
        return self.path / "export"

    @property
    def wandb(self) -> Path:
        return self.path / "wandb"

    @property
    def provenance(self) -> Path:
        return self.path / "provenance.json"

    def log_file(self, cell: int) -> Path:
        return self.path / "logs" / f"cell-{cell}.log"

    def read_manifest(self) -> dict[str, Any]:
        """Raises `DataError` where there is no readable manifest."""
        path = self.path / "manifest.json"
        try:
            manifest = read_json(path)
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"{path}: not a readable run manifest ({error})") from None
        missing = [key for key in ("run_id", "state") if not isinstance(manifest, dict) or key not in manifest]
        if missing:
            raise DataError(f"{path}: not a readable run manifest ({missing[0]} is missing)")
        return dict(manifest)

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Hold the run while inside, so that two processes never train it at once; raises UserError if one already does.

        The lock ends with the process, however it ends.
        """
        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{self.path}: another process is training this run") from None
            yield

    def is_owned(self) -> bool:
        """Whether some process is training the run now."""
        try:
            with self.owned():
                return False
        except UserError:
            return True

    def update_manifest(self, **fields: Any) -> dict[str, Any]:
        """Change some fields and keep the others; the file is replaced as a whole, by one process at a time."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".manifest.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # cells that fail together must not take each other's words away
            exists = (self.path / "manifest.json").exists()
            manifest: dict[str, Any] = self.read_manifest() if exists else {"schema_version": SCHEMA_VERSION}
            manifest.update({**fields, "updated": now()})
            write_json(self.path / "manifest.json", manifest)
        return manifest
