"""Conversation in, token ids and loss mask out, exactly as the target would have seen and written them.

What is supervised, in each assistant turn, is what the target itself wrote (see `answers`) with the end-of-turn token.
The rendered text is cut at the edges of these spans and **every piece is tokenized on its own**. That is what serving
does: the prompt ends where the answer begins, so no token straddles the edge, and the mask is right at the token level
by construction. It also lets one batched call of the fast tokenizer do all the work (`pieces`). Tokenizers that put a space in
front of each text (older SentencePiece ones) cannot be cut like this; they encode the whole text, and only tokens that
lie wholly inside a span are supervised.

Where an answer's region begins and ends comes from growing prefixes: the prompt of each answer must be a prefix of the
whole, and so must the text after it. For templates that provably only append, one rendering tells the same
(`chat_template`). A template that rewrites history (drops earlier reasoning, say) shows an answer otherwise than when
the target gave it; such a conversation is refused, or each of its answers becomes a sequence of its own.
`{% generation %}` marks say where in its region the target's words begin.

Content that holds a special token's text is refused. `<|end|>` inside a message would become the very token that ends
a turn, and a user could write turns; encoding it as plain text instead would teach an answer that the target never
gives.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from dflash_core.data.answers import THOUGHT, Region, find_answer
from dflash_core.data.pieces import PieceEncoder
from dflash_core.data.rows import Conversation
from dflash_core.data.turns import BadRow, Message, leaves

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# A prompt that ends where the target is to reason.
OPENED = re.compile(r"<(?P<tag>think|thinking|thought)>(?P<space>\s*)\Z")

RewrittenHistory = Literal["reject", "last_answer", "each_answer"]


class RewrittenHistoryError(BadRow):
    """The template shows an earlier turn otherwise than when it was answered."""

    def __init__(self, number: int) -> None:
        super().__init__("template rewrites history", f"message {number}")


@dataclass(frozen=True, slots=True)
class Rendered:
    """One sequence as text.

    Attributes:
        spans: the supervised character ranges [start, end), ascending, not empty.
        sample_id_suffix: what tells several sequences of one conversation apart: empty, or `#2` for its second answer.
        before: ids in front of the text, not supervised: what the tokenizer itself puts before plain text.
        after: ids behind it, supervised: the end of plain text.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    sample_id_suffix: str = ""
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def pieces(self) -> list[tuple[str, bool]]:
        """The text cut at the edges of the spans, each piece with whether it is supervised; no piece is empty."""
        cuts, position = [], 0
        for start, end in self.spans:
            cuts += [(self.text[position:start], False), (self.text[start:end], True)]
            position = end
        cuts.append((self.text[position:], False))
        return [cut for cut in cuts if cut[0]]


