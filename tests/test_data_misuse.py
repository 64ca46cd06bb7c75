"""What users do to files and folders that nobody planned for: each ends in one clear line, or is mended."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_core import cli
from dflash_core.data import Dataset, prepare, worker
from dflash_core.data.rows import BadRow, parse_row, rows_of
from dflash_core.data.sources import RawChunk, content_identity, expand_files, read_chunks
from dflash_core.data.store import EXCLUDED_SCHEMA
from dflash_core.errors import DataError
from tests.test_data_prepare import ROWS, content, row, write
from tests.test_data_prepare import prepare as prepare_rows
from tests.test_data_tokenizer import THINKING

ARRAYS = {
    "in one line": json.dumps(ROWS),
    "indented": json.dumps(ROWS, indent=2),
    "a row in each line": "[\n" + ",\n".join(json.dumps(item) for item in ROWS) + "\n]\n",
    "behind its bracket": "[" + ",\n".join(json.dumps(item) for item in ROWS) + "]",
    "an indented object": json.dumps(ROWS[0], indent=2),
}


@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("before", ["", "\n \r\n", "\ufeff"])
def test_a_json_document_is_refused_as_a_whole(kind: str, before: str, tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", [row("fine")])
    path = tmp_path / "x.json"
    path.write_text(before + ARRAYS[kind], encoding="utf-8")
    with pytest.raises(DataError, match=r"x\.json: is one JSON document, not one row in each line \(jq") as failed:
        prepare_rows(tmp_path, [good, str(path)])
    assert "\n" not in str(failed.value)


def test_an_array_in_a_line_that_is_too_long_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_core.data.sources.MAX_LINE_BYTES", 100)
    path = tmp_path / "x.json"
    path.write_text(json.dumps(ROWS))
    with pytest.raises(DataError, match="is one JSON document"):
        list(read_chunks(expand_files([str(path)])[0], 10, 1000))


@pytest.mark.parametrize("first", ["[1, 2]", '[{"role": "user"}]', "[1", "{", "{ ", '[{"role": "us', '{"a": 1'])
def test_a_bad_first_row_is_only_a_bad_row(first: str, tmp_path: Path) -> None:
    second = "5" if first.endswith("us") else json.dumps(ROWS[0])
    manifest = prepare_rows(tmp_path, [write(tmp_path / "x.jsonl", [first, second, json.dumps(ROWS[1])])])
    assert manifest["num_sequences"] == (2 if second != "5" else 1)


def test_what_is_wrong_with_a_cut_line_is_placed_in_that_line() -> None:
    ((_, found),) = rows_of(RawChunk(1, 1, "jsonl", [(1, b'{"text": "a"\n')], 0))
    assert isinstance(found, BadRow) and found.detail.endswith("column 14")


@pytest.mark.parametrize("name", ["x.zip", "x.tar"])
def test_a_member_of_an_archive_has_a_steady_identity(name: str, tmp_path: Path) -> None:
    inner = tmp_path / "inner.jsonl"
    write(inner, list(ROWS))
    protocol, archive = name[2:], tmp_path / name
    if protocol == "zip":
        with zipfile.ZipFile(archive, "w") as file:
            file.write(inner, "d/inner.jsonl")
    else:
        import tarfile

        with tarfile.open(archive, "w") as tar:
            tar.add(inner, "d/inner.jsonl")
    url = f"{protocol}://d/inner.jsonl::file://{archive}"
    assert content_identity(expand_files([url])[0]) == content_identity(expand_files([url])[0])
    assert prepare_rows(tmp_path, [url])["fingerprint"] == prepare_rows(tmp_path, [str(inner)], "plain")["fingerprint"]


def parsed(value: dict[str, Any]) -> Any:
    return parse_row(value, source_file="x", row=1, default_id="d", default_source="s")


def test_an_answer_that_ended_with_tool_calls_ended_by_itself() -> None:
    assert parsed(row("fine", finish_reason="tool_calls")).finish_reason == "tool_calls"


@pytest.mark.parametrize("flag", ["train", "loss"])
def test_a_flag_against_training_is_not_overlooked(flag: str) -> None:
    value = row("not to be learnt")
    value["messages"][1][flag] = False
    with pytest.raises(BadRow, match=f"unknown message key.*{flag}"):
        parsed(value)


def test_a_row_that_would_cost_gigabytes_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "MOST_CHARACTERS", 100)
    monkeypatch.setattr(worker, "MOST_CHARACTERS_PER_TOKEN", 2)
    file = write(tmp_path / "x.jsonl", [row("a" * 1000), row("fine")])
    manifest = prepare_rows(tmp_path, [file], max_length=50)
    assert manifest["num_rejected"] == {"over-long": 1} and manifest["num_sequences"] == 1
    assert prepare_rows(tmp_path, [file], max_length=600)["num_truncated"] == 1, "as configured, if max_length is large itself"


def test_everything_rewritten_says_which_key_decides(tmp_path: Path) -> None:
    turns = [*row("one")["messages"], *row("two")["messages"]]
    with pytest.raises(DataError, match=r"template rewrites history.*; data\.rewritten_history says"):
        prepare_rows(tmp_path, [write(tmp_path / "x.jsonl", [{"messages": turns}])], template=THINKING)


def test_columns_of_other_names_are_told_of_the_map(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"row 1: no messages.*; data\.columns maps"):
        prepare_rows(tmp_path, [write(tmp_path / "x.jsonl", [{"dialog": ROWS[0]["messages"]}])])


def test_a_bad_held_out_row_is_found_before_anything_is_prepared(
    micro_experiment: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(held_out.read_text() + "{not json\n")
    monkeypatch.setattr("sys.argv", ["dflash", "prepare", str(micro_experiment)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and f"{held_out}: row 7: not JSON" in error and not list(home.glob("datasets/*"))


@pytest.mark.parametrize("damage", ["cut", "a line less", "not a number"])
def test_damaged_counts_of_a_finished_part_are_made_anew(damage: str, tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", ["no", "JSON", *ROWS])
    second = write(tmp_path / "b.jsonl", [row("another")])
    whole = prepare_rows(tmp_path, [first, second], "whole")
    prepare_rows(tmp_path, [first])
    (path,) = (tmp_path / "ds" / "tokens").glob("part-*.json")
    text = path.read_text()
    damaged = {
        "cut": text[:-8],
        "a line less": text[: text[:-1].rindex("\n") + 1],
        "not a number": text.replace(": 9", ': "9"', 1),
    }
    path.write_text(damaged[damage])
    assert damaged[damage] != text
    manifest = prepare_rows(tmp_path, [first, second])
    assert manifest["fingerprint"] == whole["fingerprint"] and manifest["num_rejected"] == {"not JSON": 2}


MANIFESTS: dict[str, Any] = {
    "no files": {"source_files": [1, 2]},
    "no rejects": {"num_rejected": None},
    "other rejects": {"num_rejected": 5},
    "no truncated": {"num_truncated": None},
}


@pytest.mark.parametrize("damage", [*MANIFESTS, "deep"])
def test_a_damaged_manifest_is_one_line_and_prepared_anew(damage: str, tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", list(ROWS))
    whole = prepare_rows(tmp_path, [file])
    path = tmp_path / "ds" / "manifest.json"
    path.write_text("[" * 100000 if damage == "deep" else json.dumps({**json.loads(path.read_text()), **MANIFESTS[damage]}))
    with pytest.raises(DataError, match=r"manifest\.json: damaged"):
        Dataset.open(tmp_path / "ds")
    again = prepare_rows(tmp_path, [file])
    assert not again["reused"] and again["fingerprint"] == whole["fingerprint"]


@pytest.mark.parametrize(
    "table",
    [
        pa.table({"part": [0], "index": [999]}, schema=EXCLUDED_SCHEMA),
        pa.table({"part": [7], "index": [0]}, schema=EXCLUDED_SCHEMA),
        pa.table({"part": [0], "index": [-1]}, schema=EXCLUDED_SCHEMA),
        pa.table({"part": [0, 0], "index": [0, 1]}, schema=EXCLUDED_SCHEMA),
        pa.table({"other": [1]}),
    ],
)
def test_a_damaged_list_of_duplicates_is_one_line_and_prepared_anew(table: pa.Table, tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", [*ROWS, row("again", id="s1")])
    prepare_rows(tmp_path, [file])
    before = content(tmp_path / "ds")
    pq.write_table(table, tmp_path / "ds" / "excluded.parquet")
    with pytest.raises(DataError, match=r"excluded\.parquet: damaged"):
        Dataset.open(tmp_path / "ds")
    prepare_rows(tmp_path, [file])
    assert content(tmp_path / "ds") == before


def test_a_folder_in_what_is_left_of_a_job_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".ds.building" / "tokens" / "folder").mkdir(parents=True)
    assert prepare_rows(tmp_path, [write(tmp_path / "x.jsonl", list(ROWS))])["num_sequences"] == len(ROWS)
    assert not (tmp_path / "ds" / "tokens" / "folder").exists()


@pytest.mark.parametrize("exists", [True, False])
def test_a_dataset_that_lies_elsewhere_stays_there(exists: bool, tmp_path: Path) -> None:
    elsewhere = tmp_path / "disk" / "real"
    (elsewhere if exists else elsewhere.parent).mkdir(parents=True)
    (tmp_path / "ds").symlink_to(elsewhere)
    file = write(tmp_path / "x.jsonl", list(ROWS))
    for max_length in (4096, 50, 60):
        prepare_rows(tmp_path, [file], max_length=max_length)
    assert (tmp_path / "ds").is_symlink() and (elsewhere / "manifest.json").is_file()
    assert {path.name for path in tmp_path.glob(".ds*")} == set()


def test_a_disk_that_is_full_at_the_end_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, value: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(prepare, "write_json", full)
    with pytest.raises(DataError, match=r"manifest\.json: No space left on device$"):
        prepare_rows(tmp_path, [write(tmp_path / "x.jsonl", list(ROWS))])


def test_an_empty_name_among_the_files() -> None:
    with pytest.raises(DataError, match=r"^data\.files: an empty name$"):
        expand_files([""])


def test_an_interrupted_command_says_so_and_fails(
    micro_experiment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dflash_core.experiment.load_experiment", interrupted)
    monkeypatch.setattr("sys.argv", ["dflash", "prepare", str(micro_experiment)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130 and capsys.readouterr().err == "error: interrupted\n"
