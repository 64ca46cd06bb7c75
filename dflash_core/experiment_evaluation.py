"""The composition root's evaluation side: a run's checkpoint, or any draft folder, is measured on held-out prompts.

A run's own evaluation is of its newest checkpoint under the settings of its experiment. It goes into the run's manifest,
`evaluation.jsonl` and `metrics/evals.jsonl`, and the checkpoint is exported. Every other evaluation (another checkpoint, other
prompts) stands in a folder of its own, `evaluation.json` with `evaluation.jsonl`, and changes nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_core.errors import CheckpointError, DataError
from dflash_core.experiment_data import draft_spec, target_folder
from dflash_core.experiment_file import ExperimentConfig, load_experiment
from dflash_core.provenance import digest_json, digest_weights, read_json, write_atomically, write_json
from dflash_core.training.run_folder import RunFolder

if TYPE_CHECKING:
    from dflash_core.evaluation import Evaluation
    from dflash_core.model.draft import DFlashDraft
    from dflash_core.model.spec import DraftSpec

# Grows when results get keys or a meaning that finished evaluations do not have, so that these are made again.
SCHEMA_VERSION = 2
RESULT_FILE, PROMPTS_FILE = "evaluation.json", "evaluation.jsonl"
# Settings that do not reach a result.
WHILE_TRAINING = {"every_steps", "prompts_while_training"}
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Chosen:
    """What is evaluated, where it is not the run's own evaluation.

    Attributes:
        checkpoint: `newest`, `best` (highest score in its state), or a step.
        prompts: file, glob or URL with prompts; None: the experiment's `data.held_out`.
        max_prompts: None: the experiment's `evaluate.max_prompts`.
    """

    checkpoint: str = "newest"
    prompts: str | None = None
    max_prompts: int | None = None

    def apply(self, config: ExperimentConfig, where: str) -> ExperimentConfig:
        """The experiment with these prompts; raises DataError where there are none."""
        data, evaluate = config.data, config.evaluate
        if self.prompts is not None:
            data = data.model_copy(update={"held_out": self.prompts})
        if self.max_prompts is not None:
            evaluate = evaluate.model_copy(update={"max_prompts": self.max_prompts})
        if data.held_out is None:
            raise DataError(f"{where}: data.held_out names no file; evaluation needs held-out prompts")
        return config.model_copy(update={"data": data, "evaluate": evaluate})


def evaluate_run(run_dir: Path, progress: Progress | None = None, chosen: Chosen | None = None) -> dict[str, Any]:
    """Measure a checkpoint of a run, and the untrained draft, on held-out prompts.

    A finished evaluation of the same checkpoint on the same prompts under the same settings is used again.

    Raises:
        DataError: there is no such checkpoint or no held-out file.
        ConfigError: the run's experiment describes another draft than the checkpoint.
    """
    from dflash_core.analysis.reader import compact_streams
    from dflash_core.analysis.runs import ENDED
    from dflash_core.export import export_checkpoint
    from dflash_core.training.retention import by_step

    run, chosen = RunFolder(Path(run_dir)), chosen or Chosen()
    manifest, own = run.read_manifest(), load_experiment(run.config)
    config = chosen.apply(own, str(run.config))
    checkpoint, state = _checkpoint(run, manifest, chosen.checkpoint)
    _check_target(manifest, config)
    done = _digest(config, state["digests"])
    # What is asked for by its step may be the run's own evaluation after all.
    is_own = config == own and (chosen.checkpoint == "newest" or checkpoint == by_step(run.checkpoints)[-1])
    folder = run.path / "evaluations" / f"{checkpoint.name}-{done[:8]}"
    if is_own and manifest.get("evaluation_digest") == done:
        if not _is_export_of(run.export, checkpoint):  # deleted, or that of another step since then
            export_checkpoint(checkpoint, run.export, evaluation=manifest["evaluation"])
            run.update_manifest(export="export")
        return dict(manifest["evaluation"])
    if not is_own and (found := _finished(folder, done)) is not None:
        return found
    step = state["next_step"]
    measured = _measure(config, checkpoint, progress, is_runs=True)
    extra = {"checkpoint": str(checkpoint.relative_to(run.path)), "step": step, "training": _training(run, step)}
    result = {**measured.result, **extra}
    if not is_own:
        _write(folder, result, measured, done)
        return result
    _log_rows(run, manifest, measured, step)
    _write_prompts(run.path, measured)
    headline = {key: result[key] for key in ("acceptance_length", "acceptance_length_untrained", "lossless")}
    # Before the export, which may be refused: what was measured, perhaps for hours, is not lost then.
    run.update_manifest(**headline, evaluation=result, evaluation_digest=done)
    export_checkpoint(checkpoint, run.export, evaluation=result)
    run.update_manifest(export="export")
    if manifest.get("state") in ENDED:
        compact_streams(run.path)
    return result


def evaluate_folder(
    config: ExperimentConfig, draft: Path, progress: Progress | None = None, chosen: Chosen | None = None, out: Path | None = None
) -> dict[str, Any]:
    """Measure an exported or published draft (z-lab format) on an experiment's target and held-out prompts.

    Args:
        out: folder for `evaluation.json` and `evaluation.jsonl`; a finished evaluation in it is used again. None: nothing is
            written.

    Raises:
        DataError: the folder holds no readable draft, or one for another target; the difference is named.
    """
    config = (chosen or Chosen()).apply(config, f"experiment {config.name}")
    if not draft.is_dir():
        raise DataError(f"{draft}: no such draft folder")
    # A run's experiment never changes, that of a folder may: here stands what else of it reaches a result.
    model = config.target.model_dump(mode="json", include={"dtype", "feature_dtype", "attn_implementation"})
    weights = [digest_weights(draft), digest_weights(target_folder(config))]
    done = _digest(config, [*weights, model, config.train.seed])
    if out is not None:
        if (found := _finished(out, done)) is not None:
            return found
        _check_can_write(out)
    measured = _measure(config, draft, progress, is_runs=False)
    result = {**measured.result, "checkpoint": str(draft), "step": None, "training": None}
    if out is not None:
        _write(out, result, measured, done)
    return result


def _check_can_write(folder: Path) -> None:
    """Raises DataError where files could not be put into `folder`, which need not be there: known before hours of decoding."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise DataError(f"--out {folder}: cannot be written; {place} is no folder that may be written to")


