"""What is deployed, said once: `flows/serve.py` registers it, `prefect.yaml` says the same for a work pool (a test compares).

Every deployment asks for one parameter, `config`, whose class is the form on its page. Each runs once at a time; a further run
is queued. Nothing here starts by itself but the retraining that answers to an event, and that only where somebody sends one.
"""

from __future__ import annotations

from dataclasses import dataclass

DEMO = "flows/experiments/demo.yaml"
ARRIVED = "dflash.dataset.arrived"
WEEKLY = "0 3 * * 1"  # Monday at three
SLUG = "weekly"
TIMEZONE = "UTC"


@dataclass(frozen=True)
class Deployed:
    """One flow as a deployment. `retrains`: it has the weekly schedule and answers to the event of new data."""

    stage: str
    description: str
    tags: tuple[str, ...] = ()
    retrains: bool = False

    @property
    def module(self) -> str:
        return f"flows.{self.stage}"

    @property
    def all_tags(self) -> list[str]:
        return ["dflash", *self.tags]


ALL = (
    Deployed("experiment", "An experiment file from its data to its report: prepare, plan, train, evaluate, analyze", ("gpu",)),
    Deployed("prepare", "The dataset of an experiment, and the plan it leads to"),
    Deployed("regenerate", "Answers of the target for the prompts of an experiment", ("gpu",)),
    Deployed("train", "The trainings of an experiment, or one of them", ("gpu",)),
    Deployed("evaluate", "Acceptance lengths of the trained runs of an experiment, or of one of them", ("gpu",)),
    Deployed("analyze", "The comparison of the trained runs of an experiment, and its report"),
    Deployed("sweep", "One experiment with a grid of changes, and one comparison of all of them", ("gpu",)),
    Deployed("retrain", "New data: train, measure, and promote the drafter if it is better", ("gpu",), retrains=True),
)


def experiment_of_event(default: str) -> str:
    """The template of the experiment that an event's retraining is for: the one that the event names, else the own one."""
    return "{{ event.payload.experiment | default('" + default.replace("\\", "\\\\").replace("'", "\\'") + "', true) }}"
