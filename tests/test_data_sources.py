"""Files in all formats: what is found, how it is cut into chunks, and what damage reads like."""

from __future__ import annotations

import gzip
import json
import pickle
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.data import sources, table_files
from dflash_core.data.rows import BadRow, rows_of
from dflash_core.data.sources import RawChunk, SourceFile, content_identity, expand_files, num_bytes, read_chunks
from dflash_core.errors import DataError
from tests.test_data_rows import read_file

Rows = list[dict[str, Any]]


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


def json_lines(rows: Rows) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def two_parts(rows: Rows, compress: Callable[[bytes], bytes]) -> bytes:
    """Two gzip members or zstd frames, the edge in the middle of a line."""
    data = json_lines(rows)
    return compress(data[: len(data) // 2]) + compress(data[len(data) // 2 :])


def arrow(rows: Rows, stream: bool) -> bytes:
    table, sink = pa.Table.from_pylist(rows), pa.BufferOutputStream()
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return bytes(sink.getvalue().to_pybytes())


def parquet(rows: Rows) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=4)
    return bytes(sink.getvalue().to_pybytes())


def feather_file(rows: Rows) -> bytes:
    sink = pa.BufferOutputStream()
    feather.write_feather(pa.Table.from_pylist(rows), sink)
    return bytes(sink.getvalue().to_pybytes())


WRITERS: dict[str, Callable[[Rows], bytes]] = {
    "x.jsonl": json_lines,
    "x.json": json_lines,
    "x.NDJSON": json_lines,
    "x.jsonl.gz": lambda rows: two_parts(rows, gzip.compress),
    "x.jsonl.zst": lambda rows: two_parts(rows, zstd),
    "x.parquet": parquet,
    "x.arrow": lambda rows: arrow(rows, stream=False),
    "stream/x.arrow": lambda rows: arrow(rows, stream=True),
    "x.feather": feather_file,
}


def row(number: int, content: str = "a") -> dict[str, Any]:
    return {
        "id": f"r{number}",
        "messages": [{"role": "user", "content": "q", "name": None}, {"role": "assistant", "content": content, "name": None}],
    }


def write(folder: Path, name: str, rows: Rows) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(WRITERS[name](rows))
    return path


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1).filter(str.strip),
        min_size=1,
        max_size=9,
    )
)
def test_all_formats_give_equal_conversations(tmp_path_factory: pytest.TempPathFactory, contents: list[str]) -> None:
    folder = tmp_path_factory.mktemp("formats")
    rows = [row(number, content) for number, content in enumerate(contents)]
    found = [read_file(write(folder, name, rows)) for name in WRITERS]
    assert [item.messages[1].content for item in found[0]] == contents  # type: ignore[union-attr]
    assert all(other == found[0] for other in found[1:])


@pytest.mark.parametrize("name", WRITERS)
def test_chunks_are_cut_at_the_same_places_and_can_be_sent_to_another_process(name: str, tmp_path: Path) -> None:
    (file,) = expand_files([str(write(tmp_path, name, [row(number) for number in range(11)]))])
    chunks = list(read_chunks(file, 4, 1 << 20))
    assert [(chunk.first_row, chunk.num_rows) for chunk in chunks] == [(1, 4), (5, 4), (9, 3)]
    assert [number for chunk in pickle.loads(pickle.dumps(chunks)) for number, _ in rows_of(chunk)] == list(range(1, 12))
    assert chunks == list(read_chunks(pickle.loads(pickle.dumps(file)), 4, 1 << 20))
    ends = [chunk.end_byte for chunk in chunks]
    assert ends == sorted(ends) and 0 < ends[-1] <= (num_bytes(file) or 0)
    assert [chunk.num_rows for chunk in read_chunks(file, 4, 1)] == [1] * 11, "a chunk ends once it has max_bytes bytes"


