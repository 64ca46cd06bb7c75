"""What a run's own files say about one of its checkpoints: the material of a model card.

Read from `manifest.json`, `config.yaml`, `provenance.json`, `metrics/steps.jsonl` (docs/design.md 4) and the checkpoint's
`state.json`. What is not there, or cannot be read, is left out: a card tells what is known, and nothing is made up for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Trained:
    """Sums over the optimizer steps up to a checkpoint; a step that was trained again after a resume counts once."""

    num_steps: int
    num_epochs: int
    num_anchors: int
    num_supervised: int
    seconds: float


@dataclass(frozen=True)
class RunFacts:
    """Documents of a run, empty where there are none.

    Attributes:
        step: steps that the checkpoint has trained.
        evaluation: what was measured of this very checkpoint.
        other_evaluation_step: the step of another checkpoint of the run that was measured, if this one was not.
    """

    step: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    trained: Trained | None = None
    evaluation: Mapping[str, Any] | None = None
    other_evaluation_step: int | None = None

    def setting(self, section: str, key: str) -> Any:
        """A value of the experiment's configuration; None where it is not known."""
        values = self.config.get(section)
        return values.get(key) if isinstance(values, Mapping) else None

    def identity(self, key: str) -> Any:
        """A value of what the run is (digests, mostly); None where it is not known."""
        values = self.manifest.get("identity")
        return values.get(key) if isinstance(values, Mapping) else None


def read_run_facts(checkpoint: Path, evaluation: Mapping[str, Any] | None = None) -> RunFacts:
    """The facts of `RUN/checkpoints/step-N`; `evaluation` stands for what the manifest says of this checkpoint, if given."""
    run = checkpoint.absolute().parent.parent
    state, manifest = _document(checkpoint / "state.json"), _document(run / "manifest.json")
    step = state.get("next_step") if isinstance(state.get("next_step"), int) else None
    other = None
    if evaluation is None and isinstance(found := manifest.get("evaluation"), Mapping):
        if found.get("step") == step:
            evaluation = found
        else:
            other = found.get("step")
    return RunFacts(
        step=step,
        config=_document(run / "config.yaml"),
        manifest=manifest,
        provenance=_document(run / "provenance.json"),
        trained=None if step is None else _trained(run / "metrics" / "steps.jsonl", step),
        evaluation=evaluation,
        other_evaluation_step=other,
    )


def _document(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return value if isinstance(value, Mapping) else {}


def _trained(path: Path, step: int) -> Trained | None:
    """None where a step is missing: sums of a part would pass for those of the whole."""
    last: dict[int, Mapping[str, Any]] = {}
    for row in _rows(path):
        if isinstance(number := row.get("step"), int) and number < step:
            last[number] = row  # rows stand in the order of attempts
    try:
        if not step or len(last) != step:
            return None
        return Trained(
            num_steps=step,
            num_epochs=max(int(row["epoch"]) for row in last.values()) + 1,
            num_anchors=sum(int(row["num_anchors"]) for row in last.values()),
            num_supervised=sum(int(row["num_supervised"]) for row in last.values()),
            seconds=sum(float(row["step_s"]) for row in last.values()),
        )
    except (LookupError, TypeError, ValueError):
        return None


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                if isinstance(row, Mapping):
                    yield row
    except (OSError, ValueError):  # no file, or the torn last line of a killed run
        return
