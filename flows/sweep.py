"""A sweep: `python -m flows.sweep EXPERIMENT.yaml --grid train.lr=1e-3,2e-3 --grid draft.num_layers=2,4`.

Every point of the grid is a run of the experiment, named by what it changes; all are trained, evaluated and compared in one
report. A sweep that is run again, with the same grid or a larger one, adopts what is finished and resumes what is not.
"""

from __future__ import annotations

import sys

from flows.command import MOST_RUNS, main

if __name__ == "__main__":  # above the import of Prefect: see flows/command.py
    sys.exit(main("sweep"))

from typing import Any

from prefect import flow
from pydantic import ConfigDict, Field

from flows import grid as grids
from flows.experiment import chain
from flows.reconcile import HOOKS
from flows.tasks import Request, run_name


def _grid_first(schema: dict[str, Any]) -> None:
    """The form has its fields in this order; what a sweep is about would stand below what is hardly ever changed."""
    fields = schema["properties"]
    first = {key: fields[key] for key in ("experiment", "grid", "overrides", "run", "most")}
    schema["properties"] = first | fields


class SweepRequest(Request):
    """An experiment file, the grid of changes, and what to change in all runs."""

    model_config = ConfigDict(json_schema_extra=_grid_first)
    grid: tuple[str, ...] = Field(min_length=1, description="Each item one key with its values, such as train.lr=0.001,0.002")
    most: int = Field(MOST_RUNS, ge=1, description="Refuse a grid that makes more runs than this")


@flow(name="dflash-sweep", flow_run_name=run_name, **HOOKS)
def sweep(config: SweepRequest) -> dict[str, Any]:
    """Train an experiment at every point of a grid, and compare all of them."""
    config.load()  # looks where the experiment lies before the grid reads it
    expanded = grids.expand(config.experiment, config.overrides, config.run, config.grid, config.most)
    runner = config.model_dump(include={"task_runner", "task_runner_address", "shards"})
    return chain(Request(experiment=config.experiment, overrides=expanded, **runner))
