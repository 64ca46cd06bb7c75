"""docs/tables.md, made from the columns: `python -m dflash_core.analysis.table_docs docs/tables.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow as pa

from dflash_core.analysis.columns import Table
from dflash_core.analysis.report_columns import METRICS, REPORT_TABLES
from dflash_core.analysis.stream_columns import EVAL_METRICS, EVENT_KINDS, STREAM_TABLES
from dflash_core.analysis.tables import SCHEMA_VERSION

HEAD = """# Tables

Made from the code by `python -m dflash_core.analysis.table_docs docs/tables.md`; edit `dflash_core/analysis/stream_columns.py`
and `report_columns.py` instead.

Every table is Parquet (zstd), tidy, and whole or not there. A file's metadata hold the schema's name and version
(`dflash.schema`, `dflash.schema_version`, now SCHEMA_VERSION); each column's hold its unit and meaning (`unit`,
`description`), which pyarrow shows. Null means "not measured", NaN "measured, and not a number" (a loss that diverged):
pandas does not tell them apart unless it is asked to (`dtype_backend="pyarrow"`), DuckDB and polars do. Times are UTC, in
microseconds.

```python
pandas.read_parquet("reports/demo/runs.parquet")
polars.read_parquet("reports/demo/runs.parquet")
duckdb.sql("SELECT run_id, value FROM 'runs/*/metrics/evals.parquet' WHERE metric = 'acceptance_length'")
```

In the column "unit", `–` stands for values without one and `1` for pure numbers. A column with a * is there only where some
row has a value for it.
""".replace("SCHEMA_VERSION", str(SCHEMA_VERSION))

STREAMS_HEAD = """## Streams of a run

`runs/ID/metrics/NAME.jsonl` while the run lives, one JSON object a line, written by the training; `NAME.parquet` beside it once
the run has ended and was analysed. A field that is not named here keeps the type that its values show. Lists have
one value per target, bucket or slot. A step that was trained again after a resume is there once per attempt: the last one
counts.
"""

REPORT_HEAD = """## Tables of a report

`reports/NAME/TABLE.parquet`, written by `dflash analyze`. Only the last attempt of a step counts.
"""


def page() -> str:
    """The whole page, Markdown."""
    parts = [HEAD, STREAMS_HEAD]
    for name, table in STREAM_TABLES.items():
        parts.append(_section(name, table))
        if name == "evals":
            parts.append(_list("metric", ((name, unit, meaning) for name, (unit, meaning) in EVAL_METRICS.items())))
        if name == "events":
            parts.append(_kinds())
    parts.append(REPORT_HEAD)
    parts += [_section(name, table) for name, table in REPORT_TABLES.items()]
    parts.append(
        "`metric` is a column of `runs`, whose meaning stands there, or:\n\n"
        + _list("metric", ((name, unit, meaning) for name, (unit, meaning) in METRICS.items()))
    )
    return "\n".join(parts)


def _section(name: str, table: Table) -> str:
    order = f" Sorted by {', '.join(f'`{key}`' for key in table.sorted_by)}." if table.sorted_by else ""
    rows = [
        f"| `{column}`{' *' if about.optional else ''} | {_type(about.type)} | {about.unit} | {about.meaning} |"
        for column, about in table.columns.items()
    ]
    head = f"### {name}\n\n{table.meaning}{order}\n\n| column | type | unit | meaning |\n|---|---|---|---|\n"
    return head + "\n".join(rows) + "\n"


def _list(head: str, rows: Iterable[tuple[str, str, str]]) -> str:
    body = "\n".join(f"| `{name}` | {unit} | {meaning} |" for name, unit, meaning in rows)
    return f"| {head} | unit | meaning |\n|---|---|---|\n{body}\n"


def _kinds(kinds: Mapping[str, str] = EVENT_KINDS) -> str:
    body = "\n".join(f"| `{name}` | {meaning} |" for name, meaning in kinds.items())
    return f"| kind | meaning |\n|---|---|\n{body}\n"


def _type(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"list of {_type(kind.value_type)}"
    if pa.types.is_timestamp(kind):
        return "time"
    return {pa.string(): "text", pa.int64(): "int64", pa.float64(): "float64", pa.bool_(): "yes or no"}[kind]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
