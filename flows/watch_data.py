"""Says when new data have arrived: `python -m flows.watch_data DIR [--experiment FILE] [--once]`.

Every few seconds the folder is looked at. Files that are complete and whose content was never seen before are announced in one
event `dflash.dataset.arrived`, to which the deployment `retrain` answers (flows/serve.py). What was announced is remembered in
the workspace, so a restart, a renaming or a `touch` announces nothing again. The retraining has the last word on what is new.

Complete: a regular file (no link) with a known ending and no temporary name, not empty, left alone for `--settle` seconds. A
writer may pause for longer than that, so write under another name (`week1.jsonl.part`) and rename: then there is no doubt.

No server: the files wait, and the next look tries again. An event counts as sent when the server has answered; one that
was sent twice because this program was killed in between costs a retraining that finds nothing new. Nothing here imports Prefect.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import datetime
import hashlib
import json
import logging
import os
import signal
import stat
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_core.errors import DFlashError, TrainingError, UserError
from dflash_core.redaction import without_secrets
from flows import command, console, server
from flows.deployments import ARRIVED
from flows.launch import only_one

log = logging.getLogger("flows.watch_data")  # this is `__main__`

ENDINGS = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".feather")
COMPRESSED = (".gz", ".zst")
TEMPORARY_STARTS = (".", "_", "~", "#")
MOST_FILES = 100_000  # in the folder; more is no folder for arriving files
MOST_REMEMBERED = 200_000  # contents, the oldest are forgotten first
MOST_NAMED = 200  # names in one event, which Prefect bounds
CHUNK = 1 << 20
SEND_S = 20.0

Stamp = tuple[int, int, int]  # inode, size in bytes, mtime in nanoseconds


@dataclass
class Memory:
    """What is known of a folder. `announced`: digests of contents; `stamps`: which content a file held when it was read."""

    announced: dict[str, str] = field(default_factory=dict)
    stamps: dict[str, tuple[Stamp, str]] = field(default_factory=dict)

    @staticmethod
    def load(path: Path) -> Memory:
        """Read a memory; raises UserError for a damaged one, which must not announce everything anew."""
        if not path.exists():
            return Memory()
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            stamps = {name: ((int(a), int(b), int(c)), str(digest)) for name, ((a, b, c), digest) in document["stamps"].items()}
            return Memory({str(key): str(value) for key, value in document["announced"].items()}, stamps)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: damaged ({type(error).__name__}); delete it to announce all files anew") from None

    def save(self, path: Path) -> None:
        """Write it, whole or not at all."""
        temporary = path.with_suffix(".tmp")  # one writer at a time, see `only_one`
        with temporary.open("w", encoding="utf-8") as file:
            json.dump({"announced": self.announced, "stamps": self.stamps}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


class Watcher:
    """Finds new, complete files of one folder.

    Args:
        folder: where they arrive; folders below it are not looked into.
        memory: what is known; changed by `announce`.
        settle_s: how long a file must have been left alone.
    """

    def __init__(self, folder: Path, memory: Memory, settle_s: float) -> None:
        self.folder, self.memory, self.settle_s = folder, memory, settle_s
        self._seen: dict[str, tuple[Stamp, float]] = {}  # when a stamp was first seen

    def look(self, now: float) -> dict[str, str]:
        """Files that are complete and new, with their digests; `now` is a monotonic time in seconds."""
        listed = self._list()
        self.memory.stamps = {name: known for name, known in self.memory.stamps.items() if name in listed}
        self._seen = {name: seen for name, seen in self._seen.items() if name in listed}
        new: dict[str, str] = {}
        for name, stamp in sorted(listed.items()):
            known, first = self.memory.stamps.get(name), self._seen.get(name)
            if known is not None and known[0] == stamp and known[1] in self.memory.announced:
                continue
            if first is None or first[0] != stamp:
                self._seen[name] = first = (stamp, now)
            if now - first[1] < self.settle_s:
                continue
            digest = known[1] if known is not None and known[0] == stamp else _digest(self.folder / name, stamp)
            if digest is None:  # changed while it was read
                self._seen[name] = (stamp, now)
                continue
            self.memory.stamps[name] = (stamp, digest)
            if digest not in self.memory.announced and digest not in new.values():
                new[name] = digest
        return new

    def waiting(self) -> bool:
        """True if a file has been seen that is not yet known to be complete."""
        return any(
            name not in self.memory.stamps or self.memory.stamps[name][0] != stamp for name, (stamp, _) in self._seen.items()
        )

    def announce(self, new: Mapping[str, str]) -> None:
        """Remember that these were announced."""
        known = self.memory.announced
        known.update({digest: name for name, digest in new.items()})
        for digest in list(known)[: max(0, len(known) - MOST_REMEMBERED)]:
            del known[digest]

    def _list(self) -> dict[str, Stamp]:
        found: dict[str, Stamp] = {}
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    if not is_data_name(entry.name):
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode) and status.st_size > 0:
                            found[entry.name] = (status.st_ino, status.st_size, status.st_mtime_ns)
                    if len(found) > MOST_FILES:
                        raise UserError(f"{self.folder}: more than {MOST_FILES} data files; move the old ones away")
        except OSError as error:
            raise UserError(f"{self.folder}: cannot be listed ({error.strerror})") from None
        return found


def is_data_name(name: str) -> bool:
    """True for a name that a finished data file may have: `a.jsonl`, `b.json.gz`; not `.a.jsonl` or `a.jsonl.part`."""
    lowered = name.lower()
    if lowered.startswith(TEMPORARY_STARTS):
        return False
    for ending in COMPRESSED:
        lowered = lowered.removesuffix(ending)
    return lowered.endswith(ENDINGS)


def _digest(path: Path, stamp: Stamp) -> str | None:
    """The digest of a file's content; None if it is no longer the file of the stamp."""
    digest = hashlib.sha256()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
            status = os.fstat(file.fileno())
    except OSError:
        return None
    return digest.hexdigest() if (status.st_ino, status.st_size, status.st_mtime_ns) == stamp else None


