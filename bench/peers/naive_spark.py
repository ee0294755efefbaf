"""A PySpark job: a streaming query for each table, a UDF that reads a record in Python, and a `window()` of copies.

    python -m bench.peers.naive_spark SERVERS TOPIC LAKE CHECKPOINTS JARS WARM_TOPIC WARM_LAKE

Warms up with all records of WARM_TOPIC, then reads all records of TOPIC, and prints how many seconds TOPIC took. Each
of the four queries reads and decodes all records itself. A message with copies in two one-hour windows gets two rows.
Spark silently drops a copy that came more than an hour before the newest copy. Settings are the defaults of Spark and
Delta, except two: with the default of 200 shuffle tasks, and 50 tasks to read a table's log, the overhead of tasks
would dominate on a laptop.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import datetime

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType

from bench.peers.by_hand import TABLES, Row, read


def run(spark: SparkSession, servers: str, topic: str, lake: str, checkpoints: str) -> None:
    """Run the queries until all records of the topic are in the lake."""
    records = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", servers)
        .options(**json.loads(os.environ["BENCH_KAFKA"]))  # login
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .load()
    )
    queries = [
        _rows(spark, records, lake, table)
        .writeStream.format("delta")
        .option("checkpointLocation", f"{checkpoints}/{table}")
        .trigger(availableNow=True)
        .start(f"{lake}/{table}")
        for table in TABLES
    ]
    for query in queries:
        query.awaitTermination()


def _rows(spark: SparkSession, records: DataFrame, lake: str, table: str) -> DataFrame:
    schema = spark.read.format("delta").load(f"{lake}/{table}").schema

    @F.udf(ArrayType(schema))
    def decode(value: bytes, partition: int, offset: int, stamp: datetime) -> list[Row]:
        return read(value, partition, offset, stamp)[table]

    rows = records.select(F.inline(decode("value", "partition", "offset", "timestamp")))
    if table == "messages":
        # On a copy of the column: Spark allows one column of event time, and its window would be a second one.
        heard = rows.withColumn("heard", F.col("observed_at")).withWatermark("heard", "1 hour")
        hourly = heard.withColumn("hour", F.window("heard", "1 hour")).drop("heard")
        rows = hourly.dropDuplicates(["network", "message_id", "hour"]).drop("hour")
    return rows


def _session(jars: str) -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = sys.executable  # of the workers
    return (
        SparkSession.builder.appName("naive")
        .master("local[*]")
        .config("spark.jars", jars)
        .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
        .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
        .config("spark.sql.shuffle.partitions", str(os.cpu_count()))
        .config("spark.databricks.delta.snapshotPartitions", "1")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )


def main(servers: str, topic: str, lake: str, checkpoints: str, jars: str, warm_topic: str, warm_lake: str) -> None:
    """Read the warm-up topic, then the measured topic, and print the seconds of the latter."""
    spark = _session(jars)
    run(spark, servers, warm_topic, warm_lake, f"{checkpoints}/warm")
    started = time.perf_counter()
    run(spark, servers, topic, lake, f"{checkpoints}/timed")
    print(json.dumps({"seconds": time.perf_counter() - started}))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
