"""Many texts to token ids, fast.

Tokenizers cut a text at its added tokens before anything else, and what stands between two of them is tokenized on its
own. So it can be done once for texts that come again and again: the headers of turns, a system prompt. What is left
goes to the tokenizer in one call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Of the texts that may come again. When so many are known, all are forgotten: what does come again is soon known anew.
LONGEST_KNOWN, MOST_KNOWN = 256, 2**14


class PieceEncoder:
    """Encodes texts as `Tokenizer.encode` does each of them, without the special tokens that it adds around."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._known: dict[str, list[int]] = {}
        added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if not token.normalized}
        flags = [
            token.lstrip or token.rstrip or token.single_word
            for token in tokenizer.added_tokens_decoder.values()
            if not token.normalized
        ]
        # Tokens that take in the space beside them cannot be cut out without a look at their neighbours.
        self._ids = {} if any(flags) else added
        # The longest of those that begin at the same place, as the tokenizer takes them.
        alternatives = "|".join(re.escape(content) for content in sorted(self._ids, key=len, reverse=True))
        self._cut = re.compile(f"({alternatives})") if alternatives else None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text."""
        cut = [self._cut.split(text) if self._cut is not None else [text] for text in texts]
        if len(self._known) > MOST_KNOWN:
            self._known.clear()
        known = self._known
        wanted: dict[str, list[int]] = {}
        for parts in cut:
            for part in parts[::2]:
                if part and part not in known:
                    wanted[part] = []
        for part, encoding in zip(wanted, self._backend.encode_batch_fast(list(wanted), add_special_tokens=False), strict=True):
            wanted[part] = encoding.ids
            if len(part) <= LONGEST_KNOWN:
                known[part] = wanted[part]
        return [self._joined(parts, wanted) for parts in cut]

    def _joined(self, parts: list[str], wanted: dict[str, list[int]]) -> list[int]:
        ids: list[int] = []
        for number, part in enumerate(parts):
            if number % 2:
                ids.append(self._ids[part])
            elif part:
                ids += wanted[part] if part in wanted else self._known[part]
        return ids
