"""Arrow schemas of Delta tables, and a buffer that turns row tuples into record batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import pyarrow as pa

from kiln.pipelines.decode.processing_errors import PROCESSING_ERRORS
from kiln.schemas.delta.tables import Column, Table

_ARROW = {
    "string": pa.string(),
    "binary": pa.binary(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "map<string,string>": pa.map_(pa.string(), pa.string()),
    "array<string>": pa.list_(pa.string()),
}

# RowBuffer is full at these sizes, so that a frame of 100,000 messages does not become one record batch.
_ROWS = 5_000
_BYTES = 16 << 20


_CONVERSION_ERRORS = (*PROCESSING_ERRORS, pa.ArrowCapacityError)
"""Errors of Arrow for values that a column cannot store. No I/O happens here, so they have no other cause."""

RejectRow = Callable[[Sequence[object], Exception], None]
"""Function that receives a row that no record batch can store, and the error."""


def build_arrow_schema(columns: Iterable[Column], *, strict: bool = False) -> pa.Schema:
    """Build the Arrow schema of table columns. `strict`: if false, all columns are nullable."""
    return pa.schema(
        [
            pa.field(column.name, _ARROW[column.type.lower().replace(" ", "")], column.nullable or not strict)
            for column in columns
        ]
    )


def build_ddl(columns: Iterable[Column]) -> str:
    """Build the Spark schema of table columns as DDL, for `mapInArrow`."""
    return ", ".join(f"{column.name} {column.type}" for column in columns)


def select_columns(table: Table, *names: str) -> tuple[Column, ...]:
    """Select columns of a table by name, in the order of the names. Without names, select all columns."""
    if not names:
        return tuple(table.columns)
    by_name = {column.name: column for column in table.columns}
    return tuple(by_name[name] for name in names)


class RowBuffer:
    """Buffer that collects rows, tuples in the order of a schema, and converts them to record batches of limited
    size."""

    def __init__(self, schema: pa.Schema, rows: int = _ROWS, refuse: RejectRow | None = None) -> None:
        """Create an empty buffer.

        Args:
            rows: Maximum number of rows in a record batch.
            refuse: Called with each row that cannot be converted. By default, `drain` raises the error.
        """
        self._schema = schema
        self._max_rows = rows
        self._refuse = refuse
        self._rows: list[Sequence[object]] = []
        self._bytes = 0

    def add(self, row: Sequence[object], size: int = 0) -> bool:
        """Add a row of about `size` bytes. Returns true if the buffer is full: call `drain` then."""
        self._rows.append(row)
        self._bytes += size
        return len(self._rows) >= self._max_rows or self._bytes >= _BYTES

    def drain(self) -> Iterator[pa.RecordBatch]:
        """Empty the buffer, and yield its rows as one record batch.

        If the rows cannot be converted together, halves of them are converted, down to single rows.
        """
        pending = [self._rows] if self._rows else []
        self._rows, self._bytes = [], 0
        while pending:
            rows = pending.pop()
            try:
                columns = [
                    pa.array(values, type=field.type)
                    for values, field in zip(zip(*rows, strict=True), self._schema, strict=True)
                ]
                batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
            except _CONVERSION_ERRORS as error:  # a value, or too many bytes in one column
                half = len(rows) // 2
                if half:
                    pending += (rows[half:], rows[:half])
                elif self._refuse is None:
                    raise
                else:
                    self._refuse(rows[0], error)
            else:
                yield batch
