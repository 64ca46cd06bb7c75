"""The Parquet files as pandas, DuckDB and polars read them: the same rows, types and metadata."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_core.analysis import SCHEMA_VERSION, analyze_runs
from dflash_core.analysis.reader import read_stream
from dflash_core.analysis.runs import load_run
from dflash_core.config import AnalyzeConfig
from dflash_core.errors import DataError
from tests.fake_runs import FakeRun, write_jsonl, write_run

TIME = datetime(2026, 2, 2, 2, 40, 0, 250_000, tzinfo=UTC)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps: a plain one, one whose loss is NaN and whose lists are empty, one that measured nothing."""
    folder = write_run(tmp_path_factory.mktemp("readers") / "run", FakeRun(num_steps=3))
    path = folder / "metrics" / "steps.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0] |= {"time": TIME.timestamp(), "loss": 1.5, "bucket_counts": [1, 0, 3], "clipped": True}
    rows[1] |= {"loss": math.nan, "grad_norm": math.inf, "bucket_counts": [], "clipped": False}
    rows[2] |= {"loss": None, "bucket_counts": None, "clipped": None}
    write_jsonl(path, rows)
    read_stream(folder, "steps", compact=True)
    return path.with_suffix(".parquet")


def same(found: Any, expected: Any) -> bool:
    both_nan = isinstance(found, float) and isinstance(expected, float) and math.isnan(found) and math.isnan(expected)
    return both_nan or found == expected


def check(rows: list[dict[str, Any]]) -> None:
    """What every reader must give, as plain Python values."""
    assert [row["step"] for row in rows] == [0, 1, 2] and rows[0]["run_id"] == "run"
    assert all(same(row["loss"], value) for row, value in zip(rows, (1.5, math.nan, None), strict=True))
    assert rows[1]["grad_norm"] == math.inf
    assert [row["bucket_counts"] for row in rows] == [[1, 0, 3], [], None]
    assert [row["clipped"] for row in rows] == [True, False, None]
    assert rows[0]["time"] == TIME and rows[0]["time"].utcoffset().total_seconds() == 0


def test_pandas(steps: Path) -> None:
    frame = pd.read_parquet(steps, dtype_backend="pyarrow")
    assert str(frame.dtypes["time"]) == "timestamp[us, tz=UTC][pyarrow]" and str(frame.dtypes["step"]) == "int64[pyarrow]"
    # Scalar access would show nulls as NA and NaN alike; the Arrow values behind the frame keep them apart.
    check([{name: frame[name].array.__arrow_array__()[i].as_py() for name in frame} for i in range(len(frame))])
    plain = pd.read_parquet(steps)
    assert str(plain.dtypes["time"]) == "datetime64[us, UTC]" and plain["loss"].isna().tolist() == [False, True, True]
    assert plain["bucket_counts"][0].tolist() == [1, 0, 3]


def test_polars(steps: Path) -> None:
    frame = pl.read_parquet(steps)
    assert frame.schema["time"] == pl.Datetime("us", "UTC") and frame.schema["bucket_counts"] == pl.List(pl.Int64)
    check(frame.to_dicts())
    metadata = pl.read_parquet_metadata(steps)
    assert metadata["dflash.schema"] == "steps" and metadata["dflash.schema_version"] == str(SCHEMA_VERSION)


def test_duckdb(steps: Path) -> None:
    with duckdb.connect() as database:
        found = database.execute(f"SELECT * REPLACE (epoch_us(time) AS time) FROM '{steps}' ORDER BY step")
        names = [column[0] for column in found.description]
        rows = [dict(zip(names, row, strict=True)) for row in found.fetchall()]
        for row in rows:
            row["time"] = datetime.fromtimestamp(row["time"] / 1e6, UTC)
        check(rows)
        types = dict(database.execute(f"SELECT column_name, column_type FROM (DESCRIBE SELECT * FROM '{steps}')").fetchall())
        assert types["time"] == "TIMESTAMP WITH TIME ZONE" and types["bucket_counts"] == "BIGINT[]" and types["loss"] == "DOUBLE"
        metadata = dict(database.execute(f"SELECT key, value FROM parquet_kv_metadata('{steps}')").fetchall())
        assert metadata[b"dflash.schema"] == b"steps" and metadata[b"dflash.schema_version"] == str(SCHEMA_VERSION).encode()