def _check_target(manifest: dict[str, Any], config: ExperimentConfig) -> None:
    """Raises DataError where the target's weights are not those that the run was trained on; old runs do not say."""
    trained_on = (manifest.get("identity") or {}).get("target_weights")
    folder = target_folder(config)
    if trained_on is not None and digest_weights(folder) != trained_on:
        raise DataError(f"{folder}: other weights than those of the target that the run was trained on; nothing is measured")


def _is_export_of(folder: Path, checkpoint: Path) -> bool:
    """Whether the folder holds the checkpoint's own numbers."""
    return (folder / "model.safetensors").exists() and digest_weights(folder) == digest_weights(checkpoint)


def _checkpoint(run: RunFolder, manifest: dict[str, Any], which: str) -> tuple[Path, dict[str, Any]]:
    """The checkpoint asked for, read through and found whole."""
    from dflash_core.training.checkpoint import best_checkpoint, check_checkpoint, newest_checkpoint
    from dflash_core.training.retention import by_step, checkpoint_folder, step_of

    folders = by_step(run.checkpoints)
    newest = newest_checkpoint(run.checkpoints) if which == "newest" else None
    if not folders or (which == "newest" and newest is None):
        raise DataError(f"{run.path}: no checkpoint to evaluate (state: {manifest['state']})")
    if newest is not None:
        return newest
    steps = ", ".join(str(step_of(folder)) for folder in folders)
    try:
        if which == "best":
            best = best_checkpoint(run.checkpoints)
            if best is None:
                raise DataError(f"{run.path}: no checkpoint has a score to choose the best by; there are steps {steps}")
            return best
        elif which.isdecimal() and checkpoint_folder(run.checkpoints, int(which)) in folders:
            folder = checkpoint_folder(run.checkpoints, int(which))
        else:
            raise DataError(f"{run.path}: no checkpoint {which!r}; there are newest, best and the steps {steps}")
        return folder, check_checkpoint(folder)
    except CheckpointError as error:
        raise DataError(str(error)) from None


