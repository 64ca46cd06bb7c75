"""Small Parquet and Arrow files that stand for gigabytes: read in bounded memory, or refused in one line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.data import folded, parquet_bounds, rows
from dflash_core.data.folded import plain_type, unfolded, unfolded_bytes
from dflash_core.data.parquet_bounds import ReadPlan, plan_row_group
from dflash_core.data.parquet_pages import read_column_chunk
from dflash_core.data.rows import BadRow, rows_of
from dflash_core.data.sources import expand_files, read_chunks
from dflash_core.errors import DataError

MIB = 1 << 20
LONG = "x" * MIB


def plan(path: Path, max_rows: int = 4096, max_bytes: int = 8 * MIB) -> ReadPlan:
    with pa.OSFile(str(path)) as source:
        return plan_row_group(source, pq.read_metadata(path), 0, max_rows, max_bytes)


def read(path: Path, max_rows: int = 4096, max_bytes: int = 8 * MIB) -> list[Any]:
    return [row for chunk in read_chunks(expand_files([str(path)])[0], max_rows, max_bytes) for _, row in rows_of(chunk)]


def repeated(text: str, count: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array([text]))


def turns(content: pa.Array, ends: list[int]) -> pa.Table:
    items = pa.StructArray.from_arrays([repeated("user", len(content)), content], ["role", "content"])
    return pa.table({"messages": pa.ListArray.from_arrays(pa.array([0, *ends], pa.int32()), items)})


def write(table: pa.Table, path: Path, **options: Any) -> None:
    pq.write_table(table, path, **{"compression": "zstd", "store_schema": False, **options})


def flat(path: Path) -> None:
    """404 bytes or so, and each row a MiB."""
    write(pa.table({"text": repeated(LONG, 2000)}), path)


def flat_with_arrows_own_schema(path: Path) -> None:
    write(pa.table({"text": repeated(LONG, 2000)}), path, compression="snappy", store_schema=True)


def flat_that_says_it_is_small(path: Path) -> None:
    """Its texts are long in a later part; the footer speaks of one byte for all of them."""
    texts = pa.array(["s"] * 20_000 + ["a" * MIB] * 900)
    write(pa.table({"text": texts}), path, use_dictionary=False, data_page_size=MIB, write_batch_size=16)
    group = pq.read_metadata(path).row_group(0)
    sizes = group.total_byte_size, group.column(0).total_uncompressed_size
    data = path.read_bytes()
    for size in sizes:
        written, value = b"", size * 2  # zigzag
        while value > 127:
            written, value = written + bytes([value & 127 | 128]), value >> 7
        written += bytes([value])
        data = data.replace(written, b"\x82" + b"\x80" * (len(written) - 2) + b"\0")
    path.write_bytes(data)
    assert pq.read_metadata(path).row_group(0).total_byte_size == 1


def lists(path: Path) -> None:
    write(turns(repeated(LONG, 2000), list(range(2, 2001, 2))), path)


def prefixes(path: Path) -> None:
    write(pa.table({"text": pa.array([LONG] * 1500)}), path, use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"})


READ = [flat, flat_with_arrows_own_schema, flat_that_says_it_is_small, lists, prefixes]
PEAK = """
import sys
from dflash_core.data.sources import expand_files, read_chunks
rows = longest = 0
for chunk in read_chunks(expand_files([sys.argv[1]])[0], 4096, 8 << 20):
    rows += chunk.num_rows
    longest = max(longest, len(chunk.data))
