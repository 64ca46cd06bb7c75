"""The model card of an export: where the draft comes from, what was measured, and how it is served.

Lines without a fact are left out. A card names no folder of the machine it was written on.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from dflash_core.export.run_facts import RunFacts
from dflash_core.model.anchors import default_gamma
from dflash_core.model.spec import DraftSpec

DRAFT_FOLDER = "DRAFT_FOLDER"
# How a Hugging Face cache folder spells a repository.
_CACHED = re.compile(r"models--([^/\\]+?)--([^/\\]+)")
_LOSSES = {
    "cross_entropy": "cross-entropy on the labels with decaying slot weights",
    "dpace": "cross-entropy on the labels with D-PACE's weights",
    "kl": "Kullback-Leibler divergence from the target's own distribution, with decaying slot weights",
    "total_variation": "total variation distance to the target's own distribution, with decaying slot weights",
}


def target_name(path: str) -> str:
    """What a target is called without the folders it lies in: a repository's name, `package:NAME`, or the last folder."""
    if cached := _CACHED.search(path):
        return f"{cached[1]}/{cached[2]}"
    return path if path.startswith("package:") else re.split(r"[/\\]", path.rstrip("/\\"))[-1]


def card_text(facts: RunFacts, spec: DraftSpec, dtype: str, form: str) -> str:
    """The whole card as Markdown with a YAML head.

    Args:
        dtype: number format of the exported tensors.
        form: name of the export's format.
    """
    target = target_name(str(facts.setting("target", "path") or facts.manifest.get("target") or ""))
    head = {
        "library_name": "vllm",
        **({"base_model": target} if target else {}),
        "pipeline_tag": "text-generation",
        "tags": ["dflash", "speculative-decoding", "draft-model"],
    }
    title = f"DFlash drafter for {target}" if target else "DFlash drafter"
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---",
        f"# {title}",
        "A small network that drafts a block of tokens in one pass, from hidden states that the target model has computed"
        " anyway (DFlash, arXiv 2602.06036). The target checks the block in one forward pass of its own, so with greedy"
        " decoding the text is the target's. The drafter has no embedding and no head of its own and works with this"
        " target alone." + (" The file carries copies of the target's embedding and head." if form == "speculators" else ""),
        _section("Drafter", _drafter(facts, spec, dtype, target)),
        _section("Measured", _measured(facts)),
        _section("Data and recipe", _recipe(facts, spec)),
        _section("Training", _training(facts)),
        _serving(spec, target or "TARGET", facts.setting("data", "template_variables")),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(title: str, lines: Iterable[str]) -> str:
    listed = "\n".join(f"- {line}" for line in lines)
    return f"## {title}\n\n{listed}" if listed else ""


def _drafter(facts: RunFacts, spec: DraftSpec, dtype: str, target: str) -> list[str]:
    kinds = spec.to_hf_config()["layer_types"]
    sliding = sum(kind == "sliding_attention" for kind in kinds)
    window = f", {sliding} of them with a sliding window of {spec.to_hf_config()['sliding_window']}" if sliding else ""
    lines = [
        f"Target: {target}" if target else "",
        f"Digest of the target's weights: `{facts.identity('target_weights')}`" if facts.identity("target_weights") else "",
        f"Layers: {spec.num_layers}{window}; width {spec.hidden_size}, MLP {spec.intermediate_size}",
        f"Tapped target layers, from 0: {', '.join(map(str, spec.target_layer_ids))} of {spec.num_target_layers}",
        f"Block size: {spec.block_size} (the anchor and {spec.block_size - 1} drafted tokens); mask token {spec.mask_token_id}",
        f"Rotary base: {spec.rope_theta:g}, unscaled, over the whole head",
        f"Number format of the weights: {dtype}",
        f"Checkpoint: step {facts.step:,}" if facts.step is not None else "",
    ]
    return [line for line in lines if line]


def _measured(facts: RunFacts) -> list[str]:
    found = facts.evaluation or {}
    length = _number(found.get("acceptance_length"))
    if length is None:
        other = facts.other_evaluation_step
        more = f"; another checkpoint of the run, of step {other:,}, was" if isinstance(other, int) else ""
        return [f"Nothing was measured of this checkpoint: how much of its drafts the target accepts is not known{more}."]
    prompts = f" on {found['num_prompts']} held-out prompts" if isinstance(found.get("num_prompts"), int) else ""
    tokens = f" ({found['num_tokens']:,} tokens)" if isinstance(found.get("num_tokens"), int) else ""
    lines = [
        f"Acceptance length, +1 included: {length:.2f}{_interval(found.get('acceptance_interval'))} tokens per target forward"
        f"{prompts}{tokens}, greedy decoding"
    ]
    untrained = _number(found.get("acceptance_length_untrained"))
    if untrained is not None:
        lines.append(f"The same network before training: {untrained:.2f}")
    by_source = found.get("by_source")
    if isinstance(by_source, Mapping) and len(by_source) > 1:
        named = {name: _length_of(part) for name, part in by_source.items()}
        lines.append("By source: " + ", ".join(f"{name} {x:.2f}" for name, x in named.items() if x is not None))
    if isinstance(found.get("lossless"), bool):
        equal = "equal to" if found["lossless"] else "NOT equal to"
        lines.append(f"Output {equal} the target's plain greedy decoding on the prompts that were compared")
    return lines


