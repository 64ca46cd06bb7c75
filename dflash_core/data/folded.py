"""Columns that say less than they hold: dictionaries, runs, views. They are unfolded in slices of bounded size.

An array of a million indices into a dictionary of one long text is small, and so are its slices; every row of it is long.
`unfolded` measures before it unfolds, so what it yields has the plain types, and pieces no larger than was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

MAX_ROW_BYTES = 256 * 2**20  # a larger row is none that anybody trains on; reading it whole would break the bound on memory
MAX_ROW_ITEMS = 1 << 22  # each becomes a Python object, which takes more than its bytes here
MAX_UNFOLDED_BYTES = MAX_ROW_BYTES + (64 << 20)  # what is decompressed at once: all columns' pages, a batch of an Arrow file
MOST_UNFOLDED_BYTES, MAX_RATIO = 1 << 30, 30  # as much where the file itself is large; texts are compressed to a tenth


def check_unfolding(unfolded: int, stored: int, what: str) -> None:
    """Refuse what is decompressed at once and takes so little room in the file that it is no long text.

    Raises:
        ValueError: it unfolds to more than `MAX_UNFOLDED_BYTES`, or `MOST_UNFOLDED_BYTES` where it takes a thirtieth of that.
    """
    if unfolded > min(MOST_UNFOLDED_BYTES, max(MAX_UNFOLDED_BYTES, MAX_RATIO * stored)):
        raise ValueError(f"{what} unfolds from {mib(stored)} to {mib(unfolded)}; write smaller ones")


def mib(size: int) -> str:
    """Bytes as a person reads them."""
    return f"{size / (1 << 20):.1f} MiB"


def unfolded(batch: pa.RecordBatch, max_bytes: int) -> Iterator[pa.RecordBatch]:
    """The rows of a batch in slices of at most `max_bytes` bytes or one row, without dictionaries, runs and views.

    A batch without such columns comes as it is.

    Raises:
        ValueError: a row has more than `MAX_ROW_BYTES`.
    """
    plain = pa.schema([pa.field(field.name, plain_type(field.type), True) for field in batch.schema])
    if all(field.type == kept.type for field, kept in zip(batch.schema, plain, strict=True)):
        yield batch
        return
    start = 0
    while start < batch.num_rows:
        count = batch.num_rows - start
        while (size := sum(unfolded_bytes(column.slice(start, count)) for column in batch.columns)) > max_bytes and count > 1:
            count //= 2
        if size > MAX_ROW_BYTES:
            raise ValueError(f"a row of more than {MAX_ROW_BYTES >> 20} MiB")
        columns = [_plain(column.slice(start, count)) for column in batch.columns]
        yield pa.RecordBatch.from_arrays(columns, schema=plain)
        start += count


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type that holds the same values one by one."""
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return pa.large_string() if pa.types.is_string_view(kind) else pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, plain_type(field.type)) for field in kind])
    if _is_view_of_lists(kind):
        return pa.large_list(plain_type(kind.value_type))
    if (item := _plain_item(kind)) is not None:
        return item
    return kind


def _plain_item(kind: pa.DataType) -> pa.DataType | None:
    """A kind of list with plain items; None if it is no list or plain already."""
    if pa.types.is_map(kind):
        key, item = plain_type(kind.key_type), plain_type(kind.item_type)
        return None if (key, item) == (kind.key_type, kind.item_type) else pa.map_(key, item)
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return None
    value = plain_type(kind.value_type)
    if value == kind.value_type:
        return None
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(value, kind.list_size)
    return pa.large_list(value) if pa.types.is_large_list(kind) else pa.list_(value)


