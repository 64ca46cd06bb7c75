"""Trainings alone: `python -m flows.train EXPERIMENT.yaml [--run NAME]`, with the dataset they need."""

from __future__ import annotations

import sys

from flows.command import main

if __name__ == "__main__":  # above the import of Prefect: see flows/command.py
    sys.exit(main("train"))

from typing import Any

from prefect import flow

from flows import shards, tasks
from flows.reconcile import HOOKS
from flows.tasks import Request, run_name


@flow(name="dflash-train", flow_run_name=run_name, **HOOKS)
def train(config: Request) -> dict[str, Any]:
    """Train the runs of an experiment, or one of them."""
    variants = config.variants()
    shards.prepare(config, config.load())
    return {"paths": {f"run {name}": tasks.train(variant, name)["run_dir"] for name, variant in variants}}
