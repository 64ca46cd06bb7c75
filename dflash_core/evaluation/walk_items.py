"""What a walk needs of the target, made once: the greedy answers to the prompts, and the states of their positions.

Answers take one forward pass of the target per token, so they are kept on disk, under a name made of all that decides them: a
resume, or another run on the same target and prompts, finds them. States are kept in memory up to a number of bytes; those of
the other prompts are computed again for every walk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_core.data import Prompt
from dflash_core.evaluation.decode import greedy_decode
from dflash_core.evaluation.walk import WalkItem
from dflash_core.model.target import FrozenTarget
from dflash_core.provenance import digest_json, package_versions, read_json, write_json

log = logging.getLogger(__name__)
SCHEMA_VERSION = 1
DEFAULT_FEATURE_BYTES = 512 * 2**20

Tokens = tuple[int, ...]
# Greedy answers to prompts, in their order, of at most so many tokens.
Decode = Callable[[FrozenTarget, Sequence[Tokens], int], Iterable[Tokens]]


def decode_one_by_one(target: FrozenTarget, prompts: Sequence[Tokens], max_new_tokens: int) -> Iterator[Tokens]:
    """Plain greedy answers."""
    for prompt in prompts:
        yield greedy_decode(target, prompt, max_new_tokens).tokens


def prepare_walk(
    target: FrozenTarget,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    block_size: int,
    *,
    cache: Path | None = None,
    weights: str = "",
    max_feature_bytes: int = DEFAULT_FEATURE_BYTES,
    decode: Decode = decode_one_by_one,
    on_progress: Callable[[], None] = lambda: None,
) -> list[WalkItem]:
    """One item for each prompt.

    Args:
        max_new_tokens: the loop's limit; answers are decoded for B - 1 more (see `evaluation.walk`).
        cache: folder of the answers; None keeps them nowhere. A damaged file is made anew.
        weights: digest of the target's weights, for the name of the answers.
        max_feature_bytes: of the states that are kept in memory, in the order of the prompts.
        decode: makes the answers.
        on_progress: called after every piece of work, an answer or the states of one.
    """
    limit = max_new_tokens + block_size - 1
    tokens = [prompt.input_ids for prompt in prompts]
    key = answers_key(target, tokens, limit, weights)
    path = None if cache is None else cache / f"{key[:24]}.json"
    answers = None if path is None else _read(path, key, len(prompts), limit)
    if answers is None:
        answers = []
        for answer in decode(target, tokens, limit):
            answers.append(answer)
            on_progress()
        if path is not None:
            _write(path, key, answers)
    items, kept_bytes = [], 0
    for prompt, answer in zip(prompts, answers, strict=True):
        ended = answer[-1] in target.shape.eos_token_ids
        recomputed = partial(_features, target, prompt.input_ids + answer)
        item = WalkItem(prompt.input_ids, answer, max_new_tokens, ended, prompt.source, recomputed)
        size = item.num_context * len(target.layer_ids) * target.shape.hidden_size * target.feature_dtype.itemsize
        if item.num_anchors and kept_bytes + size <= max_feature_bytes:
            kept_bytes += size
            item = replace(item, features=partial(_first, item.features(item.num_context).cpu().contiguous()))
            on_progress()
        items.append(item)
    return items


def _features(target: FrozenTarget, tokens: Tokens, num_positions: int) -> Tensor:
    """The target's states of the first positions, [S, F]. Any thread may ask: the target records for each on its own."""
    return target.taps(torch.tensor([tokens[:num_positions]]))[0]


def _first(features_SF: Tensor, num_positions: int) -> Tensor:
    return features_SF[:num_positions]


def answers_key(target: FrozenTarget, prompts: Sequence[Tokens], limit: int, weights: str) -> str:
    """A digest of all that decides greedy answers; versions and devices count, because of ties within the rounding."""
    versions = {name: version for name, version in package_versions().items() if name in ("torch", "transformers")}
    settings = [str(target.model.dtype), str(target.model.config._attn_implementation), target.device.type, versions]
    return digest_json([SCHEMA_VERSION, weights, settings, list(target.shape.eos_token_ids), limit, prompts])


def _read(path: Path, key: str, count: int, limit: int) -> list[Tokens] | None:
    """The answers in a file that is whole and of this key; None where they have to be decoded."""
    if not path.exists():
        return None
    try:
        found: dict[str, Any] = read_json(path)
        answers = [tuple(answer) for answer in found["answers"]]
        is_whole = found["key"] == key and found["digest"] == digest_json(found["answers"])
        if is_whole and len(answers) == count and all(1 <= len(answer) <= limit for answer in answers):
            return answers
        reason = "its content has another digest than it says"
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    log.warning("%s: damaged (%s); the answers are decoded again", path, reason)
    return None


def _write(path: Path, key: str, answers: list[Tokens]) -> None:
    try:
        write_json(path, {"key": key, "answers": answers, "digest": digest_json(answers)})
    except OSError as error:  # the answers are there; a later run decodes them again
        log.warning("%s: the answers could not be kept: %s", path, error)
