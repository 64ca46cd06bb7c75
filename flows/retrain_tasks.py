"""The stages of a retraining as Prefect tasks, and the question to a person (see `flows.tasks` for what tasks may do)."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import FlowPauseTimeout
from prefect.flow_runs import pause_flow_run
from prefect.input import RunInput
from prefect.settings import PREFECT_UI_URL
from prefect.states import Running
from pydantic import Field

from dflash_core.errors import UserError
from flows.tasks import Progress, Request, markdown_table

if TYPE_CHECKING:
    from dflash_core.experiment import ExperimentConfig
    from dflash_core.experiment_retrain import Comparison, Look
    from dflash_core.registry import Entry

log = logging.getLogger(__name__)
RUN_NAME = "retrain"
POLL_S = 10.0  # between two looks whether a person has answered


class Approval(RunInput):
    """The answer of a person, given on the page of the paused flow run."""

    promote: bool = Field(description="Put the new drafter into use")
    note: str = Field("", description="Why; kept in the registry")


def only_run(request: Request) -> ExperimentConfig:
    """The one run of the experiment that is asked for; raises UserError where there are several."""
    variants = request.variants()
    if len(variants) > 1:
        names = ", ".join(name for name, _ in variants)
        raise UserError(f"{request.experiment}: a retraining is one run; choose one with --run: {names}")
    return variants[0][1]


@task(name="look for new data", cache_policy=NO_CACHE)
def look(config: ExperimentConfig) -> Look:
    """Digest the data files, and compare them with what the current drafter was trained on."""
    from dflash_core import experiment_retrain

    found = experiment_retrain.look(config)
    if found.nothing_new is not None:
        log.info("nothing new: %s", found.nothing_new)
    else:
        whose = f"for the current drafter {found.current}" if found.current else "and no drafter in the registry yet"
        log.info("%d of %d data files are new, %s", found.num_new, len(found.sources), whose)
    return found


def nothing_new(found: Look) -> dict[str, Any]:
    """The flow's result where nothing is to be done."""
    return {"decision": "nothing new", "reason": found.nothing_new, "text": f"nothing new: {found.nothing_new}", **_paths(found)}


def begin(config: ExperimentConfig, found: Look) -> ExperimentConfig:
    """The experiment to be trained."""
    from dflash_core import experiment_retrain

    return experiment_retrain.begin(config, found)


@task(name="compare with the current drafter", cache_policy=NO_CACHE)
def compare(config: ExperimentConfig, found: Look, run_dir: str) -> Comparison:
    """Measure the new and the current drafter on the same held-out prompts."""
    from dflash_core import experiment_retrain

    return experiment_retrain.compare(config, found, Path(run_dir), Progress("compare: prompts"))


def ask(config: ExperimentConfig, comparison: Comparison) -> tuple[str | None, str | None]:
    """Pause the flow run until a person answers on its page; returns why the drafter is not promoted, and the answer.

    Nobody answers in time: the current drafter stays. Prefect would then fail the flow run, for which nothing has failed; it
    goes on and says so.
    """
    timeout_s = config.retrain.approval_timeout_s
    log.info("waiting up to %.0f s for an answer on the page of this flow run: %s", timeout_s, comparison.verdict.reason)
    about = f"{comparison.candidate.export.drafter}: {comparison.verdict.reason}"
    form = Approval.with_initial_data(description=f"Promote drafter {about}?", promote=False)
    try:
        answer = pause_flow_run(
            wait_for_input=form, timeout=math.ceil(timeout_s), poll_interval=math.ceil(min(POLL_S, timeout_s / 4))
        )
    except FlowPauseTimeout:
        _go_on()
        return f"nobody approved it within {timeout_s:g} s", "no answer"
    note = f": {answer.note}" if answer.note else ""
    return (None, f"yes{note}") if answer.promote else (f"a person declined it{note}", f"no{note}")


def _go_on() -> None:
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(context.flow_run.id, Running(message="Nobody answered in time."), force=True)


@task(name="decide", cache_policy=NO_CACHE)
def conclude(
    config: ExperimentConfig, found: Look, comparison: Comparison, refused: str | None, answer: str | None
) -> dict[str, Any]:
    """Write the decision into the registry, and publish it as a Prefect artifact."""
    from dflash_core import experiment_retrain

    entry = experiment_retrain.conclude(config, found, comparison, refused, answer)
    text = f"{entry.decision}: {entry.reason}"
    rows = _rows(entry)
    markdown = (
        f"# Retraining of {config.name}\n\n**{entry.decision}**: {entry.reason}\n\n{markdown_table(rows)}\n\n"
        f"In use: `{entry.current or 'no drafter'}`. New data files: {found.num_new} of {len(found.sources)}.\n"
    )
    key = "".join(letter if letter.isalnum() else "-" for letter in config.name.lower())
    identifier = create_markdown_artifact(markdown, key=f"retraining-{key}", description=f"Retraining of {config.name}")
    log.info("%s", text)
    log.info("comparison: %s/artifacts/artifact/%s", PREFECT_UI_URL.value(), identifier)
    return {
        "decision": entry.decision,
        "reason": entry.reason,
        "drafter": entry.drafter,
        "text": text,
        "table": rows,
        **_paths(found),
    }


def _rows(entry: Entry) -> list[dict[str, Any]]:
    """Both drafters and their difference, with intervals."""
    head, interval = "tokens per target forward (+1 included)", f"{entry.confidence * 100:g} % interval"

    def row(name: str, value: float | None, low: float | None, high: float | None, sign: str = "") -> dict[str, Any]:
        ends = "-" if low is None or high is None else f"{low:{sign}.3f} to {high:{sign}.3f}"
        return {"drafter": name, head: "-" if value is None else f"{value:{sign}.3f}", interval: ends}

    old = (entry.old_acceptance_length, entry.old_acceptance_low, entry.old_acceptance_high)
    if entry.compared_with is None:
        before = row("none (plain decoding)", 1.0, None, None)
    else:
        before = row(f"current: {entry.compared_with}", *old)
    return [
        row(f"new: {entry.drafter}", entry.acceptance_length, entry.acceptance_low, entry.acceptance_high),
        before,
        row("difference", entry.difference, entry.difference_low, entry.difference_high, "+"),
    ]


def _paths(found: Look) -> dict[str, Any]:
    return {"paths": {"registry": str(found.registry)}}
