"""The log of an unfinished regeneration survives a kill at any byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.data.regenerate_log import AnswerLog, row_key
from dflash_core.errors import DataError

JOB = {"digest": "d", "model": "m"}


def finished(log: AnswerLog) -> list[tuple[str, str]]:
    return [(kind, json.loads(line)["text"]) for kind, line in log.entries()]


def test_a_log_that_was_cut_off_anywhere_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "log"
    keys = [row_key(0, 5), row_key(0, 2), row_key(1, 1)]
    ends = []
    with AnswerLog(path, JOB) as log:
        for key in keys:
            log.add(key, "A", {"text": f"{key}\t\n\u2028"})
            ends.append(path.stat().st_size)
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        with AnswerLog(path, JOB) as log:
            left = [key for key, end in zip(keys, ends, strict=True) if end <= size]
            assert log.done.tolist() == sorted(left)
            for key in keys:
                if key not in left:
                    log.add(key, "A", {"text": f"{key}\t\n\u2028"})
            assert finished(log) == [("A", f"{key}\t\n\u2028") for key in sorted(keys)]
        with AnswerLog(path, JOB) as log:
            assert log.done.tolist() == sorted(keys)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.sampled_from("ASF")), max_size=12))
def test_the_last_word_on_a_row_counts_and_failures_are_asked_again(
    tmp_path_factory: pytest.TempPathFactory, added: list[tuple[int, int, str]]
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    expected = {}
    with AnswerLog(path, JOB) as log:
        for number, (file, row, kind) in enumerate(added):
            log.add(row_key(file, row), kind, {"text": str(number)})  # type: ignore[arg-type]
            expected[row_key(file, row)] = (kind, str(number))
    with AnswerLog(path, JOB) as log:
        assert finished(log) == [expected[key] for key in sorted(expected)]
        settled = {row_key(file, row) for file, row, kind in added if kind != "F"}
        assert log.done.tolist() == sorted(settled)


def test_another_job_is_refused(tmp_path: Path) -> None:
    with AnswerLog(tmp_path / "log", JOB):
        pass
    with pytest.raises(DataError, match="model was 'm' and is 'n'"):
        AnswerLog(tmp_path / "log", {**JOB, "model": "n"})


def test_a_surrogate_does_not_break_the_log(tmp_path: Path) -> None:
    with AnswerLog(tmp_path / "log", JOB) as log:
        log.add(1, "F", {"text": "\ud800"})
        assert finished(log) == [("F", "?")]
