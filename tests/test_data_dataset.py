"""Reading a dataset back, the length histograms, and ids that come twice."""

from __future__ import annotations

import itertools
import json
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.data import Dataset, draw_histogram, has_supervised_pair, histogram, parts, write_length_histogram
from dflash_core.data.duplicates import find_duplicates
from dflash_core.data.parts import PartWriter, open_part, read_rejected, read_summary
from dflash_core.data.store import EXCLUDED, EXCLUDED_SCHEMA, Fingerprint, PageWriter, sequence_digest
from dflash_core.errors import DataError

Sequences = list[tuple[list[int], list[bool]]]
sequences = st.lists(
    st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1, max_size=40), min_size=1, max_size=12
).map(lambda found: [([i for i, _ in one], [m for _, m in one]) for one in found])


def arrays(sequence: tuple[list[int], list[bool]]) -> tuple[Any, Any]:
    return np.array(sequence[0], dtype=np.int32), np.array(sequence[1], dtype=np.bool_)


def make(folder: Path, content: Sequences, per_part: int = 4, without: tuple[int, ...] = ()) -> Path:
    """A dataset folder written without tokenizer and rows; sequences in `without` are in the parts only."""
    tokens = folder / "tokens"
    tokens.mkdir(parents=True)
    names = []
    excluded = PageWriter(folder / EXCLUDED, EXCLUDED_SCHEMA)
    fingerprint = Fingerprint("t")
    for first in range(0, len(content), per_part):
        names.append({"name": f"part-0a-{len(names):05d}", "num_sequences": len(content[first : first + per_part])})
        with PartWriter(tokens, names[-1]["name"]) as writer:
            for number, sequence in enumerate(content[first : first + per_part], start=first):
                writer.add(number, f"id-{number}", "", f"source-{number % 2}", *arrays(sequence), False)
                if number in without:
                    excluded.add(len(names) - 1, number - first)
                else:
                    fingerprint.add(sequence_digest(*arrays(sequence)))
            writer.finish(per_part, [])
    excluded.close()
    kept = [sequence for number, sequence in enumerate(content) if number not in without]
    manifest = {
        "schema_version": 2,
        "tokenizer_sha256": "t",
        "source_files": [],
        "parts": names,
        "num_parts": len(names),
        "num_sequences": len(kept),
        "num_tokens": sum(len(ids) for ids, _ in kept),
        "num_supervised": sum(sum(mask) for _, mask in kept),
        "num_truncated": 0,
        "num_excluded": len(without),
        "num_rejected": {},
        "fingerprint": fingerprint.hexdigest(),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


CONTENT: Sequences = [([n] * n, [k % 3 > 0 for k in range(n)]) for n in range(1, 30)]


@settings(max_examples=40, deadline=None)
@given(content=sequences, per_part=st.integers(1, 5), batch_tokens=st.integers(1, 60), data=st.data())
def test_what_was_written_is_read_at_any_bit_offset(
    tmp_path_factory: pytest.TempPathFactory, content: Sequences, per_part: int, batch_tokens: int, data: st.DataObject
) -> None:
    without = data.draw(st.sets(st.integers(0, len(content) - 1), max_size=len(content) - 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "BATCH_TOKENS", batch_tokens)
        folder = make(tmp_path_factory.mktemp("data") / "ds", content, per_part, tuple(without))
    dataset = Dataset.open(folder)
    kept = [number for number in range(len(content)) if number not in without]
    assert len(dataset) == len(kept)
    for index, number in reversed(list(enumerate(kept))):
        ids, mask = dataset.tokens(index)
        assert (ids.dtype, mask.dtype) == (np.int32, np.bool_)
        assert (ids.tolist(), mask.tolist()) == content[number]
        assert dataset.sample_id(index) == f"id-{number}"
        assert (dataset.lengths[index], dataset.num_supervised[index]) == (len(ids), mask.sum())
    assert dataset.sources.tolist() == [f"source-{number % 2}" for number in kept]
    dataset.verify()


def digest(*rows: tuple[list[int], list[bool]], tokenizer: str = "t") -> str:
    found = Fingerprint(tokenizer)
    for one in rows:
        found.add(sequence_digest(*arrays(one)))
    return found.hexdigest()


def test_the_fingerprint_sees_ids_masks_order_borders_and_the_tokenizer() -> None:
    one, two = ([1, 2], [False, True]), ([3], [True])
    variants = [
        digest(one, two),
        digest(one, two, tokenizer="u"),
        digest(two, one),
        digest(one),
        digest(([1, 4], [False, True]), two),
        digest(([1, 2], [True, True]), two),
        digest(([1], [False]), ([2, 3], [True, True])),
        digest(([1, 2, 3], [False, True, True])),
        digest(([1, 2, 3], [False, True, True]), ([], [])),
    ]
    assert len(set(variants)) == len(variants)
    assert digest(one, two) == variants[0]


def test_reference_arrow_itself_reads_the_same(tmp_path: Path) -> None:
    dataset = Dataset.open(make(tmp_path / "ds", CONTENT))
    files = sorted((tmp_path / "ds" / "tokens").glob("*.arrow"))
    rows = [row for file in files for row in pa.ipc.open_file(file.read_bytes()).read_all().to_pylist()]
    assert len(files) == 8 and len(rows) == len(dataset)
    for index, row in enumerate(rows):
        ids, mask = dataset.tokens(index)
        assert (row["input_ids"], row["loss_mask"]) == (ids.tolist(), mask.tolist())
        assert (row["sample_id"], row["source"], row["row"]) == (dataset.sample_id(index), dataset.sources[index], index)
        assert (row["length"], row["num_supervised"]) == (dataset.lengths[index], dataset.num_supervised[index])


def test_a_part_keeps_its_counts_and_rejected_rows(tmp_path: Path) -> None:
    with PartWriter(tmp_path, "part-0-00000") as writer:
        assert read_summary(tmp_path, "part-0-00000") is None
        writer.add(3, "a", "", "s", *arrays(CONTENT[4]), True)
        rejected = [(1, "over-long", "9 tokens"), (2, "not JSON", "line\nbreak \ud800"), (5, "not JSON", "")]
        written = writer.finish(5, rejected)
    found = read_summary(tmp_path, "part-0-00000")
    assert found == written and (found.num_rows, found.num_sequences, found.num_tokens, found.num_rejected) == (5, 1, 5, 3)
    assert found.first_fault == rejected[1] and list(read_rejected(tmp_path, "part-0-00000")) == rejected
    assert open_part(tmp_path, "part-0-00000")[0].truncated.to_pylist() == [True]
    with pytest.raises(RuntimeError), PartWriter(tmp_path, "part-0-00001") as writer:
        raise RuntimeError
    assert {path.suffix for path in tmp_path.iterdir()} == {".arrow", ".json"} and read_summary(tmp_path, "part-0-00001") is None


def test_threads_read_what_one_thread_reads_and_cannot_change_it(tmp_path: Path) -> None:
    dataset = Dataset.open(make(tmp_path / "ds", CONTENT, without=(3, 4)))
    expected = [sequence for number, sequence in enumerate(CONTENT) if number not in (3, 4)]
    order = np.random.default_rng(0).integers(len(dataset), size=2000).tolist()
    with ThreadPoolExecutor(4) as pool:
        for index, (ids, mask) in zip(order, pool.map(dataset.tokens, order, timeout=30), strict=True):
            assert (ids.tolist(), mask.tolist()) == expected[index]
    for array in (dataset.tokens(3)[0], dataset.lengths, dataset.num_supervised, dataset.sources):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    for outside in (-1, len(dataset)):
        with pytest.raises(IndexError, match=f"sequence {outside} of 27"):
            dataset.tokens(outside)


def test_many_parts_need_few_file_descriptors(tmp_path: Path) -> None:
    folder = make(tmp_path / "ds", CONTENT * 3, per_part=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 20, hard))
        dataset = Dataset.open(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    dataset.verify()


def edit_manifest(folder: Path, **change: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def part(folder: Path, number: int) -> Path:
    return folder / "tokens" / f"part-0a-{number:05d}.arrow"


def cut(path: Path, keep: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])


def other_columns(folder: Path) -> None:
    with pa.OSFile(str(part(folder, 2)), "wb") as file, pa.ipc.new_file(file, pa.schema([("a", pa.int32())])):
        pass


SEVEN = [{"name": f"part-0a-{number:05d}", "num_sequences": 4} for number in range(7)]
DAMAGE = {
    r"ds: not a dataset \(manifest.json is missing\)": lambda f: (f / "manifest.json").unlink(),
    r"manifest.json: damaged": lambda f: cut(f / "manifest.json", 0.5),
    r"manifest.json: schema version 2 expected": lambda f: edit_manifest(f, schema_version=1),
    r"00003.arrow: a part of the dataset is missing": lambda f: part(f, 3).unlink(),
    r"00001.arrow: damaged": lambda f: cut(part(f, 1), 0.7),
    r"00002.arrow: damaged": lambda f: part(f, 2).write_bytes(b""),
    r"00002.arrow: damaged \(its columns": other_columns,
    r"00004.arrow: damaged \(manifest.json says 4 sequences, it holds 1\)": lambda f: part(f, 7).rename(part(f, 4)),
    r"manifest.json: damaged \(num_parts": lambda f: edit_manifest(f, num_parts="8"),
    r"manifest.json: damaged \(num_parts\)": lambda f: edit_manifest(f, num_parts=7),
    r"manifest.json: damaged \(parts\)": lambda f: edit_manifest(f, parts=[{"name": "../x", "num_sequences": 1}], num_parts=1),
    r"excluded.parquet: damaged": lambda f: (edit_manifest(f, num_excluded=1), (f / EXCLUDED).write_bytes(b"no")),
    r"num_sequences 30, the parts hold 29": lambda f: edit_manifest(f, num_sequences=30),
    r"num_tokens 1, the parts hold 435": lambda f: edit_manifest(f, num_tokens=1),
    r"num_supervised 0, the parts hold": lambda f: edit_manifest(f, num_supervised=0),
    r"num_sequences 29, the parts hold 28": lambda f: edit_manifest(f, parts=SEVEN, num_parts=7),
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
    data = bytearray(part(folder, 0).read_bytes())
    position = data.index(np.array([7] * 50, dtype=np.int32).tobytes())
    data[position + 40] = 8
    part(folder, 0).write_bytes(data)
    dataset = Dataset.open(folder)
    with pytest.raises(DataError, match="do not fit the fingerprint"):
        dataset.verify()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_reference_a_supervised_pair_is_two_in_a_row(mask: list[bool]) -> None:
    assert has_supervised_pair(np.array(mask)) == any(a and b for a, b in itertools.pairwise(mask))


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.tuples(st.sampled_from([0, 1, 2**32, 2**62, 2**64 - 1]), st.integers(0, 3)), max_size=60),
    pass_rows=st.integers(1, 70),
    block_rows=st.integers(1, 70),
)
def test_reference_duplicates_are_rows_that_came_before(rows: list[tuple[int, int]], pass_rows: int, block_rows: int) -> None:
    digests = np.array(rows, dtype="<u8").reshape(-1, 2).view(np.uint8).reshape(-1, 16)
    assert find_duplicates(digests, pass_rows, block_rows).tolist() == [row in rows[:n] for n, row in enumerate(rows)]


@settings(max_examples=30, deadline=None)
@given(content=sequences, inner=st.sets(st.integers(1, 39), max_size=5), largest=st.integers(1, 3))
def test_reference_the_histograms_count_each_sequence_in_its_bucket(
    tmp_path_factory: pytest.TempPathFactory, content: Sequences, inner: set[int], largest: int
) -> None:
    folder = make(tmp_path_factory.mktemp("data") / "ds", content)
    edges = [*sorted(inner), 40]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(histogram, "LARGEST_SOURCES", largest)
        write_length_histogram(folder, edges)
        histogram.write_length_bins(Dataset.open(folder), folder, 1000)
    rows = pq.read_table(folder / "length_histogram.parquet").to_pylist()
    assert [(row["bucket"], row["lower"], row["upper"]) for row in rows] == list(
        zip(range(len(edges)), [0, *edges[:-1]], edges, strict=True)
    )
    named = [(f"source-{n % 2}" if n % 2 < largest else "other", *sequence) for n, sequence in enumerate(content)]
    by_source = pq.read_table(folder / "length_histogram_by_source.parquet").to_pylist()
    assert len(by_source) == len(edges) * len({name for name, _, _ in named})
    bins = pq.read_table(folder / "length_bins.parquet").to_pylist()
    assert all(row["upper"] - row["lower"] == 2 for row in bins) and sum(row["num_sequences"] for row in bins) == len(content)
    num_tokens = sum(len(ids) for ids, _ in content)
    for row in [*rows, *by_source, *bins]:
        members = [
            (ids, mask)
            for name, ids, mask in named
            if row["lower"] < len(ids) <= row["upper"] and row.get("source", name) == name
        ]
        tokens = sum(len(ids) for ids, _ in members)
        assert (row["num_sequences"], row["num_tokens"]) == (len(members), tokens)
        assert row["num_supervised"] == sum(sum(mask) for _, mask in members)
        assert row.get("pct_sequences", 100 * len(members) / len(content)) == pytest.approx(100 * len(members) / len(content))
        assert row.get("pct_tokens", 100 * tokens / num_tokens) == pytest.approx(100 * tokens / num_tokens)


def test_the_largest_sources_keep_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Dataset.open(make(tmp_path / "ds", CONTENT, without=(0, 2, 4)))
    codes, names = dataset.source_codes(1)
    assert [names[code] for code in codes] == ["source-1" if name == "source-1" else "other" for name in dataset.sources]
    assert names == ["source-1", "other"], "source-0 would be the larger one, but for what is left out"
    monkeypatch.setattr("dflash_core.data.dataset.MOST_SOURCES", 1)
    assert dataset.source_codes(5)[1] == ["source-1", "other"], "no more names than this are told apart"


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


def test_the_histogram_is_drawn_with_bars_as_long_as_the_shares(tmp_path: Path) -> None:
    folder = make(tmp_path / "ds", CONTENT)
    with pytest.raises(DataError, match=r"length_histogram\.parquet: no such file"):
        draw_histogram(folder)
    write_length_histogram(folder, [1, 10, 29, 50])
    lines = draw_histogram(folder, 90)
    assert len(lines) == 5 and max(len(line) for line in lines) == 90
    assert [line.split()[0] for line in lines] == ["length", "1-1", "2-10", "11-29", "30-50"]
    shares = [line.replace("█", "").split() for line in lines[1:]]
    assert [share for share in shares[2] if share[0].isdigit()] == ["11-29", "65.5", "87.4", "65.0"]
    blocks = [[line.count("█", 0, 45), line.count("█", 45)] for line in lines[1:]]
    assert blocks[2][1] == max(map(max, blocks)) and blocks[3] == [0, 0]
    assert blocks[2][0] == pytest.approx(blocks[2][1] * 65.5 / 87.4, abs=2)
    assert "▏" in lines[1] and lines[4].split()[-1] == "-", "a bucket with little in it shows, an empty one has no share"
    assert draw_histogram(pq.read_table(folder / "length_histogram.parquet"), 10)[1].count("█") <= 8
    (folder / "length_histogram.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match=r"length_histogram\.parquet: damaged"):
        draw_histogram(folder)
