"""Conversation in, token ids and loss mask out, exactly as the target would have seen and written them.

What is supervised, in each assistant turn: the content and the end-of-turn token, nothing else. The rendered text is
cut at the edges of these spans and **every piece is tokenized on its own**. That is what serving does: the prompt ends
where the answer begins, so no token straddles the edge, and the mask is right at the token level by construction. It
also lets one batched call of the fast tokenizer do all the work. Tokenizers that put a space in front of each text
(older SentencePiece ones) cannot be cut like this; they encode the whole text, and only tokens that lie wholly inside
a span are supervised.

Where a span begins comes from the template's `{% generation %}` marks if it has any. Otherwise the conversation is
rendered in growing prefixes: the prompt of each answer must be a prefix of the whole, and so must the text after it.
A template that rewrites history (drops earlier reasoning, say) is refused, for its masks would be guesses. What such a
template inserts in front of the content (an empty think block, a channel header) is not supervised; what an author put
inside a mark is.

Content that holds a special token's text is refused. `<|end|>` inside a message would become the very token that ends
a turn, and a user could write turns; encoding it as plain text instead would teach an answer that the target never
gives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dflash_core.data.sources import BadRow, Conversation, Message
from dflash_core.data.tokenizer import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text; `spans` are the supervised character ranges [start, end), ascending, not empty."""

    text: str
    spans: tuple[tuple[int, int], ...]
    sample_id_suffix: str = ""

    def pieces(self) -> list[tuple[str, bool]]:
        """The text cut at the edges of the spans, each piece with whether it is supervised; no piece is empty."""
        cuts, position = [], 0
        for start, end in self.spans:
            cuts += [(self.text[position:start], False), (self.text[start:end], True)]
            position = end
        cuts.append((self.text[position:], False))
        return [cut for cut in cuts if cut[0]]


class _Region(NamedTuple):
    """Where an answer's content (before `content_end`) and the end of its turn (before `end`) are looked for."""

    start: int
    content_end: int
    end: int


class _Answer(NamedTuple):
    """Content is text[start:end], then comes the end-of-turn token, up to `turn_end`."""

    start: int
    end: int
    turn_end: int