def _digest(config: ExperimentConfig, weights: Any) -> str:
    """What a result depends on: settings, draft, prompts and how they are shown, and the kind of device."""
    from dflash_core.data import content_identity, expand_files
    from dflash_core.training.devices import device_kind

    prompts = [content_identity(file) for file in expand_files([config.data.held_out or ""])]
    shown_as = [dict(config.data.columns), dict(config.data.template_variables)]
    settings = config.evaluate.model_dump(mode="json", exclude=WHILE_TRAINING)
    device = [device_kind(config.topology), config.topology.threads_per_device]
    return digest_json([SCHEMA_VERSION, settings, weights, prompts, shown_as, device])


def _finished(folder: Path, digest: str) -> dict[str, Any] | None:
    """The result in a folder, if it is this evaluation's."""
    try:
        saved = read_json(folder / RESULT_FILE)
    except (OSError, ValueError):
        return None
    if not isinstance(saved, dict) or saved.get("digest") != digest or not (folder / PROMPTS_FILE).is_file():
        return None
    return {key: value for key, value in saved.items() if key != "digest"}


@dataclass(frozen=True)
class Measured:
    """An evaluation, that of the untrained draft, and the result that is shown."""

    trained: Evaluation
    untrained: Evaluation | None
    result: dict[str, Any]


def _measure(config: ExperimentConfig, folder: Path, progress: Progress | None, *, is_runs: bool) -> Measured:
    """Decode the held-out prompts with the draft in `folder`, some with an untrained one, and time both ways of decoding.

    A run's draft (`is_runs`) must be the one that its experiment describes; any other must fit the target.
    """
    import torch

    from dflash_core.data import load_tokenizer, read_prompts
    from dflash_core.evaluation import Baseline, evaluate_draft, measure_speed
    from dflash_core.model.target import FrozenTarget
    from dflash_core.model.weights import load_draft
    from dflash_core.training.devices import device_kind

    draft, settings, model = load_draft(folder), config.evaluate, config.target
    spec = draft.spec  # never made up again: the taps are those that the draft was trained with
    if is_runs and spec != draft_spec(config):
        raise DataError(f"{folder}: the run's config.yaml describes another draft or target")
    _check_fits(spec, config, folder)
    _check_finite(draft, folder)
    prompts = read_prompts(
        config.data.held_out or "",
        load_tokenizer(target_folder(config)),
        settings.max_prompts,
        columns={str(ours): theirs for ours, theirs in config.data.columns.items()},
        template_variables=config.data.template_variables,
    )
    torch.set_num_threads(config.topology.threads_per_device)
    device = device_kind(config.topology)
    target = FrozenTarget(
        target_folder(config), spec.target_layer_ids, model.dtype, model.attn_implementation, device, model.feature_dtype
    )
    limit, batch = settings.max_new_tokens, settings.batch_prompts
    baseline = Baseline(target, limit, batch) if settings.check_lossless else None
    measure = partial(evaluate_draft, batch_prompts=batch, bootstrap_samples=settings.bootstrap_samples)
    trained = measure(target, draft.to(device), prompts, limit, baseline, progress)
    untrained = None
    if some := prompts[: settings.untrained_prompts]:
        fresh = _untrained_draft(spec, config.train.seed).to(device)
        untrained = measure(target, fresh, some, limit, baseline)
    speed = measure_speed(target, draft, [prompt.input_ids for prompt in prompts], limit, batch, settings.speed_prompts)
    return Measured(trained, untrained, _result(trained, untrained, speed))


def _untrained_draft(spec: DraftSpec, seed: int) -> DFlashDraft:
    """A draft before any training, in fp32 on the CPU."""
    from dflash_core.model.draft import DFlashDraft

    return DFlashDraft(spec).initialise(seed).eval()


def _check_finite(draft: DFlashDraft, folder: Path) -> None:
    """Raises DataError for weights that are not finite: such a draft would pass for one that is merely bad."""
    for name, tensor in draft.state_dict().items():
        if not bool(tensor.isfinite().all()):
            raise DataError(f"{folder}: tensor {name} holds numbers that are not finite")


def _check_fits(spec: DraftSpec, config: ExperimentConfig, folder: Path) -> None:
    """Raises DataError where the draft was made for another target than the experiment's."""
    from dflash_core.model.target import read_target_shape

    shape = read_target_shape(target_folder(config))
    pairs = {
        "hidden_size": (spec.hidden_size, shape.hidden_size),
        "vocab_size": (spec.vocab_size, shape.vocab_size),
        "num_target_layers": (spec.num_target_layers or shape.num_layers, shape.num_layers),  # some published files do not say
    }
    for key, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise DataError(f"{folder}: made for a target with {key} {ours}; {config.target.path} has {theirs}")
    if not spec.target_layer_ids or not all(0 <= layer < shape.num_layers for layer in spec.target_layer_ids):
        raise DataError(f"{folder}: target_layer_ids {list(spec.target_layer_ids)} are not layers of {config.target.path}")


