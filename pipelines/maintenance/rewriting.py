"""The rows of some files, in as few new files: sorted as the table's layout says, without what is too old.

Memory goes by `_SORTED_BYTES`, and not by how much there is to write anew. So a file has some stretches of rows, each
in order. A reader that skips row groups finds a value in one or two of each stretch.
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
"""rows of a row group: what a reader can skip"""
_GROUP_BYTES = 16 << 20


def rewrite_files(lake: Lake, table: str, names: Sequence[str], before: int | None, target: int) -> list[DataFile]:
    """The rows of these files of a table, in files of about `target` bytes that no commit names yet. Rows older than
    `before`, µs, are left out. FileNotFoundError: somebody has removed one of the files."""
    layout = LAYOUTS.get(table, Layout())
    out = TableFiles(lake, table, file_bytes=target)
    rows = _filter_expired(_read_files(lake, table, names), layout.age, before)
    at_once = (_SORTED_BYTES, None) if layout.order else (_GROUP_BYTES, _GROUP_ROWS)
    try:
        for stretch in _gather_tables(rows, *at_once):
            ordered = stretch.sort_by([(column, "ascending") for column in layout.order]) if layout.order else stretch
            for batch in ordered.combine_chunks().to_batches(max_chunksize=_rows_per_group(ordered)):
                out.add_batch(batch)
            del stretch, ordered, batch  # before the next stretch is read
    except BaseException:  # whatever it is: raised again
        delete_files(lake, out.close())
        raise
    return out.close()


def _read_files(lake: Lake, table: str, names: Iterable[str]) -> Iterator[pa.RecordBatch]:
    schema = build_arrow_schema(TABLES[table].columns, strict=True)
    for name in names:
        with (lake.folder(table) / name).open() as opened, pq.ParquetFile(opened) as file:
            about = file.metadata
            size = sum(about.row_group(each).total_byte_size for each in range(about.num_row_groups))
            rows = _estimate_rows(_GROUP_BYTES, size, about.num_rows)
            for batch in file.iter_batches(rows, columns=schema.names):
                yield pa.RecordBatch.from_arrays(
                    [batch.column(field.name).cast(field.type) for field in schema], schema=schema
                )


def _filter_expired(batches: Iterable[pa.RecordBatch], age: str | None, before: int | None) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if before is None or age is None:
            yield batch
            continue
        young = pc.greater_equal(batch.column(age).cast(pa.int64()), before)
        yield batch.filter(pc.fill_null(young, True))


def _gather_tables(batches: Iterable[pa.RecordBatch], size: int, rows: int | None) -> Iterator[pa.Table]:
    """The same rows in tables of about `size` bytes, and of `rows` rows at most beside those of one batch."""
    waiting: list[pa.RecordBatch] = []
    size_of = rows_of = 0
    for batch in batches:
        waiting.append(batch)
        size_of += batch.nbytes
        rows_of += batch.num_rows
        if size_of >= size or (rows is not None and rows_of >= rows):
            gathered = pa.Table.from_batches(waiting)
            waiting, size_of, rows_of = [], 0, 0
            del batch
            yield gathered
            del gathered
    if rows_of:
        yield pa.Table.from_batches(waiting)


def _rows_per_group(rows: pa.Table) -> int:
    return _estimate_rows(_GROUP_BYTES, rows.nbytes, rows.num_rows)


def _estimate_rows(size: int, bytes_of_all: int, rows: int) -> int:
    return max(1, min(_GROUP_ROWS, size * rows // max(1, bytes_of_all)))
