"""The real `dflash_core.experiment_retrain` on top of `fake_experiment`: a real registry, no target and no decoding.

Run as `python tests/fake_retrain.py MODULE ARGS...`. The experiment file is that of `fake_experiment` with one run, and more:
`{"sources": [names of data files], "tau": tokens a round of the drafter that is made, "retrain": {key: value}}`.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

from dflash_core import experiment_retrain as retrain
from dflash_core.config import EvaluateConfig, RetrainConfig
from dflash_core.experiment_retrain import Comparison, Look
from dflash_core.provenance import digest_json
from dflash_core.registry import Candidate, Measured, PromptResult, Registry, decide, read_export
from tests import fake_experiment
from tests.fake_experiment import Experiment

TARGET = "t" * 64


def registry() -> Registry:
    return Registry(fake_experiment.workspace() / "registry" / "target")


def look(config: Experiment) -> Look:
    found = registry()
    current, sources = found.current(), tuple(sorted(config.document["sources"]))
    known = set() if current is None else set(found.promotion_of(current).sources)
    num_new = len(set(sources) - known)
    return Look(found.folder, TARGET, sources, sources, num_new, current, None if num_new else "all of it is known")


def compare(config: Experiment, found: Look, run_dir: Path, progress: Any = None) -> Comparison:
    export = run_dir / "export"
    export.mkdir(exist_ok=True)
    (export / "config.json").write_text("{}")
    (export / "model.safetensors").write_text(f"{config.document['tau']} {found.sources}")
    read, tau = read_export(export), config.document["tau"]
    measured = Path(run_dir.parent / "measured.json")
    taus = json.loads(measured.read_text()) if measured.exists() else {}
    measured.write_text(json.dumps({**taus, read.drafter: tau}))

    def prompts(tau: int) -> tuple[PromptResult, ...]:
        return tuple(PromptResult(f"p{i}", 10 * tau, 10) for i in range(16))

    new = Measured(read.drafter, TARGET, 8, prompts(tau), True)
    old = None if found.current is None else Measured(found.current, TARGET, 8, prompts(taus[found.current]), True)
    verdict = decide(new, old, retrain._rule(config), target_weights=TARGET, asked=[p.key for p in new.prompts])  # type: ignore[arg-type]
    names = {"target": "target", "target_weights": TARGET, "experiment": config.name, "run_id": run_dir.name}
    data = {
        "dataset": "corpus",
        "dataset_fingerprint": "f",
        "sources": found.sources,
        "sources_sha256": digest_json(found.sources),
    }
    candidate = Candidate(
        export=read,
        parent=found.current,
        checkpoint="step",
        settings_sha256="s",
        prompts_sha256="p",
        **names,
        **data,  # type: ignore[arg-type]
    )
    return Comparison(candidate, new, old, verdict)


class Configured(Experiment):
    """With what the flow reads of the section `retrain`."""

    def __init__(self, document: dict[str, Any]) -> None:
        super().__init__(document)
        self.retrain = RetrainConfig(**document.get("retrain", {}))
        self.evaluate = EvaluateConfig()


if __name__ == "__main__":
    fake_experiment.Experiment = Configured  # type: ignore[misc]
    sys.modules["dflash_core.experiment"] = fake_experiment
    for name, stand_in in {"look": look, "compare": compare, "begin": lambda config, found: config}.items():
        setattr(retrain, name, stand_in)
    module, sys.argv = sys.argv[1], sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
