"""Parquet files of a table, written by the task that has the rows. A file becomes part of the table when a commit adds
it (decision 18)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple
from uuid import uuid4

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from kiln.conf.process.location import Location, Output
from kiln.pipelines.delta.arrow_rows import RejectRow, RowBuffer, build_arrow_schema
from kiln.pipelines.delta.lake import Lake, list_stats_columns
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.kafka.topics import MAX_TOPIC

FILE_BYTES = 128 << 20
"""Size in bytes at which a file is closed, and the next one begun."""

_GROUP_ROWS = 20_000
"""Number of rows in a row group"""

_REPEATED = frozenset(
    (
        *("network", "direction", "origin", "local_peer", "remote_peer", "protocol", "topic", "topic_source", "type"),
        *("kind", "from_peer", "separator_key", "separator_value", "separator_source", "source", "batch_cid"),
        *("verdict", "transport", "stage", "reason"),
    )
)
"""Columns whose values repeat in many rows. Arrow stores each value of a row group once, in a dictionary."""

_GREATEST_TEXT = "\U0010ffff" * (MAX_TOPIC + 1)
"""Upper bound of all texts in the columns with statistics. None of them has more than MAX_TOPIC characters."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST, _LAST = -62_135_596_800_000_000, 253_402_300_799_999_999  # years 1 to 9999


class DataFile(msgspec.Struct, frozen=True, array_like=True):
    """One Parquet file of a table. `stats`: its statistics for Delta's log, as JSON (PROTOCOL.md, Per-file
    Statistics)."""

    table: str
    name: str
    size: int
    rows: int
    stats: str


class TableFiles:
    """Writer of one table's rows into as few files as the maximum size allows. For one task and one thread."""

    def __init__(
        self, lake: Lake, table: str, *, file_bytes: int | None = None, refuse: RejectRow | None = None
    ) -> None:
        """Prepare the writer. It creates the first file with the first row.

        Args:
            file_bytes: Size in bytes at which a file is closed; `FILE_BYTES` by default.
            refuse: Called with each row that the table cannot store. By default, `add` or `close` raises the error.
        """
        self._file_bytes = FILE_BYTES if file_bytes is None else file_bytes
        self._folder = lake.folder(table)
        self._table = table
        self._schema = _with_dictionaries(build_arrow_schema(TABLES[table].columns, strict=True))
        self._stats_columns = list_stats_columns(TABLES[table])
        self._buffer = RowBuffer(self._schema, rows=_GROUP_ROWS, refuse=refuse)
        self._gathered: list[pa.RecordBatch] = []
        self._file: _OpenFile | None = None
        self._closed: list[DataFile] = []

    def add(self, row: Sequence[object], size: int = 0) -> None:
        """Add a row, with values in the order of the table's columns. `size`: its approximate size, bytes."""
        if self._buffer.add(row, size):
            self._drain()

    def add_batch(self, batch: pa.RecordBatch) -> None:
        """Add a record batch with the table's columns."""
        columns = [
            column if column.type == field.type else column.cast(field.type)
            for column, field in zip(batch.columns, self._schema, strict=True)
        ]
        self._write(pa.RecordBatch.from_arrays(columns, schema=self._schema))

    def gather(self, batch: pa.RecordBatch) -> None:
        """Add a record batch with the table's columns. Small record batches are combined into one row group."""
        if batch.num_rows:
            self._gathered.append(batch)
            if sum(gathered.num_rows for gathered in self._gathered) >= _GROUP_ROWS:
                self._write_gathered()

    def close(self) -> list[DataFile]:
        """Close the files, and return all that were written. Each is complete and on disk."""
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
            self._file = _open_file(self._folder, self._schema, self._stats_columns)
        self._file.writer.write_batch(batch)
        if self._file.out.tell() >= self._file_bytes:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            name, out, writer = self._file
            writer.close()
            size, footer = out.tell(), writer.writer.metadata
            out.close()
            stats = _build_stats(footer, self._stats_columns)
            self._closed.append(DataFile(self._table, name, size, footer.num_rows, stats))
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


class _OpenFile(NamedTuple):
    name: str
    out: Output
    writer: pq.ParquetWriter


def _open_file(folder: Location, schema: pa.Schema, stats_columns: Sequence[str]) -> _OpenFile:
    name = f"part-{uuid4()}.snappy.parquet"
    out = (folder / name).create()
    # Values of binary columns hardly repeat, so a dictionary would be wasted work.
    repeating = [field.name for field in schema if not pa.types.is_nested(field.type) and field.type != pa.binary()]
    writer = pq.ParquetWriter(
        out,
        schema,
        compression="snappy",
        use_dictionary=repeating,
        write_statistics=stats_columns,
        store_schema=False,
    )
    return _OpenFile(name, out, writer)


def _build_stats(footer: pq.FileMetaData, columns: Sequence[str]) -> str:
    """Build the statistics of a file for Delta's log (PROTOCOL.md, Per-file Statistics), from those of its row groups.

    A column has no bound if all its values are null, or if the bound is a time that no reader could parse, because its
    year does not have four digits. Readers then assume that the file may have any value. Parquet stores no bound of
    more than 4 KiB. In its place, the widest possible bound is used, because delta-rs finds no row of a text column
    without bounds.
    """
    least: dict[str, object] = {}
    greatest: dict[str, object] = {}
    nulls: dict[str, int] = {}
    for index in range(footer.num_columns):
        column = footer.schema.column(index)
        name = column.path
        if name not in columns:
            continue
        groups = [footer.row_group(group).column(index).statistics for group in range(footer.num_row_groups)]
        nulls[name] = sum(group.null_count for group in groups)
        bounded = [group for group in groups if group.num_values]
        if not bounded:
            continue
        if not all(group.has_min_max for group in bounded):  # a text of more than 4 KiB
            least[name], greatest[name] = "", _GREATEST_TEXT
        elif column.logical_type.type == "TIMESTAMP":
            low, high = min(group.min_raw for group in bounded), max(group.max_raw for group in bounded)
            if _FIRST <= low <= _LAST:
                least[name] = _format_time(low)
            if _FIRST <= high <= _LAST:
                greatest[name] = _format_time(high)
        else:
            least[name], greatest[name] = min(group.min for group in bounded), max(group.max for group in bounded)
    stats = {"numRecords": footer.num_rows, "minValues": least, "maxValues": greatest, "nullCount": nulls}
    return json.dumps(stats, ensure_ascii=False)


def _format_time(at: int) -> str:
    return (_EPOCH + timedelta(microseconds=at)).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


def delete_files(lake: Lake, files: Iterable[DataFile]) -> None:
    """Delete files that belong to no table, because no commit has added them."""
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
