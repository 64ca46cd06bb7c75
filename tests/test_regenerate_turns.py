"""A conversation whose answers are made anew: what stays, what is asked, and where it must end."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.data.regenerate_turns import NewAnswer, Remade, apart, as_request
from dflash_core.data.rows import BadRow, parse_row

CALL = {"type": "function", "id": "old-1", "function": {"name": "add", "arguments": {"a": 1}}}


def remade(row: dict[str, Any]) -> Remade:
    return Remade(parse_row(row, source_file="f", row=1, default_id="id", default_source="s", needs_answer=False))


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def run(row: dict[str, Any], *answers: NewAnswer) -> tuple[list[list[str]], dict[str, Any]]:
    """The prompts that are asked for, as contents, and the row."""
    work, prompts, given_answers = remade(row), [], iter(answers)
    while (prompt := work.prompt()) is not None:
        prompts.append([message.content for message in prompt])
        work.take(next(given_answers, NewAnswer(f"new {len(prompts)}", "stop")))
    return prompts, work.row()


def test_each_answer_is_asked_for_behind_the_new_ones() -> None:
    messages = [turn("system", "s"), turn("user", "u1"), turn("assistant", "a1"), turn("user", "u2"), turn("assistant", "a2")]
    prompts, row = run({"messages": messages, "tools": [{"type": "function"}]})
    assert prompts == [["s", "u1"], ["s", "u1", "new 1", "u2"]]
    assert [message["content"] for message in row["messages"]] == ["s", "u1", "new 1", "u2", "new 2"]
    assert row["tools"] == [{"type": "function"}] and row["num_answers"] == 2


def test_a_prompt_alone_and_a_last_question_get_an_answer() -> None:
    assert run({"prompt": "p"})[0] == [["p"]]
    prompts, row = run({"messages": [turn("user", "u1"), turn("assistant", "a1"), turn("user", "u2")]})
    assert len(prompts) == 2 and row["messages"][-1]["content"] == "new 2"


def test_greetings_and_turns_of_weight_0_stay_and_are_not_trained_on() -> None:
    messages = [turn("assistant", "hello"), turn("user", "u"), turn("assistant", "bad", weight=0), turn("user", "v")]
    prompts, row = run({"messages": messages})
    assert prompts == [["hello", "u", "bad", "v"]]
    assert [message.get("weight") for message in row["messages"]] == [0, None, 0, None, None]


@pytest.mark.parametrize("row", [{"text": "plain"}, {"messages": [turn("system", "s")]}, {"messages": [turn("assistant", "a")]}])
def test_what_asks_nothing_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(BadRow, match=r"plain text|no prompt"):
        remade(row)


def test_a_cut_answer_ends_the_conversation() -> None:
    messages = [turn("user", "u1"), turn("assistant", "a1"), turn("user", "u2"), turn("assistant", "a2")]
    prompts, row = run({"messages": messages}, NewAnswer("half", "length"))
    assert len(prompts) == 1 and row["finish_reason"] == "length" and row["ended_early"] == "length"
    assert [message["content"] for message in row["messages"]] == ["u1", "half"]
    assert "ended_early" not in run({"prompt": "p"}, NewAnswer("half", "length"))[1]


def tool_row() -> dict[str, Any]:
    return {
        "messages": [
            turn("user", "u"),
            turn("assistant", "", tool_calls=[CALL]),
            turn("tool", "2", tool_call_id="old-1"),
            turn("assistant", "a"),
        ]
    }


def test_tool_results_stay_where_the_calls_are_the_same() -> None:
    again = {**CALL, "id": "new-7"}
    prompts, row = run(tool_row(), NewAnswer("", "tool_calls", None, (again,)))
    assert (
        len(prompts) == 2 and row["messages"][1]["tool_calls"][0]["id"] == "old-1" and row["messages"][-1]["content"] == "new 2"
    )


@pytest.mark.parametrize("calls", [(), ({"type": "function", "function": {"name": "add", "arguments": {"a": 2}}},)])
def test_other_calls_end_the_conversation(calls: tuple[dict[str, Any], ...]) -> None:
    prompts, row = run(tool_row(), NewAnswer("x", "tool_calls" if calls else "stop", None, calls))
    assert len(prompts) == 1 and row["ended_early"] == "tool calls differ" and row["messages"][-1]["role"] == "assistant"


def test_requests_have_arguments_as_text_and_no_weights() -> None:
    message = parse_row(tool_row(), source_file="f", row=1, default_id="i", default_source="s").messages[1]
    sent = as_request(message)
    assert json.loads(sent["tool_calls"][0]["function"]["arguments"]) == {"a": 1} and "weight" not in sent
    assert isinstance(message.tool_calls[0]["function"]["arguments"], dict)


@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    [
        ("plain", "stop", ("plain", None)),
        ("<think>\nwhy\n</think>\n\nso", "stop", ("\n\nso", "\nwhy\n")),
        ("why\n</think>so", "stop", ("so", "why\n")),
        ("<think>\n\n</think>\n\nso", "stop", ("\n\nso", None)),
        ("cut \ufffd", "length", ("cut ", None)),
        ("kept \ufffd", "stop", ("kept \ufffd", None)),
    ],
)
def test_reasoning_inside_the_content(text: str, reason: str, expected: tuple[str, str | None]) -> None:
    assert apart(text, reason) == expected


def test_what_holds_no_answer_is_refused() -> None:
    with pytest.raises(BadRow, match="while the target was thinking"):
        apart("<think> and so on", "length")
    with pytest.raises(BadRow, match="reasoning took all tokens"):
        run({"prompt": "p"}, NewAnswer("", "length", "thoughts"))
    with pytest.raises(BadRow, match="said nothing"):
        run({"prompt": "p"}, NewAnswer(" \n", "stop"))


roles = st.lists(st.sampled_from(["user", "assistant", "system"]), min_size=1, max_size=8)


@given(roles, st.lists(st.sampled_from(["stop", "length"]), max_size=8))
def test_whatever_comes_out_is_read_by_preparation_and_keeps_the_other_side(names: list[str], reasons: list[str]) -> None:
    messages = [turn(role, f"{role} {number}") for number, role in enumerate(names)]
    answers = [NewAnswer(f"new {number}", reason) for number, reason in enumerate(reasons)]
    try:
        prompts, row = run({"messages": messages}, *answers)
    except BadRow:
        assert "user" not in names
        return
    conversation = parse_row(json.loads(json.dumps(row)), source_file="f", row=1, default_id="x", default_source="y")
    others = [message["content"] for message in messages if message["role"] != "assistant"]
    kept = [message.content for message in conversation.messages if message.role != "assistant"]
    assert kept == others[: len(kept)] and (len(kept) == len(others) or "ended_early" in row or row["finish_reason"] == "length")
    trained = [message.content for message in conversation.messages if message.role == "assistant" and message.supervised]
    assert len(trained) == len(prompts) == row["num_answers"] and all(content.startswith("new") for content in trained)
    assert not any(role == "user" for role in names[len(conversation.messages) :]) or "ended_early" in row
