"""Where in a rendered conversation the target's own words stand.

An answer is looked for in its region: behind the prompt that the target answered, up to the end of its turn. What the
target wrote there is everything, if the row tells its reasoning (opening tag included, unless the prompt has it); else
everything from its content, or from its first tool call, to the end-of-turn token. What the template puts in front of
that, such as an empty think block, is not the target's.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from dflash_core.data.turns import BadRow, Message, leaves

EMPTY_BLOCK = re.compile(r"\s*(?:<(?P<tag>[A-Za-z_|]+)>\s*</(?P=tag)>|</[A-Za-z_|]+>)\s*")
CLOSING_TAG = re.compile(r"\s*</[A-Za-z_|]+>\s*")
THOUGHT = re.compile(r"\s*<(?P<tag>think|thinking|thought)>(?P<reasoning>.*?)</(?P=tag)>(?P<content>.*)\Z", re.DOTALL)


class Region(NamedTuple):
    """text[start:end) is what follows the prompt, through the end of the turn; `mark` is the author's, if any."""

    start: int
    end: int
    mark: tuple[int, int] | None = None


class Answer(NamedTuple):
    """text[start:turn_end) is supervised; the target's words end at `end`, then comes the end-of-turn token."""

    start: int
    end: int
    turn_end: int


def find_answer(text: str, region: Region, message: Message, special: re.Pattern[str], number: int) -> Answer:
    """Find the words of one assistant turn.

    Args:
        special: matches the special tokens; the end-of-turn token is one.
        number: of the answer, for error texts.

    Raises:
        BadRow: content, reasoning or tool calls do not show up as they are, or no special token ends the turn.
    """
    where = f"answer {number}"
    reasoning = message.reasoning
    if message.tool_calls:
        found = _with_tool_calls(text, region, message, special, where)
    else:
        plain = _content(text, region, message.content, special)
        if plain is None and reasoning is None:
            # The row may have its reasoning inside the content, and the prompt may open it already.
            thought = THOUGHT.match(message.content)
            if thought and thought["content"].strip():
                reasoning = thought["reasoning"]
                plain = _content(text, region, thought["content"], special)
        if plain is None:
            raise _not_found(text, region, message.content, where)
        found = plain
    has_reasoning = reasoning is not None and bool(reasoning.strip())
    if has_reasoning and _end_of(text, region.start, found.start, str(reasoning)) is None:
        raise BadRow("template drops reasoning", where)
    return Answer(_first_word(text, region, found, has_reasoning, where), found.end, found.turn_end)


def _first_word(text: str, region: Region, found: Answer, has_reasoning: bool, where: str) -> int:
    """Where the target began to write, if its content or tool call begins at `found.start`."""
    if region.mark is None:
        return region.start if has_reasoning else found.start
    # The author says where the target's words begin; an empty think block in front is still not its own.
    start = max(region.mark[0], region.start)
    if start > found.start or region.mark[1] < found.end:
        raise BadRow("template marks do not fit", f"{where}: what it says is not inside its mark")
    inserted = None if has_reasoning else EMPTY_BLOCK.fullmatch(text, start, found.start)
    return found.start if inserted else start


def _forms(words: str) -> tuple[str, ...]:
    """Templates trim; as written comes first."""
    return tuple(dict.fromkeys((words, words.rstrip(), words.lstrip(), words.strip())))


def _content(text: str, region: Region, content: str, special: re.Pattern[str]) -> Answer | None:
    """Content is what stands right before a special token, the end-of-turn token; white space may come between.

    Looking for it from the token backwards cannot hit a chance repetition of the content in what the template inserts.
    """
    limit = region.end if region.mark is None else region.mark[1]
    forms = _forms(content)
    for token in special.finditer(text, region.start, region.end):
        end = token.start()
        trimmed = region.start + len(text[region.start : end].rstrip())
        for candidate in dict.fromkeys((end, trimmed)):
            if candidate <= limit:
                for form in forms:
                    if text.endswith(form, region.start, candidate):
                        return Answer(candidate - len(form), candidate, token.end())
    return None


def _not_found(text: str, region: Region, content: str, where: str) -> BadRow:
    if content.strip() in text[region.start : region.end]:
        return BadRow("no end-of-turn token", f"{where}: no special token follows it")
    return BadRow("template alters the answer", where)


def _end_of(text: str, start: int, end: int, words: str) -> int | None:
    for form in _forms(words):
        found = text.find(form, start, end)
        if found >= 0:
            return found + len(form)
    return None


def _with_tool_calls(text: str, region: Region, message: Message, special: re.Pattern[str], where: str) -> Answer:
    start = region.start
    if message.reasoning is not None:
        end = _end_of(text, start, region.end, message.reasoning)
        if end is None:
            raise BadRow("template drops reasoning", where)
        closing = CLOSING_TAG.match(text, end, region.end)
        start = closing.end() if closing else end
    elif inserted := EMPTY_BLOCK.match(text, start, region.end):
        start = inserted.end()
    after = start
    if message.content.strip():
        start, after = _words(text, region, start, message.content, where)
    for number, call in enumerate(message.tool_calls, start=1):
        after = _after_call(text, after, region.end, call["function"], f"{where}, call {number}")
    tokens = list(special.finditer(text, after, region.end))
    if not tokens:
        raise BadRow("no end-of-turn token", f"{where}: no special token follows its tool calls")
    return Answer(start, tokens[-1].start(), tokens[-1].end())


def _words(text: str, region: Region, start: int, content: str, where: str) -> tuple[int, int]:
    for begin in (start, region.start):  # behind what looks inserted; but content may begin like that itself
        for form in _forms(content):
            if text.startswith(form, begin, region.end):
                return begin, begin + len(form)
    for form in _forms(content):
        found = text.find(form, start, region.end)
        if found >= 0:
            return found, found + len(form)
    raise BadRow("template alters the answer", where)


def _after_call(text: str, start: int, end: int, function: dict[str, Any], where: str) -> int:
    """The end of a call's name, if the name and all of the arguments show up behind `start`."""
    name = text.find(function["name"], start, end)
    if name < 0:
        raise BadRow("template drops tool calls", where)
    shown = text[name:end]
    for leaf in leaves(function["arguments"]):
        written = {str(leaf), json.dumps(leaf), json.dumps(leaf, ensure_ascii=False)}
        if isinstance(leaf, str):
            written = {leaf, *(form[1:-1] for form in written if form != leaf)}
        if not any(form in shown for form in written):
            raise BadRow("template drops tool calls", f"{where}: argument {ascii(leaf)[:40]}")
    return name + len(function["name"])
