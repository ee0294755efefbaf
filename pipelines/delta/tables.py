"""Tables of the lake as DataFrames."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from delta.tables import DeltaTable
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from kiln.pipelines.delta.arrow_rows import build_ddl
from kiln.pipelines.delta.files import DataFile, TableFiles
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.delta.tables import TABLES

_STATISTICS_ROUNDING: Final = 1_000
"""µs by which the greatest time of a file may be above what is stated: Spark states milliseconds (PROTOCOL.md,
Per-file Statistics)."""


class TimeBounds(NamedTuple):
    """A range of a column of times: from `low` up to before `high`, µs; None: no bound."""

    column: str = "observed_at"
    low: int | None = None
    high: int | None = None

    @property
    def holds(self) -> Column:
        """Condition that a row is in the range."""
        at, found = F.col(self.column), F.lit(True)
        if self.low is not None:
            found &= at >= F.timestamp_micros(F.lit(self.low))
        if self.high is not None:
            found &= at < F.timestamp_micros(F.lit(self.high))
        return found

    def may_hold(self, files: pa.Table) -> pa.ChunkedArray:
        """Select the files, as delta-rs lists them, that may have a row in the range: a file that does not state its
        least and greatest value may."""
        least, greatest = (_read_statistic(files, f"{of}.{self.column}") for of in ("min", "max"))
        found = pa.chunked_array([pa.repeat(pa.scalar(True), files.num_rows)])
        if self.low is not None:
            found = pc.and_(found, pc.fill_null(pc.greater_equal(greatest, self.low - _STATISTICS_ROUNDING), True))
        if self.high is not None:
            found = pc.and_(found, pc.fill_null(pc.less(least, self.high), True))
        return found


_UNBOUNDED = TimeBounds()


def _read_statistic(files: pa.Table, name: str) -> pa.ChunkedArray:
    if name not in files.column_names:  # not one of the files states any
        return pa.chunked_array([pa.nulls(files.num_rows, pa.int64())])
    return pc.cast(files[name], pa.int64())


def create_empty(spark: SparkSession, table: str) -> DataFrame:
    """The columns of a table."""
    return spark.createDataFrame([], build_ddl(TABLES[table].columns))


def read_table(spark: SparkSession, lake: Lake, table: str, version: int | None = None) -> DataFrame:
    """A version of a table by Delta's connector, which reads every kind of table; None: the newest."""
    place = lake.folder(table).spark_uri
    if version is not None:
        return spark.read.format("delta").option("versionAsOf", str(version)).load(place)
    newest: DataFrame = DeltaTable.forPath(spark, place).toDF()
    return newest


def read_rows(
    spark: SparkSession, lake: Lake, table: str, version: int | None = None, times: TimeBounds = _UNBOUNDED
) -> DataFrame:
    """Read the rows of a table in a range of times.

    delta-rs says which files there are, and Spark reads those that may have such rows: Delta's connector takes a second
    or two for each table. The connector reads a table where a row of a file may be gone, or a column have another name.
    """
    opened = lake.open(table, version)
    found = pa.table(opened.get_add_actions(flatten=True))
    paths = found.filter(times.may_hold(found))["path"].to_pylist()
    if not paths:
        return create_empty(spark, table)
    place = lake.folder(table).spark_uri
    if opened.protocol().min_reader_version > 1 or _PATTERN & set(place) or any(_NO_NAME & set(path) for path in paths):
        return read_table(spark, lake, table, version).where(times.holds)
    columns = build_ddl(TABLES[table].columns)
    return spark.read.schema(columns).parquet(*(f"{place}/{path}" for path in paths)).where(times.holds)


_PATTERN: Final = frozenset("*?[]{}\\")
"""What Spark would take for a pattern of names."""
_NO_NAME: Final = _PATTERN | frozenset("%:")
"""What the log writes otherwise than Spark, or what makes more of a path than a name in the table's folder."""


def write_files(rows: DataFrame, lake: Lake, table: str) -> list[DataFile]:
    """Write rows, in the table's columns, into files where they are computed. A commit makes them part of the
    table."""

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        files = TableFiles(lake, table)
        for batch in batches:
            files.add_batch(batch)
        yield pa.RecordBatch.from_pydict({"file": [msgspec.msgpack.encode(each) for each in files.close()]}, _FILE)

    wrote = rows.select(*(column.name for column in TABLES[table].columns)).mapInArrow(write, "file binary").collect()
    return [msgspec.msgpack.decode(bytes(row.file), type=DataFile) for row in wrote]


_FILE = pa.schema([("file", pa.binary())])
