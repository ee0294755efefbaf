"""Rows that are settled group by group: a shuffle brings the rows of a group together and in order, and a task settles
one group after another, so that no group is held by the driver, and few rows at a time by a task."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import Final, NamedTuple

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from kiln.pipelines.delta.arrow_rows import RowBuffer
from kiln.pipelines.delta.files import DataFile

MIXED: Final = (
    "network string, name string, rank int, at bigint, partition int, offset bigint, position int, note int, "
    "data binary"
)
"""A group is a network and a name. Within a group rows come by `rank`, which says what a row is, and then by the five
columns after it."""

_ORDER: Final = ("network", "name", "rank", "at", "partition", "offset", "position", "note")
_SCHEMA: Final = pa.schema(
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

TALLY: Final = 0
"""The rank of what a task tells the driver; such rows have neither network nor name."""


class MergedRow(NamedTuple):
    """A row of MIXED. `at`: µs."""

    network: str
    name: str
    rank: int
    at: int
    partition: int = 0
    offset: int = 0
    position: int = 0
    note: int = 0
    data: bytes = b""


class StageOutput(msgspec.Struct, frozen=True, array_like=True):
    """What a task wrote: files of the run's tables, files of what lies beyond the edges of the run's range, and how
    many frames it read."""

    files: list[DataFile]
    beyond: list[DataFile] = []
    frames: int = 0


TALLIES: Final = "data binary"
"""A `StageOutput` each: what a stage gives out whose rows all go into files."""


def tallies(*wrote: StageOutput) -> pa.RecordBatch:
    """What a task tells the driver, in TALLIES."""
    return pa.RecordBatch.from_pydict({"data": pa.array(map(msgspec.msgpack.encode, wrote), pa.binary())})


class MergedRowBuffer:
    """Rows of a task on their way into MIXED."""

    def __init__(self) -> None:
        self._buffer = RowBuffer(_SCHEMA)

    def add(self, row: MergedRow) -> Iterator[pa.RecordBatch]:
        """Takes a row; gives out rows when there are enough."""
        if self._buffer.add(row, len(row.data)):
            yield from self._buffer.drain()

    def tell(self, wrote: StageOutput) -> Iterator[pa.RecordBatch]:
        """The last rows, and what the task tells the driver."""
        self._buffer.add(MergedRow("", "", TALLY, 0, data=msgspec.msgpack.encode(wrote)))
        yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """The last rows."""
        yield from self._buffer.drain()


def in_groups(rows: DataFrame) -> DataFrame:
    """MIXED in and out: the rows of a group in one task, one after another and in order."""
    columns = [F.col(name) for name in _ORDER]
    return rows.repartition(*columns[:2]).sortWithinPartitions(*columns)


def read_groups(batches: Iterator[pa.RecordBatch]) -> Iterator[Iterator[MergedRow]]:
    """What `in_groups` gave, as a task reads it: the rows of a group, group after group."""
    for _, group in groupby(_rows(batches), key=itemgetter(0, 1)):
        yield group


def _rows(batches: Iterator[pa.RecordBatch]) -> Iterator[MergedRow]:
    for batch in batches:
        yield from map(MergedRow._make, zip(*(column.to_pylist() for column in batch.columns), strict=True))


def among(marks: DataFrame, rows: DataFrame) -> DataFrame:
    """MIXED in and out: those of `marks` whose group has a row in `rows`. Marks are of days, rows of a chunk: what a
    task reads is to go by the chunk."""
    group = F.xxhash64("network", "name")
    ids = rows.where(F.col("rank") != TALLY).select(group.alias("id")).distinct()
    return marks.withColumn("id", group).join(ids, "id", "left_semi").drop("id")