[peak] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")]
print(rows, longest, peak)
"""


@pytest.mark.slow
@pytest.mark.parametrize("make", READ)
def test_what_unfolds_is_read_in_bounded_memory(make: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "bomb.parquet"
    make(path)
    assert path.stat().st_size < 2 * MIB
    done = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, timeout=100, check=True)
    count, longest, peak_kib = map(int, done.stdout.split())
    assert count == pq.read_metadata(path).num_rows
    assert longest < 20 * MIB
    assert peak_kib < 700 << 10  # they unfold to 900 MiB at once and to 2 GiB


@pytest.mark.parametrize("make", [flat, flat_with_arrows_own_schema, lists])
def test_rows_come_out_as_they_went_in(make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LONG", "x" * 1000)
    monkeypatch.setattr(parquet_bounds, "BATCH_BYTES", 1 << 14)
    path = tmp_path / "x.parquet"
    make(path)
    assert plan(path).folded_columns, "the way that is tested"
    assert read(path, 64, 1 << 14) == pq.read_table(path).to_pylist()
    chunks = list(read_chunks(expand_files([str(path)])[0], 64, 1 << 14))
    assert max(len(chunk.data) for chunk in chunks if isinstance(chunk.data, bytes)) < 3 << 14


def test_an_ordinary_file_is_read_in_whole_batches_without_detour(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    texts = [f"question {number} " * 9 for number in range(6000)]
    write(pa.table({"id": texts, "messages": [[{"role": "user", "content": text}] for text in texts]}), path)
    assert plan(path) == ReadPlan(1024, ())
    with pa.OSFile(str(path)) as source:
        metadata = pq.read_metadata(path)
        for number in range(metadata.num_columns):
            chunk, described = read_column_chunk(source, metadata, 0, number), metadata.row_group(0).column(number)
            assert (chunk.num_values, chunk.num_bytes) == (described.num_values, described.total_uncompressed_size)
            assert chunk.compressed_bytes == described.total_compressed_size


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "zstd", "lz4", "brotli"])
def test_pages_of_every_kind_are_walked_along(tmp_path: Path, version: str, codec: str) -> None:
    path = tmp_path / "x.parquet"
    texts = ["é" * (number % 50) for number in range(3000)]
    write(pa.table({"text": texts}), path, compression=codec, data_page_version=version, data_page_size=512, write_batch_size=64)
    with pa.OSFile(str(path)) as source:
        chunk = read_column_chunk(source, pq.read_metadata(path), 0, 0)
    assert len(chunk.pages) > 4 and chunk.num_values == 3000 and chunk.longest_entry == 98
    assert chunk.num_bytes == pq.read_metadata(path).row_group(0).column(0).total_uncompressed_size


def one_line(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        read(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: cannot be read (") and "\n" not in text
    return text


def test_a_page_that_unfolds_to_more_than_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.parquet"
    write(pa.table({"id": ["a"], "text": ["b" * (4 * MIB)]}), path, use_dictionary=False)
    assert len(read(path)) == 1
    monkeypatch.setattr(folded, "MAX_UNFOLDED_BYTES", 3 * MIB)
    assert "row group 1, column text: a page unfolds from 0.0 MiB to 4.0 MiB" in one_line(path)
    write(pa.table({"text": ["b" * (4 * MIB)]}), path, use_dictionary=False, compression="none")
    assert len(read(path)) == 1, "a page that takes as much room in the file is allowed"


def test_lists_that_one_row_could_not_hold_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.parquet"
    write(turns(repeated(LONG, 2000), [2000]), path)
    assert "a row of more than 256 MiB" in one_line(path)
    write(turns(repeated("a", 5_000_000), [5_000_000]), path)
    assert "a row with more than 4194304 items in its lists" in one_line(path)
    monkeypatch.setattr(parquet_bounds, "MAX_VALUES", 9_999_999)
    assert "row group 1: 10000000 values in lists" in one_line(path)
    write(pa.table({"number": range(3000)}), path, max_rows_per_page=3000)
    monkeypatch.setattr(parquet_bounds, "MAX_VALUES", 2999)
    assert "row group 1: a page of 3000 values" in one_line(path)
    monkeypatch.setattr(parquet_bounds, "MAX_VALUES", 3000)
    monkeypatch.setattr(parquet_bounds, "MAX_ROW_BYTES", 4 * MIB)
    write(turns(pa.array(["a" * MIB] * 9), [9]), path, use_dictionary=False, write_batch_size=1)
    assert "unfold to 9.0 MiB" in one_line(path)
    prefixed = {"messages.list.element.content": "DELTA_BYTE_ARRAY"}
    write(turns(pa.array(["a" * MIB] * 9), [9]), path, use_dictionary=False, column_encoding=prefixed)
    assert "messages.list.element.content: DELTA_BYTE_ARRAY in lists" in one_line(path)


def test_lists_of_token_ids_that_take_their_room_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_bounds, "MAX_VALUES", 1000)
    ids = [[(row * 7919 + place * 104_729) % 50_000 for place in range(100)] for row in range(300)]
    path = tmp_path / "ids.parquet"
    write(pa.table({"input_ids": pa.array(ids, pa.list_(pa.int32()))}), path, max_rows_per_page=9)
    assert [row["input_ids"] for row in read(path)] == ids
    write(pa.table({"input_ids": pa.array([[7] * 100] * 300, pa.list_(pa.int32()))}), path, max_rows_per_page=9)
    assert "30000 values in lists" in one_line(path)


def test_a_damaged_page_header_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write(pa.table({"text": ["a"] * 9}), path)
    data = path.read_bytes()
    for filling in (b"\xff", b"\x1c", b"\x19", b"\x15"):
        path.write_bytes(data[:4] + filling * 30 + data[34:])
        one_line(path)


@pytest.mark.parametrize("ending", ["arrow", "feather"])
def test_arrow_files_fold_too(tmp_path: Path, ending: str) -> None:
    """A dictionary of one long text, of which `to_pylist` would make a text for every row."""
    path, table = tmp_path / f"x.{ending}", pa.table({"text": repeated("y" * 10_000, 3000)})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    chunks = list(read_chunks(expand_files([str(path)])[0], 4096, MIB))
    assert sum(chunk.num_rows for chunk in chunks) == 3000
    assert max(len(chunk.data) for chunk in chunks) < 2.1 * MIB
    assert read(path) == table.to_pylist()


@pytest.mark.parametrize("codec", ["zstd", "lz4", None])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("where", ["batch", "dictionary"])
def test_compressed_arrow_batches_say_what_they_unfold_to(
    tmp_path: Path, codec: str | None, is_stream: bool, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, texts = tmp_path / "x.arrow", [str(number) + "a" * 100_000 for number in range(20)]
    column = pa.array(texts)
    table = pa.table({"id": list(range(20)), "text": column if where == "batch" else column.dictionary_encode()})
    new = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    with new(path, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_table(table)
    assert read(path) == table.to_pylist()
    monkeypatch.setattr(folded, "MAX_UNFOLDED_BYTES", MIB)
    if codec is None:
        assert len(read(path)) == 20, "it takes as much in the file"
    else:
        assert "unfolds from 0.0 MiB to 1.9 MiB" in one_line(path)
    path.write_bytes(path.read_bytes()[:-40])
    one_line(path)  # cut short


ITEMS = st.lists(st.none() | st.text(max_size=5), min_size=1, max_size=12)


def folded_kinds(texts: list[str | None]) -> dict[str, pa.Array]:
    coded = pa.array(texts, pa.string()).dictionary_encode()
    count = len(texts)
    ends = pa.array([0, count // 2, count // 2, count], pa.int32())
    struct = pa.StructArray.from_arrays([coded, pa.array(range(count))], ["a", "b"])
    return {
        "dictionary": coded,
        "runs": pa.RunEndEncodedArray.from_arrays(pa.array(range(1, count + 1), pa.int32()), pa.array(texts, pa.string())),
        "view": pa.array(texts, pa.string_view()),
        "struct": struct,
        "list": pa.ListArray.from_arrays(ends, struct, mask=pa.array([False, True, False])),
        "large list": pa.LargeListArray.from_arrays(ends.cast(pa.int64()), coded),
        "fixed list": pa.FixedSizeListArray.from_arrays(coded, 1),
        "map": pa.MapArray.from_arrays(ends, pa.array(["k"] * count), coded),
        "list view": pa.ListViewArray.from_arrays(pa.array([0, 0], pa.int32()), pa.array([count, 1], pa.int32()), coded),
        "dictionary of lists": pa.DictionaryArray.from_arrays(pa.array([0, 0, None], pa.int32()), pa.array([texts])),
    }


@settings(max_examples=15, deadline=None)
@given(texts=ITEMS, max_bytes=st.integers(1, 400), start=st.integers(0, 3))
def test_property_unfolding_keeps_the_values_and_measures_at_least_what_comes_out(
    texts: list[str | None], max_bytes: int, start: int
) -> None:
    for kind, column in folded_kinds(texts).items():
        column = column.slice(min(start, len(column) - 1))
        parts = list(unfolded(pa.RecordBatch.from_arrays([column], ["x"]), max_bytes))
        assert [value for part in parts for value in part["x"].to_pylist()] == column.to_pylist(), kind
        assert {part["x"].type for part in parts} == {plain_type(column.type)}
        for part in parts:
            assert part.num_rows == 1 or sum(len(text or "") for text in _texts(part["x"].to_pylist())) <= max_bytes
        whole = sum(len((text or "").encode()) for text in _texts(column.to_pylist()))
        assert unfolded_bytes(column) >= whole, kind


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [text for item in items for text in _texts(item)]


def test_plain_batches_are_not_touched() -> None:
    batch = pa.RecordBatch.from_pylist([{"messages": [{"role": "user", "content": "a"}], "id": 1}] * 3)
    (same,) = unfolded(batch, 1)
    assert same is batch
    assert folded.num_items(batch["messages"]) == 3


def test_a_line_of_empty_objects_is_too_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rows, "MAX_LINE_ITEMS", 100)
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": [' + "{}," * 200 + "{}]}\n" + '{"a": ' + '"' + "," * 90 + '"}\n')
    first, second = read(path)
    assert isinstance(first, BadRow) and first.reason == "over-long line"
    assert second == {"a": "," * 90}
