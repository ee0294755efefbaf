"""Rows of several kinds that a backfill run shuffles together: new rows, and rows of its own tables and the live ones.

The shuffle brings the rows of a group, such as all copies of a message, into one task in order. The task reads one
group after another, so it keeps few rows in memory.
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
"""Schema of the shuffled rows, as a DDL string.

Rows with the same network and name form a group, such as the rows of one message. Within a group they are sorted by
`rank`, which is the kind of a row, and then by the five columns after it. A *mark* is a row for something that a live
table, or a table of the run, already contains."""

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
"""Rank of a row with the result of a task (`StageOutput`). Its network and name are empty."""


class MergedRow(NamedTuple):
    """A row of the shuffle (MERGED_ROWS). `at` is a time in µs, except for frames, where it is a sequence number."""

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
    """Number and times of the frames in a run's input files that are outside its time range. Times are µs."""

    frames: int = 0
    first_at: int = 0
    last_at: int = 0

    def merge(self, other: OutsideFrames) -> OutsideFrames:
        """Return the frames of both objects together."""
        if not self.frames or not other.frames:
            return self if self.frames else other
        first_at, last_at = min(self.first_at, other.first_at), max(self.last_at, other.last_at)
        return OutsideFrames(self.frames + other.frames, first_at, last_at)


class StageOutput(msgspec.Struct, frozen=True, array_like=True):
    """Result of one Spark task of a backfill run: the uncommitted data files that it wrote, and counts."""

    files: list[DataFile]
    """files for the run's tables"""
    beyond: list[DataFile] = []
    """files with rows outside the run's time range, which the run needs near both ends of the range"""
    frames: int = 0
    """number of frames read"""
    outside: OutsideFrames = OutsideFrames()


STAGE_OUTPUTS: Final = "data binary"
"""Schema of the output of tasks that write all rows to files: each row is an encoded `StageOutput`."""


def encode_outputs(*outputs: StageOutput) -> pa.RecordBatch:
    """Encode results of tasks as a record batch (STAGE_OUTPUTS)."""
    return pa.RecordBatch.from_pydict({"data": pa.array(map(msgspec.msgpack.encode, outputs), pa.binary())})


class MergedRowBuffer:
    """Buffer in which a task collects rows for the shuffle (MERGED_ROWS) into record batches."""

    def __init__(self) -> None:
        self._buffer = RowBuffer(MERGED_SCHEMA)

    def add(self, row: MergedRow) -> Iterator[pa.RecordBatch]:
        """Add a row. If the buffer is full, yield its rows as record batches."""
        if self._buffer.add(row, len(row.data)):
            yield from self._buffer.drain()

    def finish(self, output: StageOutput) -> Iterator[pa.RecordBatch]:
        """Add the result of the task, and yield the rows that are left as record batches."""
        self._buffer.add(MergedRow("", "", OUTPUT_RANK, 0, data=msgspec.msgpack.encode(output)))
        yield from self.drain()

    def drain(self) -> Iterator[pa.RecordBatch]:
        """Yield the buffered rows as record batches."""
        yield from self._buffer.drain()


def select_merged(rows: DataFrame, **columns: Column) -> DataFrame:
    """Build rows for the shuffle (MERGED_ROWS). Columns that are not given are 0, or empty for `data`."""
    zeros = dict.fromkeys(("partition", "offset", "position", "note"), F.lit(0))
    given = {**zeros, "data": F.lit(b""), **columns}
    return rows.select(*(given[name].cast(kind).alias(name) for name, kind in _TYPES.items()))


def group_rows(rows: DataFrame) -> DataFrame:
    """Shuffle rows (MERGED_ROWS) so that each group, with equal network and name, is in one task, sorted."""
    columns = [F.col(name) for name in _ORDER]
    # Spark compares 8 bytes first, and message ids of one author begin alike, so their hash comes first
    return rows.repartition(*columns[:2]).sortWithinPartitions(F.xxhash64(*columns[:2]), *columns)


def read_groups(batches: Iterator[pa.RecordBatch]) -> Iterator[Iterator[MergedRow]]:
    """Yield the rows of one group (network and name) after another, from the output of `group_rows`."""
    for _, group in groupby(_rows(batches), key=itemgetter(0, 1)):
        yield group


def _rows(batches: Iterator[pa.RecordBatch]) -> Iterator[MergedRow]:
    for batch in batches:
        yield from map(MergedRow._make, zip(*(column.to_pylist() for column in batch.columns), strict=True))


def semi_join(marks: DataFrame, rows: DataFrame) -> DataFrame:
    """Select the rows of `marks` whose group (network and name) also has a row in `rows`.

    `marks` covers days of history, and `rows` only one chunk of a run. So a task gets only the marks that it needs.
    """
    group = F.xxhash64("network", "name")
    ids = rows.where(F.col("rank") != OUTPUT_RANK).select(group.alias("id")).distinct()
    return marks.withColumn("id", group).join(ids, "id", "left_semi").drop("id")
