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

# RowBuffer must be drained at these sizes, so that a frame of 100,000 messages never makes a batch of 100,000 rows.
_ROWS = 5_000
_BYTES = 16 << 20


_CONVERSION_ERRORS = (*PROCESSING_ERRORS, pa.ArrowCapacityError)
"""errors of Arrow for values that a column cannot store. Only rows can cause them here, as nothing does I/O."""

RejectRow = Callable[[Sequence[object], Exception], None]
"""Receives a row that no record batch can store, and the error."""


def build_arrow_schema(columns: Iterable[Column], *, strict: bool = False) -> pa.Schema:
    """Build the Arrow schema of table columns. `strict`: make required columns not nullable."""
    return pa.schema(
        [
            pa.field(column.name, _ARROW[column.type.lower().replace(" ", "")], column.nullable or not strict)
            for column in columns
        ]
    )


def build_ddl(columns: Iterable[Column]) -> str:
    """Build Spark's schema of table columns as DDL, for `mapInArrow`."""
    return ", ".join(f"{column.name} {column.type}" for column in columns)


def select_columns(table: Table, *names: str) -> tuple[Column, ...]:
    """Select columns of a table by name, in the order of the names; with no names, all columns."""
    if not names:
        return tuple(table.columns)
    by_name = {column.name: column for column in table.columns}
    return tuple(by_name[name] for name in names)


class RowBuffer:
    """Buffer of rows (tuples in the schema's order) for record batches of bounded size."""

    def __init__(self, schema: pa.Schema, rows: int = _ROWS, refuse: RejectRow | None = None) -> None:
        """Create an empty buffer.

        Args:
            schema: Schema of the batches.
            rows: Maximum number of rows in a batch.
            refuse: Called with each row that cannot be converted; by default `drain` raises.
        """
        self._schema = schema
        self._max_rows = rows
        self._refuse = refuse
        self._rows: list[Sequence[object]] = []
        self._bytes = 0

    def add(self, row: Sequence[object], size: int = 0) -> bool:
        """Add a row of about `size` bytes, and return true if the buffer must be drained."""
        self._rows.append(row)
        self._bytes += size
        return len(self._rows) >= self._max_rows or self._bytes >= _BYTES

    def drain(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows since the last `drain` as one batch, or none if there are no rows.

        If the rows cannot be converted together, each half is converted separately, down to single rows.
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
