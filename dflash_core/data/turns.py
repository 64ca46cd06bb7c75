"""The turns of a conversation: OpenAI and ShareGPT forms, tool calls, reasoning, and what is refused in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

# What the corpora in use call the roles; ShareGPT's `from` and OpenAI's `role` share one table.
ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "ipython": "tool",
}
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
KNOWN_KEYS = frozenset({"role", "content", "from", "value", "name", "tool_call_id", "tool_calls", "weight", *REASONING_KEYS})
# Notes about a turn that no chat template shows (the turns of WildChat, LMSYS and exports of chat services have them).
NOTES = frozenset(
    {"id", "index", "timestamp", "created_at", "date", "model", "language", "redacted", "toxic", "turn_identifier"}
    | {"country", "state", "hashed_ip", "header"}
)
# What other trainers call `weight`: here even a False says something.
TRAINING_FLAGS = frozenset({"train", "trainable", "training", "loss"})
MAX_DEPTH = 64  # of tools and arguments; templates walk them recursively
UNUSABLE_CHARACTERS = re.compile("[\x00\ud800-\udfff]")


class BadRow(Exception):
    """A row cannot be used: `reason` is one of a few fixed texts, `detail` says what exactly."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason, self.detail = reason, detail
        super().__init__(reason, detail)

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})" if self.detail else self.reason


class Message(NamedTuple):
    """One turn. `tool_calls` hold `{"type": "function", "function": {"name", "arguments"}}` with arguments as an object.

    `supervised` is False for an answer that the row asks not to train on (`weight: 0`).
    """

    role: str
    content: str
    reasoning: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    supervised: bool = True

    def for_template(self) -> dict[str, Any]:
        """The turn as chat templates expect it; keys without a value are left out, as transformers does."""
        turn: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning is not None:
            turn["reasoning_content"] = turn["thinking"] = self.reasoning
        if self.tool_calls:
            turn["tool_calls"] = list(self.tool_calls)
        if self.name is not None:
            turn["name"] = self.name
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        return turn


def short(value: object) -> str:
    """A value in one short line of ASCII, for error texts."""
    try:
        text = ascii(value)
    except RecursionError:
        text = type(value).__name__
    return text if len(text) <= 60 else text[:59] + "…"


def check_characters(text: str, where: str) -> None:
    """Raise `BadRow` for NUL and lone surrogates, which no tokenizer can give back."""
    found = UNUSABLE_CHARACTERS.search(text)
    if found:
        reason = "NUL character" if found[0] == "\x00" else "lone surrogate"
        raise BadRow(reason, f"{where}, character {found.start() + 1}")


def parse_turns(value: Any, field: str) -> tuple[Message, ...]:
    """The turns in a list, or in a JSON string that holds one; raises `BadRow`."""
    turns = _list(value, field)
    if not turns:
        raise BadRow("empty conversation")
    return tuple(_message(turn, f"message {number}") for number, turn in enumerate(turns, start=1))


def parse_tools(value: Any) -> tuple[dict[str, Any], ...] | None:
    """The tool descriptions of a row, a list or a JSON string that holds one; None if there are none."""
    if value is None or value == "":
        return None
    tools = _list(value, "tools")
    for number, tool in enumerate(tools, start=1):
        if not isinstance(tool, dict):
            raise BadRow("ill-typed tools", f"tool {number} is not an object")
        _check_json(tool, f"tool {number}", "ill-typed tools")
    return tuple(tools) or None


def _list(value: Any, field: str) -> list[Any]:
    if isinstance(value, str):
        value = _from_json(value)
    if not isinstance(value, list):
        raise BadRow(f"{field} is not a list", type(value).__name__)
    return value


