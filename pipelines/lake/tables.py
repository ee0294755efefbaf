"""Tables of the lake as DataFrames."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pyarrow as pa
from delta.tables import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from pipelines.lake.files import DataFile, TableFiles
from pipelines.lake.lake import Lake
from schemas.tables import TABLES


def read_table(spark: SparkSession, lake: Lake, table: str) -> DataFrame:
    """The newest version of a table."""
    frame: DataFrame = DeltaTable.forPath(spark, lake.folder(table).spark_uri).toDF()
    return frame


def read_version(spark: SparkSession, lake: Lake, table: str, version: int) -> DataFrame:
    """A table as of a version."""
    return spark.read.format("delta").option("versionAsOf", str(version)).load(lake.folder(table).spark_uri)


def write_files(rows: DataFrame, lake: Lake, table: str) -> list[DataFile]:
    """Writes rows, in the table's columns, into files where they are computed. A commit makes them part of the
    table."""

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        files = TableFiles(lake, table)
        for batch in batches:
            files.add_batch(batch)
        yield pa.RecordBatch.from_pydict({"file": [msgspec.msgpack.encode(each) for each in files.close()]}, _FILE)

    wrote = rows.select(*(column.name for column in TABLES[table].columns)).mapInArrow(write, "file binary").collect()
    return [msgspec.msgpack.decode(bytes(row.file), type=DataFile) for row in wrote]


_FILE = pa.schema([("file", pa.binary())])
