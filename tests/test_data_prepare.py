"""The dataset folder: what lands in it, when it is kept, and that it is whole or not there."""

from __future__ import annotations

import gzip
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_core.config import DataConfig
from dflash_core.data import ChatEncoder, Dataset, PrepareProgress, expand_files, pool, prepare_dataset
from dflash_core.data import progress as progress_module
from dflash_core.data.replace_folder import folder_lock
from dflash_core.data.rows import Conversation, parse_row, rows_of
from dflash_core.data.sources import read_chunks
from dflash_core.errors import DataError
from tests.test_data_tokenizer import CHATML, MARKED, THINKING, byte_tokenizer, merging_tokenizer


def row(answer: str, question: str = "q", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


def write(path: Path, rows: list[dict[str, Any] | str]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in rows), encoding="utf-8")
    return str(path)


def prepare(
    tmp_path: Path, files: list[str], name: str = "ds", template: str = MARKED, progress: Any = None, **settings: Any
) -> dict[str, Any]:
    config = DataConfig(name=name, files=tuple(files), **{"num_workers": 1, **settings})
    return prepare_dataset(config, byte_tokenizer(template), target="models/t", folder=tmp_path / name, progress=progress)


def visible(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.endswith(".lock")}


def parts(folder: Path) -> dict[str, int]:
    """Names and inodes of the finished parts."""
    return {
        path.name: path.stat().st_ino for path in (folder / "tokens").glob("part-*.arrow") if path.with_suffix(".json").exists()
    }


def content(folder: Path) -> list[tuple[list[int], list[bool], str, str]]:
    dataset = Dataset.open(folder)
    dataset.verify()
    arrays = [dataset.tokens(index) for index in range(len(dataset))]
    return [
        (ids.tolist(), mask.tolist(), dataset.sample_id(index), dataset.sources[index])
        for index, (ids, mask) in enumerate(arrays)
    ]


