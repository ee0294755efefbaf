"""`kiln.updates` to records of `kiln.batches`: CIP-123 batches, by the log's own clock."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from kiln.pipelines.batch.batching import BatchConfig
from kiln.pipelines.batch.offset_ranges import STRETCHES, stretches
from kiln.pipelines.batch.processor import OUTPUT, BatchProcessor


def batch_updates(records: DataFrame, batching: BatchConfig, prefix: str) -> DataFrame:
    """Columns partition, offset, stamp, value in; topic, key, value out: batches, and updates that cannot be read."""
    return (
        records.select("partition", "offset", "stamp", "value")
        .mapInArrow(stretches(batching.which), STRETCHES)
        .groupBy("partition")
        .transformWithStateInPandas(
            BatchProcessor(batching), outputStructType=OUTPUT, outputMode="Append", timeMode="None"
        )
        .select(F.concat(F.lit(prefix), "topic").alias("topic"), "key", "value")
    )
