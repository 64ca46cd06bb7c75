"""Rows of JSONL files: what is taken, what is refused, and how the refusal reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.data import Conversation, Message, Reject, read_conversations
from dflash_core.errors import DataError

GOOD = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


def turn(**change: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", **change}]}).encode()


BAD_ROWS = {
    "not JSON (Expecting value: column 14)": b'{"messages": oops}',
    "not JSON (RecursionError)": b'{"messages": ' + b"[" * 100_000,
    "not JSON (ValueError)": b'{"messages": ' + b"1" * 5000 + b"}",
    "invalid UTF-8 (byte 2)": b'"\xff"',
    "not an object (list)": b"[1]",
    "no messages": b'{"text": "x"}',
    "messages is not a list (str)": b'{"messages": "x"}',
    "empty conversation": b'{"messages": []}',
    "ill-typed message (message 1 is not an object)": b'{"messages": ["x"]}',
    "ill-typed message (message 2: content is not a string)": turn(content=["x"]),
    "ill-typed message (message 2: role is not a string)": turn(role=None),
    "unknown role (message 2: 'bot')": turn(role="bot"),
    "unknown message key (message 2: 'tool_calls')": turn(tool_calls=[1]),
    "empty assistant content (message 2)": turn(content=" \n"),
    "NUL character (message 2, character 3)": turn(content="ab\0"),
    "lone surrogate (message 2, character 2)": turn(content="a\ud800"),
    "no assistant turn": turn(role="user"),
    "unknown finish_reason ('abort'; known are stop and length)": json.dumps({**GOOD, "finish_reason": "abort"}).encode(),
    "ill-typed id ([])": json.dumps({**GOOD, "id": []}).encode(),
    "ill-typed source (3)": json.dumps({**GOOD, "source": 3}).encode(),
    "duplicate id ('first')": json.dumps({**GOOD, "id": "first"}).encode(),
}


@pytest.mark.parametrize("problem", BAD_ROWS)
def test_a_bad_row_is_one_line_with_file_and_row_or_a_reject(problem: str, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    first, last = ({**GOOD, "id": name} for name in ("first", "last"))
    file.write_bytes(json.dumps(first).encode() + b"\n\n" + BAD_ROWS[problem] + b"\n" + json.dumps(last).encode())
    with pytest.raises(DataError) as caught:
        list(read_conversations([str(file)], "error"))
    assert str(caught.value) == f"{file}: row 3: {problem}"
    before, bad, after = read_conversations([str(file)], "reject")
    assert isinstance(bad, Reject)
    assert str(bad) == f"{file}: row 3: {problem}"
    assert isinstance(before, Conversation) and isinstance(after, Conversation)
    assert (before.sample_id, before.row, after.sample_id, after.row) == ("first", 1, "last", 4)


def test_a_row_keeps_what_it_says_and_gets_names_where_it_says_nothing(tmp_path: Path) -> None:
    file = tmp_path / "talks.jsonl"
    full = {
        **GOOD,
        "id": 7,
        "source": "web",
        "finish_reason": "length",
        "own_key": [1],
        "messages": [*GOOD["messages"], {"role": "tool", "content": "", "name": None}],
    }
    file.write_text(json.dumps(full) + "\n" + json.dumps(GOOD))
    given_names, default_names = read_conversations([str(file)], "error")
    turns = (Message("user", "q"), Message("assistant", "a"))
    assert given_names == Conversation("7", "web", (*turns, Message("tool", "")), "length", file.as_posix(), 1)
    assert default_names == Conversation(f"{file.as_posix()}:2", "talks", turns, None, file.as_posix(), 2)


def test_files_come_in_the_order_given_globs_sorted_nothing_twice(tmp_path: Path) -> None:
    for name in ("b1", "a10", "a9", "[odd]"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(GOOD) + "\n")
    (tmp_path / "a_folder.jsonl").mkdir()
    items = read_conversations([f"{tmp_path}/b*.jsonl", f"{tmp_path}/[odd].jsonl", f"{tmp_path}/*.jsonl"], "error")
    sources = [item.source for item in items if isinstance(item, Conversation)]
    assert sources == ["b1", "[odd]", "a10", "a9"]


def test_missing_files_are_named_before_anything_is_read(tmp_path: Path) -> None:
    for pattern, text in (("no.jsonl", "no such file"), ("*.json", "no file matches"), (".", "is a folder")):
        with pytest.raises(DataError, match=text) as caught:
            read_conversations([f"{tmp_path}/{pattern}"], "reject")
        assert str(caught.value).startswith(f"{tmp_path}/{pattern}")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1).filter(str.strip),
        min_size=1,
        max_size=4,
    )
)
def test_any_text_survives_line_separators_included(tmp_path_factory: pytest.TempPathFactory, contents: list[str]) -> None:
    file = tmp_path_factory.mktemp("rows") / "x.jsonl"
    rows = [{"messages": [{"role": "assistant", "content": content}]} for content in contents]
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8", newline="")
    read = [item.messages[0].content for item in read_conversations([str(file)], "error") if isinstance(item, Conversation)]
    assert read == contents


@settings(max_examples=80, deadline=None)
@given(
    st.binary(max_size=40)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=3),
        lambda x: (
            st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(["messages", "role", "content", "id", "z"]), x, max_size=3)
        ),
        max_leaves=8,
    ).map(lambda v: json.dumps(v).encode())
)
def test_no_row_raises_anything_but_a_data_error(tmp_path_factory: pytest.TempPathFactory, row: bytes) -> None:
    file = tmp_path_factory.mktemp("rows") / "x.jsonl"
    file.write_bytes(row)
    items = list(read_conversations([str(file)], "reject"))
    assert len(items) == sum(bool(line.strip()) for line in row.split(b"\n"))
    assert all("\n" not in str(item) for item in items if isinstance(item, Reject))
