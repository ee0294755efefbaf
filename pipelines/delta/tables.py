"""Tables of the lake as Spark DataFrames."""

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

    The constant filter shows Spark's optimizer that it is empty, so that unions and joins with it are dropped.
    """
    return spark.createDataFrame([], build_ddl(TABLES[table].columns)).where(F.lit(False))


def read_table(spark: SparkSession, lake: Lake, table: str, version: int | None = None) -> DataFrame:
    """Read a version of a table, by default the newest, with Delta's connector. It can read every table, but is slower
    than `read_rows`."""
    path = lake.folder(table).spark_uri
    if version is not None:
        return spark.read.format("delta").option("versionAsOf", str(version)).load(path)
    newest: DataFrame = DeltaTable.forPath(spark, path).toDF()
    return newest


def read_rows(
    spark: SparkSession, lake: Lake, table: str, version: int | None = None, times: TimeBounds = _UNBOUNDED
) -> DataFrame:
    """Read the rows of a table in a range of times.

    delta-rs lists the files that may have such rows, and Spark reads these files, because Delta's connector takes a
    second or two for each table. The connector is used only for a table with deletion vectors, with column mapping, or
    with characters in its path that Spark would interpret as a pattern.
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
    """A Parquet file without deleted rows: the table has all its rows."""

    location: Location
    size: int
    """size in bytes"""


def list_plain_files(
    lake: Lake, table: str, version: int | None = None, times: TimeBounds = _UNBOUNDED
) -> list[PlainFile] | None:
    """List the files of a table that may have a row in a range of times.

    Returns:
        None if the files alone do not give the rows, because the table has deletion vectors or column mapping, or if a
        path has characters that the log escapes, or that Spark reads as a pattern.
    """
    opened = lake.open(table, version)
    files = _list_files(opened, times)
    paths = files["path"].to_pylist()
    if opened.protocol().min_reader_version > 1 or any(_NO_NAME & set(path) for path in paths):
        return None
    folder = lake.folder(table)
    return [PlainFile(folder / path, size) for path, size in zip(paths, files["size_bytes"].to_pylist(), strict=True)]


def read_files(spark: SparkSession, lake: Lake, table: str, files: Sequence[DataFile]) -> DataFrame:
    """Read files that no commit has added to their table yet."""
    if not files:
        return create_empty(spark, table)
    folder = lake.folder(table).spark_uri
    return spark.read.schema(build_ddl(TABLES[table].columns)).parquet(*(f"{folder}/{file.name}" for file in files))


def count_rows_at_most(lake: Lake, table: str, version: int | None = None, times: TimeBounds = _UNBOUNDED) -> int:
    """Return an upper bound for the number of rows that `read_rows` returns, from the statistics of the files.

    If a file has no statistics, the result is `sys.maxsize`.
    """
    counts = _list_files(lake.open(table, version), times)["num_records"]
    return sys.maxsize if counts.null_count else int(pc.sum(counts, min_count=0).as_py())


def _list_files(table: deltalake.DeltaTable, times: TimeBounds) -> pa.Table:
    files = pa.table(table.get_add_actions(flatten=True))
    return files.filter(times.select_files(files))


_GLOB: Final = frozenset("*?[]{}\\")
"""Characters that Spark interprets as patterns in paths"""
_NO_NAME: Final = _GLOB | frozenset("%:")
"""Characters of Spark's patterns, characters that the log escapes, and the colon of a URI"""


def write_files(rows: DataFrame, lake: Lake, table: str) -> list[DataFile]:
    """Write rows with the columns of a table into files, on the executors. The files belong to the table once a commit
    adds them."""

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        files = TableFiles(lake, table)
        for batch in batches:
            files.add_batch(batch)
        yield pa.RecordBatch.from_pydict({"file": [msgspec.msgpack.encode(file) for file in files.close()]}, _FILE)

    written = rows.select(*(column.name for column in TABLES[table].columns)).mapInArrow(write, "file binary").collect()
    return [msgspec.msgpack.decode(bytes(row.file), type=DataFile) for row in written]


_FILE = pa.schema([("file", pa.binary())])
