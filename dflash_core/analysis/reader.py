"""Read a run's metrics: JSON lines while it lives, Parquet once it has ended.

Two rules make a killed and resumed run readable. A torn last line is skipped. A step that was trained again after a resume
counts once: the rows of its last attempt stay, those of earlier ones go.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
import pyarrow.parquet as pq

from dflash_core.analysis.fast_rows import LEAST_BYTES, read_fast
from dflash_core.analysis.tables import COLUMNS, SCHEMA_VERSION, STREAMS, VERSION_KEY, write_table
from dflash_core.errors import DataError

logger = logging.getLogger(__name__)

SOURCE_BYTES_KEY = "dflash.source_bytes"
# The other streams hold fields of many kinds, whose types Arrow's reader would guess (a text like a date becomes a date).
FIXED_STREAMS = ("steps", "batches", "stats")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a JSONL file, in order.

    Blank lines, and a last line that is torn (not JSON, or without its newline and not JSON), are skipped.

    Raises:
        DataError: the file is missing, or another line is not a JSON object; names file and row.
    """
    return _rows_of(_content(path), path)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _rows_of(data: bytes, path: Path) -> list[dict[str, Any]]:
    lines = data.split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines):  # only a last line without its newline comes here: the file's writer was killed
                break
            raise DataError(f"{path}, row {number}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}, row {number}: not a JSON object")
        rows.append(row)
    return rows


def read_stream(run_dir: Path, stream: str, *, compact: bool) -> pa.Table:
    """All rows of one stream of a run, every attempt, in the order of writing; no rows where the stream has no file.

    Columns are those of `tables.STREAMS` plus what else the rows hold. The Parquet file is taken when it was made from
    the JSONL file as it is now. With `compact`, it is written if it is not there.

    Raises:
        DataError: a file is damaged; names file and row.
    """
    source, compacted = run_dir / "metrics" / f"{stream}.jsonl", run_dir / "metrics" / f"{stream}.parquet"
    num_bytes = source.stat().st_size if source.is_file() else None
    if compacted.is_file():
        table = _read_compacted(compacted, num_bytes, stream)
        if table is not None:
            return table
    if num_bytes is None:
        return STREAMS[stream].empty_table()
    data = _content(source)
    table = _parse(data, source, stream)
    if compact:
        try:
            write_table(compacted, stream, table, {SOURCE_BYTES_KEY: str(len(data))})
        except OSError as error:
            logger.warning("%s: not compacted: %s", source, error)
    return table


def compact_streams(run_dir: Path) -> None:
    """Write the Parquet files of a run that has ended, so that every analysis begins with them.

    A damaged stream is left as it is, with a warning: whoever analyses the run is told.
    """
    for stream in STREAMS:
        try:
            read_stream(run_dir, stream, compact=True)
        except DataError as error:
            logger.warning("not compacted: %s", error)


def _read_compacted(path: Path, source_bytes: int | None, stream: str) -> pa.Table | None:
    """The compacted stream, or None when its JSONL source has grown since, or another version of this code wrote it.

    Where the source is gone, nothing better can be made: what an earlier version wrote is brought into today's columns.
    """
    try:
        with pq.ParquetFile(path) as file:  # without the detours that `read_table` makes for folders of files
            table = file.read(use_threads=False)
    except (OSError, pa.ArrowInvalid) as error:
        if source_bytes is None:
            raise DataError(f"{path}: not a readable Parquet file: {error}") from None
        logger.warning("%s: not a readable Parquet file, the JSONL beside it is taken: %s", path, error)
        return None
    metadata = table.schema.metadata or {}
    table = table.replace_schema_metadata(None)
    same_version = metadata.get(VERSION_KEY) == str(SCHEMA_VERSION).encode()
    if source_bytes is None:
        return table if same_version else _of_today(table, stream, path)
    fresh = metadata.get(SOURCE_BYTES_KEY.encode()) == str(source_bytes).encode()
    return table if fresh and same_version else None


