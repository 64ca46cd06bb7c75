"""The composition root's retraining side: from new data to a drafter that replaces the current one, or does not.

`flows/retrain.py` calls, in this order: `look` (what is new; seconds, and no torch), `begin` (the experiment to be trained),
the stages `prepare` and `train`, `compare` (both drafters on the same prompts, and the rule's verdict), and `conclude` (the
registry). Each finds again what an earlier process finished, so that a retraining that was killed goes on when it is started
again: the dataset, the run, both evaluations, the decision.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_core.errors import ConfigError, DataError
from dflash_core.experiment_data import draft_spec, target_folder, workspace
from dflash_core.experiment_evaluation import PROMPTS_FILE, evaluate_folder, evaluate_run
from dflash_core.experiment_file import ExperimentConfig
from dflash_core.provenance import digest_json, digest_weights
from dflash_core.registry import (
    Candidate,
    Entry,
    Measured,
    PromptResult,
    Registry,
    Rule,
    Verdict,
    decide,
    read_export,
    registry_folder,
)
from dflash_core.training.run_folder import RunFolder

RUN_NAME = "retrain"
NOTHING_NEW = "nothing new"
# Sections and keys that reach neither weights nor decision.
RECIPE = ("target", "data", "bucketing", "draft", "train", "evaluate", "retrain")
NOT_IN_THE_RECIPE: dict[str, set[str]] = {
    "data": {"name", "files", "num_workers"},
    "draft": {"init_from"},
    "train": {"checkpoint_every", "keep_last", "keep_every", "self_checks"},
    "retrain": {"force", "approval", "approval_timeout_s"},
}


@dataclass(frozen=True)
class Look:
    """What a retraining finds before it begins.

    Attributes:
        registry: folder of the target's registry.
        files: the data files as they are now; a file that arrives later belongs to the next retraining.
        sources: identities of their contents, sorted, each once.
        num_new: contents that the current drafter was not trained on.
        current: id of the drafter in use; None: there is none.
        nothing_new: why nothing is to be done, in one line; None: there is something.
    """

    registry: Path
    target_weights: str
    files: tuple[str, ...]
    sources: tuple[str, ...]
    num_new: int
    current: str | None
    nothing_new: str | None

    @property
    def sources_sha256(self) -> str:
        return digest_json(list(self.sources))


@dataclass(frozen=True)
class Comparison:
    """What `compare` found."""

    candidate: Candidate
    new: Measured
    old: Measured | None
    verdict: Verdict


def look(config: ExperimentConfig) -> Look:
    """Digest the experiment's data files, and find out whether they hold anything new. Loads no torch and no model.

    New is a content that the current drafter was not trained on; that files were taken away is not. Data that were tried
    since the current drafter came into use, with the same settings, and were not good enough, are not new either.

    Raises:
        ConfigError, DataError: the target, a data file or the held-out file is not there, or the registry is damaged.
    """
    from dflash_core.data import content_identity, expand_files

    if config.data.held_out is None:
        raise ConfigError("data.held_out: names no file; a drafter is promoted by what it does on held-out prompts")
    expand_files([config.data.held_out])
    weights = digest_weights(target_folder(config))
    registry = Registry(registry_folder(workspace(), config.target.path, weights))
    files = expand_files(config.data.files)
    sources = tuple(sorted({content_identity(file) for file in files}))
    entries = registry.entries()
    current = entries[-1].current if entries else None
    known = set() if current is None else set(registry.promotion_of(current).sources)
    found = Look(
        registry=registry.folder,
        target_weights=weights,
        files=tuple(file.url for file in files),
        sources=sources,
        num_new=len(set(sources) - known),
        current=current,
        nothing_new=None,
    )
    return found if config.retrain.force else replace(found, nothing_new=_nothing_new(found, entries, _recipe(config)))


def _nothing_new(found: Look, entries: list[Entry], recipe: str) -> str | None:
    if found.current is not None and not found.num_new:
        return f"the current drafter {found.current} was trained on all {len(found.sources)} data files that there are"
    for entry in reversed(entries):
        same_data = entry.sources_sha256 == found.sources_sha256 and entry.settings_sha256 == recipe
        if same_data and entry.drafter != found.current and found.current in (entry.compared_with, entry.current):
            when = f"{entry.time:%Y-%m-%d}"
            return f"these data were tried on {when} and drafter {entry.drafter} was {_past(entry)}: {entry.reason}"
    return None


def _past(entry: Entry) -> str:
    return {"kept": "not promoted", "rejected": "rejected", "rolled_back": "rolled back"}.get(entry.decision, entry.decision)


def _recipe(config: ExperimentConfig) -> str:
    """A digest of all settings behind a drafter and the decision about it."""
    values = {section: getattr(config, section).model_dump(mode="json") for section in RECIPE}
    for section, keys in NOT_IN_THE_RECIPE.items():
        values[section] = {key: value for key, value in values[section].items() if key not in keys}
    return digest_json(values)


def begin(config: ExperimentConfig, found: Look) -> ExperimentConfig:
    """The experiment to be trained: on exactly these files, beginning with the weights of the current drafter.

    With another current drafter, or another dataset, the run is another one (`experiment.create_run` names it by both).
    """
    changes: dict[str, Any] = {"data": config.data.model_copy(update={"files": found.files})}
    if found.current is not None:
        folder = Registry(found.registry).drafter_folder(found.current) if config.retrain.warm_start else None
        init_from = None if folder is None else str(folder)
        changes["draft"] = config.draft.model_copy(update={"init_from": init_from})
    return config.model_copy(update=changes)


def compare(
    config: ExperimentConfig, found: Look, run_dir: Path, progress: Callable[[int, int], None] | None = None
) -> Comparison:
    """Measure the run's drafter and the current one on the same held-out prompts, and apply the rule.

    Raises:
        DataError: an evaluation is not possible, or its files are damaged.
    """
    run, registry, rule = RunFolder(run_dir), Registry(found.registry), _rule(config)
    result = evaluate_run(run_dir, progress)
    manifest, export = run.read_manifest(), read_export(run.export)
    trained_for = (manifest.get("identity") or {}).get("target_weights")
    new = _measured(export.drafter, trained_for, run.path, run.export, result)
    old = None
    if found.current is not None:
        out = registry.folder / "evaluations" / f"{found.current}-{_settings_of_evaluation(config)}"
        folder = registry.drafter_folder(found.current)
        lean = config.evaluate.model_copy(update={"untrained_prompts": 0, "speed_prompts": 0})
        before = evaluate_folder(config.model_copy(update={"evaluate": lean}), folder, progress, out=out)
        old = _measured(found.current, registry.promotion_of(found.current).target_weights, out, folder, before)
    asked = _asked(config)
    weights = digest_weights(target_folder(config))
    unservable = _why_not_servable(run.export, config)
    verdict = decide(new, old, rule, target_weights=weights, asked=asked, unservable=unservable)
    candidate = Candidate(
        export=export,
        parent=found.current if config.draft.init_from and found.current else None,
        target=config.target.path,
        target_weights=weights,
        experiment=config.name,
        run_id=str(manifest["run_id"]),
        checkpoint=str(result["checkpoint"]),
        dataset=config.data.name,
        dataset_fingerprint=str(manifest.get("dataset_fingerprint") or ""),
        sources=found.sources,
        sources_sha256=found.sources_sha256,
        settings_sha256=_recipe(config),
        prompts_sha256=digest_json(asked),
    )
    return Comparison(candidate, new, old, verdict)


def conclude(
    config: ExperimentConfig, found: Look, comparison: Comparison, refused: str | None = None, approval: str | None = None
) -> Entry:
    """Write the decision into the registry; with a promotion the drafter is the current one from then on.

    Args:
        refused: why a drafter that the rule would promote is not: a person said no, or nobody answered.
        approval: what a person answered, where one was asked.
    """
    verdict = comparison.verdict
    if refused is not None and verdict.promote:
        verdict = replace(verdict, decision="kept", reason=f"{refused} ({verdict.reason})")
    return Registry(found.registry).add(comparison.candidate, comparison.new, comparison.old, verdict, _rule(config), approval)


def _rule(config: ExperimentConfig) -> Rule:
    ours = config.retrain
    return Rule(
        min_gain=ours.min_gain,
        confidence=ours.confidence,
        min_prompts=ours.min_prompts,
        require_lossless=ours.require_lossless,
        same_block_size=ours.same_block_size,
        num_samples=config.evaluate.bootstrap_samples,
    )


def _settings_of_evaluation(config: ExperimentConfig) -> str:
    """Names the folder in which the current drafter's evaluation is looked for; what it holds has a digest of its own."""
    return digest_json([config.evaluate.model_dump(mode="json"), config.data.held_out])[:8]