def _result(trained: Evaluation, untrained: Evaluation | None, speed: dict[str, Any]) -> dict[str, Any]:
    """What is shown, and kept in the manifest or in `evaluation.json`."""
    overall, samples = trained.overall, trained.bootstrap_samples
    intervals = {name: part.interval(samples) for name, part in trained.by_source.items()}
    num_plain, num_drafted = trained.num_plain_forwards, len(overall.rounds)
    forwards = {
        "num_plain_forwards": num_plain,
        "num_speculative_forwards": num_drafted,
        "target_forwards_saved": num_plain / num_drafted if num_drafted else None,
    }
    as_lists = {name: None if ends is None else list(ends) for name, ends in intervals.items()}
    return {
        "acceptance_length": overall.acceptance_length,
        "acceptance_interval": as_lists["all"],
        "acceptance_length_untrained": None if untrained is None else untrained.overall.acceptance_length,
        "lossless": trained.lossless,
        "mismatches": list(trained.mismatches),
        "differences": [difference.as_dict() for difference in trained.differences],
        "num_prompts": overall.num_prompts,
        "num_tokens": overall.num_tokens,
        "num_target_forwards": num_drafted,
        "by_source": {name: part.acceptance_length for name, part in trained.by_source.items()},
        "interval_by_source": as_lists,
        "histogram": overall.histogram(),
        "conditional_by_position": overall.conditional(),
        "prefix_survival_by_position": overall.prefix_survival(),
        "speed": {**forwards, **speed},
    }


def _training(run: RunFolder, next_step: int) -> dict[str, Any]:
    """What stands behind a checkpoint: steps, anchors trained on, and the time of these steps; None where no metrics say it.

    A step that was trained again after a resume counts once.
    """
    from dflash_core.analysis.reader import last_attempts, numbers, read_stream

    rows = last_attempts(read_stream(run.path, "steps", compact=False))
    seconds = anchors = None
    if len(rows):
        behind = numbers(rows, "step") < next_step
        anchors = int(numbers(rows, "num_anchors", missing=0)[behind].sum())
        seconds = float(numbers(rows, "step_s", missing=0)[behind].sum())
    return {
        "steps": next_step,
        "num_anchors": anchors,
        "seconds": seconds,
        "hours": None if seconds is None else seconds / 3600,
    }


def _log_rows(run: RunFolder, manifest: dict[str, Any], measured: Measured, step: int) -> None:
    """Write the `evals` rows of a run's own evaluation."""
    from dflash_core.metrics.sinks import JsonlSink, RunLog

    rows = measured.trained.rows("trained", step)
    if measured.untrained is not None:
        rows += measured.untrained.rows("untrained", 0)
    rows += [
        {"kind": "trained", "step": step, "source": "all", "position": None, "metric": metric, "value": value}
        for metric, value in _speed_values(measured.result["speed"]).items()
    ]
    log_file = RunLog(JsonlSink(run.metrics), manifest["run_id"], int(manifest.get("attempt", 0)))
    try:
        for row in rows:
            log_file.log("evals", row)
    finally:
        log_file.close()


def _speed_values(speed: dict[str, Any]) -> dict[str, float | None]:
    values = {"target_forwards_saved": speed["target_forwards_saved"]}
    for name in ("single", "batched"):
        for key in ("plain_s_per_token", "speculative_s_per_token", "speedup"):
            values[f"{name}_{key}"] = None if speed[name] is None else speed[name][key]
    return values


def _write_prompts(folder: Path, measured: Measured) -> None:
    from dflash_core.metrics.sinks import encode_row

    write_atomically(folder / PROMPTS_FILE, b"".join(encode_row(row) for row in measured.trained.prompt_rows()))


def _write(folder: Path, result: dict[str, Any], measured: Measured, digest: str) -> None:
    """Both files of an evaluation that stands by itself; the one that says it is finished last."""
    (folder / RESULT_FILE).unlink(missing_ok=True)
    _write_prompts(folder, measured)
    write_json(folder / RESULT_FILE, {**result, "digest": digest})
