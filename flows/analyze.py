"""The comparison alone: `python -m flows.analyze EXPERIMENT.yaml`, of runs that are trained."""

from __future__ import annotations

import sys

from flows.command import main

if __name__ == "__main__":  # above the import of Prefect: see flows/command.py
    sys.exit(main("analyze"))

from typing import Any

from prefect import flow

from flows import tasks
from flows.reconcile import HOOKS
from flows.tasks import Request, run_name


@flow(name="dflash-analyze", flow_run_name=run_name, **HOOKS)
def analyze(config: Request) -> dict[str, Any]:
    """Compare the runs of an experiment and write the report."""
    run_dirs = tasks.trained(config)
    report = tasks.analyze(config.load(), list(run_dirs.values()))
    return {"table": report["table"], "paths": {"report (text)": report["report_md"], "report": report["report_html"]}}
