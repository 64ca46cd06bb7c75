"""The dataset folder: what lands in it, when it is kept, and that it is whole or not there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from dflash_core.config import DataConfig
from dflash_core.data import ChatEncoder, Conversation, Dataset, prepare_dataset, read_conversations
from dflash_core.data.replace_folder import folder_lock
from dflash_core.errors import DataError
from tests.test_data_tokenizer import CHATML, MARKED, THINKING, byte_tokenizer, merging_tokenizer


def row(answer: str, question: str = "q", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


def write(path: Path, rows: list[dict[str, Any] | str]) -> str:
    path.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in rows), encoding="utf-8")
    return str(path)


def prepare(
    tmp_path: Path, files: list[str], name: str = "ds", template: str = MARKED, progress: Any = None, **settings: Any
) -> dict[str, Any]:
    config = DataConfig(name=name, files=tuple(files), **settings)
    return prepare_dataset(config, byte_tokenizer(template), target="models/t", folder=tmp_path / name, progress=progress)


def visible(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.endswith(".lock")}


ROWS = [row("answer " * n, id=f"s{n}", source="long" if n > 4 else "short") for n in range(1, 8)]


def test_the_folder_holds_what_the_rows_say_in_their_order(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", ROWS)
    seen: list[int] = []
    manifest = prepare(tmp_path, [file], shard_sequences=3, progress=seen.append)
    dataset = Dataset.open(tmp_path / "ds")
    encoder = ChatEncoder(byte_tokenizer())
    conversations = [item for item in read_conversations([file], "error") if isinstance(item, Conversation)]
    expected = encoder.encode([encoder.render(item) for item in conversations])
    assert len(dataset) == len(ROWS) and seen[-1] == len(ROWS)
    for index, (conversation, encoded) in enumerate(zip(conversations, expected, strict=True)):
        ids, mask = dataset.tokens(index)
        assert np.array_equal(ids, encoded.input_ids) and np.array_equal(mask, encoded.loss_mask)
        assert (dataset.sample_id(index), dataset.sources[index]) == (conversation.sample_id, conversation.source)
        assert (dataset.lengths[index], dataset.num_supervised[index]) == (len(ids), mask.sum())
    dataset.verify()
    stored = json.loads((tmp_path / "ds" / "manifest.json").read_text())
    assert {**stored, "reused": False} == manifest
    assert visible(tmp_path / "ds" / "tokens") == {f"part-0000{n}.arrow" for n in range(3)}
    lengths = [len(item.input_ids) for item in expected]
    counts = {
        "num_sequences": 7,
        "num_tokens": sum(lengths),
        "num_supervised": sum(int(e.loss_mask.sum()) for e in expected),
        "longest": max(lengths),
    }
    assert counts.items() <= manifest.items()
    assert manifest["num_rejected"] == {} and manifest["source_files"][0]["rows"] == 7


def test_the_fine_histogram_adds_up(tmp_path: Path) -> None:
    manifest = prepare(tmp_path, [write(tmp_path / "x.jsonl", ROWS)], max_length=2000)
    bins = pq.read_table(tmp_path / "ds" / "length_bins.parquet").to_pydict()
    for key in ("num_sequences", "num_tokens", "num_supervised"):
        assert sum(bins[key]) == manifest[key]
    assert all(upper - lower == 4 for lower, upper in zip(bins["lower"], bins["upper"], strict=True)), (
        "2000 tokens in at most 512 bins"
    )
    for lower, upper, sequences, tokens in zip(
        bins["lower"], bins["upper"], bins["num_sequences"], bins["num_tokens"], strict=True
    ):
        assert sequences * lower < tokens <= sequences * upper
    assert set(bins["source"]) == {"short", "long"}


def test_every_row_is_in_the_dataset_or_among_the_rejects(tmp_path: Path) -> None:
    bad: list[dict[str, Any] | str] = ["{oops", row("x <|end|> y"), row("ok", id="s1"), {"messages": []}]
    cut_to_nothing: list[dict[str, Any] | str] = [row("a", finish_reason="length"), row("answer", question="q" * 500)]
    file = write(tmp_path / "x.jsonl", [ROWS[0], *bad, *cut_to_nothing, ROWS[1]])
    manifest = prepare(tmp_path, [file], on_bad_row="reject", max_length=100)
    rejects = pq.read_table(tmp_path / "ds" / "rejects.parquet").to_pylist()
    assert [(item["row"], item["reason"]) for item in rejects] == [
        (2, "not JSON"),
        (3, "special token in content"),
        (4, "duplicate id"),
        (5, "empty conversation"),
        (6, "no supervised pair"),
        (7, "no supervised pair"),
    ]
    assert rejects[1]["detail"] == "message 2, character 3: <|end|>" and {item["source_file"] for item in rejects} == {file}
    assert manifest["num_rejected"] == {
        "not JSON": 1,
        "special token in content": 1,
        "duplicate id": 1,
        "empty conversation": 1,
        "no supervised pair": 2,
    }
    dataset = Dataset.open(tmp_path / "ds")
    assert [dataset.sample_id(index) for index in range(len(dataset))] == ["s1", "s2"]
    assert manifest["source_files"][0]["rows"] == 8


def test_over_long_conversations_are_truncated_or_dropped(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", ROWS)
    manifest = prepare(tmp_path, [file], max_length=30)
    whole = prepare(tmp_path, [file], name="whole")
    cut, full = Dataset.open(tmp_path / "ds"), Dataset.open(tmp_path / "whole")
    assert cut.lengths.tolist() == np.minimum(full.lengths, 30).tolist() and manifest["longest"] == 30
    for index in range(len(cut)):
        assert all(np.array_equal(a, b[:30]) for a, b in zip(cut.tokens(index), full.tokens(index), strict=True))
    dropped = prepare(tmp_path, [file], name="dropped", max_length=30, over_long="drop")
    kept = [index for index in range(7) if full.lengths[index] <= 30]
    assert 0 < len(kept) < 7 and whole["num_rejected"] == {}
    assert Dataset.open(tmp_path / "dropped").lengths.tolist() == full.lengths[kept].tolist()
    assert dropped["num_rejected"] == {"over-long": 7 - len(kept)}, "an over-long row is no error even with on_bad_row: error"


@pytest.mark.parametrize(
    ("bad", "template", "text"),
    [
        ("{oops", MARKED, "not JSON (Expecting property name enclosed in double quotes: column 2)"),
        (row("a<|end|>"), MARKED, "special token in content (message 2, character 2: <|end|>)"),
        ({"messages": [*row("a")["messages"], *row("b")["messages"]]}, THINKING, "template rewrites history (message 2)"),
        ({"messages": [{"role": "tool", "content": ""}, *row("b")["messages"]]}, MARKED, "template refuses (no role tool)"),
    ],
)
def test_a_bad_row_ends_the_job_with_one_line_and_no_folder(tmp_path: Path, bad: Any, template: str, text: str) -> None:
    file = write(tmp_path / "x.jsonl", [*ROWS, bad])
    with pytest.raises(DataError) as caught:
        prepare(tmp_path, [file], template=template)
    assert str(caught.value) == f"{file}: row 8: {text}"
    assert visible(tmp_path) == {"x.jsonl"}


def test_nothing_usable_is_an_error_that_shows_the_first_reason(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", ["{", "}"])
    with pytest.raises(DataError, match=r"no usable row; 2 rejected, the first: .*x\.jsonl: row 1: not JSON"):
        prepare(tmp_path, [file], on_bad_row="reject")
    with pytest.raises(DataError, match=r"empty\.jsonl: no rows$"):
        prepare(tmp_path, [write(tmp_path / "empty.jsonl", [])])
    assert visible(tmp_path) == {"x.jsonl", "empty.jsonl"}


def test_the_fingerprint_depends_on_content_only(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", ROWS)
    halves = [
        write(tmp_path / "1.jsonl", ROWS[:3]),
        write(tmp_path / "2.jsonl", [{**item, "id": item["id"] + "x"} for item in ROWS[3:]]),
    ]
    base = prepare(tmp_path, [file], name="a")["fingerprint"]
    assert prepare(tmp_path, halves, name="b", shard_sequences=2)["fingerprint"] == base
    assert prepare(tmp_path, halves[::-1], name="c")["fingerprint"] != base
    assert prepare(tmp_path, [file], name="d", template=CHATML)["fingerprint"] != base
    cut = write(tmp_path / "3.jsonl", [*ROWS[:-1], {**ROWS[-1], "finish_reason": "length"}])
    assert prepare(tmp_path, [cut], name="e")["fingerprint"] != base
    reworded = MARKED.replace("m['content']", "(m['content'])")
    assert prepare(tmp_path, [file], name="f", template=reworded)["fingerprint"] == base, "a template enters by its result"
    config = DataConfig(name="g", files=(file,))
    other = prepare_dataset(config, merging_tokenizer(MARKED), target="models/t", folder=tmp_path / "g")
    assert other["fingerprint"] != base


def state(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_ino for path in folder.rglob("*") if path.is_file()}


def test_the_same_job_again_does_nothing(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", ROWS)
    first = prepare(tmp_path, [file])
    before = state(tmp_path / "ds")
    again = prepare(tmp_path, [file], progress=lambda rows: pytest.fail("worked"))
    assert again == {**first, "reused": True} and state(tmp_path / "ds") == before


@pytest.mark.parametrize("change", ["row", "config", "template", "damage", "file name"])
def test_a_dataset_that_would_come_out_different_is_rebuilt(tmp_path: Path, change: str) -> None:
    file = write(tmp_path / "x.jsonl", ROWS)
    first = prepare(tmp_path, [file])
    before = state(tmp_path / "ds")
    settings: dict[str, Any] = {"template": MARKED}
    if change == "row":
        write(tmp_path / "x.jsonl", [*ROWS[:-1], row("other", id="s7")])
    elif change == "config":
        settings["max_length"] = 50
    elif change == "template":
        settings["template"] = CHATML
    elif change == "damage":
        part = tmp_path / "ds" / "tokens" / "part-00000.arrow"
        part.write_bytes(part.read_bytes()[:-100])
    else:
        file = shutil.move(file, tmp_path / "y.jsonl").as_posix()
    second = prepare(tmp_path, [file], **settings)
    assert second["reused"] is False and set(state(tmp_path / "ds").values()).isdisjoint(before.values())
    assert (second["fingerprint"] == first["fingerprint"]) == (change in ("damage", "file name"))
    Dataset.open(tmp_path / "ds").verify()
    assert visible(tmp_path) == {Path(file).name, "ds"}


@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError("disk full")])
def test_a_job_that_fails_late_leaves_the_old_dataset_as_it_was(tmp_path: Path, fault: Any) -> None:
    file = write(tmp_path / "x.jsonl", ROWS)
    prepare(tmp_path, [file])
    before = state(tmp_path / "ds")

    def fail(rows: int) -> None:
        raise fault

    with pytest.raises(fault if isinstance(fault, type) else type(fault)):
        prepare(tmp_path, [file], max_length=50, progress=fail)
    assert state(tmp_path / "ds") == before and visible(tmp_path) == {"x.jsonl", "ds"}


def test_a_failure_between_the_two_renames_puts_the_old_dataset_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "x.jsonl", ROWS)
    prepare(tmp_path, [file])
    before = state(tmp_path / "ds")
    rename = Path.rename

    def failing(self: Path, to: Path) -> Path:
        if ".new-" in self.name:
            raise OSError("no rename")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="no rename"):
        prepare(tmp_path, [file], max_length=50)
    assert state(tmp_path / "ds") == before and visible(tmp_path) == {"x.jsonl", "ds"}


def test_what_a_killed_job_leaves_looks_unfinished_and_is_cleaned_up(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", ROWS)
    byte_tokenizer().save_pretrained(tmp_path / "target")
    code = (
        "import os, pathlib, signal, sys\n"
        "from dflash_core.config import DataConfig\n"
        "from dflash_core.data import load_tokenizer, prepare_dataset\n"
        "root = pathlib.Path(sys.argv[1])\n"
        "config = DataConfig(name='ds', files=(str(root / 'x.jsonl'),), shard_sequences=2)\n"
        "kill = lambda rows: os.kill(os.getpid(), signal.SIGKILL)\n"
        "prepare_dataset(config, load_tokenizer(root / 'target'), target='models/t', folder=root / 'ds', progress=kill)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (leftover,) = visible(tmp_path) - {"x.jsonl", "target"}
    assert leftover.startswith(".ds.new-") and any((tmp_path / leftover / "tokens").iterdir())
    with pytest.raises(DataError, match=r"ds: not a dataset"):
        Dataset.open(tmp_path / "ds")
    assert prepare(tmp_path, [file])["num_sequences"] == 7
    assert visible(tmp_path) == {"x.jsonl", "target", "ds"}


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", ROWS)
    prepare(tmp_path, [file])
    (tmp_path / "ds").rename(tmp_path / ".ds.old")
    (tmp_path / f".ds.new-{os.getpid()}").mkdir()
    assert prepare(tmp_path, [file])["reused"] is True
    assert visible(tmp_path) == {"x.jsonl", "ds"}


def test_two_jobs_do_not_build_the_same_folder_at_once(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", ROWS)
    with folder_lock(tmp_path / "ds"), pytest.raises(DataError, match="ds: another process is preparing it"):
        prepare(tmp_path, [file])
    assert prepare(tmp_path, [file])["reused"] is False


def test_a_folder_that_is_no_dataset_is_left_alone(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", ROWS)
    (tmp_path / "ds").mkdir()
    write(tmp_path / "ds" / "thesis.txt", ["precious"])
    with pytest.raises(DataError, match=r"ds: exists and is not a dataset"):
        prepare(tmp_path, [file])
    assert (tmp_path / "ds" / "thesis.txt").read_text() == "precious\n"


def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", ROWS)

    def append(rows: int) -> None:
        with Path(file).open("a") as opened:
            opened.write("\n")

    with pytest.raises(DataError, match="changed while it was read"):
        prepare(tmp_path, [file], progress=append)
    assert visible(tmp_path) == {"x.jsonl"}