def _of_today(table: pa.Table, stream: str, path: Path) -> pa.Table:
    """A stream of another schema version: columns that it lacks are null, objects become text."""
    columns = {}
    for name, kind in ((field.name, field.type) for field in STREAMS[stream]):
        try:
            columns[name] = table[name].cast(kind) if name in table.column_names else pa.nulls(len(table), kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(f"{path}: {name} is not what it should be: {error}") from None
    for name in table.column_names:
        if name not in columns:
            columns[name] = _infer(table[name].to_pylist()) if pa.types.is_nested(table[name].type) else table[name]
    return _optional_typed(pa.table(columns), stream)


def _parse(data: bytes, path: Path, stream: str) -> pa.Table:
    if stream in FIXED_STREAMS and data.endswith(b"\n") and not data.isspace():
        schema = _schema_of_first(data, stream)
        table = read_fast(data, schema) if stream == "batches" and len(data) >= LEAST_BYTES else None
        if table is not None:
            return _typed(table, stream)
        try:
            return _typed(_parse_by_arrow(data, schema), stream)
        except pa.ArrowInvalid:
            pass  # the slow way below takes what Arrow does not, or finds the row and says what is wrong with it
    try:
        return _typed(_table_of_rows(_rows_of(data, path), stream), stream)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise DataError(f"{path}: a field has values of another type than it should: {error}") from None


def _raw_schema(stream: str) -> pa.Schema:
    """The stream's schema as it stands in JSON, with times as seconds since 1970."""
    return pa.schema([(f.name, pa.float64() if f.name == "time" else f.type) for f in STREAMS[stream]])


def _schema_of_first(data: bytes, stream: str) -> pa.Schema:
    """The stream's schema with the optional fields that the first row has."""
    first = data[: data.find(b"\n")]
    known = list(_raw_schema(stream))
    known += [(n, c.type) for n, c in COLUMNS[stream].items() if c.optional and f'"{n}":'.encode() in first]
    return pa.schema(known)


def _parse_by_arrow(data: bytes, schema: pa.Schema) -> pa.Table:
    """Other fields than those of the schema become columns, too. What types it does not have to guess Arrow reads faster.

    With one thread to compute with, others for reading would only cost.
    """
    reading = pyarrow.json.ReadOptions(use_threads=pa.cpu_count() > 1)
    options = pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="infer")
    return pyarrow.json.read_json(pa.BufferReader(data), read_options=reading, parse_options=options)


def _table_of_rows(rows: list[dict[str, Any]], stream: str) -> pa.Table:
    known = _raw_schema(stream)
    extra = sorted({name for row in rows for name in row} - set(known.names))
    columns = {f.name: _array([row.get(f.name) for row in rows], f) for f in known}
    columns |= {name: _infer([row.get(name) for row in rows]) for name in extra}
    return pa.table(columns)


def _array(values: list[Any], field: pa.Field) -> pa.Array:
    """The values in the field's type. Arrow cuts 3.5 to 3 without a word."""
    if pa.types.is_integer(field.type) and any(isinstance(value, float) and not value.is_integer() for value in values):
        raise pa.ArrowInvalid(f"{field.name} has a value that is not a whole number")
    return pa.array(values, type=field.type)


def _infer(values: list[Any]) -> pa.Array:
    try:
        found = pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        found = None
    if found is None or pa.types.is_struct(found.type):  # a field of mixed types, or of many keys, has no column type but text
        return pa.array([None if value is None else json.dumps(value) for value in values])
    return found


def _typed(table: pa.Table, stream: str) -> pa.Table:
    """Times as times, and fields that not all rows have in the types that they should have, where their values allow it."""
    table = _optional_typed(table, stream)
    seconds = table["time"]
    micros = pc.round(pc.multiply(seconds, 1e6)).cast(pa.int64()) if len(table) else seconds.cast(pa.int64())
    table = table.set_column(table.schema.get_field_index("time"), "time", micros.cast(pa.timestamp("us", tz="UTC")))
    known = STREAMS[stream].names
    return table.select(known + [name for name in table.column_names if name not in known])


def _optional_typed(table: pa.Table, stream: str) -> pa.Table:
    for number, field in enumerate(table.schema):
        column = COLUMNS[stream].get(field.name)
        if column is not None and column.optional and field.type != column.type:
            try:
                table = table.set_column(number, field.name, table[field.name].cast(column.type))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                continue  # it is not one of ours, or is damaged; whoever reads it looks at what it is
    return table


def last_attempts(table: pa.Table, keys: Iterable[str] = ("step",)) -> pa.Table:
    """Drop the rows of a key (by default a step) that a later attempt holds too."""
    if not len(table):
        return table
    attempt = numbers(table, "attempt", missing=0)
    if (attempt == attempt[0]).all():
        return table
    groups = table.select(list(keys)).to_pandas()
    last = groups.assign(attempt=attempt).groupby(list(keys), dropna=False, sort=False)["attempt"].transform("max")
    return table.filter(pa.array(attempt == last.to_numpy()))


def numbers(table: pa.Table, column: str, missing: float = np.nan) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A column as float64, nulls as `missing`. It may be the table's own memory, which cannot be written to."""
    values = table[column]
    if not pa.types.is_float64(values.type):
        values = values.cast(pa.float64())
    if values.null_count:
        values = pc.fill_null(values, missing)
    return np.asarray(values.chunk(0).to_numpy() if values.num_chunks == 1 else values.to_numpy())


def matrix(table: pa.Table, column: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A list column as float64 of shape [rows, longest list], NaN where a list is shorter or null."""
    lists = table[column].combine_chunks()
    if isinstance(lists, pa.ChunkedArray):
        lists = pa.concat_arrays(lists.chunks) if lists.num_chunks else pa.array([], type=table.schema.field(column).type)
    lengths = np.asarray(pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)).astype(np.int64)
    shape = (len(lists), int(lengths.max(initial=0)))
    flat = np.asarray(pc.fill_null(pc.list_flatten(lists).cast(pa.float64()), np.nan).to_numpy(zero_copy_only=False))
    if len(flat) == shape[0] * shape[1]:
        return flat.reshape(shape)
    result = np.full(shape, np.nan)
    rows = np.repeat(np.arange(len(lists)), lengths)
    columns = np.arange(len(flat)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    result[rows, columns] = flat
    return result
