"""What a column of a table is: its type, its unit and what it means. Schemas and documentation are both made from this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

# No unit: a name, a yes or no, or a position.
PLAIN = "–"
# A pure number.
ONE = "1"


@dataclass(frozen=True)
class Column:
    """One column.

    Args:
        type: of its values.
        unit: `–` where a value has none, `1` where it is a pure number.
        meaning: one or two sentences, Markdown.
        optional: a table has the column only where some row has a value for it.
    """

    type: pa.DataType
    unit: str
    meaning: str
    optional: bool = False


@dataclass(frozen=True)
class Table:
    """One table.

    Args:
        meaning: what a row is, Markdown.
        columns: by name, in order.
        sorted_by: the columns by which a file is sorted; nothing for streams, whose rows stand as they were written.
    """

    meaning: str
    columns: Mapping[str, Column]
    sorted_by: tuple[str, ...] = ()

    def schema(self) -> pa.Schema:
        """Types of the columns that are always there."""
        return pa.schema([(name, column.type) for name, column in self.columns.items() if not column.optional])


def text(meaning: str, unit: str = PLAIN) -> Column:
    return Column(pa.string(), unit, meaning)


def integer(unit: str, meaning: str) -> Column:
    return Column(pa.int64(), unit, meaning)


def real(unit: str, meaning: str) -> Column:
    return Column(pa.float64(), unit, meaning)


def flag(meaning: str) -> Column:
    return Column(pa.bool_(), PLAIN, meaning)


def moment(meaning: str) -> Column:
    return Column(pa.timestamp("us", tz="UTC"), "UTC", meaning)


def integers(unit: str, meaning: str) -> Column:
    return Column(pa.list_(pa.int64()), unit, meaning)


def reals(unit: str, meaning: str) -> Column:
    return Column(pa.list_(pa.float64()), unit, meaning)


def texts(meaning: str) -> Column:
    return Column(pa.list_(pa.string()), PLAIN, meaning)


def optional(columns: Mapping[str, Column]) -> dict[str, Column]:
    """The same columns, each in a table only where rows have it."""
    return {name: Column(column.type, column.unit, column.meaning, optional=True) for name, column in columns.items()}


def described(schema: pa.Schema, columns: Mapping[str, Column]) -> pa.Schema:
    """The schema with unit and meaning of each known column in the field's metadata (`unit`, `description`)."""
    fields = []
    for field in schema:
        column = columns.get(field.name)
        known = None if column is None else {"unit": column.unit, "description": column.meaning}
        fields.append(field.with_metadata(known) if known else field.remove_metadata())
    return pa.schema(fields, metadata=schema.metadata)
