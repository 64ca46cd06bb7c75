"""Answers alone: `python -m flows.regenerate EXPERIMENT.yaml`. The target answers the prompts of `regenerate.files`."""

from __future__ import annotations

import sys

from flows.command import main

if __name__ == "__main__":  # above the import of Prefect: see flows/command.py
    sys.exit(main("regenerate"))

from typing import Any

from prefect import flow

from flows import shards
from flows.reconcile import HOOKS
from flows.tasks import Request, run_name


@flow(name="dflash-regenerate", flow_run_name=run_name, **HOOKS)
def regenerate(config: Request) -> dict[str, Any]:
    """Have the target answer the prompts of an experiment anew."""
    answers = shards.regenerate(config, config.load())
    return {"paths": {"answers": str(answers["path"])}}