def _length_of(part: Any) -> float | None:
    return _number(part.get("acceptance_length") if isinstance(part, Mapping) else part)


def _interval(value: Any) -> str:
    if not isinstance(value, list | tuple) or len(value) != 2 or None in map(_number, value):
        return ""
    return f" (95 % interval {value[0]:.2f} to {value[1]:.2f})"


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


def _recipe(facts: RunFacts, spec: DraftSpec) -> list[str]:
    if not facts.config:
        return []
    train = facts.config.get("train")
    setting = train if isinstance(train, Mapping) else {}
    loss = str(setting.get("loss") or "")
    gamma = setting.get("loss_gamma") or default_gamma(spec.block_size)
    detail = f"alpha {setting.get('dpace_alpha')}" if loss == "dpace" else f"gamma {gamma:g}"
    name, fingerprint = facts.setting("data", "name"), facts.manifest.get("dataset_fingerprint")
    pairs = [
        ("Dataset", name and f"{name}" + (f", fingerprint `{fingerprint}`" if fingerprint else "")),
        ("Loss", loss and f"{_LOSSES.get(loss, loss)}, {detail}"),
        ("Peak learning rate", setting.get("lr")),
        ("Anchors per sequence, at most", setting.get("num_anchors")),
        ("Longest sequence", facts.setting("data", "max_length")),
        ("Batches per step", facts.setting("bucketing", "batches_per_step")),
        ("Order of batches", facts.setting("bucketing", "order")),
        ("Seed", setting.get("seed")),
        ("Number format of the draft's arithmetic", setting.get("compute_dtype")),
        ("Number format of the target", facts.setting("target", "dtype")),
    ]
    lines = [f"{key}: {value}" for key, value in pairs if value not in (None, "")]
    if facts.identity("draft.init_from"):
        lines.append(f"Training began with the weights of another drafter, digest `{facts.identity('draft.init_from')}`")
    return lines


def _training(facts: RunFacts) -> list[str]:
    lines = []
    if (done := facts.trained) is not None:
        lines += [
            f"Steps: {done.num_steps:,}; epochs begun: {done.num_epochs}",
            f"Anchors trained: {done.num_anchors:,}; supervised slots: {done.num_supervised:,}",
            f"Time of all steps: {_duration(done.seconds)}",
        ]
    devices = facts.provenance.get("devices")
    if isinstance(devices, list) and devices:
        machine = facts.provenance.get("machine")
        where = f" ({machine}, {facts.provenance.get('num_cpus')} CPUs)" if machine and "cpu" in devices else ""
        lines.append(f"Devices of a cell, the drafter's first: {', '.join(map(str, devices))}{where}")
        cells = facts.setting("topology", "cells")
        lines += [f"Cells: {cells}"] if cells is not None else []
    packages = facts.provenance.get("packages")
    if isinstance(packages, Mapping):
        named = [f"{name} {packages[name]}" for name in ("torch", "transformers") if name in packages]
        lines += [f"Software: {', '.join(named)}"] if named else []
    return lines


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _serving(spec: DraftSpec, target: str, variables: Any) -> str:
    named = shlex.quote(target)
    told = json.dumps({"method": "dflash", "model": DRAFT_FOLDER, "num_speculative_tokens": spec.block_size - 1})
    kinds = set(spec.to_hf_config()["layer_types"])
    runner = "VLLM_USE_V2_MODEL_RUNNER=1 " if len(kinds) > 1 else ""  # vLLM 0.32 refuses a mixture otherwise
    lines = [
        "## Serving",
        f"`{DRAFT_FOLDER}` is this folder, `{target}` the target's repository or folder.",
        f"vLLM:\n\n```bash\n{runner}vllm serve {named} --speculative-config '{told}'\n```",
        f"SGLang:\n\n```bash\npython -m sglang.launch_server --model-path {named} --speculative-algorithm DFLASH \\\n"
        f"    --speculative-draft-model-path {DRAFT_FOLDER} --speculative-num-draft-tokens {spec.block_size}\n```",
    ]
    if isinstance(variables, Mapping) and variables:
        shown = json.dumps({"chat_template_kwargs": dict(variables)}, ensure_ascii=False)
        lines.append(
            f"The chat template was applied with `{json.dumps(dict(variables), ensure_ascii=False)}`. Serve with the same"
            f" (`{shown}` in each request): a drafter that was trained without thinking drafts poorly in thinking mode, and"
            " the other way round."
        )
    elif variables is not None:
        lines.append(
            "The chat template was applied without variables of its own. Serve in the template's default mode: a drafter that"
            " was trained without thinking drafts poorly in thinking mode, and the other way round."
        )
    return "\n\n".join(lines)