def _asked(config: ExperimentConfig) -> list[str]:
    """Keys of the held-out prompts as they are now, in the order in which they are decoded."""
    from dflash_core.data import load_tokenizer, read_prompts

    prompts = read_prompts(
        config.data.held_out or "",
        load_tokenizer(target_folder(config)),
        config.evaluate.max_prompts,
        columns={str(ours): theirs for ours, theirs in config.data.columns.items()},
        template_variables=config.data.template_variables,
    )
    return [digest_json([prompt.id, list(prompt.input_ids)]) for prompt in prompts]


def _measured(name: str, target_weights: str | None, folder: Path, draft: Path, result: Mapping[str, Any]) -> Measured:
    """An evaluation's prompts, from its `evaluation.jsonl`; raises DataError where the file is damaged."""
    from dflash_core.model.weights import read_spec

    path = folder / PROMPTS_FILE
    prompts = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            rounds = [int(kept) for kept in row["accepted"]]
            key = digest_json([row["id"], row["prompt_ids"]])
            prompts.append(PromptResult(key, sum(rounds) + len(rounds), len(rounds)))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: cannot be read ({error}); without it the evaluation has to be made again") from None
    if len(prompts) != result["num_prompts"]:
        raise DataError(f"{path}: holds {len(prompts)} prompts where {result['num_prompts']} were measured; the file is damaged")
    block_size, different = read_spec(draft).block_size, len(result.get("mismatches") or ())
    return Measured(name, target_weights, block_size, tuple(prompts), result.get("lossless"), different)


def _why_not_servable(export: Path, config: ExperimentConfig) -> str | None:
    """What of the exported files no engine could follow with this target: shapes, taps, mask token, rotary base."""
    from dflash_core.model.warm_start import KEY, check_initial_draft

    try:
        check_initial_draft(export, draft_spec(config))
    except ConfigError as error:
        return f"no engine could serve it with {config.target.path}: {str(error).removeprefix(f'{KEY}: ')}"
    return None
