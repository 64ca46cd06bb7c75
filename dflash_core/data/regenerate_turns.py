"""A conversation whose answers are made anew, one after the other, and the row that it becomes.

Every assistant turn is asked for with the conversation so far, which holds the new answers, as the target will meet it in
serving. System turns, tools, user turns and tool results stay. Two kinds of assistant turns are kept as they are and get
`weight: 0`, so that nobody is trained on them: those that the row itself marks so, and those that answer nothing (a greeting).

The other side of a conversation was written for the old answers. Where a new one does not lead there, the row ends with it:
where it was cut by the length limit, and where the tool calls are not those whose results follow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from dflash_core.data.rows import Conversation
from dflash_core.data.turns import BadRow, Message

# Servers without a reasoning parser give the thought inside the content, without the opening tag where the prompt has it.
THOUGHT = re.compile(
    r"\s*(?:<(?P<tag>think|thinking|thought)>)?(?P<reasoning>.*?)</(?:think|thinking|thought)>(?P<content>.*)\Z", re.DOTALL
)
OPEN_THOUGHT = re.compile(r"\s*<(?:think|thinking|thought)>")
# What stands at the end of a text that was cut between two bytes of a character.
REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class NewAnswer:
    """One answer of the target.

    Attributes:
        finish_reason: `stop`, `tool_calls` or `length` (cut by the limit).
        num_prompt_tokens: tokens of the prompt, None where a server does not say; `num_tokens` likewise of the answer.
    """

    content: str
    finish_reason: str
    reasoning: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    num_prompt_tokens: int | None = None
    num_tokens: int | None = None


def apart(answer_text: str, finish_reason: str) -> tuple[str, str | None]:
    """Content and reasoning of a text that may have its reasoning inside.

    Raises:
        BadRow: the text ends inside the reasoning.
    """
    if finish_reason == "length":
        answer_text = answer_text.rstrip(REPLACEMENT)
    found = THOUGHT.match(answer_text)
    if found:
        return found["content"], found["reasoning"] if found["reasoning"].strip() else None
    if OPEN_THOUGHT.match(answer_text):
        raise BadRow("no answer", "cut while the target was thinking; regenerate.max_new_tokens is too small")
    return answer_text, None


def as_request(message: Message) -> dict[str, Any]:
    """A turn as servers take it: arguments of tool calls are JSON strings there, and reasoning has two names (vLLM's is new)."""
    turn = message.for_template()
    if (reasoning := turn.pop("thinking", None)) is not None:
        turn["reasoning"] = reasoning
    if message.tool_calls:
        turn["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}}
            for call in message.tool_calls
        ]
    return turn


def _as_row(message: Message) -> dict[str, Any]:
    turn = message.for_template()
    turn.pop("thinking", None)
    return turn if message.supervised else {**turn, "weight": 0}


class Remade:
    """One conversation on its way: `prompt` says what to ask next, `take` takes the answer.

    Raises:
        BadRow: nothing in the row can be answered.
    """

    def __init__(self, conversation: Conversation) -> None:
        if conversation.text is not None:
            raise BadRow("plain text", "only conversations and prompts can be answered")
        self.conversation = conversation
        self._said: list[Message] = []
        self._left = list(conversation.messages)
        self._old: Message | None = None  # the answer that is replaced next
        self._answers: list[NewAnswer] = []
        self._ended_early: str | None = None
        self._waiting = self._go_on()
        if not self._waiting:
            raise BadRow("no prompt", "nothing in it asks for an answer")

    def prompt(self) -> tuple[Message, ...] | None:
        """The turns that the target is to answer next; None when the conversation is complete."""
        return tuple(self._said) if self._waiting else None

    def _go_on(self) -> bool:
        """Keep turns up to the next one that is to be answered; says whether there is one."""
        self._old = None
        while self._left:
            turn = self._left.pop(0)
            asked = any(said.role in ("user", "tool") for said in self._said)
            if turn.role == "assistant" and turn.supervised and asked:
                self._old = turn
                return True
            self._said.append(turn._replace(supervised=False) if turn.role == "assistant" else turn)
        since = takewhile(lambda said: said.role != "assistant", reversed(self._said))
        return any(said.role in ("user", "tool") for said in since)

    def take(self, answer: NewAnswer) -> None:
        """Add the answer to the prompt asked for last; raises `BadRow` if there is nothing in it."""
        if not answer.content.strip() and not answer.tool_calls:
            why = "the reasoning took all tokens" if answer.reasoning else "the target said nothing"
            raise BadRow("no answer", f"answer {len(self._answers) + 1}: {why}")
        calls = answer.tool_calls
        results = list(takewhile(lambda turn: turn.role == "tool", self._left))
        if answer.finish_reason == "length":
            self._end("length")
        elif results and self._old is not None and _same_calls(self._old.tool_calls, calls):
            calls = self._old.tool_calls  # with the ids that the results name
        elif results or (calls and self._left):
            self._end("tool calls differ")
        self._said.append(Message("assistant", answer.content, answer.reasoning, calls))
        self._answers.append(answer)
        self._waiting = self._go_on() if self._left else False

    def _end(self, reason: str) -> None:
        if self._left:
            self._ended_early = reason
        self._left = []

    def row(self) -> dict[str, Any]:
        """The finished row, in a shape that `rows.parse_row` reads, with where it comes from and what it cost."""
        conversation = self.conversation
        row: dict[str, Any] = {
            "id": conversation.sample_id,
            "source": conversation.source,
            "messages": [_as_row(message) for message in self._said],
            "finish_reason": self._answers[-1].finish_reason,
            "num_answers": len(self._answers),
            "num_prompt_tokens": _total([answer.num_prompt_tokens for answer in self._answers]),
            "num_answer_tokens": _total([answer.num_tokens for answer in self._answers]),
            "file": conversation.source_file,
            "row": conversation.row,
        }
        if conversation.tools is not None:
            row["tools"] = list(conversation.tools)
        if self._ended_early is not None:
            row["ended_early"] = self._ended_early
        return row


def _same_calls(old: tuple[dict[str, Any], ...], new: tuple[dict[str, Any], ...]) -> bool:
    """Whether two turns call the same functions with the same arguments, so that the results of one are those of the other."""
    return bool(old) and [_function(call) for call in old] == [_function(call) for call in new]


def _function(call: Mapping[str, Any]) -> tuple[str, Any]:
    return call["function"]["name"], call["function"]["arguments"]


def _total(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
