"""Parquet files of a table, written by the task that has the rows. A file becomes part of the table once a commit names
the file (decision 18)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kiln.conf.process.location import Location
from kiln.pipelines.delta.arrow_rows import RejectRow, RowBuffer, build_arrow_schema
from kiln.pipelines.delta.lake import Lake, list_stats_columns
from kiln.schemas.delta.tables import TABLES

FILE_BYTES = 128 << 20
"""Size in bytes at which a file is closed, and the next one started."""

_GROUP_ROWS = 20_000
"""Number of rows in a row group"""

_REPEATED = frozenset(
    (
        *("network", "direction", "origin", "local_peer", "remote_peer", "protocol", "topic", "topic_source", "type"),
        *("kind", "from_peer", "separator_key", "separator_value", "separator_source", "source", "batch_cid"),
        *("verdict", "transport", "stage", "reason"),
    )
)
"""Columns whose values repeat over the messages of a frame or the tips of a batch. Arrow stores each value once."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST, _LAST = -62_135_596_800_000_000, 253_402_300_799_999_999  # years 1 to 9999


class DataFile(msgspec.Struct, frozen=True, array_like=True):
    """One Parquet file of a table. `stats`: JSON, as in the log (PROTOCOL.md, Per-file Statistics)."""

    table: str
    name: str
    size: int
    rows: int
    stats: str


class TableFiles:
    """Writer of one table's rows into as few files as their size allows. For one task; not thread-safe."""

    def __init__(
        self, lake: Lake, table: str, *, file_bytes: int | None = None, refuse: RejectRow | None = None
    ) -> None:
        """Prepare the writer, which makes no file before the first row.

        Args:
            lake: The lake of the table.
            table: Name of the table.
            file_bytes: Size in bytes at which a file is closed; `FILE_BYTES` by default.
            refuse: Called with each row that the table cannot store; by default `add` or `close` raises.
        """
        self._file_bytes = FILE_BYTES if file_bytes is None else file_bytes
        self._folder = lake.folder(table)
        self._table = table
        self._schema = _with_dictionaries(build_arrow_schema(TABLES[table].columns, strict=True))
        self._buffer = RowBuffer(self._schema, rows=_GROUP_ROWS, refuse=refuse)
        self._gathered: list[pa.RecordBatch] = []
        self._file: _OpenFile | None = None
        self._closed: list[DataFile] = []

    def add(self, row: Sequence[object], size: int = 0) -> None:
        """Add a row in the table's columns, of about `size` bytes."""
        if self._buffer.add(row, size):
            self._drain()

    def add_batch(self, batch: pa.RecordBatch) -> None:
        """Add a record batch in the table's columns."""
        columns = [
            column if column.type == field.type else column.cast(field.type)
            for column, field in zip(batch.columns, self._schema, strict=True)
        ]
        self._write(pa.RecordBatch.from_arrays(columns, schema=self._schema))

    def gather(self, batch: pa.RecordBatch) -> None:
        """Add a record batch in the table's columns. Small record batches are combined into one row group."""
        if batch.num_rows:
            self._gathered.append(batch)
            if sum(gathered.num_rows for gathered in self._gathered) >= _GROUP_ROWS:
                self._write_gathered()

    def close(self) -> list[DataFile]:
        """Close and return all files, each complete and on disk; no file if there was no row."""
        self._write_gathered()
        self._drain()
        self._close()
        return self._closed

    def _write_gathered(self) -> None:
        if self._gathered:
            for batch in pa.Table.from_batches(self._gathered).combine_chunks().to_batches():
                self.add_batch(batch)
            self._gathered = []

    def _drain(self) -> None:
        for batch in self._buffer.drain():
            self._write(batch)

    def _write(self, batch: pa.RecordBatch) -> None:
        if self._file is None:
            self._file = _OpenFile(self._folder, self._table, self._schema)
        if self._file.write(batch) >= self._file_bytes:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._closed.append(self._file.close())
            self._file = None


