"""A PySpark job with a UDF that decodes a record into an array of structs, and a `foreachBatch` that appends to tables.

Messages are made unique by `dropDuplicatesWithinWatermark` in a query of their own. A crash between two appends doubles
rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from bench.peers.by_hand import Row, read

APPENDED = ("frames", "copies", "quarantine")


def run(spark: SparkSession, servers: str, topic: str, lake: Path, checkpoints: Path, ddl: Mapping[str, str]) -> None:
    """Reads all of a topic; appends to the tables that `ddl`, columns as Spark DDL, names."""

    def rows_of(value: bytes, partition: int, offset: int, stamp: int, table: str) -> list[Row]:
        found = read(value, partition, offset, stamp)
        if table == "messages":
            return [_with_map(row) for _, row in found.messages]
        return {"frames": found.frames, "copies": found.copies, "quarantine": found.quarantine}[table]

    records = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", servers)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .load()
        .select("value", "partition", "offset", F.unix_micros("timestamp").alias("stamp"))
    )

    def of_table(frame: DataFrame, table: str) -> DataFrame:
        numbers = ddl[table].replace(" timestamp", " bigint")
        decode = F.udf(rows_of, f"array<struct<{_fields(numbers)}>>")
        arrays = decode("value", "partition", "offset", "stamp", F.lit(table))
        rows = frame.select(F.explode(arrays).alias("row")).select("row.*")
        columns = [column.split(" ", 1) for column in ddl[table].split(", ")]
        times = [name for name, kind in columns if kind == "timestamp"]
        return rows.withColumns({name: F.timestamp_micros(name) for name in times})

    def append(frame: DataFrame, batch_id: int) -> None:
        frame.persist()
        for table in APPENDED:
            of_table(frame, table).write.format("delta").mode("append").save(str(lake / table))
        frame.unpersist()

    messages = (
        of_table(records, "messages")
        .withWatermark("observed_at", "24 hours")
        .dropDuplicatesWithinWatermark(["network", "message"])
    )
    queries = [
        records.writeStream.foreachBatch(append).option("checkpointLocation", str(checkpoints / "appended")).start(),
        messages.writeStream.format("delta")
        .option("checkpointLocation", str(checkpoints / "messages"))
        .start(str(lake / "messages")),
    ]
    for query in queries:
        query.processAllAvailable()
        query.stop()


def _with_map(row: Row) -> Row:
    pairs = row[14]
    return (*row[:14], dict(pairs) if isinstance(pairs, list) else None, *row[15:])


def _fields(ddl: str) -> str:
    return ", ".join(column.replace(" ", ": ", 1) for column in ddl.split(", "))
