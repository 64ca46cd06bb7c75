"""Retraining: `python -m flows.retrain EXPERIMENT.yaml [--run NAME] [--set a.b=value ...]` (docs/registry.md).

New data are appended, a drafter is trained from the current one of the registry, both are measured on the same held-out
prompts, and the new one takes its place only if it is better. A flow that is run again adopts what is finished; one that finds
nothing new ends at once.
"""

from __future__ import annotations

import sys

from flows.command import main

if __name__ == "__main__":  # above the import of Prefect: see flows/command.py
    sys.exit(main("retrain"))

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows import retrain_tasks, tasks
from flows.reconcile import HOOKS
from flows.retrain_tasks import RUN_NAME
from flows.tasks import Request, run_name


@flow(name="dflash-retrain", flow_run_name=run_name, **HOOKS)
def retrain(config: Request) -> State[dict[str, Any]]:
    """Train a drafter on new data, and promote it if it is better than the current one."""
    experiment = retrain_tasks.only_run(config)
    found = retrain_tasks.look(experiment)
    if found.nothing_new is not None:
        return Completed(name="Nothing new", message=found.nothing_new, data=retrain_tasks.nothing_new(found))
    begun = retrain_tasks.begin(experiment, found)
    tasks.prepare(begun)
    trained = tasks.train(begun, RUN_NAME)
    comparison = retrain_tasks.compare(begun, found, trained["run_dir"])
    refused, answer = None, None
    if comparison.verdict.promote and experiment.retrain.approval:
        refused, answer = retrain_tasks.ask(experiment, comparison)
    result = retrain_tasks.conclude(begun, found, comparison, refused, answer)
    return Completed(name=result["decision"].capitalize(), message=result["reason"], data=result)