def _from_json(text: str) -> Any:
    """What a JSON string holds, or the string itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _message(turn: object, where: str) -> Message:
    if not isinstance(turn, dict):
        raise BadRow("ill-typed message", f"{where} is not an object")
    _check_keys(turn, where)
    share_gpt = turn.get("role") is None and turn.get("from") is not None
    said = turn.get("from") if share_gpt else turn.get("role")
    if not isinstance(said, str):
        raise BadRow("ill-typed message", f"{where}: role is not a string")
    role = ROLES.get(said)
    if role is None:
        raise BadRow("unknown role", f"{where}: {short(said)}")
    content = turn.get("value") if share_gpt or turn.get("content") is None else turn.get("content")
    calls = _tool_calls(turn.get("tool_calls"), where)
    if said == "function_call":
        calls, content = calls + _tool_calls(content, where), None
        if not calls:
            raise BadRow("ill-typed tool call", f"{where} has none")
    text = "" if content is None and calls else _text(content, where)
    check_characters(text, where)
    reasoning = _reasoning(turn, where)
    if role != "assistant" and (calls or reasoning is not None):
        raise BadRow("unknown message key", f"{where}: {'tool_calls' if calls else 'reasoning'} in a turn of {short(said)}")
    if role in ("user", "assistant") and not text.strip() and not calls:
        raise BadRow(f"empty {role} content", where)
    named = {key: _optional_text(turn.get(key), key, where) for key in ("name", "tool_call_id")}
    return Message(role, text, reasoning, calls, named["name"], named["tool_call_id"], _supervised(turn.get("weight"), where))


def _check_keys(turn: dict[Any, Any], where: str) -> None:
    unknown = turn.keys() - KNOWN_KEYS - NOTES
    for key in sorted(unknown, key=str):
        value = turn[key]
        if value is not None and (value is not False or key in TRAINING_FLAGS) and value not in ("", [], {}):
            raise BadRow("unknown message key", f"{where}: {short(key)}")


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRow("ill-typed message", f"{where}: content is not a string")
    parts = []
    for number, part in enumerate(content, start=1):
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None
        if not isinstance(text, str):
            raise BadRow("content is not text", f"{where}, part {number}")
        parts.append(text)
    return "".join(parts)


def _reasoning(turn: dict[Any, Any], where: str) -> str | None:
    found: set[str] = set()
    for key in REASONING_KEYS:
        value = _optional_text(turn.get(key), key, where)
        if value is not None and value.strip():
            found.add(value)
    if len(found) > 1:
        raise BadRow("two different reasonings", where)
    return found.pop() if found else None


def _optional_text(value: object, key: str, where: str) -> str | None:
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise BadRow("ill-typed message", f"{where}: {key} is not a string")
    check_characters(value, f"{where}, {key}")
    return value


def _supervised(weight: object, where: str) -> bool:
    if weight is None:
        return True
    if isinstance(weight, bool) or weight not in (0, 1):
        raise BadRow("ill-typed message", f"{where}: weight is neither 0 nor 1")
    return weight == 1


def _tool_calls(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    if isinstance(value, str):
        value = _from_json(value)
    if value is None or value == "":
        return ()
    calls = [value] if isinstance(value, dict) else value
    if not isinstance(calls, list):
        raise BadRow("ill-typed tool call", f"{where}: {type(calls).__name__}")
    return tuple(_tool_call(call, f"{where}, call {number}") for number, call in enumerate(calls, start=1))


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRow("ill-typed tool call", f"{where} has no name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # As serving does it: templates write objects as JSON themselves, and would quote a string once more.
        arguments = _from_json(arguments) if arguments.strip() else {}
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise BadRow("ill-typed tool call", f"{where}: arguments are not an object")
    result: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if isinstance(call.get("id"), str):
        result = {"id": call["id"], **result}
    _check_json(result, where, "ill-typed tool call")
    return result


def _check_json(value: Any, where: str, reason: str, depth: int = 0) -> None:
    """Raise `BadRow` unless a value is made of what JSON has, with usable characters; tables hold other things, too."""
    if depth > MAX_DEPTH:
        raise BadRow(reason, f"{where}: more than {MAX_DEPTH} levels")
    if isinstance(value, str):
        check_characters(value, where)
    elif isinstance(value, (dict, list)):
        for item in value if isinstance(value, list) else [*value, *value.values()]:
            _check_json(item, where, reason, depth + 1)
    elif value is not None and not isinstance(value, (bool, int, float)):
        raise BadRow(reason, f"{where}: {type(value).__name__}")


def leaves(value: Any) -> Iterable[Any]:
    """Keys and single values of a nested value, in order."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    else:
        yield value
