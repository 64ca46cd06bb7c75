"""Answers without a server: rows are taken in groups, and each group's next prompts are decoded together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from dflash_core.data.regenerate_inputs import InputRow
from dflash_core.data.regenerate_tally import Tally
from dflash_core.data.regenerate_turns import NewAnswer, Remade, apart
from dflash_core.data.rows import BadRow
from dflash_core.data.template import ChatEncoder
from dflash_core.data.turns import check_characters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Tokens = tuple[int, ...]
# Prompts and a number for each (what is drawn depends on it), to new tokens: with an end token last, or cut by the limit.
Decode = Callable[[Sequence[Tokens], Sequence[int]], Sequence[Tokens]]


def answer_here(
    rows: Iterable[InputRow],
    tokenizer: PreTrainedTokenizerFast,
    encoder: ChatEncoder,
    decode: Decode,
    end_tokens: Sequence[int],
    longest_prompt: int | None,
    group_size: int,
    tally: Tally,
) -> None:
    """Answer all rows, `group_size` at once; a row is recorded when it ends.

    Args:
        longest_prompt: tokens of a prompt beyond which an answer does not fit into the target's positions; None: any.
    """
    work = _Local(tokenizer, encoder, decode, frozenset(end_tokens), longest_prompt, tally)
    remaining = iter(rows)
    while group := list(islice(remaining, group_size)):
        active = []
        for row in group:
            if isinstance(row.asked, BadRow):
                tally.skip(row, row.asked)
            else:
                active.append((row, row.asked))
        turn = 0
        while active:
            active = work.one_turn(active, turn)
            turn += 1


class _Local:
    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        encoder: ChatEncoder,
        decode: Decode,
        end_tokens: frozenset[int],
        longest_prompt: int | None,
        tally: Tally,
    ) -> None:
        self._tokenizer, self._encoder, self._decode = tokenizer, encoder, decode
        self._end_tokens, self._longest, self._tally = end_tokens, longest_prompt, tally

    def one_turn(self, active: Sequence[tuple[InputRow, Remade]], turn: int) -> list[tuple[InputRow, Remade]]:
        """The next answer of each row; returns those that need another one."""
        asked = [(row, remade, ids) for row, remade in active if (ids := self._prompt(row, remade)) is not None]
        if not asked:
            return []
        found = self._decode([ids for _, _, ids in asked], [row.key * 64 + turn for row, _, _ in asked])
        going_on = []
        for (row, remade, ids), tokens in zip(asked, found, strict=True):
            try:
                remade.take(self._answer(tokens, len(ids)))
                if remade.prompt() is None:
                    self._tally.finish(row)
                else:
                    going_on.append((row, remade))
            except BadRow as error:
                self._tally.fail(row, error)
        return going_on

    def _prompt(self, row: InputRow, remade: Remade) -> Tokens | None:
        """The prompt's ids; None if the row failed."""
        try:
            ids = self._encoder.encode_prompt(remade.prompt() or (), remade.conversation.tools)
            if self._longest is not None and len(ids) > self._longest:
                raise BadRow("over-long", f"prompt of {len(ids)} tokens, at most {self._longest} leave room for an answer")
        except BadRow as error:
            self._tally.fail(row, error)
            return None
        return tuple(ids.tolist())

    def _answer(self, tokens: Tokens, num_prompt_tokens: int) -> NewAnswer:
        ended = bool(tokens) and tokens[-1] in self._end_tokens
        text = str(self._tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=False))
        check_characters(text, "answer")
        reason = "stop" if ended else "length"
        content, reasoning = apart(text, reason)
        return NewAnswer(content, reason, reasoning, (), num_prompt_tokens, len(tokens))
