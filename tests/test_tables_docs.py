"""Every column is documented where its type is, and the page is made from that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_core.analysis.compare import estimates
from dflash_core.analysis.reader import read_stream
from dflash_core.analysis.report_columns import METRICS, REPORT_TABLES
from dflash_core.analysis.stream_columns import STREAM_TABLES
from dflash_core.analysis.table_docs import page
from dflash_core.analysis.tables import COLUMNS, STREAMS, TABLES
from tests.fake_runs import FakeRun, undocumented, write_jsonl, write_run

DOCS = Path(__file__).parents[1] / "docs" / "tables.md"


def test_the_page_is_what_the_code_says() -> None:
    same = DOCS.read_text(encoding="utf-8") == page()
    assert same, "docs/tables.md is out of date: python -m dflash_core.analysis.table_docs docs/tables.md"


def test_every_column_has_a_unit_and_a_meaning() -> None:
    for name, table in (STREAM_TABLES | REPORT_TABLES).items():
        assert set(table.sorted_by) <= set(table.columns), name
        for column, about in table.columns.items():
            where = f"{name}.{column}"
            assert about.unit and about.meaning.endswith((".", "?")) and "|" not in about.meaning, where
            if column.endswith("_s") and not column.endswith("per_s"):
                assert about.unit == "s", where
    assert not undocumented_in_page()


def undocumented_in_page() -> set[str]:
    text = DOCS.read_text(encoding="utf-8")
    return {name for columns in COLUMNS.values() for name in columns if f"| `{name}`" not in text}


def test_every_compared_metric_is_documented(tmp_path: Path) -> None:
    import numpy as np

    from dflash_core.analysis.run_tables import grad_norm_rows, run_row
    from dflash_core.analysis.runs import load_run

    run = load_run(write_run(tmp_path / "run", FakeRun(num_steps=30)))
    row, rng = run_row(run, np.random.default_rng(0)), np.random.default_rng(0)
    assert set(estimates(run, row, grad_norm_rows(run, 6.0)[0], rng)) <= set(METRICS) | set(TABLES["runs"].names)


def test_files_carry_unit_and_meaning_of_each_column(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", FakeRun(num_steps=6))
    read_stream(folder, "stats", compact=True)
    schema = pq.read_schema(folder / "metrics" / "stats.parquet")
    for name in ("ready_depth", "longest_run", "bucket_counts"):
        field, about = schema.field(name), STREAM_TABLES["stats"].columns[name]
        assert field.type == about.type
        assert field.metadata[b"unit"].decode() == about.unit and field.metadata[b"description"].decode() == about.meaning
    assert schema.metadata[b"dflash.schema"] == b"stats"


def test_fields_that_not_all_rows_have_get_their_own_types(tmp_path: Path) -> None:
    base: dict[str, Any] = {"run_id": "r", "attempt": 0, "time": 1.0, "step": 0}
    (tmp_path / "metrics").mkdir()
    rows = [{**base, "reduce_s": 1, "own": [1]}, {**base, "reduce_s": 0.5}, {**base, "log_s": 2}]
    write_jsonl(tmp_path / "metrics" / "steps.jsonl", rows)
    found = read_stream(tmp_path, "steps", compact=False)
    assert found["reduce_s"].to_pylist() == [1.0, 0.5, None] and found.schema.field("log_s").type == pa.float64()
    assert "optimizer_busy_s" not in found.column_names and found["own"].to_pylist() == [[1], None, None]
    waiting = [{**base, "ready_waiting_for": None, "longest_run": n, "queue_tokens": []} for n in (1, 2)]
    write_jsonl(tmp_path / "metrics" / "stats.jsonl", waiting)
    found = read_stream(tmp_path, "stats", compact=False)
    assert found.schema.field("ready_waiting_for").type == pa.int64() and found["longest_run"].to_pylist() == [1, 2]
    events = [{**base, "kind": "validation", "by_source": {"all": 2.5}, "validation_s": 1}, {**base, "kind": "signal", "name": 7}]
    write_jsonl(tmp_path / "metrics" / "events.jsonl", events)
    found = read_stream(tmp_path, "events", compact=True)
    assert json.loads(found["by_source"][0].as_py()) == {"all": 2.5} and found["validation_s"].to_pylist() == [1.0, None]
    assert found["name"].to_pylist() == [None, "7"]
    write_jsonl(tmp_path / "metrics" / "events.jsonl", [{**base, "kind": "x", "snapshot_s": "soon"}])
    assert read_stream(tmp_path, "events", compact=True)["snapshot_s"].to_pylist() == ["soon"]
    assert pq.read_table(tmp_path / "metrics" / "events.parquet")["kind"].to_pylist() == ["x"]


def test_what_is_not_documented_is_found(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", FakeRun(num_steps=6))
    assert undocumented(folder) == set()
    with (folder / "metrics" / "steps.jsonl").open("a") as file:
        file.write(json.dumps({"step": 1, "warp_s": 1.0}) + "\n")
    assert undocumented(folder) == {"steps.warp_s"}


@pytest.mark.parametrize("name", sorted(STREAMS))
def test_a_stream_without_rows_has_its_columns(tmp_path: Path, name: str) -> None:
    assert read_stream(tmp_path, name, compact=True).schema.equals(STREAMS[name])
