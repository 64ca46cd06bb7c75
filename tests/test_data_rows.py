"""What rows mean: the shapes that are recognised, what a turn may hold, and how a refusal reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.data.rows import BadRow, Conversation, Message, parse_row, rows_of
from dflash_core.data.sources import RawChunk, expand_files, read_chunks

GOOD = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
TURNS = (Message("user", "q"), Message("assistant", "a"))


def parse(value: dict[str, Any], columns: Mapping[str, str] | None = None, needs_answer: bool = True) -> Conversation:
    return parse_row(
        value,
        source_file="x.jsonl",
        row=3,
        default_id="x.jsonl:3",
        default_source="x",
        columns=columns or {},
        needs_answer=needs_answer,
    )


def problem(value: dict[str, Any], **more: Any) -> str:
    with pytest.raises(BadRow) as caught:
        parse(value, **more)
    return str(caught.value)


def read_file(path: Path | str, columns: Mapping[str, str] | None = None) -> list[Conversation | BadRow]:
    """All rows of the files that a pattern names, read the way the rest of the package does it."""
    found: list[Conversation | BadRow] = []
    for file in expand_files([str(path)]):
        for chunk in read_chunks(file, 7, 1 << 20):
            for number, value in rows_of(chunk):
                try:
                    if isinstance(value, BadRow):
                        raise value
                    names = {"source_file": "f", "row": number, "default_id": f"f:{number}", "default_source": "s"}
                    found.append(parse_row(value, columns=columns or {}, **names))
                except BadRow as error:
                    found.append(error)
    return found


def turn(**change: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", **change}]}


def call(arguments: object = None, **change: object) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments, **change}}


SHARE_GPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
SHAPES: dict[str, dict[str, Any]] = {
    "messages": GOOD,
    "messages in ShareGPT form": {"messages": SHARE_GPT},
    "messages as JSON": {"messages": json.dumps(GOOD["messages"])},
    "conversations": {"conversations": SHARE_GPT},
    "conversations in OpenAI form": {"conversations": GOOD["messages"]},
    "conversations as JSON": {"conversations": json.dumps(SHARE_GPT)},
    "prompt and response": {"prompt": "q", "response": "a"},
    "prompt and completion": {"prompt": "q", "completion": "a", "response": None},
    "prompt and completion as TRL writes them": {"prompt": GOOD["messages"][:1], "completion": GOOD["messages"][1:]},
    "text parts": turn(content=[{"type": "text", "text": ""}, {"text": "a"}]),
    "messages before all others": {**GOOD, "conversations": [], "prompt": "p", "response": "r", "text": "t"},
    "conversations before prompt and text": {"conversations": SHARE_GPT, "prompt": "p", "response": "r", "text": "t"},
    "prompt and response before text": {"prompt": "q", "response": "a", "text": "t", "messages": None},
    "empty extras": turn(tool_calls=[], refusal=None, function_call="", annotations=[], prefix=False, reasoning_content=" "),
    "notes": turn(id="m1", timestamp=3, language="English"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_gives_the_same_turns(shape: str) -> None:
    assert parse(SHAPES[shape]) == Conversation("x.jsonl:3", "x", TURNS, None, "x.jsonl", 3)


def test_plain_text_is_a_conversation_without_turns() -> None:
    expected = Conversation("7", "web", (), "length", "x.jsonl", 3, text=" some text\n")
    assert parse({"text": " some text\n", "id": 7, "source": "web", "finish_reason": "length", "prompt": "p"}) == expected
    assert problem({"text": 3}) == "ill-typed text (int)"
    assert problem({"text": " \n"}) == "empty text"
    assert problem({"text": "ab\0"}) == "NUL character (text, character 3)"


def test_a_column_map_names_fields_and_comes_before_the_usual_names() -> None:
    alpaca = {"instruction": "q", "output": "a", "text": "whole", "messages": [], "uuid": "u", "set": "s"}
    columns = {"prompt": "instruction", "response": "output", "id": "uuid", "source": "set"}
    assert parse(alpaca, columns) == Conversation("u", "s", TURNS, None, "x.jsonl", 3)
    assert parse(GOOD, columns).messages == TURNS, "a row without the mapped columns is read as usual"
    assert parse({"dialog": SHARE_GPT, **turn(content="other")}, {"messages": "dialog"}).messages == TURNS
    assert parse({"body": "t", **GOOD}, {"text": "body"}).text == "t"
    assert problem({"dialog": SHARE_GPT}) == "no messages (nor conversations, prompt or text)"


@pytest.mark.parametrize(
    ("said", "role"),
    [
        ("human", "user"),
        ("user", "user"),
        ("gpt", "assistant"),
        ("chatgpt", "assistant"),
        ("bing", "assistant"),
        ("model", "assistant"),
        ("system", "system"),
        ("developer", "developer"),
        ("tool", "tool"),
        ("observation", "tool"),
        ("function", "tool"),
    ],
)
def test_roles_by_their_many_names(said: str, role: str) -> None:
    assert parse({"conversations": [{"from": said, "value": "x"}, *SHARE_GPT]}).messages[0] == Message(role, "x")


def test_tool_turns_are_taken_in_with_arguments_as_objects() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    messages = [
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": None, "tool_calls": [call('{"x": 1, "y": [2]}'), call({"x": None})]},
        {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"},
        {"role": "assistant", "content": "three"},
    ]
    expected = (
        Message("user", "1+2?"),
        Message("assistant", "", tool_calls=(call({"x": 1, "y": [2]}), call({"x": None}))),
        Message("tool", "3", name="add", tool_call_id="c1"),
        Message("assistant", "three"),
    )
    found = parse({"messages": messages, "tools": tools})
    assert (found.messages, found.tools) == (expected, tuple(tools))
    assert parse({"messages": messages, "tools": json.dumps(tools)}) == found
    share_gpt = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "a"},
    ]
    function = {"name": "add", "arguments": {"x": 1}}
    assert parse({"conversations": share_gpt}).messages[1].tool_calls == ({"type": "function", "function": function},)
    assert parse({"conversations": share_gpt, "tools": ""}).tools is None


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_taken_in_by_all_its_names(key: str) -> None:
    message = parse(turn(**{key: "r"})).messages[1]
    assert message == Message("assistant", "a", reasoning="r")
    assert message.for_template() == {"role": "assistant", "content": "a", "reasoning_content": "r", "thinking": "r"}
    assert parse(turn(**{"reasoning": "r", key: "r"})).messages[1].reasoning == "r"


def test_a_weight_of_zero_takes_a_turn_out_of_supervision() -> None:
    assert [parse(turn(weight=weight)).messages[1].supervised for weight in (0, 1, 0.0, None)] == [False, True, False, True]
    assert problem(turn(weight=0.5)) == problem(turn(weight=True)) == "ill-typed message (message 2: weight is neither 0 nor 1)"


BAD: dict[str, dict[str, Any]] = {
    "no messages (nor conversations, prompt or text)": {"messages": None, "own": 1},
    "no response": {"prompt": "q"},
    "no prompt": {"response": "a", "prompt": None, "completion": None, "text": None, "messages": None},
    "ill-typed prompt (int)": {"prompt": 3, "response": "a"},
    "messages is not a list (str)": {"messages": "x"},
    "messages is not a list (dict)": {"messages": '{"a": 1}'},
    "conversations is not a list (int)": {"conversations": 1},
    "empty conversation": {"messages": []},
    "ill-typed message (message 1 is not an object)": {"messages": ["x"]},
    "ill-typed message (message 2: content is not a string)": turn(content=3),
    "ill-typed message (message 2: role is not a string)": turn(role=None),
    "content is not text (message 2, part 2)": turn(content=[{"type": "text", "text": "a"}, {"type": "image_url", "text": "b"}]),
    "content is not text (message 2, part 1)": turn(content=["x"]),
    "unknown role (message 2: 'bot')": turn(role="bot"),
    "unknown message key (message 2: 'audio')": turn(audio={"id": 1}),
    "unknown message key (message 2: 'refusal')": turn(refusal="no"),
    "unknown message key (message 2: tool_calls in a turn of 'user')": turn(role="user", tool_calls=[call()]),
    "unknown message key (message 2: reasoning in a turn of 'tool')": turn(role="tool", thinking="x"),
    "two different reasonings (message 2)": turn(thinking="x", reasoning="y"),
    "ill-typed message (message 2: reasoning is not a string)": turn(reasoning=[1]),
    "ill-typed tool call (message 2, call 1 has no name)": turn(tool_calls=[{"function": {}}]),
    "ill-typed tool call (message 2, call 2 has no name)": turn(tool_calls=[call(), 1]),
    "ill-typed tool call (message 2: int)": turn(tool_calls=3),
    "ill-typed tool call (message 2, call 1: arguments are not an object)": turn(tool_calls=[call("{oops")]),
    "ill-typed tool call (message 1 has none)": {"messages": [{"from": "function_call", "value": ""}]},
    "ill-typed tools (tool 1 is not an object)": {**GOOD, "tools": ["x"]},
    "tools is not a list (dict)": {**GOOD, "tools": {}},
    "empty assistant content (message 2)": turn(content=" \n"),
    "empty user content (message 1)": {"messages": [{"role": "user", "content": ""}]},
    "NUL character (message 2, character 3)": turn(content="ab\0"),
    "lone surrogate (message 2, character 2)": turn(content="a\ud800"),
    "lone surrogate (message 2, reasoning, character 1)": turn(reasoning="\udfff"),
    "NUL character (message 2, call 1, character 1)": turn(tool_calls=[call({"\0": 1})]),
    "lone surrogate (tool 1, character 1)": {**GOOD, "tools": [{"name": "\ud800"}]},
    "no assistant turn": turn(role="user"),
    "unknown finish_reason ('abort'; known are stop, tool_calls and length)": {**GOOD, "finish_reason": "abort"},
    "ill-typed id ([])": {**GOOD, "id": []},
    "ill-typed id ('')": {**GOOD, "id": ""},
    "ill-typed id (True)": {**GOOD, "id": True},
    "ill-typed source (3)": {**GOOD, "source": 3},
    "NUL character (id, character 1)": {**GOOD, "id": "\0"},
}  # fmt: skip
BAD["no prompt"] = {"response": "a", "prompt": None}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_row_says_what_is_wrong(text: str) -> None:
    columns = {"response": "response"} if text == "no prompt" else None
    assert problem(BAD[text], columns=columns) == text


def test_a_held_out_row_needs_no_answer() -> None:
    assert parse({"prompt": "q"}, needs_answer=False).messages == TURNS[:1]
    assert parse({"messages": GOOD["messages"][:1]}, needs_answer=False).messages == TURNS[:1]


LINES = {
    "not JSON (Expecting value: column 14)": b'{"messages": oops}',
    "not JSON (RecursionError)": b'{"messages": ' + b"[" * 100_000,
    "not JSON (ValueError)": b'{"messages": ' + b"1" * 5000 + b"}",
    "invalid UTF-8 (byte 2)": b'"\xff"',
    "not an object (list)": b"[1]",
}


@pytest.mark.parametrize("text", LINES)
def test_a_line_that_is_no_row_comes_as_a_bad_row_between_its_neighbours(text: str) -> None:
    good = json.dumps(GOOD).encode()
    rows = dict(rows_of(RawChunk(4, 3, "jsonl", [(4, good), (6, LINES[text]), (7, good)], 0)))
    assert rows[4] == rows[7] == GOOD
    assert isinstance(rows[6], BadRow) and str(rows[6]) == text


def arrow_chunk(table: pa.Table) -> RawChunk:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return RawChunk(1, table.num_rows, "arrow", sink.getvalue().to_pybytes(), 0)


def test_nulls_in_structs_are_absent_and_text_that_is_not_utf8_concerns_its_row_and_column_only() -> None:
    message = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(pa.string()))])
    messages = pa.array([[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]] * 3, pa.list_(message))
    garbled = pa.array([b"fine", b"\xff", None]).view(pa.string())
    times = pa.array([0, 0, 2**62], pa.timestamp("s"))
    rows = dict(rows_of(arrow_chunk(pa.table({"messages": messages, "note": garbled, "time": times}))))
    assert [parse(rows[number]).messages for number in (1, 2, 3)] == [TURNS] * 3
    assert rows[1]["messages"] == GOOD["messages"] and "note" not in rows[3]
    assert problem(rows[2], columns={"id": "note"}) == "invalid UTF-8 (column 'note')"
    assert problem(rows[3], columns={"id": "time"}).startswith("unreadable value (column 'time'")
    assert problem(rows[1], columns={"id": "time"}).startswith("ill-typed id (datetime")


def test_rows_without_columns_are_counted(tmp_path: Path) -> None:
    table = pa.table({"a": [1, 2]}).select([])
    assert [number for number, _ in rows_of(arrow_chunk(table))] in ([1, 2], [])


KEYS = ["role", "content", "from", "value", "tool_calls", "function", "name", "weight", "z"]
values = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2) | st.floats() | st.text(max_size=3) | st.sampled_from(["user", "gpt", "[]"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(["messages", "conversations", "prompt", "response", "text", "tools", "id"]), values))
def test_no_row_raises_anything_but_a_bad_row(row: dict[str, Any]) -> None:
    try:
        parse(row)
    except BadRow as error:
        assert "\n" not in str(error)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_no_line_raises_anything_but_a_bad_row(line: bytes) -> None:
    ((number, row),) = rows_of(RawChunk(5, 1, "jsonl", [(5, line or b" ")], 0))
    assert number == 5 and (isinstance(row, dict) or "\n" not in str(row))


def test_values_nested_without_end_are_bad_rows() -> None:
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    for row in ({**GOOD, "id": deep}, {**GOOD, "tools": [{"a": deep}]}, turn(tool_calls=[call({"a": deep})]), turn(z=deep)):
        assert "\n" not in problem(row)
