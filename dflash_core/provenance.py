"""Where results come from: content digests, versions, git, and files that are written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import threading
from importlib import metadata
from pathlib import Path
from typing import Any

from dflash_core.redaction import without_secrets

PACKAGES = ("torch", "transformers", "prefect", "wandb", "pandas", "pyarrow", "numpy", "tokenizers", "safetensors")
UNREADABLE = "unknown"
SAMPLED_BYTES = 1 << 20


def digest_bytes(data: bytes) -> str:
    """SHA-256 of `data` as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def digest_json(value: Any) -> str:
    """SHA-256 of a value that JSON can hold, independent of the order of keys."""
    return digest_bytes(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())


def digest_file(path: Path) -> str:
    """SHA-256 of a file's content, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_weights(folder: Path) -> str:
    """A digest of a model folder's weights that stays cheap for files of many GB.

    It covers names and sizes of the safetensors files, their first MiB (which holds the table of tensors) and their
    last, and `config.json`. Another training or another quantisation changes it.
    """
    parts: list[Any] = [digest_file(path) for path in [folder / "config.json"] if path.is_file()]
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(SAMPLED_BYTES)
            file.seek(max(0, size - SAMPLED_BYTES))
            parts.append([path.name, size, digest_bytes(first), digest_bytes(file.read(SAMPLED_BYTES))])
    return digest_json(parts)


def sync_to_disk(path: Path) -> None:
    """Flush a file or a folder's entries, so that a later rename cannot reach the disk before them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes | str) -> None:
    """Write a file so that a reader sees the old content or the new one, never a part.

    The data goes to a temporary file in the same folder, is flushed to disk, and replaces the old file by a rename.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """`write_atomically` for an indented JSON document."""
    write_atomically(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """The JSON document of a file; raises `ValueError` for a damaged one."""
    return json.loads(path.read_text(encoding="utf-8"))


def package_versions() -> dict[str, str]:
    """Installed versions of the packages that can change a result."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def git_state(folder: Path) -> dict[str, Any]:
    """Commit and whether the working tree differs from it; `unknown` outside a repository."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit, status = git("rev-parse", "HEAD"), git("status", "--porcelain")
    return {"commit": commit or UNREADABLE, "dirty": UNREADABLE if status is None else bool(status)}


def provenance(devices: list[str], fingerprints: dict[str, str]) -> dict[str, Any]:
    """What a run's `provenance.json` holds (docs/design.md 4)."""
    return {
        "git": git_state(Path(__file__).parent),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "machine": platform.machine(),
        "num_cpus": os.cpu_count(),
        "packages": package_versions(),
        "argv": [without_secrets(word) for word in sys.argv],
        "devices": devices,
        "fingerprints": fingerprints,
    }
