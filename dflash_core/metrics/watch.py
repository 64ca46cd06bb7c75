"""`dflash watch`: a run as its files tell it, while it lives or afterwards, from any machine that sees the folder.

Reads only, and of each file only what is new (`follow`), so a look costs the same after ten steps and after a million.
`batches` is not read: what the view needs of it stands in `steps` and `stats`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console, RenderableType
from rich.live import Live

from dflash_core.errors import DataError, UserError
from dflash_core.metrics.console import duration
from dflash_core.metrics.follow import JsonlFollower
from dflash_core.metrics.run_view import RunView
from dflash_core.metrics.screen import whole_view
from dflash_core.provenance import read_json

ENDED = ("completed", "stopped", "failed")
WATCHED_STREAMS = ("steps", "stats", "events")
QUIET_S = 60.0  # without a row, at least
QUIET_STEPS = 10.0
SAVING_S = 600.0
UNEVEN_SNAPSHOTS = 5
DEEP_SHARE, EMPTY_SHARE = 0.6, 0.2  # of the longest queue: one target's mean depth above the one, another's below the other
UNEQUAL_DISPATCH = 0.1  # of the mean


def watch(run_dir: Path, every_s: float = 1.0, once: bool = False, console: Console | None = None) -> None:
    """Show a run until it ends, or once. Off a terminal each look is printed below the one before.

    Raises:
        UserError, DataError: not a run folder, or a file of it is damaged; names the file.
    """
    watched = WatchedRun(run_dir)
    console = console or Console()
    if once or not console.is_terminal:
        while True:
            console.print(watched.look(time.time()))
            if once or watched.has_ended:
                return
            time.sleep(every_s)
    # No thread of rich's: each look draws. The last one stays on the terminal whole.
    with Live(watched.look(time.time()), console=console, auto_refresh=False, vertical_overflow="crop") as live:
        live.refresh()
        while not watched.has_ended:
            time.sleep(every_s)
            live.update(watched.look(time.time()), refresh=True)


class WatchedRun:
    """One run folder, looked at again and again. `has_ended` is that of the last look."""

    def __init__(self, run_dir: Path) -> None:
        if not run_dir.is_dir():
            raise UserError(f"{run_dir}: no such run folder")
        self.folder, self.has_ended = run_dir, False
        self.manifest = self._read_manifest()
        self.config = self._read_config()
        cells = self._setting("topology", "cells")
        self.view = RunView(self._total_steps(), num_cells=cells if isinstance(cells, int) else 1)
        self.followers = {name: JsonlFollower(run_dir / "metrics" / f"{name}.jsonl") for name in WATCHED_STREAMS}

    def look(self, now: float) -> RenderableType:
        """Read what is new and draw it.

        Args:
            now: seconds since 1970.
        """
        self.manifest = self._read_manifest()  # before the rows: those of an ended run are then all there
        self.has_ended = self.manifest["state"] in ENDED
        self.view.total_steps = self._total_steps()
        try:
            for name in WATCHED_STREAMS:
                samples, rows = self._read_rows(name)
                for row in samples if name == "steps" else ():
                    self.view.sample(row)
                for row in rows:
                    self.view.take(name, row)
            self._take_measurement()
            described = {**self.manifest, "settings": self._settings(), "edges": self._edges()}
            return whole_view(self.view, described, self.warnings(now), now)
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise DataError(f"{self.folder / 'metrics'}: a field has a value of another kind than it should ({what})") from error

    def _take_measurement(self) -> None:
        """What `dflash evaluate` has measured stands in the manifest."""
        evaluation, value = self.manifest.get("evaluation"), self.manifest.get("acceptance_length")
        step = evaluation.get("step") if isinstance(evaluation, Mapping) else None
        if isinstance(step, int) and isinstance(value, float) and (self.view.measured is None or step >= self.view.measured[0]):
            self.view.measured = step, value

    def warnings(self, now: float) -> list[str]:
        """What is wrong with the run now, one line each."""
        found = [*self._silence(now), *_uneven_depths(self.view)] if not self.has_ended else []
        if self._setting("prefetch", "dispatch") != "least_loaded":  # which is meant to give unequal numbers
            found += _unequal_dispatch(self.view)
        not_finite = [row["step"] for row in self.view.recent if row.get("skipped")]
        if not_finite:
            found.append(
                f"{len(not_finite)} of the last {len(self.view.recent)} steps were not finite, the last one {not_finite[-1]}"
            )
        if bad := sum(follower.num_bad for follower in self.followers.values()):
            found.append(f"{bad} lines of the metrics are no JSON objects and are left out")
        return found

    def _silence(self, now: float) -> list[str]:
        view, pid = self.view, self.manifest.get("pid")
        if self.manifest["state"] == "running" and isinstance(pid, int) and not _is_alive(pid):
            return [f"process {pid}, which trains the run, is not on this machine: it was killed, or it runs elsewhere"]
        found = []
        if view.saving_since is not None and now - view.saving_since[1] > SAVING_S:
            saving = duration(now - view.saving_since[1])
            found.append(f"the checkpoint of step {view.saving_since[0]:,} has been written for {saving}")
        quiet = now - view.last_time if view.last_time is not None else 0.0
        if quiet > max(QUIET_S, QUIET_STEPS * (view.seconds_per_step() or 0.0)):
            found.append(f"no row has come for {duration(quiet)}")
        return found

    def _read_rows(self, stream: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        follower = self.followers[stream]
        try:
            return follower.read()
        except OSError as error:
            raise UserError(f"{follower.path}: cannot be read: {error.strerror}") from None

    def _read_manifest(self) -> dict[str, Any]:
        path = self.folder / "manifest.json"
        try:
            manifest = read_json(path)
        except OSError as error:
            raise UserError(f"{path}: not a run folder, this file cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: damaged: {error}") from None
        if not isinstance(manifest, dict) or not isinstance(manifest.get("state"), str):
            raise DataError(f"{path}: not the manifest of a run (state is missing)")
        return manifest

    def _read_config(self) -> Mapping[str, Any]:
        path = self.folder / "config.yaml"
        try:
            config = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{path}: not a run folder, this file cannot be read: {error.strerror}") from None
        except (ValueError, yaml.YAMLError) as error:
            raise DataError(f"{path}: damaged: {error}") from None
        return config if isinstance(config, Mapping) else {}

    def _setting(self, section: str, key: str) -> Any:
        values = self.config.get(section)
        return values.get(key) if isinstance(values, Mapping) else None

    def _total_steps(self) -> int | None:
        """As planned; a run that is older than the manifest's field, or has not planned yet, may only know a limit."""
        for value in (self.manifest.get("num_planned_steps"), self._setting("train", "max_steps")):
            if isinstance(value, int) and value > 0:
                return value
        return None

    def _settings(self) -> str:
        targets, order = self._setting("topology", "targets_per_cell"), self._setting("bucketing", "order")
        words = [f"{self.view.num_cells} {'cell' if self.view.num_cells == 1 else 'cells'}"]
        words += [f"{targets} {'target' if targets == 1 else 'targets'} each"] if targets is not None else []
        words += [f"order {order}"] if order is not None else []
        return ", ".join(words)

    def _edges(self) -> list[int]:
        identity = self.manifest.get("identity")
        edges = identity.get("edges") if isinstance(identity, Mapping) else None
        return edges if isinstance(edges, list) else []


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _uneven_depths(view: RunView) -> list[str]:
    found = []
    for cell, rows in sorted(view.stats.items()):
        means = view.mean_depths(cell)
        longest = max(rows[-1].get("queue_max_depths") or [0])
        if len(rows) < UNEVEN_SNAPSHOTS or len(means) < 2 or longest < 2:
            continue
        if max(means) >= DEEP_SHARE * longest and min(means) <= EMPTY_SHARE * longest:
            deep, empty = means.index(max(means)), means.index(min(means))
            found.append(
                f"queues are uneven in cell {cell}: target {deep} has {means[deep]:.1f} batches waiting, "
                f"target {empty} {means[empty]:.1f} (means of {len(rows)} snapshots)"
            )
    return found


def _unequal_dispatch(view: RunView) -> list[str]:
    found: list[str] = []
    for cell, rows in sorted(view.stats.items()):
        counts: list[int] = rows[-1].get("dispatched_per_target") or []
        total = sum(counts)
        if len(counts) < 2 or total < 20 * len(counts):
            continue
        if (max(counts) - min(counts)) * len(counts) > UNEQUAL_DISPATCH * total:
            found.append(f"targets of cell {cell} were given unequal numbers of batches: {', '.join(f'{n:,}' for n in counts)}")
    return found