def test_all_tables_of_a_report_read_alike(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", FakeRun(num_steps=30))
    manifest = analyze_runs([folder], tmp_path / "report", AnalyzeConfig())
    streams = {name: str(folder / "metrics" / f"{name}.parquet") for name in ("steps", "batches", "evals", "events", "stats")}
    tables = {name: path for name, path in manifest["paths"].items() if path.endswith(".parquet")}
    with duckdb.connect() as database:
        for name, path in (streams | tables).items():
            expected = pq.read_table(path)
            polars = pl.read_parquet(path)
            assert polars.columns == expected.column_names, name
            assert len(polars) == len(expected) == len(pd.read_parquet(path)), name
            assert database.execute(f"SELECT count(*) FROM '{path}'").fetchone() == (len(expected),), name
            numbers = [field.name for field in expected.schema if str(field.type) in ("int64", "double")]
            for column in numbers:
                values = expected[column].to_pylist()
                assert all(same(*pair) for pair in zip(polars[column].to_list(), values, strict=True)), f"{name}.{column}"


def test_a_run_whose_jsonl_is_gone_stays_readable_also_of_an_earlier_version(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", FakeRun(num_steps=3))
    before = read_stream(folder, "steps", compact=True)
    (folder / "metrics" / "steps.jsonl").unlink()
    assert read_stream(folder, "steps", compact=True).equals(before)
    # Of an earlier version: other types, columns that were not there yet, objects as they were.
    path = folder / "metrics" / "steps.parquet"
    objects = pa.array([{"a": 1}, None, {"a": 2}])
    old = before.drop_columns(["grad_norm"]).set_column(0, "run_id", before["run_id"].dictionary_encode())
    old = old.set_column(old.schema.get_field_index("step"), "step", old["step"].cast(pa.int32())).append_column("more", objects)
    pq.write_table(old.replace_schema_metadata({b"dflash.schema_version": b"1"}), path)
    found = read_stream(folder, "steps", compact=True)
    assert found.select(["run_id", "step", "loss", "time"]).equals(before.select(["run_id", "step", "loss", "time"]))
    assert found["grad_norm"].null_count == 3 and found["more"].to_pylist() == ['{"a": 1}', None, '{"a": 2}']
    pq.write_table(old.set_column(old.schema.get_field_index("step"), "step", pa.array(["a", "b", "c"])), path)
    with pytest.raises(DataError, match=r"steps\.parquet: step is not what it should be"):
        read_stream(folder, "steps", compact=True)


def test_numbers_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for number, (stream, field, value, message) in enumerate(
        (
            ("batches", "bucket", -1, r"batches\.jsonl: bucket -1 cannot be"),
            ("batches", "bucket", 10**7, r"batches\.jsonl: bucket 10000000 cannot be"),
            ("steps", "step", -1, r"steps\.jsonl: step -1 cannot be"),
            ("batches", "seq_no", 2**70, r"batches\.jsonl: a field has values of another type"),
            ("steps", "step", 1.5, r"steps\.jsonl: .*step has a value that is not a whole number"),
        )
    ):
        folder = write_run(tmp_path / str(number), FakeRun(num_steps=3))
        path = folder / "metrics" / f"{stream}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        write_jsonl(path, [rows[0] | {field: value}, *rows[1:]])
        with pytest.raises(DataError, match=message):
            load_run(folder)


def test_a_damaged_parquet_file_is_made_again_from_its_jsonl(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", FakeRun(num_steps=3))
    before, path = read_stream(folder, "steps", compact=True), folder / "metrics" / "steps.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    assert read_stream(folder, "steps", compact=True).equals(before) and pq.read_table(path).num_rows == 3
    path.write_bytes(b"PAR1")
    (folder / "metrics" / "steps.jsonl").unlink()
    with pytest.raises(DataError, match=r"steps\.parquet: not a readable Parquet file"):
        read_stream(folder, "steps", compact=True)


@pytest.mark.parametrize(("key", "value"), [("state", 5), ("lossless", "maybe"), ("acceptance_length", "x")])
def test_a_manifest_with_other_kinds_of_values_is_one_readable_error(tmp_path: Path, key: str, value: Any) -> None:
    folder = write_run(tmp_path / "run", FakeRun(num_steps=3, manifest={key: value}))
    with pytest.raises(DataError, match=rf"manifest\.json: {key} cannot be"):
        load_run(folder)


def test_a_configured_number_of_buckets_that_cannot_be_is_not_believed(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run", FakeRun(num_steps=3, config={"bucketing.num_buckets": 10**9})))
    assert run.num_buckets <= 6