def test_lines_are_counted_as_an_editor_counts_them(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id": 1}\r\n\n  \r\n{"id": "\xe2\x80\xa8"}\n\x00\n{"id": 3}')
    (chunk,) = read_chunks(*expand_files([str(path)]), 10, 1000)
    rows = dict(rows_of(chunk))
    assert (chunk.first_row, chunk.num_rows, list(rows)) == (1, 4, [1, 4, 5, 6])
    assert (rows[1], rows[4], rows[6]) == ({"id": 1}, {"id": "\u2028"}, {"id": 3})


def test_an_over_long_line_is_skipped_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 50)
    monkeypatch.setattr(sources, "READ_BYTES", 16)
    path = tmp_path / "x.jsonl"
    fits = b'{"id": "' + b"f" * 39 + b'"}\n'
    path.write_bytes(fits + b"x" * 333 + b"\n" + b'{"id": 3}\n' + b"y" * 51)
    chunks = list(read_chunks(*expand_files([str(path)]), 10, 1000))
    assert all(len(line) <= 50 for chunk in chunks for _, line in chunk.data)  # type: ignore[misc]
    rows = dict(found for chunk in chunks for found in rows_of(chunk))
    assert [number for number, value in rows.items() if isinstance(value, dict)] == [1, 3]
    assert all(str(rows[number]).startswith("over-long line (more than ") for number in (2, 4))


def test_large_record_batches_come_in_small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_files, "MAPPED_BYTES", 3000)  # so that the map is opened anew several times
    table = pa.table({"text": ["x" * 1000] * 3 + ["y" * 100] * 50, "n": list(range(53))})
    feather.write_feather(table, tmp_path / "x.arrow", compression="uncompressed")
    pq.write_table(table, tmp_path / "x.parquet")
    for file in expand_files([f"{tmp_path}/x.*"]):
        chunks = list(read_chunks(file, 1000, 2000))
        assert len(chunks) >= 3 and max(len(chunk.data) for chunk in chunks) < 6000
        assert [value["n"] for chunk in chunks for _, value in rows_of(chunk)] == list(range(53))  # type: ignore[index]


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.jsonl.zst", "x.parquet", "x.arrow", "stream/x.arrow", "x.feather"])
@pytest.mark.parametrize("damage", ["truncated", "garbage", "flipped", "empty"])
def test_a_damaged_file_is_one_line_that_names_it(name: str, damage: str, tmp_path: Path) -> None:
    path = write(tmp_path, name, [row(number, f"{number * 7919 % 104729:x}" * 40) for number in range(40)])
    data = path.read_bytes()
    changed = {"truncated": data[: len(data) - 40], "garbage": b"PAR? no such thing\n" * 9, "flipped": b"", "empty": b""}[damage]
    if damage == "flipped":
        middle = len(data) // 3
        changed = data[:middle] + bytes(byte ^ 0xA5 for byte in data[middle : middle + 64]) + data[middle + 64 :]
    path.write_bytes(changed)
    try:
        rows = [found for chunk in read_chunks(*expand_files([str(path)]), 5, 1 << 20) for found in rows_of(chunk)]
    except DataError as error:
        assert str(error).startswith(f"{path}: cannot be read (") and "\n" not in str(error)
    else:  # no checksum in these formats tells that bytes inside the data changed; an empty stream is an empty file
        assert damage == "flipped" or (damage == "empty" and ".jsonl" in name)
        assert all(isinstance(value, (dict, BadRow)) for _, value in rows)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_bytes_raise_anything_but_a_data_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(WRITERS)))
    path = write(tmp_path_factory.mktemp("noise"), name, [row(number) for number in range(9)])
    content = bytearray(path.read_bytes())
    for position, value in data.draw(st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), max_size=4)):
        content[position] = value
    path.write_bytes(bytes(content[: data.draw(st.integers(0, len(content)))]))
    try:
        for chunk in read_chunks(*expand_files([str(path)]), 5, 1 << 20):
            assert all(isinstance(value, (dict, BadRow)) for _, value in rows_of(chunk))
    except DataError as error:
        assert str(path) in str(error) and "\n" not in str(error)


def urls(patterns: Iterable[str]) -> list[str]:
    return [file.url for file in expand_files(patterns)]