def event(folder: Path, files: Sequence[str], experiment: str | None) -> dict[str, Any]:
    """The event that says that files have arrived."""
    payload: dict[str, Any] = {"path": str(folder), "files": list(files[:MOST_NAMED]), "num_files": len(files)}
    if experiment is not None:
        payload["experiment"] = experiment
    return {
        "id": str(uuid.uuid4()),
        "occurred": datetime.datetime.now(datetime.UTC).isoformat(),
        "event": ARRIVED,
        "resource": {"prefect.resource.id": f"dflash.data.{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"},
        "payload": payload,
    }


def send(document: Mapping[str, Any], url: str) -> None:
    """Hand an event to the server at `url`; returns when it has it. Raises TrainingError."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("PREFECT_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    elif user := os.environ.get("PREFECT_API_AUTH_STRING"):
        headers["Authorization"] = "Basic " + base64.b64encode(user.encode()).decode()
    request = urllib.request.Request(f"{url.rstrip('/')}/events", json.dumps([document]).encode(), headers)  # noqa: S310
    handlers = [urllib.request.ProxyHandler({})] if url.startswith("http://127.0.0.1:") else []
    try:
        urllib.request.build_opener(*handlers).open(request, timeout=SEND_S).close()
    except (OSError, ValueError) as error:
        raise TrainingError(f"{url}: does not take the event ({error})") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Watch until a signal; returns the exit code (0 after Ctrl-C or SIGTERM)."""
    arguments = _parser().parse_args(argv)
    command.raise_on_sigterm()
    console.show_our_lines()
    try:
        _watch(arguments)
    except DFlashError as error:
        sys.stderr.write(f"error: {without_secrets(str(error))}\n")
        return error.exit_code
    except (KeyboardInterrupt, command.Terminated):
        return 128 + signal.SIGINT if arguments.once else 0
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dflash watch-data", description="Say when new data have arrived in a folder.")
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--experiment", metavar="FILE", help="retrain this one instead of the one that is served")
    parser.add_argument("--every", type=_seconds, default=10.0, metavar="S", help="seconds between looks; default: %(default)g")
    parser.add_argument(
        "--settle",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="a file is complete when left alone so long; default: %(default)g",
    )
    parser.add_argument("--once", action="store_true", help="announce what is there, and end")
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 86400:
        raise argparse.ArgumentTypeError("from 0.1 to 86400 seconds")
    return value


def _watch(arguments: argparse.Namespace) -> None:
    from dflash_core.experiment import load_experiment, workspace

    folder = arguments.folder.absolute()
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    if arguments.experiment is not None and len(load_experiment(arguments.experiment).variants()) > 1:
        raise UserError(f"{arguments.experiment}: a retraining is one run, and this experiment has several")
    place = workspace() / "watch"
    place.mkdir(exist_ok=True)
    memory_file = place / f"{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}.json"
    with only_one(memory_file.with_suffix(".lock"), f"{folder}: is being watched already"):
        watcher = Watcher(folder, Memory.load(memory_file), arguments.settle)

        def announce(new: Mapping[str, str]) -> bool:
            return _announce(watcher, new, memory_file, arguments.experiment, workspace())

        if arguments.once:
            _look_once(watcher, announce, arguments.settle)
        else:
            log.info("watching %s every %g s", folder, arguments.every)
            _look_for_ever(watcher, announce, arguments.every)


def _look_once(watcher: Watcher, announce: Callable[[Mapping[str, str]], bool], settle_s: float) -> None:
    watcher.look(time.monotonic())
    if watcher.waiting():
        time.sleep(settle_s)
    new = watcher.look(time.monotonic())
    if not new:
        log.info("nothing new")
    elif not announce(new):
        raise UserError("no server runs that could take the event; start one: dflash serve")


def _look_for_ever(watcher: Watcher, announce: Callable[[Mapping[str, str]], bool], every_s: float) -> None:
    told = False
    while True:
        new = watcher.look(time.monotonic())
        try:
            waits = bool(new) and not announce(new)
            reason = "no server runs (dflash serve)"
        except TrainingError as error:
            waits, reason = True, str(error)
        if waits and not told:
            log.info("%d new files wait: %s", len(new), reason)
        told = waits
        time.sleep(every_s)


def _announce(watcher: Watcher, new: Mapping[str, str], memory_file: Path, experiment: str | None, home: Path) -> bool:
    """Send the event and remember it; False if no server runs."""
    url = server.external_url(home)
    if url is None and (embedded := server.find(home)) is not None:
        url = embedded.url
    if url is None:
        return False
    send(event(watcher.folder, list(new), experiment), url)
    watcher.announce(new)
    watcher.memory.save(memory_file)
    log.info(
        "announced %d new file%s: %s",
        len(new),
        "s" if len(new) > 1 else "",
        ", ".join(list(new)[:5]) + (", ..." if len(new) > 5 else ""),
    )
    return True


if __name__ == "__main__":
    sys.exit(main())