@dataclass(frozen=True, slots=True)
class Encoded:
    """`input_ids` int32 [S], `loss_mask` bool [S]."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]


class ChatEncoder:
    """Renders and encodes conversations with one tokenizer and its chat template.

    Rendering is per conversation and raises `BadRow`; encoding takes many rendered ones, for the tokenizer is fast
    only in batches.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        template_variables: Mapping[str, Any] | None = None,
        rewritten_history: str = "reject",
    ) -> None:
        self._template = str(tokenizer.get_chat_template())
        self._has_marks = GENERATION_MARK.search(self._template) is not None
        self._variables: dict[str, Any] = {**tokenizer.special_tokens_map, **(template_variables or {})}
        self._rewritten_history = rewritten_history
        self._backend = tokenizer.backend_tokenizer
        # A tokenizer.json may come with a truncation, which would shorten pieces in silence.
        self._backend.no_truncation()
        self._backend.no_padding()
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        special.update(tokenizer.all_special_tokens)
        self._special = re.compile("|".join(re.escape(token) for token in sorted(special, key=len, reverse=True)) or "(?!)")
        self._pieces_stand_alone = self._ids("a\nb") == self._ids("a\n") + self._ids("b")

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def render(self, conversation: Conversation) -> list[Rendered]:
        """The sequences of a conversation."""
        try:
            return [self._render_one(conversation)]
        except BadRow as error:
            if error.reason != "template rewrites history" or self._rewritten_history != "each_answer":
                raise
        ends = [index for index, message in enumerate(conversation.messages, start=1) if message.role == "assistant"]
        pieces = [self._render_one(replace(conversation, messages=conversation.messages[end - 2 : end])) for end in ends]
        return [replace(piece, sample_id_suffix=f"#{number}") for number, piece in enumerate(pieces, start=1)]

    def _render_one(self, conversation: Conversation) -> Rendered:
        """Text and supervised spans of a conversation.

        With `finish_reason == "length"` the text ends with the content of the last answer: it was cut there, so no
        end-of-turn token belongs after it.

        Raises:
            BadRow: content holds a special token, or the template refuses, rewrites history, alters an answer, or ends
                one without a special token.
        """
        messages = conversation.messages
        answers = [message.content for message in messages if message.role == "assistant"]
        if not answers:
            raise BadRow("no assistant turn")
        self._check_no_special_tokens(messages)
        text, regions = self._marked_regions(messages) if self._has_marks else self._prefix_regions(messages)
        spans = []
        for number, (region, answer) in enumerate(zip(regions, answers, strict=True), start=1):
            found = self._find_answer(text, region, answer, number)
            # A mark says where the target's own text begins; without one only the content is surely its own.
            spans.append((region.start if self._has_marks else found.start, found.turn_end))
        if conversation.finish_reason == "length":
            spans[-1] = (spans[-1][0], found.end)
            text = text[: found.end]
        return Rendered(text, tuple(spans))

    def _check_no_special_tokens(self, messages: Sequence[Message]) -> None:
        for number, message in enumerate(messages, start=1):
            found = self._special.search(message.content)
            if found:
                raise BadRow("special token in content", f"message {number}, character {found.start() + 1}: {found[0]}")

    def _marked_regions(self, messages: Sequence[Message]) -> tuple[str, list[_Region]]:
        text, marks = self._run_template(messages, marks=True)
        num_answers = sum(message.role == "assistant" for message in messages)
        if len(marks) != num_answers:
            raise BadRow("template marks do not fit", f"{len(marks)} generation marks for {num_answers} answers")
        nexts = [*(start for start, _ in marks[1:]), len(text)]
        return text, [_Region(start, end, following) for (start, end), following in zip(marks, nexts, strict=True)]

    def _prefix_regions(self, messages: Sequence[Message]) -> tuple[str, list[_Region]]:
        text, _ = self._run_template(messages)
        regions, reached = [], ""
        for index, message in enumerate(messages):
            if message.role != "assistant":
                continue
            prompt, _ = self._run_template(messages[:index], add_generation_prompt=True)
            answered = text if index + 1 == len(messages) else self._run_template(messages[: index + 1])[0]
            if not (prompt.startswith(reached) and answered.startswith(prompt) and text.startswith(answered)):
                raise BadRow("template rewrites history", f"message {index + 1}")
            regions.append(_Region(len(prompt), len(answered), len(answered)))
            reached = answered
        return text, regions

    def _run_template(
        self, messages: Sequence[Message], *, marks: bool = False, add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                conversations=[[message._asdict() for message in messages]],
                chat_template=self._template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise BadRow("template refuses", one_line(error)) from error
        return texts[0], spans[0] if marks else []

    def _find_answer(self, text: str, region: _Region, answer: str, number: int) -> _Answer:
        """Where the content of an answer stands in the rendered text.

        The content is what stands right before a special token, the end-of-turn token; some templates trim it, or put
        white space between the two. Looking for it from the token backwards cannot hit a chance repetition of the
        content in what the template inserts.
        """
        forms = (answer, answer.rstrip(), answer.lstrip(), answer.strip())
        for token in self._special.finditer(text, region.start, region.end):
            before = text[region.start : token.start()]
            for candidate in (before, before.rstrip()):
                form = next((form for form in forms if candidate.endswith(form)), None)
                end = region.start + len(candidate)
                if form is not None and end <= region.content_end:
                    return _Answer(end - len(form), end, token.end())
        if answer.strip() in text[region.start : region.content_end]:
            raise BadRow("no end-of-turn token", f"answer {number}: no special token follows it")
        raise BadRow("template alters the answer", f"answer {number}")

    def encode(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        """Token ids and loss masks, in order; nothing is truncated."""
        if not self._pieces_stand_alone:
            return self._encode_whole(rendered)
        pieces = [item.pieces() for item in rendered]
        encodings = self._backend.encode_batch_fast([text for item in pieces for text, _ in item], add_special_tokens=False)
        remaining = iter(encodings)
        return [_join([(next(remaining).ids, supervised) for _, supervised in item]) for item in pieces]

    def _encode_whole(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        encodings = self._backend.encode_batch([item.text for item in rendered], add_special_tokens=False)
        results = []
        for item, encoding in zip(rendered, encodings, strict=True):
            offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            mask = np.zeros(len(offsets), dtype=np.bool_)
            for start, end in item.spans:
                mask |= (offsets[:, 0] >= start) & (offsets[:, 1] <= end)
            results.append(Encoded(np.asarray(encoding.ids, dtype=np.int32), mask))
        return results

    def encode_prompt(self, messages: Sequence[Message]) -> NDArray[np.int32]:
        """Ids of a prompt up to the point where the target answers, int32 [S]; raises `BadRow`."""
        self._check_no_special_tokens(messages)
        text, _ = self._run_template(messages, add_generation_prompt=True)
        return np.asarray(self._ids(text), dtype=np.int32)


def _join(pieces: list[tuple[list[int], bool]]) -> Encoded:
    lengths = [len(ids) for ids, _ in pieces]
    input_ids = np.empty(sum(lengths), dtype=np.int32)
    loss_mask = np.empty(len(input_ids), dtype=np.bool_)
    position = 0
    for (ids, supervised), length in zip(pieces, lengths, strict=True):
        input_ids[position : position + length] = ids
        loss_mask[position : position + length] = supervised
        position += length
    return Encoded(input_ids, loss_mask)
