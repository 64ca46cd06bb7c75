"""The composition root's evaluation side: a run's checkpoint is measured on held-out prompts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_core.errors import DataError
from dflash_core.experiment_data import draft_spec, target_folder
from dflash_core.experiment_file import ExperimentConfig, load_experiment
from dflash_core.provenance import digest_json
from dflash_core.training.run_folder import RunFolder


def evaluate_run(run_dir: Path, progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """Measure a run's newest checkpoint, and the untrained draft, on held-out prompts; export the checkpoint.

    A finished evaluation of the same checkpoint on the same prompts under the same settings is used again.

    Raises:
        DataError: there is no checkpoint or no held-out file.
    """
    from dflash_core.data import content_identity, expand_files
    from dflash_core.export import export_checkpoint
    from dflash_core.training.checkpoint import newest_checkpoint

    run = RunFolder(Path(run_dir))
    config, manifest = load_experiment(run.config), run.read_manifest()
    found = newest_checkpoint(run.checkpoints)
    if found is None:
        raise DataError(f"{run.path}: no checkpoint to evaluate (state: {manifest['state']})")
    if config.data.held_out is None:
        raise DataError(f"{run.config}: data.held_out names no file; evaluation needs held-out prompts")
    checkpoint, state = found
    prompts = [content_identity(file) for file in expand_files([config.data.held_out])]
    shown_as = [dict(config.data.columns), dict(config.data.template_variables)]
    done = digest_json([config.evaluate.model_dump(mode="json"), state["digests"], prompts, shown_as])
    if manifest.get("evaluation_digest") == done and (run.export / "model.safetensors").exists():
        return dict(manifest["evaluation"])
    measured = _measure(config, run, checkpoint, state["next_step"], progress)
    result = {**measured, "checkpoint": str(checkpoint.relative_to(run.path)), "step": state["next_step"]}
    export_checkpoint(checkpoint, run.export)
    headline = {key: result[key] for key in ("acceptance_length", "acceptance_length_untrained", "lossless")}
    run.update_manifest(**headline, export="export", evaluation=result, evaluation_digest=done)
    return result


def _measure(
    config: ExperimentConfig, run: RunFolder, checkpoint: Path, step: int, progress: Callable[[int, int], None] | None
) -> dict[str, Any]:
    """Decode the held-out prompts with the checkpoint, some with the untrained draft, and log the `evals` rows."""
    import torch

    from dflash_core.data import load_tokenizer, read_prompts
    from dflash_core.evaluation import Baseline, evaluate_draft
    from dflash_core.metrics.sinks import JsonlSink, RunLog
    from dflash_core.model.draft import DFlashDraft
    from dflash_core.model.target import FrozenTarget
    from dflash_core.model.weights import load_draft
    from dflash_core.training.devices import device_kind

    torch.set_num_threads(config.topology.threads_per_device)
    folder, draft, device = target_folder(config), load_draft(checkpoint), device_kind(config.topology)
    spec = draft.spec  # never made up again: the taps are those that the checkpoint was trained with
    if spec != draft_spec(config):
        raise DataError(f"{run.config}: describes another draft or target than {checkpoint}")
    model = config.target
    target = FrozenTarget(folder, spec.target_layer_ids, model.dtype, model.attn_implementation, device, model.feature_dtype)
    settings, manifest = config.evaluate, run.read_manifest()
    prompts = read_prompts(
        config.data.held_out or "",
        load_tokenizer(folder),
        settings.max_prompts,
        columns={str(ours): theirs for ours, theirs in config.data.columns.items()},
        template_variables=config.data.template_variables,
    )
    baseline = Baseline(target, settings.max_new_tokens) if settings.check_lossless else None
    trained = evaluate_draft(target, draft.to(device), prompts, settings.max_new_tokens, baseline, progress)
    rows, untrained = trained.rows("trained", step), None
    if some := prompts[: settings.untrained_prompts]:
        fresh = DFlashDraft(spec).initialise(config.train.seed).eval().to(device)
        before = evaluate_draft(target, fresh, some, settings.max_new_tokens, baseline)
        rows, untrained = rows + before.rows("untrained", 0), before.overall.acceptance_length
    log_file = RunLog(JsonlSink(run.metrics), manifest["run_id"], int(manifest.get("attempt", 0)))
    try:
        for row in rows:
            log_file.log("evals", row)
    finally:
        log_file.close()
    return {
        "acceptance_length": trained.overall.acceptance_length,
        "acceptance_length_untrained": untrained,
        "lossless": trained.lossless,
        "mismatches": list(trained.mismatches),
        "num_prompts": trained.overall.num_prompts,
        "num_tokens": trained.overall.num_tokens,
        "num_target_forwards": len(trained.overall.rounds),
        "by_source": {name: part.acceptance_length for name, part in trained.by_source.items()},
    }