def _with_dictionaries(schema: pa.Schema) -> pa.Schema:
    encoded = pa.dictionary(pa.int32(), pa.string())
    return pa.schema(
        [
            pa.field(field.name, encoded, field.nullable)
            if field.name in _REPEATED and field.type == pa.string()
            else field
            for field in schema
        ]
    )


class _OpenFile:
    def __init__(self, folder: Location, table: str, schema: pa.Schema) -> None:
        self._table = table
        self._name = f"part-{uuid4()}.snappy.parquet"
        self._ranges = {name: _Range() for name in list_stats_columns(TABLES[table])}
        self._rows = 0
        self._out = (folder / self._name).create()
        # Values of binary columns hardly repeat, so a dictionary would be wasted work.
        repeating = [field.name for field in schema if not pa.types.is_nested(field.type) and field.type != pa.binary()]
        self._writer = pq.ParquetWriter(
            self._out,
            schema,
            compression="snappy",
            use_dictionary=repeating,
            write_statistics=[name for name in self._ranges if name in schema.names],
            store_schema=False,
        )

    def write(self, batch: pa.RecordBatch) -> int:
        """Write rows, and return the size of the file so far."""
        self._writer.write_batch(batch)
        self._rows += batch.num_rows
        for name, values in self._ranges.items():
            values.widen(batch.column(name))
        return self._out.tell()

    def close(self) -> DataFile:
        self._writer.close()
        size = self._out.tell()
        self._out.close()
        return DataFile(self._table, self._name, size, self._rows, _build_stats(self._rows, self._ranges))


class _Range:
    """Least and greatest value of a column, and its number of nulls."""

    def __init__(self) -> None:
        self.least: object = None
        self.greatest: object = None
        self.nulls = 0

    def widen(self, column: pa.Array) -> None:
        self.nulls += column.null_count
        if pa.types.is_dictionary(column.type):
            column = column.dictionary
        bounds = pc.min_max(column)
        if not bounds["min"].is_valid:
            return
        # timestamps as numbers, because converting each to a Python datetime would dominate the cost
        low, high = (bound.value if pa.types.is_timestamp(column.type) else bound.as_py() for bound in bounds.values())
        self.least = low if self.least is None else min(self.least, low)
        self.greatest = high if self.greatest is None else max(self.greatest, high)
        self.times = pa.types.is_timestamp(column.type)


def _build_stats(rows: int, ranges: dict[str, _Range]) -> str:
    known = {name: limits for name, limits in ranges.items() if limits.least is not None}
    least = {name: _format_stat(limits.least, limits.times) for name, limits in known.items()}
    greatest = {name: _format_stat(limits.greatest, limits.times) for name, limits in known.items()}
    return json.dumps(
        {
            "numRecords": rows,
            "minValues": {name: value for name, value in least.items() if value is not None},
            "maxValues": {name: value for name, value in greatest.items() if value is not None},
            "nullCount": {name: limits.nulls for name, limits in ranges.items()},
        },
        ensure_ascii=False,
    )


def _format_stat(value: object, time: bool) -> object:
    """Format a value for the log (PROTOCOL.md, Per-file Statistics): times in ISO 8601.

    Returns:
        None for a time whose year does not have four digits, which no reader could parse. Readers then assume that the
        file may hold any value.
    """
    if not time or not isinstance(value, int):
        return value
    if not _FIRST <= value <= _LAST:
        return None
    return (_EPOCH + timedelta(microseconds=value)).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


def delete_files(lake: Lake, files: Iterable[DataFile]) -> None:
    """Delete files that no commit names."""
    for file in files:
        (lake.folder(file.table) / file.name).remove()


def rewrite_file(lake: Lake, file: DataFile, keep: Callable[[pa.Table], pa.ChunkedArray | pa.Array]) -> list[DataFile]:
    """Rewrite a file with the rows that the mask `keep` selects, if there are any, and delete the old file."""
    with (lake.folder(file.table) / file.name).open() as opened:
        table = pq.read_table(opened)
    files = TableFiles(lake, file.table)
    for batch in table.filter(keep(table)).to_batches(max_chunksize=20_000):
        files.add_batch(batch)
    delete_files(lake, [file])
    return files.close()
