"""The Parquet tables of this project: schemas, version, and how they are written.

Every file carries its schema's name and version in its metadata (`dflash.schema`, `dflash.schema_version`) and unit and
meaning of each column in that column's metadata (`unit`, `description`), is compressed with zstd, and appears whole or not at
all. NaN means "measured, and not a number" (a diverged loss); null means "not measured". Times are UTC. Columns are described
in `stream_columns` and `report_columns`; docs/tables.md is made from these.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dflash_core.analysis.columns import described
from dflash_core.analysis.report_columns import REPORT_TABLES
from dflash_core.analysis.stream_columns import STREAM_TABLES
from dflash_core.provenance import write_atomically

# 2: fields that not every row has get the types that docs/tables.md names, objects become text, events have a kind.
SCHEMA_VERSION = 2
NAME_KEY, VERSION_KEY = b"dflash.schema", b"dflash.schema_version"
ROW_GROUP_ROWS = 64 * 1024

# The columns that are always there. Other fields of a row become columns, too (`stream_columns` types those that it knows).
STREAMS: dict[str, pa.Schema] = {name: table.schema() for name, table in STREAM_TABLES.items()}
TABLES: dict[str, pa.Schema] = {name: table.schema() for name, table in REPORT_TABLES.items()}
COLUMNS = {name: table.columns for name, table in (STREAM_TABLES | REPORT_TABLES).items()}


def table_of(name: str, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """The report table `name`; a row must have exactly its columns.

    Raises:
        ValueError: a row has a column too many or too few (a mistake of ours).
    """
    schema = TABLES[name]
    for row in rows:
        if set(row) != set(schema.names):
            raise ValueError(f"{name}: columns differ: {sorted(set(row) ^ set(schema.names))}")
    return pa.Table.from_pylist([dict(row) for row in rows], schema=schema)


def in_order(name: str, table: pa.Table) -> pa.Table:
    """The report table `name`, sorted as its files are."""
    return table.sort_by([(key, "ascending") for key in REPORT_TABLES[name].sorted_by])


def write_table(path: Path, name: str, table: pa.Table, extra: Mapping[str, str] | None = None) -> None:
    """Write `table` under the schema name `name`, with `extra` metadata. Encodings follow a column's type."""
    metadata = {NAME_KEY: name.encode(), VERSION_KEY: str(SCHEMA_VERSION).encode()}
    metadata.update({key.encode(): value.encode() for key, value in (extra or {}).items()})
    encodings, dictionaries = {}, []
    for field in table.schema:
        if pa.types.is_floating(field.type):
            encodings[field.name] = "BYTE_STREAM_SPLIT"
        elif pa.types.is_integer(field.type) or pa.types.is_timestamp(field.type):
            encodings[field.name] = "DELTA_BINARY_PACKED"
        elif pa.types.is_string(field.type):
            dictionaries.append(field.name)
    buffer = io.BytesIO()
    pq.write_table(
        table.cast(described(table.schema, COLUMNS[name]).with_metadata(metadata)),
        buffer,
        compression="zstd",
        row_group_size=ROW_GROUP_ROWS,
        use_dictionary=dictionaries,
        column_encoding=encodings,
    )
    write_atomically(path, buffer.getvalue())
