"""What makes an analysis fast changes nothing in it: the fast reader, values kept with a run, medians, steps of checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core import experiment as root
from dflash_core.analysis import reader
from dflash_core.analysis.checkpoints import Checkpoint, _during
from dflash_core.analysis.fast_rows import read_fast
from dflash_core.analysis.findings.curve_tools import curves_of
from dflash_core.analysis.findings.loss_parts import fit_loss
from dflash_core.analysis.runs import Run, load_run, once_per_run
from dflash_core.analysis.series import inner_median, running_median
from dflash_core.errors import DataError
from dflash_core.training import cell as cell_module
from tests.fake_runs import FakeRun, write_run

ROW = {"run_id": "r", "attempt": 0, "step": 3, "loss_sum": 1.5, "skipped": True}
SCHEMA = pa.schema(
    [("run_id", pa.string()), ("attempt", pa.int64()), ("step", pa.int64()), ("loss_sum", pa.float64()), ("skipped", pa.bool_())]
)
ODD: list[Any] = [
    None, 0, -7, 2.5, 2**53, 2**63, 1e300, 3.0, True, False, "x", "", "a:b", 'a"b', "ü", "[x]", "\ud800", "3", "null",
    [], [1], ["x"], {}, {"a": 1}, {"a": None}, float("nan"), float("inf"),
]  # fmt: skip


def line(row: dict[str, Any], tight: bool) -> str:
    return json.dumps(row, separators=(",", ":") if tight else None) + "\n"


def carefully(data: bytes) -> pa.Table | None:
    """As the other two ways read the rows; None where they refuse them, or find another field that is not null."""
    try:
        table = reader._parse_by_arrow(data, SCHEMA)
    except pa.ArrowInvalid:
        try:
            rows = reader._rows_of(data, Path("rows"))
            columns = {field.name: reader._array([row.get(field.name) for row in rows], field) for field in SCHEMA}
            columns |= {
                name: pa.array([1]) for row in rows for name, value in row.items() if name not in columns and value is not None
            }
            table = pa.table(columns)
        except (DataError, pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeEncodeError):
            return None
    others = [name for name in table.column_names if name not in SCHEMA.names and table[name].null_count < len(table)]
    return None if others else table.select(SCHEMA.names).combine_chunks()


changes = st.tuples(st.sampled_from([*ROW, "other"]), st.sampled_from(ODD), st.booleans())


@given(st.lists(st.tuples(st.lists(changes, max_size=2), st.booleans()), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_what_is_read_fast_is_what_is_read_carefully(edits: list[tuple[list[tuple[str, Any, bool]], bool]]) -> None:
    data = ""
    for several, tight in edits:
        row: dict[str, Any] = dict(ROW)
        for name, value, gone in several:
            row.pop(name, None)
            row |= {} if gone else {name: value}
        data += line(row, tight)
    table = read_fast(data.encode(), SCHEMA)
    if table is not None:
        expected = carefully(data.encode())
        assert expected is not None and table.schema == SCHEMA and table.combine_chunks().equals(expected)


@pytest.mark.parametrize("change", [{}, {"loss_sum": None}, {"loss_sum": 2}, {"step": 2**62}, {"skipped": None}])
def test_rows_as_training_writes_them_are_read_fast(change: dict[str, Any]) -> None:
    for tight in (True, False):
        data = (line(ROW, tight) + line({**ROW, **change}, tight)).encode()
        table, expected = read_fast(data, SCHEMA), carefully(data)
        assert table is not None and expected is not None and table.combine_chunks().equals(expected)


OTHER = (
    '{"attempt": 1}{"attempt": 2}', '{"attempt": 1}\n', '{"attempt": 1', '{"attempt": 1, "attempt": 2}', "[1]", "null",
    '{"run_id": 5}', '{"run_id": ["x"]}', '{"run_id": {"a": 1}}', '{"other": 5}', '{"attempt": NaN}', '{"attempt":1,}',
)  # fmt: skip


@pytest.mark.parametrize("text", OTHER)
def test_anything_else_is_left_to_the_careful_reader(text: str) -> None:
    assert read_fast((line(ROW, False) + text + "\n").encode(), SCHEMA) is None


def test_both_readers_give_the_same_stream_and_the_same_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "r", FakeRun(num_steps=20))
    slow = reader.read_stream(folder, "batches", compact=False)
    asked: list[str] = []
    monkeypatch.setattr(reader, "LEAST_BYTES", 0)
    monkeypatch.setattr(reader, "read_fast", lambda data, schema: asked.append("") or read_fast(data, schema))
    fast = reader.read_stream(folder, "batches", compact=False)
    assert asked and fast.combine_chunks().equals(slow.combine_chunks()) and fast.schema.equals(slow.schema)
    path = folder / "metrics" / "batches.jsonl"
    good = path.read_text()
    path.write_text(good + '{"run_id": "r", "st')  # a torn last line
    assert len(reader.read_stream(folder, "batches", compact=False)) == len(slow)
    path.write_text(good + "nonsense\n")
    with pytest.raises(DataError, match=rf"batches.jsonl, row {len(slow) + 1}: not JSON"):
        reader.read_stream(folder, "batches", compact=False)


def test_what_is_kept_with_a_run_is_made_once_and_not_for_another_one(tmp_path: Path) -> None:
    made: list[str] = []

    @once_per_run
    def count(run: Run) -> int:
        made.append(run.run_id)
        return len(run.batches)

    run = load_run(write_run(tmp_path / "r", FakeRun(num_steps=60)))
    assert (count(run), count(run), len(made)) == (240, 240, 1)
    assert count(replace(run, batches=run.batches.slice(0, 8))) == 8
    assert fit_loss(run) is fit_loss(run) and curves_of(run) is curves_of(run)
    assert (
        run.buckets() is run.buckets()
        and replace(run, batches=run.batches.slice(0, 8)).buckets().tolist() == run.buckets()[:8].tolist()
    )


@given(st.integers(11, 200), st.sampled_from([3, 11]), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_inner_medians_are_those_of_a_running_median(size: int, width: int, seed: int) -> None:
    values = np.round(np.random.default_rng(seed).normal(size=size), 1)  # with ties
    assert inner_median(values, width).tolist() == running_median(values, width)[width // 2 : size - width // 2].tolist()


@given(st.integers(0, 2**32), st.floats(0, 3))
@settings(max_examples=100, deadline=None)
def test_the_steps_of_a_checkpoint_are_those_whose_time_meets_its_own(seed: int, disorder: float) -> None:
    rng = np.random.default_rng(seed)
    end = np.cumsum(rng.exponential(size=60)) + disorder * rng.normal(size=60)
    seconds, attempt = rng.exponential(size=60), rng.integers(0, 2, 60).astype(float)
    seconds[rng.random(60) < 0.1] = np.nan
    end[rng.random(60) < 0.1] = np.nan
    begins = rng.uniform(-5, 70, 12)
    checkpoints = [Checkpoint(int(rng.integers(2)), 0, one, one + rng.exponential(3), 0, 0, 0, 0) for one in begins.tolist()]
    for one, rows in zip(checkpoints, _during(end, attempt, seconds, checkpoints), strict=True):
        plain = (end > one.begin) & (end - seconds < one.end) & (attempt == one.attempt)
        assert rows.tolist() == np.flatnonzero(plain).tolist()


def test_a_long_run_is_compacted_when_its_training_ends(micro_experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = root.load_experiment(micro_experiment, [])
    root.prepare(config)
    run_dir = root.create_run(config, "long")
    monkeypatch.setattr(cell_module, "WORTH_COMPACTING_BYTES", 1)
    root.train_run(root.load_experiment(run_dir / "config.yaml"), run_dir)
    for stream in ("steps", "batches", "events"):
        path = run_dir / "metrics" / f"{stream}.parquet"
        metadata = pq.read_metadata(path).metadata
        assert metadata[reader.SOURCE_BYTES_KEY.encode()] == str(path.with_suffix(".jsonl").stat().st_size).encode()
