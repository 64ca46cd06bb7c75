"""Samples of a dataset as a reader sees them: decoded text in which the supervised tokens stand out."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SUPERVISED_ON, SUPERVISED_OFF = "\x1b[30;42m", "\x1b[0m"  # black on green, readable on dark and light terminals
OPENING, CLOSING = "⟦", "⟧"
# Besides control characters, those that change the direction of text or break lines without saying so.
INVISIBLE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


def show_samples(
    samples: Iterable[tuple[str, NDArray[np.int32], NDArray[np.bool_]]],
    tokenizer: PreTrainedTokenizerFast,
    *,
    colour: bool,
    sources: Iterable[str] | None = None,
) -> Iterator[str]:
    """Lines that print samples: one header line each, then its text with special tokens, supervised runs marked.

    Args:
        samples: sample id, `input_ids` int32 [S] and `loss_mask` bool [S] of each.
        colour: whether supervised text is coloured with ANSI codes; else it stands between ⟦ and ⟧.
        sources: the source of each sample, shown in its header.

    A character whose bytes lie on both sides of an edge of the mask is shown on the side of its first byte.
    """
    names = iter(sources) if sources is not None else None
    for sample_id, input_ids, loss_mask in samples:
        source = f"{_visible(next(names))}, " if names is not None else ""
        num_supervised = int(loss_mask.sum())
        share = 100 * num_supervised / max(1, len(loss_mask))
        yield (
            f"--- {_visible(sample_id).replace(chr(10), '␊')}: {source}{len(input_ids)} tokens, "
            f"{num_supervised} supervised ({share:.0f} %)"
        )
        marked = "".join(_marked(text, flag, colour) for text, flag in _runs(input_ids, loss_mask, tokenizer))
        yield from marked.split("\n")


def _runs(
    input_ids: NDArray[np.int32], loss_mask: NDArray[np.bool_], tokenizer: PreTrainedTokenizerFast
) -> Iterator[tuple[str, bool]]:
    """The text of each run of equally supervised tokens; a run that ends inside a character is given the rest of it."""
    ids = input_ids.tolist()
    edges = [0, *(np.flatnonzero(np.diff(loss_mask.astype(np.int8))) + 1).tolist(), len(ids)]
    taken = 0
    for start, end in itertools.pairwise(edges):
        if taken >= end:
            continue
        begin, stop = max(start, taken), end
        text = _decode(ids[begin:stop], tokenizer)
        while text.endswith("\ufffd") and stop < min(len(ids), end + 3):
            longer = _decode(ids[begin : stop + 1], tokenizer)
            stop += 1
            if longer.count("\ufffd") < text.count("\ufffd"):
                text = longer
                break
        else:
            stop = end
        taken = stop
        yield text, bool(loss_mask[start])


def _decode(ids: list[int], tokenizer: PreTrainedTokenizerFast) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _visible(text: str) -> str:
    return INVISIBLE.sub(lambda found: ascii(found[0])[1:-1], text)


def _marked(text: str, supervised: bool, colour: bool) -> str:
    text = _visible(text)
    if not supervised or not text:
        return text
    if not colour:
        return f"{OPENING}{text}{CLOSING}"
    # A pager or a log shows line by line, so that each line must switch the colour on and off by itself.
    return "\n".join(f"{SUPERVISED_ON}{line}{SUPERVISED_OFF}" if line else "" for line in text.split("\n"))