def _is_view_of_lists(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def _plain(column: pa.Array) -> pa.Array:
    """The rows of a slice in their plain type and nothing beside them: Arrow's own cast of lists takes what lies behind, too."""
    given, kind, count = column.type, plain_type(column.type), len(column)
    if kind == given:
        return column
    if pa.types.is_struct(given):
        parts = [_plain(column.field(index)) for index in range(given.num_fields)]
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=column.is_null())
    if _is_view_of_lists(given):  # whose cast loses rows
        return pa.array(column.to_pylist(), type=kind)
    if not (pa.types.is_nested(given) and (items := _items(column))):
        return _plain_by_cast(column, kind)
    parts, mask = [_plain(part) for part in items], column.is_null()
    if pa.types.is_fixed_size_list(given):
        return pa.FixedSizeListArray.from_arrays(parts[0], given.list_size, mask=mask)
    offsets = pc.subtract(column.offsets.slice(0, count + 1), column.offsets[0])
    if pa.types.is_map(given):
        return pa.MapArray.from_arrays(offsets, parts[0], parts[1], mask=mask)
    made = pa.LargeListArray if pa.types.is_large_list(given) else pa.ListArray
    return made.from_arrays(offsets, parts[0], mask=mask)


def _plain_by_cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    try:
        return column.cast(kind)
    except pa.ArrowNotImplementedError:  # runs, dictionaries of lists
        return pa.array(column.to_pylist(), type=kind)


def unfolded_bytes(column: pa.Array) -> int:
    """At least the bytes that a column, or a slice of one, takes once it is unfolded."""
    kind, count = column.type, len(column)
    if not count:
        return 0
    if pa.types.is_dictionary(kind):
        return count * 4 + _dictionary_bytes(column)
    if pa.types.is_run_end_encoded(kind):
        runs = column.values.slice(column.find_physical_offset(), column.find_physical_length())
        return count * unfolded_bytes(runs)
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        views = np.frombuffer(column.buffers()[1], "<i4").reshape(-1, 4)[column.offset : column.offset + count, 0]
        return count * 8 + int(views[column.is_valid().to_numpy(zero_copy_only=False)].sum(dtype=np.int64))
    if pa.types.is_struct(kind):
        return count + sum(unfolded_bytes(column.field(index)) for index in range(kind.num_fields))
    if _is_view_of_lists(kind) and count > 1:
        return count * unfolded_bytes(column.values)
    if (items := _items(column)) is not None:
        return count * 8 + sum(map(unfolded_bytes, items))
    return int(column.nbytes)


def _dictionary_bytes(column: pa.DictionaryArray) -> int:
    entries, indices = column.dictionary, column.indices
    if pa.types.is_string(entries.type) or pa.types.is_binary(entries.type) or _is_large_text(entries.type):
        return int(pc.sum(pc.binary_length(entries).cast(pa.int64()).take(indices.drop_null())).as_py() or 0)
    return len(indices) * unfolded_bytes(entries)


def _is_large_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_large_string(kind) or pa.types.is_large_binary(kind))


def _items(column: pa.Array) -> list[pa.Array] | None:
    """The items of a column of lists, of its own rows alone; None if it holds no lists."""
    kind, count = column.type, len(column)
    if pa.types.is_fixed_size_list(kind):
        return [column.values.slice(column.offset * kind.list_size, count * kind.list_size)]
    if _is_view_of_lists(kind):
        return [
            column.values.slice(first.as_py(), size.as_py()) for first, size in zip(column.offsets, column.sizes, strict=True)
        ]
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind)):
        return None
    first, last = column.offsets[0].as_py(), column.offsets[count].as_py()
    parts = [column.keys, column.items] if pa.types.is_map(kind) else [column.values]
    return [part.slice(first, last - first) for part in parts]


def num_items(column: pa.Array) -> int:
    """Items in all lists of a column, also of lists in lists and in structs."""
    if pa.types.is_struct(column.type):
        return sum(num_items(column.field(index)) for index in range(column.type.num_fields))
    items = _items(column) or []
    return sum(len(part) + num_items(part) for part in items)


def check_row(row: pa.RecordBatch) -> None:
    """Refuse a single row, of plain types, that is too large to become Python objects.

    Raises:
        ValueError: it has more than `MAX_ROW_BYTES` or `MAX_ROW_ITEMS`.
    """
    if row.nbytes > MAX_ROW_BYTES:
        raise ValueError(f"a row of more than {MAX_ROW_BYTES >> 20} MiB")
    if sum(map(num_items, row.columns)) > MAX_ROW_ITEMS:
        raise ValueError(f"a row with more than {MAX_ROW_ITEMS} items in its lists")
