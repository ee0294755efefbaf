"""Arrow schemas of Delta tables, and row tuples gathered into Arrow batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa

from schemas.tables import Column, Table

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

# RowBuffer asks for a drain at these sizes, so that a frame of 100,000 messages never makes a batch of 100,000 rows.
_ROWS = 5_000
_BYTES = 16 << 20


def arrow_schema(columns: Iterable[Column], *, strict: bool = False) -> pa.Schema:
    """The Arrow schema of table columns. `strict`: a column that must have a value is not nullable."""
    return pa.schema(
        [
            pa.field(column.name, _ARROW[column.type.lower().replace(" ", "")], column.nullable or not strict)
            for column in columns
        ]
    )


def ddl(columns: Iterable[Column]) -> str:
    """The same columns as Spark takes the schema of a `mapInArrow`."""
    return ", ".join(f"{column.name} {column.type}" for column in columns)


def columns_of(table: Table, *names: str) -> tuple[Column, ...]:
    """Columns of a table by name, in the order of the names; with no names, all columns."""
    if not names:
        return tuple(table.columns)
    found = {column.name: column for column in table.columns}
    return tuple(found[name] for name in names)


class RowBuffer:
    """Rows (tuples in the schema's order) on their way to Arrow batches of bounded size."""

    def __init__(self, schema: pa.Schema, rows: int = _ROWS) -> None:
        """`rows`: the most rows of a batch."""
        self._schema = schema
        self._most = rows
        self._rows: list[Sequence[object]] = []
        self._bytes = 0

    def add(self, row: Sequence[object], size: int = 0) -> bool:
        """Takes a row that holds about `size` bytes of payload; True when it is time to `drain()`."""
        self._rows.append(row)
        self._bytes += size
        return len(self._rows) >= self._most or self._bytes >= _BYTES

    def drain(self) -> Iterator[pa.RecordBatch]:
        """The rows since the last `drain` as one batch. No batch where there are no rows."""
        if self._rows:
            columns = [
                pa.array(values, type=field.type)
                for values, field in zip(zip(*self._rows, strict=True), self._schema, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=self._schema)
            self._rows = []
            self._bytes = 0
