"""Reading a dataset back, the length histogram, and held-out prompts."""

from __future__ import annotations

import gzip
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.data import Dataset, Message, has_supervised_pair, read_prompts, write_length_histogram
from dflash_core.data.store import Fingerprint, ShardWriter
from dflash_core.errors import DataError
from tests.test_data_tokenizer import MARKED, byte_tokenizer, end_adding_tokenizer, merging_tokenizer

Sequences = list[tuple[list[int], list[bool]]]
sequences = st.lists(
    st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1, max_size=40), min_size=1, max_size=12
).map(lambda found: [([i for i, _ in one], [m for _, m in one]) for one in found])


def make(folder: Path, content: Sequences, shard_sequences: int = 4) -> Path:
    """A dataset folder written without tokenizer and rows."""
    writer, fingerprint = ShardWriter(folder, shard_sequences), Fingerprint("t")
    for number, (ids, mask) in enumerate(content):
        arrays = np.array(ids, dtype=np.int32), np.array(mask, dtype=np.bool_)
        writer.add(f"id-{number}", f"source-{number % 2}", *arrays)
        fingerprint.add(*arrays)
    manifest = {
        "schema_version": 1,
        "tokenizer_sha256": "t",
        "source_files": [],
        "num_parts": writer.close(),
        "num_sequences": len(content),
        "num_tokens": sum(len(ids) for ids, _ in content),
        "num_supervised": sum(sum(mask) for _, mask in content),
        "fingerprint": fingerprint.hexdigest(),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


CONTENT: Sequences = [([n] * n, [k % 3 > 0 for k in range(n)]) for n in range(1, 30)]


@settings(max_examples=40, deadline=None)
@given(content=sequences, shard_sequences=st.integers(1, 5))
def test_what_was_written_is_read_at_any_bit_offset(
    tmp_path_factory: pytest.TempPathFactory, content: Sequences, shard_sequences: int
) -> None:
    folder = make(tmp_path_factory.mktemp("data") / "ds", content, shard_sequences)
    dataset = Dataset.open(folder)
    assert len(dataset) == len(content)
    for index in reversed(range(len(content))):
        ids, mask = dataset.tokens(index)
        assert (ids.dtype, mask.dtype) == (np.int32, np.bool_)
        assert (ids.tolist(), mask.tolist()) == content[index]
        assert dataset.sample_id(index) == f"id-{index}"
    assert dataset.sources.tolist() == [f"source-{number % 2}" for number in range(len(content))]
    dataset.verify()


def fingerprint(tokenizer: str, *rows: tuple[list[int], list[bool]]) -> str:
    found = Fingerprint(tokenizer)
    for ids, mask in rows:
        found.add(np.array(ids, dtype=np.int32), np.array(mask, dtype=np.bool_))
    return found.hexdigest()


def test_the_fingerprint_sees_ids_masks_order_borders_and_the_tokenizer() -> None:
    one, two = ([1, 2], [False, True]), ([3], [True])
    variants = [
        fingerprint("t", one, two),
        fingerprint("u", one, two),
        fingerprint("t", two, one),
        fingerprint("t", one),
        fingerprint("t", ([1, 4], [False, True]), two),
        fingerprint("t", ([1, 2], [True, True]), two),
        fingerprint("t", ([1], [False]), ([2, 3], [True, True])),
        fingerprint("t", ([1, 2, 3], [False, True, True])),
    ]
    assert len(set(variants)) == len(variants)
    assert fingerprint("t", one, two) == variants[0]


def test_reference_arrow_itself_reads_the_same(tmp_path: Path) -> None:
    dataset = Dataset.open(make(tmp_path / "ds", CONTENT))
    parts = sorted((tmp_path / "ds" / "tokens").iterdir())
    rows = [row for part in parts for row in pa.ipc.open_file(part.read_bytes()).read_all().to_pylist()]
    assert len(parts) == 8 and len(rows) == len(dataset)
    for index, row in enumerate(rows):
        ids, mask = dataset.tokens(index)
        assert (row["input_ids"], row["loss_mask"]) == (ids.tolist(), mask.tolist())
        assert (row["sample_id"], row["source"]) == (dataset.sample_id(index), dataset.sources[index])
        assert (row["length"], row["num_supervised"]) == (dataset.lengths[index], dataset.num_supervised[index])


def test_threads_read_what_one_thread_reads_and_cannot_change_it(tmp_path: Path) -> None:
    dataset = Dataset.open(make(tmp_path / "ds", CONTENT))
    order = np.random.default_rng(0).integers(len(dataset), size=2000).tolist()
    with ThreadPoolExecutor(4) as pool:
        for index, (ids, mask) in zip(order, pool.map(dataset.tokens, order, timeout=30), strict=True):
            assert (ids.tolist(), mask.tolist()) == CONTENT[index]
    for array in (dataset.tokens(3)[0], dataset.lengths, dataset.num_supervised, dataset.sources):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    for outside in (-1, len(dataset)):
        with pytest.raises(IndexError, match=f"sequence {outside} of 29"):
            dataset.tokens(outside)


def edit_manifest(folder: Path, **change: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def cut(path: Path, keep: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])


DAMAGE = {
    r"ds: not a dataset \(manifest.json is missing\)": lambda f: (f / "manifest.json").unlink(),
    r"manifest.json: damaged": lambda f: cut(f / "manifest.json", 0.5),
    r"manifest.json: schema version 1 expected": lambda f: edit_manifest(f, schema_version=2),
    r"part-00003.arrow: a part of the dataset is missing": lambda f: (f / "tokens/part-00003.arrow").unlink(),
    r"part-00001.arrow: damaged": lambda f: cut(f / "tokens/part-00001.arrow", 0.7),
    r"part-00002.arrow: damaged": lambda f: (f / "tokens/part-00002.arrow").write_bytes(b""),
    r"manifest.json: damaged \(num_parts": lambda f: edit_manifest(f, num_parts="8"),
    r"num_sequences 30, the parts hold 29": lambda f: edit_manifest(f, num_sequences=30),
    r"num_tokens 1, the parts hold 435": lambda f: edit_manifest(f, num_tokens=1),
    r"num_supervised 0, the parts hold": lambda f: edit_manifest(f, num_supervised=0),
    r"num_sequences 29, the parts hold 28": lambda f: edit_manifest(f, num_parts=7),
}


@pytest.mark.parametrize("text", DAMAGE)
def test_damage_is_named_when_the_dataset_is_opened(tmp_path: Path, text: str) -> None:
    folder = make(tmp_path / "ds", CONTENT)
    DAMAGE[text](folder)
    with pytest.raises(DataError, match=text) as caught:
        Dataset.open(folder)
    assert "\n" not in str(caught.value) and "ds" in str(caught.value)


def test_a_changed_token_is_found_by_verify(tmp_path: Path) -> None:
    folder = make(tmp_path / "ds", [([7] * 1000, [True] * 1000)])
    part = folder / "tokens" / "part-00000.arrow"
    data = bytearray(part.read_bytes())
    position = data.index(np.array([7] * 50, dtype=np.int32).tobytes())
    data[position + 40] = 8
    part.write_bytes(data)
    dataset = Dataset.open(folder)
    with pytest.raises(DataError, match="do not fit the fingerprint"):
        dataset.verify()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_reference_a_supervised_pair_is_two_in_a_row(mask: list[bool]) -> None:
    assert has_supervised_pair(np.array(mask)) == any(a and b for a, b in itertools.pairwise(mask))


@settings(max_examples=30, deadline=None)
@given(content=sequences, inner=st.sets(st.integers(1, 39), max_size=5))
def test_reference_the_histogram_counts_each_sequence_in_its_bucket(
    tmp_path_factory: pytest.TempPathFactory, content: Sequences, inner: set[int]
) -> None:
    folder = make(tmp_path_factory.mktemp("data") / "ds", content)
    edges = [*sorted(inner), 40]
    write_length_histogram(folder, edges)
    rows = pq.read_table(folder / "length_histogram.parquet").to_pylist()
    assert [(row["bucket"], row["lower"], row["upper"]) for row in rows] == list(
        zip(range(len(edges)), [0, *edges[:-1]], edges, strict=True)
    )
    num_tokens = sum(len(ids) for ids, _ in content)
    for row in rows:
        members = [(ids, mask) for ids, mask in content if row["lower"] < len(ids) <= row["upper"]]
        tokens = sum(len(ids) for ids, _ in members)
        assert (row["num_sequences"], row["num_tokens"]) == (len(members), tokens)
        assert row["num_supervised"] == sum(sum(mask) for _, mask in members)
        assert row["pct_sequences"] == pytest.approx(100 * len(members) / len(content))
        assert row["pct_tokens"] == pytest.approx(100 * tokens / num_tokens)


@pytest.mark.parametrize(
    ("edges", "text"),
    [
        ([], "do not ascend"),
        ([0, 40], "do not ascend"),
        ([20, 20, 40], "do not ascend"),
        ([10, 28], "end at 28, the longest sequence has 29"),
    ],
)
def test_edges_that_are_no_buckets_are_refused(tmp_path: Path, edges: list[int], text: str) -> None:
    folder = make(tmp_path / "ds", CONTENT)
    with pytest.raises(DataError, match=text):
        write_length_histogram(folder, edges)
    assert not (folder / "length_histogram.parquet").exists()


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
