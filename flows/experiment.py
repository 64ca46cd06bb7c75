"""The chain: `python -m flows.experiment EXPERIMENT.yaml [--set a.b=value ...]`.

Prepare and plan once; create, train and evaluate each run; then compare them and report. A flow that is run again goes
on where the last one ended: finished stages recognise their own work, a stopped training is resumed.
"""

from __future__ import annotations

import sys

from flows.command import main

if __name__ == "__main__":  # above the import of Prefect: see flows/command.py
    sys.exit(main("experiment"))

from typing import Any

from prefect import flow

from flows import shards, tasks
from flows.reconcile import HOOKS
from flows.tasks import Request, run_name


@flow(name="dflash-experiment", flow_run_name=run_name, **HOOKS)
def experiment(config: Request) -> dict[str, Any]:
    """Run an experiment file from its data to its report."""
    return chain(config)


def chain(config: Request) -> dict[str, Any]:
    """The stages one after the other, within the flow that calls this."""
    whole = config.load()
    variants = config.variants()
    shards.prepare(config, whole)
    tasks.plan(whole)
    run_dirs = []
    for name, variant in variants:
        trained = tasks.train(variant, name)
        tasks.evaluate(name, trained["run_dir"])
        run_dirs.append(trained["run_dir"])
    report = tasks.analyze(whole, run_dirs)
    runs = dict(zip((f"run {name}" for name, _ in variants), run_dirs, strict=True))
    return {"table": report["table"], "paths": {**runs, "report (text)": report["report_md"], "report": report["report_html"]}}