@contextmanager
def counted_work(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the parts that are made in this process."""
    made: list[str] = []
    write_part = pool.write_part

    def counting(encoder: Any, settings: Any, job: Any, chunk: Any) -> Any:
        made.append(job.name)
        return write_part(encoder, settings, job, chunk)

    with monkeypatch.context() as patch:
        patch.setattr(pool, "write_part", counting)
        yield made


@pytest.fixture
def all_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is shown after every part."""
    monkeypatch.setattr(progress_module, "EVERY_S", 0.0)


def conversations(file: str) -> Iterator[Conversation]:
    for chunk in read_chunks(expand_files([file])[0], 1000, 2**20):
        for number, value in rows_of(chunk):
            assert isinstance(value, dict)
            yield parse_row(value, source_file=file, row=number, default_id=f"d:{number}", default_source="x")


ROWS = [row("answer " * n, id=f"s{n}", source="long" if n > 4 else "short") for n in range(1, 8)]


def test_the_folder_holds_what_the_rows_say_in_their_order(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", ROWS)
    seen: list[PrepareProgress] = []
    manifest = prepare(tmp_path, [file], shard_sequences=3, progress=seen.append)
    dataset = Dataset.open(tmp_path / "ds")
    encoder = ChatEncoder(byte_tokenizer())
    items = list(conversations(file))
    expected = encoder.encode([encoder.render(item)[0] for item in items])
    assert len(dataset) == len(ROWS)
    for index, (conversation, encoded) in enumerate(zip(items, expected, strict=True)):
        ids, mask = dataset.tokens(index)
        assert np.array_equal(ids, encoded.input_ids) and np.array_equal(mask, encoded.loss_mask)
        assert (dataset.sample_id(index), dataset.sources[index]) == (conversation.sample_id, conversation.source)
        assert (dataset.lengths[index], dataset.num_supervised[index]) == (len(ids), mask.sum())
    dataset.verify()
    stored = json.loads((tmp_path / "ds" / "manifest.json").read_text())
    assert {**stored, "reused": False} == manifest
    assert [part["num_sequences"] for part in stored["parts"]] == [3, 3, 1]
    assert {f"{part['name']}.arrow" for part in stored["parts"]} == parts(tmp_path / "ds").keys()
    lengths = [len(item.input_ids) for item in expected]
    counts = {
        "num_sequences": 7,
        "num_tokens": sum(lengths),
        "num_supervised": sum(int(e.loss_mask.sum()) for e in expected),
        "longest": max(lengths),
    }
    assert counts.items() <= manifest.items()
    assert manifest["num_rejected"] == {} and manifest["source_files"][0]["rows"] == 7
    size = Path(file).stat().st_size
    assert seen[-1] == PrepareProgress(7, 0, counts["num_tokens"], size, size, 1, 1, 0)


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
    file = write(tmp_path / "x.jsonl", [ROWS[0], *bad, *cut_to_nothing, ROWS[1], "", row("ok", id="s2")])
    manifest = prepare(tmp_path, [file], on_bad_row="reject", max_length=100, shard_sequences=3)
    rejects = pq.read_table(tmp_path / "ds" / "rejects.parquet").to_pylist()
    assert [(item["row"], item["reason"]) for item in rejects] == [
        (2, "not JSON"),
        (3, "special token in content"),
        (4, "duplicate id"),
        (5, "empty conversation"),
        (6, "no supervised pair"),
        (7, "no supervised pair"),
        (10, "duplicate id"),
    ]
    assert rejects[1]["detail"] == "message 2, character 3: <|end|>" and {item["source_file"] for item in rejects} == {file}
    assert rejects[2]["detail"] == "'s1'"
    assert manifest["num_rejected"] == {
        "not JSON": 1,
        "special token in content": 1,
        "duplicate id": 2,
        "empty conversation": 1,
        "no supervised pair": 2,
    }
    assert [item[2] for item in content(tmp_path / "ds")] == ["s1", "s2"]
    assert manifest["source_files"][0]["rows"] == 9 and manifest["num_excluded"] == 2
    bins = pq.read_table(tmp_path / "ds" / "length_bins.parquet").to_pydict()
    assert sum(bins["num_sequences"]) == manifest["num_sequences"] == 2


def test_over_long_conversations_are_truncated_or_dropped(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", ROWS)
    manifest = prepare(tmp_path, [file], max_length=30)
    whole = prepare(tmp_path, [file], name="whole")
    cut, full = Dataset.open(tmp_path / "ds"), Dataset.open(tmp_path / "whole")
    assert cut.lengths.tolist() == np.minimum(full.lengths, 30).tolist() and manifest["longest"] == 30
    for index in range(len(cut)):
        assert all(np.array_equal(a, b[:30]) for a, b in zip(cut.tokens(index), full.tokens(index), strict=True))
    dropped = prepare(tmp_path, [file], name="dropped", max_length=30, over_long="drop", on_bad_row="error")
    kept = [index for index in range(7) if full.lengths[index] <= 30]
    assert 0 < len(kept) < 7 and whole["num_rejected"] == {}
    assert (manifest["num_truncated"], whole["num_truncated"], dropped["num_truncated"]) == (7 - len(kept), 0, 0)
    assert Dataset.open(tmp_path / "dropped").lengths.tolist() == full.lengths[kept].tolist()
    assert dropped["num_rejected"] == {"over-long": 7 - len(kept)}, "an over-long row is no error even with on_bad_row: error"


@pytest.mark.parametrize("num_workers", [1, 3], ids=["one", "fewer chunks than processes"])
@pytest.mark.parametrize(
    ("bad", "template", "text"),
    [
        ("{oops", MARKED, "not JSON (Expecting property name enclosed in double quotes: column 2)"),
        (row("a<|end|>"), MARKED, "special token in content (message 2, character 2: <|end|>)"),
        ({"messages": [*row("a")["messages"], *row("b")["messages"]]}, THINKING, "template rewrites history (message 2)"),
        ({"messages": [{"role": "tool", "content": ""}, *row("b")["messages"]]}, MARKED, "template refuses (no role tool)"),
        (row("again", id="s3"), MARKED, "duplicate id ('s3')"),
    ],
)
def test_a_bad_row_ends_the_job_with_one_line_if_it_is_to(
    tmp_path: Path, bad: Any, template: str, text: str, num_workers: int
) -> None:
    file = write(tmp_path / "x.jsonl", [*ROWS, bad, "{later"][: 8 if "duplicate" in text else 9])
    with pytest.raises(DataError) as caught:
        prepare(tmp_path, [file], template=template, on_bad_row="error", shard_sequences=5, num_workers=num_workers)
    assert str(caught.value) == f"{file}: row 8: {text}"
    assert visible(tmp_path) == {"x.jsonl", ".ds.building"}
    manifest = prepare(tmp_path, [file], template=template, shard_sequences=5)
    assert manifest["num_sequences"] == 7 and visible(tmp_path) == {"x.jsonl", "ds"}
    with pytest.raises(DataError, match="row 8"):  # a dataset with rejects is not what "error" asks for
        prepare(tmp_path, [file], template=template, on_bad_row="error", shard_sequences=5)


def test_the_first_bad_row_in_the_order_of_files_and_rows_is_the_error(tmp_path: Path) -> None:
    files = [
        write(tmp_path / f"{name}.jsonl", [row(name, id=name), *bad]) for name, bad in (("b", []), ("z", ["{"]), ("a", ["{"]))
    ]
    for given in (files, files[::-1]):
        first = next(file for file in given if "b.jsonl" not in file)
        for _ in range(2):  # anew, and from the parts that are there
            with pytest.raises(DataError) as caught:
                prepare(tmp_path, given, on_bad_row="error")
            assert str(caught.value).startswith(f"{first}: row 2: not JSON")


def test_nothing_usable_is_an_error_that_shows_the_first_reason(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", ["{", row("a" * 90), "}"])
    text = r"no usable row; 3 rejected \(not JSON: 2, over-long: 1\), the first: .*x\.jsonl: row 1: not JSON"
    with pytest.raises(DataError, match=text):
        prepare(tmp_path, [file], max_length=40, over_long="drop")
    with pytest.raises(DataError, match=r"empty\.jsonl: no rows$"):
        prepare(tmp_path, [write(tmp_path / "empty.jsonl", [])])
    assert not (tmp_path / "ds").exists()


def test_a_row_without_an_id_is_called_by_the_files_content_and_its_number(tmp_path: Path) -> None:
    files = [write(tmp_path / name, [row("one"), row("two")]) for name in ("x.jsonl", "other/name.jsonl")]
    names = []
    for number, file in enumerate(files):
        manifest = prepare(tmp_path, [file], name=f"ds{number}")
        names.append([item[2] for item in content(tmp_path / f"ds{number}")])
    identity = manifest["source_files"][0]["identity"].removeprefix("sha256:")
    assert names == [[f"{identity[:12]}:1", f"{identity[:12]}:2"]] * 2


def halves() -> list[list[dict[str, Any]]]:
    return [ROWS[:3], ROWS[3:]]


def test_the_fingerprint_depends_on_content_only(tmp_path: Path) -> None:
    one, two = (write(tmp_path / f"{n}.jsonl", rows) for n, rows in enumerate(halves()))
    base = prepare(tmp_path, [one, two], name="a")["fingerprint"]
    expected = content(tmp_path / "a")
    zipped, table = tmp_path / "moved" / "z.jsonl.gz", tmp_path / "p.parquet"
    zipped.parent.mkdir()
    zipped.write_bytes(gzip.compress(Path(one).read_bytes()))
    pq.write_table(pa.Table.from_pylist(ROWS[3:]), table)
    renamed = write(tmp_path / "renamed.jsonl", halves()[1])
    variants: dict[str, list[str]] = {
        "order": [two, one],
        "gzip": [str(zipped), two],
        "parquet": [one, str(table)],
        "names": [renamed, one],
        "given twice": [two, one, renamed],
    }
    for name, files in variants.items():
        for shard_sequences in (2, 100):
            manifest = prepare(tmp_path, files, name=f"{name[0]}{shard_sequences}", shard_sequences=shard_sequences)
            assert manifest["fingerprint"] == base and manifest["num_excluded"] == 0, name
            repeated = [{"path": renamed, "same_as": two}] if name == "given twice" else []
            assert manifest["repeated_files"] == repeated
            assert content(tmp_path / f"{name[0]}{shard_sequences}") == expected
    for later in ([one], [two]):
        prepare(tmp_path, later, name="later")
        assert prepare(tmp_path, [one, two], name="later")["fingerprint"] == base
        assert content(tmp_path / "later") == expected


def test_the_fingerprint_sees_what_the_content_is(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", ROWS)
    base = prepare(tmp_path, [file], name="a")["fingerprint"]
    assert prepare(tmp_path, [write(tmp_path / "2.jsonl", ROWS[::-1])], name="c")["fingerprint"] != base
    assert prepare(tmp_path, [file], name="d", template=CHATML)["fingerprint"] != base
    cut = write(tmp_path / "3.jsonl", [*ROWS[:-1], {**ROWS[-1], "finish_reason": "length"}])
    assert prepare(tmp_path, [cut], name="e")["fingerprint"] != base
    reworded = MARKED.replace("m['content']", "(m['content'])")
    assert prepare(tmp_path, [file], name="f", template=reworded)["fingerprint"] == base, "a template enters by its result"
    config = DataConfig(name="g", files=(file,), num_workers=1)
    other = prepare_dataset(config, merging_tokenizer(MARKED), target="models/t", folder=tmp_path / "g")
    assert other["fingerprint"] != base


def test_of_rows_with_one_id_the_same_one_stays_however_files_are_given(tmp_path: Path) -> None:
    contents = [[row(f"answer {name} {n}", id=f"s{n}") for n in range(4)] for name in "abc"]
    contents.append([row("answer a 0", id="t")])
    files = [write(tmp_path / f"{n}.jsonl", rows) for n, rows in enumerate(contents)]
    first = prepare(tmp_path, files, shard_sequences=3)
    expected = content(tmp_path / "ds")
    assert sorted(item[2] for item in expected) == ["s0", "s1", "s2", "s3", "t"] and first["num_rejected"] == {"duplicate id": 8}
    rejects = pq.read_table(tmp_path / "ds" / "rejects.parquet").to_pylist()
    places = [(item["source_file"], item["row"]) for item in rejects]
    assert places == sorted(places) and len(places) == 8
    for given in (files[::-1], files[1:] + files[:1]):
        assert prepare(tmp_path, given)["fingerprint"] == first["fingerprint"]
        assert content(tmp_path / "ds") == expected
    fewer = prepare(tmp_path, files[:1])
    assert (fewer["num_excluded"], len(content(tmp_path / "ds"))) == (0, 4)
    assert not (tmp_path / "ds" / "excluded.parquet").exists()


def test_files_with_the_same_sequences_but_other_ids_are_ordered_by_the_ids(tmp_path: Path) -> None:
    rows = [row("one"), row("two")]
    named = [[{**item, "id": f"{name}{n}"} for n, item in enumerate(rows)] for name in ("x", "y")]
    named[1][0]["id"] = "x1"  # so that it matters which file comes first
    results = set()
    for number in range(7):  # the same rows in files whose bytes, and so identities, differ
        files = [write(tmp_path / f"{number}{k}.jsonl", [*items, *[""] * (number * (k + 1))]) for k, items in enumerate(named)]
        results.add((prepare(tmp_path, files, name=f"ds{number}")["fingerprint"], str(content(tmp_path / f"ds{number}"))))
    assert len({fingerprint for fingerprint, _ in results}) == 1


def test_several_sequences_of_one_row_stay_or_go_together(tmp_path: Path) -> None:
    def turns(*answers: str, **more: Any) -> dict[str, Any]:
        return {"messages": [turn for answer in answers for turn in row(answer)["messages"]], **more}

    rows = [turns("aa", "bb", "cc", id="one"), turns("dd", "ee", id="two"), turns("ff", "gg", id="one"), turns("hh", id="one")]
    file = write(tmp_path / "x.jsonl", rows)
    manifest = prepare(tmp_path, [file], template=THINKING, rewritten_history="each_answer", shard_sequences=3)
    names = [item[2] for item in content(tmp_path / "ds")]
    assert len(set(names)) == 5 and [name[:3] for name in names] == ["one"] * 3 + ["two"] * 2
    assert (manifest["num_rejected"], manifest["num_excluded"]) == ({"duplicate id": 2}, 3)
    rejects = pq.read_table(tmp_path / "ds" / "rejects.parquet").to_pylist()
    assert [item["row"] for item in rejects] == [3, 4]


def state(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_ino for path in folder.rglob("*") if path.is_file()}


def test_the_same_job_again_does_nothing(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", ROWS)
    first = prepare(tmp_path, [file])
    before = state(tmp_path / "ds")
    again = prepare(tmp_path, [file], progress=lambda rows: pytest.fail("worked"), num_workers=7)
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
        (part,) = (tmp_path / "ds" / "tokens").glob("*.arrow")
        part.write_bytes(part.read_bytes()[:-100])
    else:
        file = shutil.move(file, tmp_path / "y.jsonl").as_posix()
    second = prepare(tmp_path, [file], **settings)
    assert second["reused"] is False and set(state(tmp_path / "ds").values()).isdisjoint(before.values())
    assert (second["fingerprint"] == first["fingerprint"]) == (change in ("damage", "file name"))
    Dataset.open(tmp_path / "ds").verify()
    assert visible(tmp_path) == {Path(file).name, "ds"}


def test_only_what_is_new_is_tokenized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [write(tmp_path / f"{n}.jsonl", [row(f"answer {n} {k}") for k in range(5)]) for n in range(3)]
    prepare(tmp_path, files[:2], shard_sequences=2)
    before = parts(tmp_path / "ds")
    seen: list[PrepareProgress] = []
    with counted_work(monkeypatch) as made:
        manifest = prepare(tmp_path, files, shard_sequences=2, progress=seen.append)
        after = parts(tmp_path / "ds")
        assert len(made) == 3 and before.items() < after.items() and len(after) == 9
        assert (seen[-1].reused_files, seen[-1].num_rows, manifest["num_sequences"]) == (2, 15, 15)
        moved = write(tmp_path / "elsewhere" / "0.jsonl", [row(f"answer 0 {k}") for k in range(5)])
        prepare(tmp_path, [moved, *files[1:]], shard_sequences=2)
        prepare(tmp_path, files[:1], shard_sequences=2)
        assert len(made) == 3, "a file in another folder, and fewer files, need no work"
    assert len(parts(tmp_path / "ds")) == 3 and len(content(tmp_path / "ds")) == 5


def test_a_file_system_without_links_gets_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [write(tmp_path / f"{n}.jsonl", [row(f"answer {n}")]) for n in range(2)]
    prepare(tmp_path, files[:1])

    def refuse(*paths: Any) -> None:
        raise OSError("no links")

    monkeypatch.setattr("os.link", refuse)
    with counted_work(monkeypatch) as made:
        assert prepare(tmp_path, files)["num_sequences"] == 2 and len(made) == 1
    assert len(content(tmp_path / "ds")) == 2


@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError("disk full")])
@pytest.mark.usefixtures("all_progress")
def test_a_job_that_fails_late_leaves_the_old_dataset_and_what_is_done(
    tmp_path: Path, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "x.jsonl", ROWS)
    prepare(tmp_path, [file])
    before = state(tmp_path / "ds")

    def fail(seen: PrepareProgress) -> None:
        if seen.num_rows == 4:
            raise fault

    with pytest.raises(KeyboardInterrupt if fault is KeyboardInterrupt else DataError):
        prepare(tmp_path, [file], shard_sequences=2, progress=fail)
    assert state(tmp_path / "ds") == before and visible(tmp_path) == {"x.jsonl", "ds", ".ds.building"}
    done = parts(tmp_path / ".ds.building")
    with counted_work(monkeypatch) as made:
        prepare(tmp_path, [file], shard_sequences=2)
    assert len(made) == 2 and done.items() < parts(tmp_path / "ds").items()
    assert visible(tmp_path) == {"x.jsonl", "ds"}


def test_a_failure_before_anything_is_done_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ChatEncoder, "encode", fail)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path, [write(tmp_path / "x.jsonl", ROWS)])
    assert visible(tmp_path) == {"x.jsonl"}


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dflash_core.data.parts.sync_to_disk", fail)
    with pytest.raises(DataError, match=r"tokens: cannot be written to \(No space left on device\)"):
        prepare(tmp_path, [write(tmp_path / "x.jsonl", ROWS)])
    assert visible(tmp_path) == {"x.jsonl"}


def test_leftovers_of_other_settings_and_of_killed_jobs_are_removed(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", [*ROWS, "{"])
    for limit in (40, 50):
        with pytest.raises(DataError):
            prepare(tmp_path, [file], on_bad_row="error", max_length=limit)
        tokens = tmp_path / ".ds.building" / "tokens"
        assert len(list(tokens.iterdir())) == 2
        (tokens / ".part-1-00000.tmp").write_bytes(b"x")
    prepare(tmp_path, [file], max_length=50)
    assert len(list((tmp_path / "ds" / "tokens").iterdir())) == 3


@pytest.mark.parametrize("damage", ["cut", "empty", "other count", "no summary", "bad summary"])
def test_a_damaged_part_of_an_interrupted_job_is_made_anew(tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "x.jsonl", [*ROWS, "{"])
    with pytest.raises(DataError):
        prepare(tmp_path, [file], on_bad_row="error", shard_sequences=4)
    part = min((tmp_path / ".ds.building" / "tokens").glob("*.arrow"))
    summary = part.with_suffix(".json")
    if damage == "no summary":
        summary.unlink()
    elif damage == "bad summary":
        summary.write_text("{}\n")
    elif damage == "other count":
        shutil.copyfile(max(part.parent.glob("*.arrow")), part)
    else:
        part.write_bytes(part.read_bytes()[: 0 if damage == "empty" else -100])
    with counted_work(monkeypatch) as made:
        prepare(tmp_path, [file], shard_sequences=4)
    assert made == [part.stem] and len(content(tmp_path / "ds")) == 7


def test_a_failure_between_the_two_renames_puts_the_old_dataset_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "x.jsonl", ROWS)
    prepare(tmp_path, [file])
    before = state(tmp_path / "ds")
    rename = Path.rename

    def failing(self: Path, to: Path) -> Path:
        if self.name == ".ds.building":
            raise OSError("no rename")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(DataError, match="no rename"):
        prepare(tmp_path, [file], max_length=50)
    assert state(tmp_path / "ds") == before and visible(tmp_path) == {"x.jsonl", "ds", ".ds.building"}


def test_what_a_killed_job_leaves_looks_unfinished_and_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "x.jsonl", ROWS)
    byte_tokenizer().save_pretrained(tmp_path / "target")
    code = (
        "import os, pathlib, signal, sys\n"
        "from dflash_core.config import DataConfig\n"
        "from dflash_core.data import load_tokenizer, prepare_dataset, progress\n"
        "progress.EVERY_S = 0.0\n"
        "root = pathlib.Path(sys.argv[1])\n"
        "config = DataConfig(name='ds', files=(str(root / 'x.jsonl'),), shard_sequences=2, num_workers=1)\n"
        "kill = lambda seen: seen.num_rows == 4 and os.kill(os.getpid(), signal.SIGKILL)\n"
        "prepare_dataset(config, load_tokenizer(root / 'target'), target='models/t', folder=root / 'ds', progress=kill)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert visible(tmp_path) - {"x.jsonl", "target"} == {".ds.building"}
    left = parts(tmp_path / ".ds.building")
    with pytest.raises(DataError, match=r"ds: not a dataset"):
        Dataset.open(tmp_path / "ds")
    with counted_work(monkeypatch) as made:
        assert prepare(tmp_path, [file], shard_sequences=2)["num_sequences"] == 7
    assert len(left) == 2 and len(made) == 2 and left.items() < parts(tmp_path / "ds").items()
    prepare(tmp_path, [file], name="whole", shard_sequences=2)
    assert content(tmp_path / "ds") == content(tmp_path / "whole")
    assert visible(tmp_path) == {"x.jsonl", "target", "ds", "whole"}


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", ROWS)
    prepare(tmp_path, [file])
    (tmp_path / "ds").rename(tmp_path / ".ds.old")
    (tmp_path / ".ds.building").mkdir()
    with folder_lock(tmp_path / "ds"):
        assert visible(tmp_path) == {"x.jsonl", "ds", ".ds.building"}
    assert prepare(tmp_path, [file])["reused"] is True


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


@pytest.mark.usefixtures("all_progress")
@pytest.mark.parametrize("when", [2, 7], ids=["early", "after the last row"])
def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path: Path, when: int, monkeypatch: pytest.MonkeyPatch) -> None:
    other, file = write(tmp_path / "a.jsonl", [row("other")]), write(tmp_path / "x.jsonl", ROWS)

    def append(seen: PrepareProgress) -> None:
        if seen.num_rows == when + 1 and seen.files_done == 1:
            with Path(file).open("a") as opened:
                opened.write("\n")

    with counted_work(monkeypatch) as made, pytest.raises(DataError, match=r"x\.jsonl: the file changed while it was read"):
        prepare(tmp_path, [other, file], progress=append, shard_sequences=2 if when == 2 else 7)
    assert len(made) == 2, "nothing is made of what was read after the change"
    assert len(parts(tmp_path / ".ds.building")) == 1, "no part of the changed file stays"
    assert prepare(tmp_path, [other, file])["num_sequences"] == 8
