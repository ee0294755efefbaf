"""Rows of several sources, merged by a shuffle that brings the rows of a group together, in order.

A task reads one group after another, so that the driver holds no rows and a task only a few.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import Final, NamedTuple

import msgspec
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from kiln.pipelines.delta.arrow_rows import RowBuffer
from kiln.pipelines.delta.files import DataFile

MERGED_ROWS: Final = (
    "network string, name string, rank int, at bigint, partition int, offset bigint, position int, note int, "
    "data binary"
)
"""Rows with one network and name are a group. They are sorted by `rank`, which is the kind of a row, and then by the
five columns after it. A *mark* is such a row of what a table of the run or of the lake has already."""

_TYPES: Final = dict(column.split() for column in MERGED_ROWS.split(", "))
_ORDER: Final = ("network", "name", "rank", "at", "partition", "offset", "position", "note")
MERGED_SCHEMA: Final = pa.schema(
    [
        ("network", pa.string()),
        ("name", pa.string()),
        ("rank", pa.int32()),
        ("at", pa.int64()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("position", pa.int32()),
        ("note", pa.int32()),
        ("data", pa.binary()),
    ]
)

OUTPUT_RANK: Final = 0
"""Rank of a row that holds a `StageOutput`; its network and name are empty."""


class MergedRow(NamedTuple):
    """A row of MERGED_ROWS. `at`: µs."""

    network: str
    name: str
    rank: int
    at: int
    partition: int = 0
    offset: int = 0
    position: int = 0
    note: int = 0
    data: bytes = b""


class OutsideFrames(msgspec.Struct, frozen=True, array_like=True):
    """Frames of files that are outside the range of a run. Times are µs."""

    frames: int = 0
    first_at: int = 0
    last_at: int = 0

    def merge(self, other: OutsideFrames) -> OutsideFrames:
        """Add the frames of another object."""
        if not self.frames or not other.frames:
            return self if self.frames else other
        first_at, last_at = min(self.first_at, other.first_at), max(self.last_at, other.last_at)
        return OutsideFrames(self.frames + other.frames, first_at, last_at)


class StageOutput(msgspec.Struct, frozen=True, array_like=True):
    """Result of one task."""

    files: list[DataFile]
    """files of the run's tables"""
    beyond: list[DataFile] = []
    """files of rows outside the run's range"""
    frames: int = 0
    """frames read"""
    outside: OutsideFrames = OutsideFrames()


STAGE_OUTPUTS: Final = "data binary"
"""One `StageOutput` a row: the output of a stage that writes all its rows to files."""


def encode_outputs(*outputs: StageOutput) -> pa.RecordBatch:
    """Encode the results of a task as STAGE_OUTPUTS."""
    return pa.RecordBatch.from_pydict({"data": pa.array(map(msgspec.msgpack.encode, outputs), pa.binary())})


class MergedRowBuffer:
    """Buffer of a task that emits MERGED_ROWS."""

    def __init__(self) -> None:
        self._buffer = RowBuffer(MERGED_SCHEMA)

    def add(self, row: MergedRow) -> Iterator[pa.RecordBatch]:
        """Add a row, and yield a record batch when the buffer is full."""
        if self._buffer.add(row, len(row.data)):
            yield from self._buffer.drain()

    def finish(self, output: StageOutput) -> Iterator[pa.RecordBatch]:
        """Add the result of the task, and yield the last rows."""
        self._buffer.add(MergedRow("", "", OUTPUT_RANK, 0, data=msgspec.msgpack.encode(output)))
        yield from self.drain()

    def drain(self) -> Iterator[pa.RecordBatch]:
        """Yield the buffered rows."""
        yield from self._buffer.drain()


def select_merged(rows: DataFrame, **columns: Column) -> DataFrame:
    """Select MERGED_ROWS: these columns, and zeros and no data for the other ones."""
    zeros = dict.fromkeys(("partition", "offset", "position", "note"), F.lit(0))
    given = {**zeros, "data": F.lit(b""), **columns}
    return rows.select(*(given[name].cast(kind).alias(name) for name, kind in _TYPES.items()))


def group_rows(rows: DataFrame) -> DataFrame:
    """Shuffle MERGED_ROWS so that one task has all rows of a group, sorted."""
    columns = [F.col(name) for name in _ORDER]
    # Spark compares 8 bytes first, and message ids of one author begin alike, so their hash comes first
    return rows.repartition(*columns[:2]).sortWithinPartitions(F.xxhash64(*columns[:2]), *columns)


def read_groups(batches: Iterator[pa.RecordBatch]) -> Iterator[Iterator[MergedRow]]:
    """Yield the rows of each group from the output of `group_rows`."""
    for _, group in groupby(_rows(batches), key=itemgetter(0, 1)):
        yield group


def _rows(batches: Iterator[pa.RecordBatch]) -> Iterator[MergedRow]:
    for batch in batches:
        yield from map(MergedRow._make, zip(*(column.to_pylist() for column in batch.columns), strict=True))


def semi_join(marks: DataFrame, rows: DataFrame) -> DataFrame:
    """Return the marks whose group has a row in `rows`.

    Marks cover days, and `rows` one chunk. So the input of a task depends on the size of the chunk.
    """
    group = F.xxhash64("network", "name")
    ids = rows.where(F.col("rank") != OUTPUT_RANK).select(group.alias("id")).distinct()
    return marks.withColumn("id", group).join(ids, "id", "left_semi").drop("id")
