"""The dataset alone: `python -m flows.prepare EXPERIMENT.yaml`. Shows the plan it leads to as well."""

from __future__ import annotations

import sys

from flows.command import main

if __name__ == "__main__":  # above the import of Prefect: see flows/command.py
    sys.exit(main("prepare"))

from typing import Any

from prefect import flow

from flows import shards, tasks
from flows.reconcile import HOOKS
from flows.tasks import Request, run_name


@flow(name="dflash-prepare", flow_run_name=run_name, **HOOKS)
def prepare(config: Request) -> dict[str, Any]:
    """Prepare the dataset of an experiment."""
    whole = config.load()
    dataset = shards.prepare(config, whole)
    tasks.plan(whole)
    return {"paths": {"dataset": str(dataset["path"])}}
