"""Weights & Biases, offline unless asked: the one file that imports it.

It is never the truth: after a kill its file can lack the last rows, and it wants no row twice. So it takes the charts of
`panels`, without explicit global steps, and everything it keeps lies inside the given folder. To look at an offline run
without an account: `wandb leet` in the terminal; to send it later: `wandb sync`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import wandb

from dflash_core.metrics.panels import NAME_SPACES, panel_values
from dflash_core.metrics.sinks import OptionalSink, check_stream

logger = logging.getLogger(__name__)

FOLDER_VARIABLES = {"WANDB_DIR": "", "WANDB_CACHE_DIR": "cache", "WANDB_CONFIG_DIR": "config", "WANDB_DATA_DIR": "data"}


class WandbSink(OptionalSink):
    """Charts `steps`, `stats` and `evals` rows and the validations among `events`; the others stay in the JSONL files.

    One at a time in a process. A resumed run continues under the same `run_id`.

    Args:
        mode: `offline` writes files only; `online` needs the user's own login; `disabled` does nothing.
        folder: where files, caches and settings go.
        config: the experiment, shown beside the charts.

    Raises:
        wandb.Error: online without a login or a connection.
    """

    def __init__(
        self, mode: Literal["offline", "online", "disabled"], project: str, run_id: str, folder: Path, config: Mapping[str, Any]
    ) -> None:
        self._lock = threading.Lock()
        self._defined: set[str] = {f"{space}/step" for space in NAME_SPACES}
        self._environment = {"WANDB_MODE": mode, "WANDB_SILENT": "true"}
        for name, below in FOLDER_VARIABLES.items():
            path = folder / below
            path.mkdir(parents=True, exist_ok=True)
            self._environment[name] = str(path.absolute())
        self._before = {name: os.environ.get(name) for name in self._environment}
        os.environ.update(self._environment)
        self._run: Any = None
        try:
            self._run = wandb.init(
                mode=mode,
                project=project,
                id=run_id,
                name=run_id,
                dir=str(folder.absolute()),
                config=dict(config),
                resume="allow",
                # Its metadata hold the command line as it was typed; a run's provenance.json has it without secrets.
                settings=wandb.Settings(console="off", disable_git=True, disable_code=True, silent=True, x_disable_meta=True),
            )
            for space in NAME_SPACES:
                self._run.define_metric(f"{space}/step", hidden=True)
        except BaseException:
            self.close()
            raise
        if mode == "online":
            logger.info("W&B: %s", self._run.url)

    def log(self, stream: str, row: Mapping[str, Any]) -> None:
        check_stream(stream)
        values = panel_values(stream, row)
        with self._lock:
            if values and self._run is not None:
                self._define(values)
                self._run.log(values)

    def _define(self, values: Mapping[str, float]) -> None:
        """Give each new name its step axis, one by one: a pattern (`queue/*`) leaves it open whether it means deeper names."""
        for name in values:
            if name not in self._defined:
                self._defined.add(name)
                self._run.define_metric(name, step_metric=f"{name.split('/', 1)[0]}/step")

    def flush(self) -> None:
        """Nothing to do: rows go to W&B's own writer process at once, which offers no call to wait for it."""

    def close(self) -> None:
        """Finish the run, end W&B's helper process, and give the environment back."""
        with self._lock:
            run, self._run = self._run, None
            try:
                if run is not None:
                    run.finish()
            finally:
                wandb.teardown()
                for name, value in self._before.items():
                    if value is None:
                        os.environ.pop(name, None)
                    else:
                        os.environ[name] = value
                self._before = {}
