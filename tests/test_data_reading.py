"""Held-out prompts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_core.data import Message, read_prompts
from dflash_core.errors import DataError
from tests.test_data_tokenizer import MARKED, byte_tokenizer, end_adding_tokenizer, merging_tokenizer


def prompt_row(number: int, *more: dict[str, str]) -> str:
    return json.dumps({"id": f"p{number}", "source": "s", "messages": [{"role": "user", "content": f"question {number}"}, *more]})


def test_a_prompt_ends_where_the_target_answers(tmp_path: Path) -> None:
    file = tmp_path / "held_out.jsonl"
    answer, question = {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}
    file.write_text(
        "\n".join(
            [prompt_row(0), prompt_row(1, answer), prompt_row(2, answer, question), prompt_row(3, answer, question, answer)]
        )
    )
    tokenizer = merging_tokenizer(MARKED)
    prompts = read_prompts(file, tokenizer, 10)
    two_turns = "<|user|>question {}<|end|><|assistant|>a<|end|><|user|>r<|end|><|assistant|>"
    expected = [
        "<|user|>question 0<|end|><|assistant|>",
        "<|user|>question 1<|end|><|assistant|>",
        two_turns.format(2),
        two_turns.format(3),
    ]
    assert [tokenizer.decode(list(prompt.input_ids)) for prompt in prompts] == expected
    assert [(prompt.id, prompt.source) for prompt in prompts] == [(f"p{n}", "s") for n in range(4)]
    slow = tokenizer.apply_chat_template([Message("user", "question 0")._asdict()], add_generation_prompt=True)
    assert prompts[0].input_ids == tuple(slow["input_ids"])


def test_prompts_are_spread_evenly_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "held_out.jsonl"
    file.write_text("\n".join(prompt_row(n) for n in range(10)))
    for count, picked in ((1, [0]), (3, [0, 3, 6]), (4, [0, 2, 5, 7]), (10, list(range(10))), (99, list(range(10)))):
        assert [prompt.id for prompt in read_prompts(file, byte_tokenizer(), count)] == [f"p{n}" for n in picked]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ("{oops", r"row 2: not JSON \(Expecting"),
        ('{"messages": []}', "row 2: empty conversation$"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', r"row 2: no prompt \(nothing stands before the answer\)$"),
        (prompt_row(0), r"row 2: duplicate id \('p0'\)$"),
        ('{"messages": [{"role": "user", "content": "<|end|>"}]}', "row 2: special token in content"),
        ('{"messages": [{"role": "tool", "content": ""}]}', r"row 2: template refuses \(no role tool\)$"),
    ],
)
def test_a_bad_held_out_row_is_one_line_with_file_and_row(tmp_path: Path, row: str, text: str) -> None:
    file = tmp_path / "held_out.jsonl"
    file.write_text(prompt_row(0) + "\n" + row)
    with pytest.raises(DataError, match=text) as caught:
        read_prompts(file, byte_tokenizer(), 10)
    assert str(caught.value).startswith(f"{file}: row 2: ")


def test_a_held_out_file_that_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: no such file$"):
        read_prompts(tmp_path / "none.jsonl", byte_tokenizer(), 1)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"empty\.jsonl: no rows$"):
        read_prompts(tmp_path / "empty.jsonl", byte_tokenizer(), 1)


def test_prompts_come_from_all_formats_shapes_and_globs_with_columns_and_variables(tmp_path: Path) -> None:
    rows = [{"key": f"k{n}", "ask": f"question {n}", "reply": "a"} for n in range(4)]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table.slice(0, 2), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows[2:]).encode()))
    template = MARKED.replace("add_generation_prompt -%}", "add_generation_prompt -%}{{ mode }}")
    tokenizer, columns = byte_tokenizer(template), {"prompt": "ask", "id": "key", "response": "reply"}
    for pattern in (f"{tmp_path}/*.*", f"file://{tmp_path}/*.*"):
        prompts = read_prompts(pattern, tokenizer, 9, columns=columns, template_variables={"mode": "M"})
        assert [(prompt.id, prompt.source) for prompt in prompts] == [("k0", "a"), ("k1", "a"), ("k2", "b"), ("k3", "b")]
        assert tokenizer.decode(list(prompts[2].input_ids)) == "<|user|>question 2<|end|>M<|assistant|>"


def test_a_plain_text_prompt_begins_as_the_tokenizer_begins_texts_and_does_not_end(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "once"}\n{"prompt": "q"}\n')
    once, question = read_prompts(file, end_adding_tokenizer(True), 2)
    assert once.input_ids == (257, *b"once")
    assert question.input_ids == (258, ord("q"), 260, 259)


def test_tools_and_reasoning_reach_the_prompt(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    template = "{{ tools | tojson }}" + MARKED.replace(
        "{{ m['content'] }}<|end|>{%- endgen", "{{ m.thinking ~ m.content }}<|end|>{%- endgen"
    )
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "reasoning": "why"},
        {"role": "user", "content": "r"},
    ]
    file.write_text(json.dumps({"messages": turns, "tools": [{"name": "t"}]}))
    (prompt,) = read_prompts(file, byte_tokenizer(template), 1)
    expected = '[{"name": "t"}]<|user|>q<|end|><|assistant|>whya<|end|><|user|>r<|end|><|assistant|>'
    assert byte_tokenizer(template).decode(list(prompt.input_ids)) == expected
