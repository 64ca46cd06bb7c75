"""Self-check of the mask row: a row of the target's embedding that is there, is a usable vector, and means nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_core.data import Dataset, load_tokenizer
from dflash_core.errors import ConfigError
from dflash_core.model.target import FrozenTarget
from dflash_core.training.self_check_report import Figures

KEY = "target.mask_token_id"
# Sequences, evenly spread, and tokens that are looked through for the mask; about half a second.
MOST_SEQUENCES, MOST_TOKENS = 2000, 2_000_000
# A mask in this share of the sequences is a mark of the chat template, and not a text that somebody has quoted.
MARK_SHARE = 0.01
SPARE_NAMES = re.compile(r"mask|reserved|unused|spare|extra|placeholder", re.IGNORECASE)


class _Use(NamedTuple):
    """Which ids the looked-through sequences hold [V], and in which share of them the mask stands."""

    seen_V: NDArray[np.bool_]
    num_sequences: int
    mask_share: float
    mask_supervised: bool


def check_mask(target: FrozenTarget, folder: Path, mask: int, dataset: Dataset | None) -> Figures:
    """The mask is a finite row that is not zero, no token with a meaning of its own, and not used in the data.

    `dataset` is None where there is none yet. Returns `mask_sequences`, the number of sequences that were looked through.
    """
    embedding = target.embedding_VH
    if not 0 <= mask < len(embedding):
        raise ConfigError(f"{KEY}: {mask} is not a row of the target's embedding (0 to {len(embedding) - 1})")
    tokenizer: Any = load_tokenizer(folder)
    taken = _meanings(target, tokenizer)
    use = None if dataset is None else _look_through(dataset, mask, len(embedding))
    cause = _cause(embedding[mask], mask, taken, use)
    if cause is not None:
        free = _unused(tokenizer, embedding, taken, use)
        advice = "choose an unused row of the embedding" if free is None else f"id {free} is unused"
        raise ConfigError(f"{KEY}: {mask} {cause}; {advice}")
    return {"mask_sequences": 0 if use is None else use.num_sequences}


def _cause(row_H: Tensor, mask: int, taken: dict[int, str], use: _Use | None) -> str | None:
    """What is wrong with the mask, or None."""
    if mask in taken:
        return f"is the {taken[mask]} token, so that masked slots would mean something else"
    if not bool(torch.isfinite(row_H).all()):
        return "is a row of the embedding that is not finite"
    if not bool((row_H != 0).any()):
        return "is an all-zero row of the embedding"
    if use is not None and use.mask_supervised:
        return "occurs in the supervised text of the dataset, so that the draft would be trained to propose its own mask"
    if use is not None and use.mask_share > MARK_SHARE:
        return f"occurs in {use.mask_share:.0%} of the dataset's sequences"
    return None


def _meanings(target: FrozenTarget, tokenizer: Any) -> dict[int, str]:
    """Ids that mean something: padding, end (of config, generation config and tokenizer), beginning, unknown."""
    config = target.model.config.get_text_config(decoder=True)
    generation = getattr(target.model, "generation_config", None)
    sources = [(source, name) for source in (config, generation, tokenizer) for name in ("pad", "bos", "eos")]
    taken: dict[int, str] = {}
    for source, name in [*sources, (tokenizer, "unk")]:
        value = getattr(source, f"{name}_token_id", None)
        for token in value if isinstance(value, list | tuple) else [value]:
            if token is not None:
                taken[int(token)] = {"pad": "padding", "bos": "beginning", "eos": "end", "unk": "unknown"}[name]
    return taken


def _look_through(dataset: Dataset, mask: int, num_rows: int) -> _Use:
    """Read sequences from all over the dataset."""
    count = min(len(dataset), MOST_SEQUENCES)
    chosen = [number * len(dataset) // count for number in range(count)]
    dataset.check_files(chosen)
    seen, left, read, holding, supervised = np.zeros(num_rows, dtype=np.bool_), MOST_TOKENS, 0, 0, False
    for index in np.random.default_rng(0).permutation(chosen).tolist():
        tokens, loss_mask = dataset.tokens(index)
        seen[tokens] = True
        read, left = read + 1, left - len(tokens)
        hits = tokens == mask
        holding += bool(hits.any())
        supervised = supervised or bool((hits & loss_mask).any())
        if left <= 0:
            break
    return _Use(seen, read, holding / read, supervised)


def _unused(tokenizer: Any, embedding: Tensor, taken: dict[int, str], use: _Use | None) -> int | None:
    """An id to take instead: a spare special token, or a row behind the tokenizer's last id; None if none is found."""
    added = {int(token): str(name) for token, name in tokenizer.added_tokens_decoder.items()}
    spare = [token for token, name in sorted(added.items()) if SPARE_NAMES.search(name)]
    for token in (token for token in [*spare, *range(len(tokenizer), len(embedding))] if token < len(embedding)):
        if (use is None or not use.seen_V[token]) and _cause(embedding[token], token, taken, None) is None:
            return int(token)
    return None
