"""Reader of data files of the table `frames` for the tasks that decode them, so that no row passes through the JVM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kiln.conf.process.location import Location
from kiln.pipelines.backfill.terms import TimeRange
from kiln.pipelines.delta.arrow_rows import build_arrow_schema
from kiln.pipelines.delta.tables import PlainFile
from kiln.schemas.delta.tables import TABLES

_SLICE_BYTES: Final = 16 << 20
_TASK_BYTES: Final = 64 << 20
_BATCH_ROWS: Final = 5_000
_SCHEMA: Final = build_arrow_schema(TABLES["frames"].columns)
_TIMES: Final = {"observed_at", "kafka_timestamp"}


class _FileSlice(NamedTuple):
    """A part of a Parquet file: its row groups are divided into `parts` parts, numbered from 0."""

    file: Location
    number: int
    parts: int


@dataclass(frozen=True)
class FrameTasks:
    """The slices of files that each task reads, and the time range and network of the rows that it returns."""

    tasks: Sequence[Sequence[_FileSlice]]
    span: TimeRange
    """time range in which the frames were captured"""
    network: str | None
    """network of the frames, or `None` for all"""

    def read(self, task: int) -> Iterator[pa.RecordBatch]:
        """Read the rows of one task. The columns are those of the table, with times as integers in µs."""
        for piece in self.tasks[task]:
            with piece.file.open() as opened:
                file = pq.ParquetFile(opened)
                count = file.num_row_groups
                own = [group for group in range(count) if group * piece.parts // count == piece.number]
                groups = [group for group in own if _may_overlap(file, group, self.span)]
                for batch in file.iter_batches(_BATCH_ROWS, row_groups=groups, use_threads=False):
                    yield self._select(_convert(batch))

    def _select(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        at = rows.column("observed_at")
        mask = pc.and_(pc.greater_equal(at, self.span.low), pc.less(at, self.span.high))
        if self.network is not None:
            mask = pc.and_(mask, pc.equal(rows.column("network"), self.network))
        return rows.filter(mask)


def plan_tasks(files: Sequence[PlainFile], at_least: int, span: TimeRange, network: str | None) -> FrameTasks:
    """Divide files among tasks.

    Args:
        files: The files, whose order is kept.
        at_least: Minimum number of tasks, if there are enough slices.
        span: Time range of the frames to read.
        network: Network of the frames to read, or `None` for all.
    """
    slices = []
    for file in files:
        count = max(1, -(-file.size // _SLICE_BYTES))
        slices += [_FileSlice(file.location, number, count) for number in range(count)]
    tasks = min(len(slices), max(at_least, sum(file.size for file in files) // _TASK_BYTES))
    edges = [number * len(slices) // tasks for number in range(tasks + 1)] if tasks else []
    return FrameTasks([slices[low:high] for low, high in pairwise(edges)], span, network)


def _may_overlap(file: pq.ParquetFile, group: int, span: TimeRange) -> bool:
    column = file.schema_arrow.get_field_index("observed_at")
    limits = file.metadata.row_group(group).column(column).statistics
    is_micros = file.schema_arrow.field(column).type == _SCHEMA.field("observed_at").type
    if limits is None or not limits.has_min_max or not is_micros:
        return True
    return bool(limits.max_raw >= span.low and limits.min_raw < span.high)


def _convert(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert rows of a file to the current columns of the table. Columns that the file lacks are null."""
    columns = []
    for field in _SCHEMA:
        index = batch.schema.get_field_index(field.name)
        column = pa.nulls(batch.num_rows, field.type) if index < 0 else batch.column(index).cast(field.type)
        columns.append(column.cast(pa.int64()) if field.name in _TIMES else column)
    return pa.RecordBatch.from_arrays(columns, names=_SCHEMA.names)
