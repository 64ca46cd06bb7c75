"""Embedding and head of a target, read alone from its safetensors files: the target itself is not loaded.

Shapes: V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash_core.model.spec import DraftSpec


@dataclass(frozen=True)
class TargetRows:
    """The frozen rows that a draft works with, as the target's files have them; a tied head is the embedding."""

    embedding_VD: Tensor
    head_VD: Tensor


def read_target_rows(folder: Path, spec: DraftSpec) -> TargetRows | None:
    """The rows of the target in `folder`; None where its files do not hold them under the usual names and in this shape."""
    shape = (spec.vocab_size, spec.hidden_size)
    try:
        embedding = _only_one(folder, "embed_tokens.weight", shape)
        head = embedding if spec.tie_word_embeddings else _only_one(folder, "lm_head.weight", shape)
    except (OSError, SafetensorError):
        return None
    return None if embedding is None or head is None else TargetRows(embedding, head)


def _only_one(folder: Path, ending: str, shape: tuple[int, int]) -> Tensor | None:
    """The tensor with this ending and shape, if there is exactly one: a model of several parts may have more."""
    found = list(_places(folder, ending, shape))
    if len(found) != 1:
        return None
    path, name = found[0]
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def _places(folder: Path, ending: str, shape: tuple[int, int]) -> Iterator[tuple[Path, str]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name.endswith(ending) and tuple(file.get_slice(name).get_shape()) == shape:
                    yield path, name
