"""Transforms of the query `batch`: make CIP-123 batches for `kiln.batches` from `kiln.updates`."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from kiln.pipelines.batch.batching import BatchConfig
from kiln.pipelines.batch.offset_range import UpdateFilter, pack_offset_range, read_offset_range
from kiln.pipelines.batch.processor import OUTPUT, BatchProcessor
from kiln.pipelines.runtime.kafka_ranges import ArrowTask

OFFSET_RANGES = "partition int, first bigint, last bigint, data binary"
"""Rows between tasks. The columns after `partition` are the fields of a PackedOffsetRange."""

_OFFSET_RANGES_SCHEMA = pa.schema(
    [("partition", pa.int32()), ("first", pa.int64()), ("last", pa.int64()), ("data", pa.binary())]
)


def batch_ranges(ranges: DataFrame, batching: BatchConfig, prefix: str) -> DataFrame:
    """Batch the updates of OFFSET_RANGES. Columns topic, key, value out: batches, and updates that cannot be read."""
    return (
        ranges.groupBy("partition")
        .transformWithStateInPandas(
            BatchProcessor(batching), outputStructType=OUTPUT, outputMode="Append", timeMode="None"
        )
        .select(F.concat(F.lit(prefix), "topic").alias("topic"), "key", "value")
    )


def build_range_task(update_filter: UpdateFilter) -> ArrowTask:
    """Build the task that decodes updates. RECORDS in; OFFSET_RANGES out.

    It makes one row per partition and record batch, because PySpark takes 5 µs to unpack each row for a stateful
    processor.
    """

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            partitions = batch.column("partition").unique().to_pylist()
            rows = []
            for partition in partitions:
                records = batch
                if len(partitions) > 1:
                    records = batch.filter(pc.equal(batch.column("partition"), partition))
                offsets, stamps, values = (
                    records.column(name).to_numpy(zero_copy_only=False).tolist()
                    for name in ("offset", "stamp", "value")
                )
                rows.append((partition, *pack_offset_range(read_offset_range(offsets, stamps, values, update_filter))))
            if not rows:
                continue
            fields = zip(zip(*rows, strict=True), _OFFSET_RANGES_SCHEMA, strict=True)
            arrays = [pa.array(column, field.type) for column, field in fields]
            yield pa.RecordBatch.from_arrays(arrays, schema=_OFFSET_RANGES_SCHEMA)

    return read
