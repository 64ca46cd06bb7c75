"""Evaluations alone: `python -m flows.evaluate EXPERIMENT.yaml [--run NAME]`, of runs that are trained."""

from __future__ import annotations

import sys

from flows.command import main

if __name__ == "__main__":  # above the import of Prefect: see flows/command.py
    sys.exit(main("evaluate"))

from typing import Any

from prefect import flow

from flows import tasks
from flows.reconcile import HOOKS
from flows.tasks import Request, run_name

COLUMNS = ("acceptance_length", "acceptance_length_untrained", "lossless", "num_prompts")


@flow(name="dflash-evaluate", flow_run_name=run_name, **HOOKS)
def evaluate(config: Request) -> dict[str, Any]:
    """Evaluate the trained runs of an experiment, or one of them."""
    run_dirs = tasks.trained(config)
    results = {name: tasks.evaluate(name, run_dir) for name, run_dir in run_dirs.items()}
    rows = [{"run": name, **{key: result[key] for key in COLUMNS}} for name, result in results.items()]
    return {"table": rows, "paths": {f"run {name}": run_dir for name, run_dir in run_dirs.items()}}
