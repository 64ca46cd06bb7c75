"""The composition root's validation side: how a draft is measured on held-out prompts while it is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dflash_core.errors import ConfigError
from dflash_core.experiment_data import workspace
from dflash_core.experiment_file import ExperimentConfig
from dflash_core.provenance import digest_json

if TYPE_CHECKING:
    from dflash_core.evaluation.walk import WalkItem
    from dflash_core.model.draft import DFlashDraft
    from dflash_core.model.target import FrozenTarget
    from dflash_core.training.job import TrainingJob
    from dflash_core.training.validation import HowToValidate, Validation


def check_validation(config: ExperimentConfig) -> None:
    """Raise ConfigError where drafts are to be measured while training and there are no prompts for it."""
    wanted = {"evaluate.every_steps": config.evaluate.every_steps is not None, "train.keep_best": config.train.keep_best}
    keys = [key for key, is_wanted in wanted.items() if is_wanted]
    if keys and config.data.held_out is None:
        raise ConfigError(f"{keys[0]}: data.held_out names no file; the acceptance length is measured on held-out prompts")


def how_to_validate(config: ExperimentConfig) -> HowToValidate | None:
    """For `CellParts`; None where nothing is to be measured while training.

    Raises:
        ConfigError: see `check_validation`.
    """
    from dflash_core.training.validation import HowToValidate

    check_validation(config)
    if config.evaluate.every_steps is None and not config.train.keep_best:
        return None

    def make(job: TrainingJob, target: FrozenTarget, on_progress: Callable[[], None]) -> WalkValidator:
        return make_validator(config, job, target, on_progress)

    return HowToValidate(config.evaluate.every_steps, make)


class WalkValidator:
    """Measures a draft by a walk over known greedy answers (`evaluation.walk`)."""

    def __init__(self, target: FrozenTarget, items: list[WalkItem], measured_on: str) -> None:
        self._target, self._items, self.measured_on = target, items, measured_on

    def __call__(self, draft: DFlashDraft, should_stop: Callable[[], bool]) -> Validation | None:
        from dflash_core.evaluation.walk import walk_draft
        from dflash_core.training.validation import Validation

        found = walk_draft(draft, self._items, self._target.embedding_VH, self._target.head_VH, should_stop)
        if found is None:
            return None
        by_source = {source: part.acceptance_length for source, part in found.by_source.items()}
        return Validation(found.acceptance_length, found.expected, by_source, found.rows)


def make_validator(
    config: ExperimentConfig, job: TrainingJob, target: FrozenTarget, on_progress: Callable[[], None]
) -> WalkValidator:
    """Read the prompts, and decode the target's own answers or find them in the workspace's cache."""
    from dflash_core.data import load_tokenizer, read_prompts
    from dflash_core.evaluation.walk_items import prepare_walk

    settings = config.evaluate
    prompts = read_prompts(
        config.data.held_out or "",
        load_tokenizer(job.target_folder),
        settings.prompts_while_training,
        columns={str(ours): theirs for ours, theirs in config.data.columns.items()},
        template_variables=config.data.template_variables,
    )
    items = prepare_walk(
        target,
        prompts,
        settings.max_new_tokens,
        job.spec.block_size,
        cache=workspace() / "cache" / "greedy",
        weights=job.identity["target_weights"],
        on_progress=on_progress,
    )
    digest = digest_json([[prompt.input_ids for prompt in prompts], settings.max_new_tokens])
    return WalkValidator(target, items, f"{len(prompts)} prompts of at most {settings.max_new_tokens} new tokens ({digest[:8]})")
