"""Tables of the lake as DataFrames."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import deltalake
import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from delta.tables import DeltaTable
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from kiln.conf.process.location import Location
from kiln.pipelines.delta.arrow_rows import build_ddl
from kiln.pipelines.delta.files import DataFile, TableFiles
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.delta.time_bounds import TimeBounds
from kiln.schemas.delta.tables import TABLES

_UNBOUNDED = TimeBounds()


def build_condition(times: TimeBounds) -> Column:
    """Build the Spark condition that selects the rows in a range of times."""
    time, condition = F.col(times.column), F.lit(True)
    if times.low is not None:
        condition &= time >= F.timestamp_micros(F.lit(times.low))
    if times.high is not None:
        condition &= time < F.timestamp_micros(F.lit(times.high))
    return condition


def create_empty(spark: SparkSession, table: str) -> DataFrame:
    """Create an empty DataFrame with the columns of a table.

    The constant filter shows Spark's optimizer that the DataFrame is empty, so that it drops unions and joins with the
    DataFrame without a job.
    """
    return spark.createDataFrame([], build_ddl(TABLES[table].columns)).where(F.lit(False))


def read_table(spark: SparkSession, lake: Lake, table: str, version: int | None = None) -> DataFrame:
    """Read a version of a table (by default the newest) with Delta's connector, which reads every kind of table."""
    path = lake.folder(table).spark_uri
    if version is not None:
        return spark.read.format("delta").option("versionAsOf", str(version)).load(path)
    newest: DataFrame = DeltaTable.forPath(spark, path).toDF()
    return newest


def read_rows(
    spark: SparkSession, lake: Lake, table: str, version: int | None = None, times: TimeBounds = _UNBOUNDED
) -> DataFrame:
    """Read the rows of a table in a range of times.

    delta-rs lists the files, and Spark reads the files that may have such rows, because Delta's connector takes a
    second or two for each table. The connector is used only for tables with deletion vectors, column mapping, or
    characters in paths that Spark would interpret.
    """
    files = list_plain_files(lake, table, version, times)
    if files is None or _GLOB & set(lake.folder(table).spark_uri):
        return read_table(spark, lake, table, version).where(build_condition(times))
    if not files:
        return create_empty(spark, table)
    columns = build_ddl(TABLES[table].columns)
    return (
        spark.read.schema(columns).parquet(*(file.location.spark_uri for file in files)).where(build_condition(times))
    )


class PlainFile(NamedTuple):
    """A Parquet file whose rows are those of its table."""

    location: Location
    size: int
    """size in bytes"""


def list_plain_files(
    lake: Lake, table: str, version: int | None = None, times: TimeBounds = _UNBOUNDED
) -> list[PlainFile] | None:
    """List the files of a table that may have a row in a range of times, or return `None` if a reader needs more than
    the files: the table has deletion vectors or column mapping, or names that the log escapes."""
    opened = lake.open(table, version)
    files = _list_files(opened, times)
    paths = files["path"].to_pylist()
    if opened.protocol().min_reader_version > 1 or any(_NO_NAME & set(path) for path in paths):
        return None
    folder = lake.folder(table)
    return [PlainFile(folder / path, size) for path, size in zip(paths, files["size_bytes"].to_pylist(), strict=True)]


def read_files(spark: SparkSession, lake: Lake, table: str, files: Sequence[DataFile]) -> DataFrame:
    """Read files of a table that no commit names yet."""
    if not files:
        return create_empty(spark, table)
    folder = lake.folder(table).spark_uri
    return spark.read.schema(build_ddl(TABLES[table].columns)).parquet(*(f"{folder}/{file.name}" for file in files))


def count_rows_at_most(lake: Lake, table: str, version: int | None = None, times: TimeBounds = _UNBOUNDED) -> int:
    """Count the rows in the files that `read_rows` reads, from the files' statistics: an upper bound of the number of
    rows that `read_rows` returns.

    If a file has no statistics, the result is `sys.maxsize`.
    """
    counts = _list_files(lake.open(table, version), times)["num_records"]
    return sys.maxsize if counts.null_count else int(pc.sum(counts, min_count=0).as_py())


def _list_files(table: deltalake.DeltaTable, times: TimeBounds) -> pa.Table:
    files = pa.table(table.get_add_actions(flatten=True))
    return files.filter(times.select_files(files))


_GLOB: Final = frozenset("*?[]{}\\")
"""characters of Spark's glob patterns"""
_NO_NAME: Final = _GLOB | frozenset("%:")
"""Spark's glob characters, characters that the log escapes, and the colon of a URI"""


def write_files(rows: DataFrame, lake: Lake, table: str) -> list[DataFile]:
    """Write rows, in the table's columns, into files on the executors. A commit makes them part of the table."""

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        files = TableFiles(lake, table)
        for batch in batches:
            files.add_batch(batch)
        yield pa.RecordBatch.from_pydict({"file": [msgspec.msgpack.encode(file) for file in files.close()]}, _FILE)

    written = rows.select(*(column.name for column in TABLES[table].columns)).mapInArrow(write, "file binary").collect()
    return [msgspec.msgpack.decode(bytes(row.file), type=DataFile) for row in written]


_FILE = pa.schema([("file", pa.binary())])
