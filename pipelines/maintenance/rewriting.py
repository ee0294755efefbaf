"""Rewrite of files into fewer ones, sorted by the table's layout and without expired rows.

Memory depends on `_SORTED_BYTES`, not on the amount to rewrite. So a file consists of several sorted runs, and a reader
that skips row groups reads one or two groups of each run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kiln.pipelines.delta.arrow_rows import build_arrow_schema
from kiln.pipelines.delta.files import DataFile, TableFiles, delete_files
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.delta.layout import LAYOUTS, Layout
from kiln.schemas.delta.tables import TABLES

_SORTED_BYTES = 32 << 20
"""bytes of rows in memory"""
_GROUP_ROWS = 20_000
"""rows of a row group, the unit that a reader can skip"""
_GROUP_BYTES = 16 << 20


def rewrite_files(lake: Lake, table: str, names: Sequence[str], before: int | None, target: int) -> list[DataFile]:
    """Rewrite files of a table into uncommitted files of about `target` bytes.

    Args:
        names: Files to rewrite.
        before: Leave out rows older than this, µs.

    Raises:
        FileNotFoundError: Another process removed one of the files.
    """
    layout = LAYOUTS.get(table, Layout())
    out = TableFiles(lake, table, file_bytes=target)
    rows = _drop_expired(_read_files(lake, table, names), layout.age, before)
    limits = (_SORTED_BYTES, None) if layout.order else (_GROUP_BYTES, _GROUP_ROWS)
    try:
        for run in _gather_tables(rows, *limits):
            ordered = run.sort_by([(column, "ascending") for column in layout.order]) if layout.order else run
            rows_per_group = _estimate_rows(_GROUP_BYTES, ordered.nbytes, ordered.num_rows)
            for batch in ordered.combine_chunks().to_batches(max_chunksize=rows_per_group):
                out.add_batch(batch)
            del run, ordered, batch  # before the next run is read
    except BaseException:  # whatever it is: raised again
        delete_files(lake, out.close())
        raise
    return out.close()


def _read_files(lake: Lake, table: str, names: Iterable[str]) -> Iterator[pa.RecordBatch]:
    schema = build_arrow_schema(TABLES[table].columns, strict=True)
    for name in names:
        with (lake.folder(table) / name).open() as opened, pq.ParquetFile(opened) as file:
            metadata = file.metadata
            size = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
            rows = _estimate_rows(_GROUP_BYTES, size, metadata.num_rows)
            for batch in file.iter_batches(rows, columns=schema.names):
                yield pa.RecordBatch.from_arrays(
                    [batch.column(field.name).cast(field.type) for field in schema], schema=schema
                )


def _drop_expired(batches: Iterable[pa.RecordBatch], age: str | None, before: int | None) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if before is None or age is None:
            yield batch
            continue
        unexpired = pc.greater_equal(batch.column(age).cast(pa.int64()), before)
        yield batch.filter(pc.fill_null(unexpired, True))


def _gather_tables(batches: Iterable[pa.RecordBatch], size: int, rows: int | None) -> Iterator[pa.Table]:
    """Gather record batches into tables of about `size` bytes and at most about `rows` rows."""
    waiting: list[pa.RecordBatch] = []
    gathered_size = gathered_rows = 0
    for batch in batches:
        waiting.append(batch)
        gathered_size += batch.nbytes
        gathered_rows += batch.num_rows
        if gathered_size >= size or (rows is not None and gathered_rows >= rows):
            gathered = pa.Table.from_batches(waiting)
            waiting, gathered_size, gathered_rows = [], 0, 0
            del batch
            yield gathered
            del gathered
    if gathered_rows:
        yield pa.Table.from_batches(waiting)


def _estimate_rows(size: int, total_bytes: int, rows: int) -> int:
    return max(1, min(_GROUP_ROWS, size * rows // max(1, total_bytes)))