@dataclass(frozen=True, slots=True)
class Encoded:
    """`input_ids` int32 [S], `loss_mask` bool [S]."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]


class ChatEncoder:
    """Renders and encodes conversations with one tokenizer and its chat template.

    Rendering is per conversation and raises `BadRow`; encoding takes many rendered ones, for the tokenizer is fast
    only in batches.

    Args:
        template_variables: reach every rendering, prompts included.
        rewritten_history: what becomes of conversations whose history the template rewrites; all others stay whole.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        template_variables: Mapping[str, bool | int | str] = {},
        rewritten_history: RewrittenHistory = "reject",
    ) -> None:
        from dflash_core.data.chat_template import ChatTemplate  # loads transformers

        variables: dict[str, Any] = {**tokenizer.special_tokens_map, **template_variables}
        self._template = ChatTemplate(str(tokenizer.get_chat_template()), variables)
        self._rewritten_history = rewritten_history
        self._generation_prompt: str | None = None
        self._backend = tokenizer.backend_tokenizer
        # A tokenizer.json may come with a truncation, which would shorten pieces in silence.
        self._backend.no_truncation()
        self._backend.no_padding()
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        special.update(tokenizer.all_special_tokens)
        self._special = re.compile("|".join(re.escape(token) for token in sorted(special, key=len, reverse=True)) or "(?!)")
        self._pieces = PieceEncoder(tokenizer)
        self._pieces_stand_alone = self._ids("a\nb") == self._ids("a\n") + self._ids("b")
        self._around_text = self._ids_around_text(tokenizer.eos_token_id)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _ids_around_text(self, end: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the tokenizer adds before and after a text by itself; the end token is added if it does not."""
        encoding = self._backend.encode("a", add_special_tokens=True)
        inner = [index for index, special in enumerate(encoding.special_tokens_mask) if not special]
        first, last = (inner[0], inner[-1]) if inner else (len(encoding.ids), len(encoding.ids))
        before, after = tuple(encoding.ids[:first]), tuple(encoding.ids[last + 1 :])
        return before, after if after or end is None else (int(end),)

    # ---- rendering ----

    def render(self, conversation: Conversation) -> list[Rendered]:
        """Text and supervised spans: one sequence, or one for each answer where the template rewrites history.

        With `finish_reason == "length"` the text ends with the words of the last answer: it was cut there, so no
        end-of-turn token belongs after it.

        Raises:
            BadRow: content holds a special token, or the template refuses, rewrites history, alters an answer or drops
                a part of it, or ends one without a special token.
        """
        if conversation.text is not None:
            return [self._render_text(conversation)]
        messages = conversation.messages
        answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
        if not answers:
            raise BadRow("no assistant turn")
        chosen = [index for index in answers if messages[index].supervised]
        if not chosen:
            raise BadRow("no supervised turn")
        self._check_no_special_tokens(messages, conversation.tools)
        turns = [message.for_template() for message in messages]
        try:
            return [self._render_whole(conversation, turns, answers)]
        except RewrittenHistoryError:
            if self._rewritten_history == "reject":
                raise
        if self._rewritten_history == "last_answer":
            return [self._render_last(conversation, turns[: chosen[-1] + 1], answers, "")]
        return [
            self._render_last(conversation, turns[: index + 1], answers, f"#{number}" if number > 1 else "")
            for number, index in enumerate(answers, start=1)
            if messages[index].supervised
        ]

    def _render_text(self, conversation: Conversation) -> Rendered:
        text = str(conversation.text)
        found = self._special.search(text)
        if found:
            raise BadRow("special token in content", f"text, character {found.start() + 1}: {found[0]}")
        before, after = self._around_text
        return Rendered(text, ((0, len(text)),), before=before, after=() if conversation.finish_reason == "length" else after)

    def _render_whole(self, conversation: Conversation, turns: list[dict[str, Any]], answers: list[int]) -> Rendered:
        text, regions = self._regions(turns, conversation.tools, answers)
        return self._with_spans(conversation, text, list(zip(answers, regions, strict=True)), answers)

    def _render_last(self, conversation: Conversation, turns: list[dict[str, Any]], answers: list[int], suffix: str) -> Rendered:
        """The last of `turns` as the target saw and wrote it: the prompt of the turns before, then its answer."""
        index, tools = len(turns) - 1, conversation.tools
        prompt = self._template.text(turns[:-1], tools, generation_prompt=True)
        text, marks, _ = self._template.trace(turns, tools)
        mark = self._checked_marks(marks, answers[: answers.index(index) + 1])[-1]
        if not text.startswith(prompt):
            text = self._continued(prompt, text, conversation.messages[index], index)
            mark = None
        region = Region(len(prompt), len(text), mark)
        return self._with_spans(conversation, text, [(index, region)], answers, suffix)

    def _continued(self, prompt: str, text: str, message: Message, index: int) -> str:
        """The prompt and what the target wrote, where the template cannot show both.

        Templates in the manner of DeepSeek-R1 open the reasoning in the prompt and cut it out of the answer. If the
        row holds it, inside the content or beside it, that and the rest of the content are what the target wrote, without
        the tag that the prompt has already.
        """
        opened, thought = OPENED.search(prompt), THOUGHT.match(message.content)
        if opened is None or message.tool_calls or (thought and thought["tag"] != opened["tag"]):
            raise RewrittenHistoryError(index + 1)
        if thought:
            content, written = thought["content"], message.content.lstrip().removeprefix(f"<{opened['tag']}>")
        elif message.reasoning:
            content, written = message.content, f"{message.reasoning.strip()}\n</{opened['tag']}>\n\n{message.content}"
        else:
            raise RewrittenHistoryError(index + 1)
        shown = text.rfind(content.strip())
        token = self._special.search(text, shown + len(content.strip())) if shown >= 0 else None
        if token is None:
            raise RewrittenHistoryError(index + 1)
        return prompt + written.removeprefix(opened["space"]) + token[0]

    def _with_spans(
        self,
        conversation: Conversation,
        text: str,
        regions: Iterable[tuple[int, Region]],
        answers: list[int],
        suffix: str = "",
    ) -> Rendered:
        spans = []
        for index, region in regions:
            message = conversation.messages[index]
            if not message.supervised:
                continue
            found = find_answer(text, region, message, self._special, answers.index(index) + 1)
            cut = conversation.finish_reason == "length" and index == answers[-1]
            spans.append((found.start, found.end if cut else found.turn_end))
            text = text[: found.end] if cut else text
        return Rendered(text, tuple(spans), suffix)

    def _check_no_special_tokens(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> None:
        search = self._special.search
        for number, message in enumerate(messages, start=1):
            parts = [message.content]
            if len(message) > 2 and any(message[2:6]):
                more = (message.reasoning, message.name, message.tool_call_id, *leaves(message.tool_calls))
                parts += [part for part in more if isinstance(part, str)]
            for part in parts:
                found = search(part)
                if found:
                    raise BadRow("special token in content", f"message {number}, character {found.start() + 1}: {found[0]}")
        for leaf in leaves(tools) if tools else ():
            found = search(leaf) if isinstance(leaf, str) else None
            if found:
                raise BadRow("special token in content", f"tools: {found[0]}")

    # ---- regions ----

    def _regions(
        self, turns: list[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, answers: list[int]
    ) -> tuple[str, list[Region]]:
        """The text of a conversation and the region of each answer; raises `RewrittenHistoryError`."""
        text, marks, borders = self._template.trace(turns, tools)
        checked = self._checked_marks(marks, answers)
        if borders is None or answers[0] == 0:  # nothing is known about the text of no messages at all
            edges = self._edges_from_prefixes(text, turns, tools, answers)
        else:
            edges = self._edges_from_borders(text, borders, turns, tools, answers)
        return text, [Region(start, end, mark) for (start, end), mark in zip(edges, checked, strict=True)]

    def _checked_marks(self, marks: list[tuple[int, int]], answers: list[int]) -> Sequence[tuple[int, int] | None]:
        if not self._template.has_marks:
            return [None] * len(answers)
        if len(marks) != len(answers):
            raise BadRow("template marks do not fit", f"{len(marks)} generation marks for {len(answers)} answers")
        return marks

    def _edges_from_borders(
        self,
        text: str,
        borders: list[int],
        turns: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        answers: list[int],
    ) -> list[tuple[int, int]]:
        if self._generation_prompt is None:
            before = turns[: answers[0]]
            prompt = self._template.text(before, tools, generation_prompt=True)
            self._generation_prompt = prompt[len(self._template.text(before, tools)) :]
        edges = []
        for index in answers:
            start = borders[index] + len(self._generation_prompt)
            if start > borders[index + 1] or not text.startswith(self._generation_prompt, borders[index]):
                raise RewrittenHistoryError(index + 1)
            edges.append((start, borders[index + 1]))
        return edges

    def _edges_from_prefixes(
        self, text: str, turns: list[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, answers: list[int]
    ) -> list[tuple[int, int]]:
        edges, reached = [], ""
        for index in answers:
            prompt = self._template.text(turns[:index], tools, generation_prompt=True)
            answered = text if index + 1 == len(turns) else self._template.text(turns[: index + 1], tools)
            if not (prompt.startswith(reached) and answered.startswith(prompt) and text.startswith(answered)):
                raise RewrittenHistoryError(index + 1)
            edges.append((len(prompt), len(answered)))
            reached = answered
        return edges

    # ---- encoding ----

    def encode(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        """Token ids and loss masks, in order; nothing is truncated."""
        if not self._pieces_stand_alone:
            return self._encode_whole(rendered)
        pieces = [item.pieces() for item in rendered]
        ids = iter(self._pieces.encode([text for item in pieces for text, _ in item]))
        return [_join(item, [(next(ids), flag) for _, flag in cuts]) for item, cuts in zip(rendered, pieces, strict=True)]

    def _encode_whole(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        encodings = self._backend.encode_batch([item.text for item in rendered], add_special_tokens=False)
        results = []
        for item, encoding in zip(rendered, encodings, strict=True):
            offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            mask = np.zeros(len(offsets), dtype=np.bool_)
            for start, end in item.spans:
                mask |= (offsets[:, 0] >= start) & (offsets[:, 1] <= end)
            ids = np.asarray([*item.before, *encoding.ids, *item.after], dtype=np.int32)
            results.append(
                Encoded(ids, np.concatenate([[False] * len(item.before), mask, [True] * len(item.after)]).astype(bool))
            )
        return results

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None) -> NDArray[np.int32]:
        """Ids of a prompt up to the point where the target answers, int32 [S]; raises `BadRow`."""
        self._check_no_special_tokens(messages, tools)
        text = self._template.text([message.for_template() for message in messages], tools, generation_prompt=True)
        return np.asarray(self._ids(text), dtype=np.int32)

    def encode_text_prompt(self, conversation: Conversation) -> NDArray[np.int32]:
        """Ids of a plain-text row that the target is to continue, int32 [S]; raises `BadRow`."""
        rendered = self._render_text(conversation)
        return np.asarray([*rendered.before, *self._ids(rendered.text)], dtype=np.int32)


def _join(item: Rendered, pieces: list[tuple[list[int], bool]]) -> Encoded:
    ids = list(item.before)
    edges = []
    for piece, supervised in pieces:
        start = len(ids)
        ids += piece
        if supervised:
            edges.append((start, len(ids)))
    if item.after:
        edges.append((len(ids), len(ids) + len(item.after)))
        ids += item.after
    loss_mask = np.zeros(len(ids), dtype=np.bool_)
    for start, end in edges:
        loss_mask[start:end] = True
    return Encoded(np.array(ids, dtype=np.int32), loss_mask)