def test_files_come_in_the_order_given_globs_sorted_nothing_twice(tmp_path: Path) -> None:
    for name in ("b1", "a10", "a9", "[odd]", "deep/er/c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    (tmp_path / "a_folder.jsonl").mkdir()
    found = urls([f"{tmp_path}/b*.jsonl", f"{tmp_path}/[odd].jsonl", f"{tmp_path}/./b1.jsonl", f"{tmp_path}/**/*.jsonl"])
    assert found == [f"{tmp_path}/{name}.jsonl" for name in ("b1", "[odd]", "a10", "a9", "deep/er/c")]


def test_a_file_says_its_format_and_its_rows_get_its_name() -> None:
    for url, stem in (("a/b.x.jsonl.gz", "b.x"), ("memory://t/c.parquet", "c"), ("s3://b/d.json.zst", "d"), ("e.feather", "e")):
        compression = {"gz": "gzip", "zst": "zstd"}.get(url.rsplit(".", 1)[1])
        assert SourceFile(url, "jsonl", compression).stem == stem  # type: ignore[arg-type]
    assert sources._source_file("https://h/x.jsonl.gz?download=true") == SourceFile(
        "https://h/x.jsonl.gz?download=true", "jsonl", "gzip"
    )


def test_what_cannot_be_found_or_read_is_named_before_anything_is_read(tmp_path: Path) -> None:
    for name in ("x.csv", "x", "x.parquet.gz", "x.gz"):
        (tmp_path / name).write_text("")
    cases = {
        "no.jsonl": "no such file",
        "*.json": "no file matches",
        ".": "is a folder",
        "x.csv": "unknown kind of file; known endings are .jsonl, .ndjson",
        "x": "unknown kind of file",
        "x.gz": "unknown kind of file",
        "x.parquet.gz": "unknown kind of file",
    }
    for pattern, text in cases.items():
        with pytest.raises(DataError, match=text) as caught:
            expand_files([f"{tmp_path}/{pattern}"])
        assert str(caught.value).startswith(f"{tmp_path}/{pattern}: ") or pattern == "."


@pytest.fixture
def memory() -> Iterable[Any]:
    fs = fsspec.filesystem("memory")
    yield fs
    for name in list(fs.find("/corpus")):
        fs.rm(name)


def test_urls_are_read_like_local_files(memory: Any, tmp_path: Path) -> None:
    rows = [row(number) for number in range(9)]
    local = [read_file(write(tmp_path, name, rows)) for name in WRITERS]
    for name, writer in WRITERS.items():
        memory.pipe(f"/corpus/{name}", writer(rows))
    assert [read_file(f"memory://corpus/{name}") for name in WRITERS] == local
    assert [read_file(f"file://{tmp_path}/{name}") for name in WRITERS] == local
    assert urls(["memory://corpus/x.j*"]) == [f"memory:///corpus/x.{end}" for end in ("json", "jsonl", "jsonl.gz", "jsonl.zst")]
    assert urls(["memory://corpus/**/x.arrow"]) == ["memory:///corpus/stream/x.arrow", "memory:///corpus/x.arrow"]
    chained = urls(["simplecache::memory://corpus/x.par*"])
    assert read_file(chained[0]) == local[0] and chained[0].startswith("simplecache::memory://")
    for pattern, text in (("no.jsonl", "no such file"), ("*.csv", "no file matches"), ("stream", "is a folder")):
        with pytest.raises(DataError, match=text):
            expand_files([f"memory://corpus/{pattern}"])


def test_identity_depends_on_content_for_local_files_and_is_asked_of_the_file_system_for_others(
    memory: Any, tmp_path: Path
) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text("{}\n")
    second.write_text("{}\n")
    one, two, url = expand_files([str(first), str(second), f"file://{first}"])
    assert content_identity(one) == content_identity(two) == content_identity(url)
    assert content_identity(one).startswith("sha256:") and num_bytes(one) == num_bytes(url) == 3
    memory.pipe("/corpus/x.jsonl", b"{}\n")
    (remote,) = expand_files(["memory://corpus/x.jsonl"])
    before = content_identity(remote)
    assert before.startswith("ukey:") and before == content_identity(remote) and num_bytes(remote) == 3
    memory.pipe("/corpus/x.jsonl", b'{"a": 1}\n')
    assert content_identity(remote) != before
    first.unlink()
    with pytest.raises(DataError, match=r"a\.jsonl: cannot be read"):
        content_identity(one)


def test_a_protocol_whose_package_is_missing_is_one_line_with_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"class": "no_such_package.FileSystem", "err": "Install no_such_package to read parcels"}
    monkeypatch.setitem(sys.modules["fsspec.registry"].known_implementations, "parcel", entry)
    for url, text in (("parcel://x.jsonl", "Install no_such_package"), ("nowhere://x.jsonl", "Protocol not known: nowhere")):
        with pytest.raises(DataError, match=text) as caught:
            expand_files([url])
        assert str(caught.value).startswith(f"{url}: cannot be opened (")


def test_reading_stops_where_the_reader_stops(tmp_path: Path) -> None:
    """A consumer that leaves early must not leave the file open or see an error."""
    for name in WRITERS:
        chunks = read_chunks(*expand_files([str(write(tmp_path, name, [row(number) for number in range(20)]))]), 2, 1 << 20)
        assert isinstance(next(chunks), RawChunk)
        chunks.close()  # type: ignore[attr-defined]
