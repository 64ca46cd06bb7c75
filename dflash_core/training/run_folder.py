"""The folder of one run: where its files are, and its manifest (docs/design.md 4). Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dflash_core.errors import DataError
from dflash_core.provenance import read_json, write_json

SCHEMA_VERSION = 1


def now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


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
        try:
            return dict(read_json(self.path / "manifest.json"))
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path / 'manifest.json'}: not a readable run manifest ({error})") from None

    def update_manifest(self, **fields: Any) -> dict[str, Any]:
        """Change some fields and keep the others; the file is replaced as a whole."""
        exists = (self.path / "manifest.json").exists()
        manifest: dict[str, Any] = self.read_manifest() if exists else {"schema_version": SCHEMA_VERSION}
        manifest.update({**fields, "updated": now()})
        write_json(self.path / "manifest.json", manifest)
        return manifest
