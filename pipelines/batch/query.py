"""Query `batch`: windows of each separator to CIP-123 batches on `kiln.batches`. The ticks of its driver advance log
time.

    kiln.updates ─ decode in the tasks of the source ─ shuffle by partition ─ windows in Spark's state ─ Kafka

A micro-batch takes effect in this order: batches into Kafka, the windows that are still open into the checkpoint,
Spark's commit. After a crash between two of these effects, Spark repeats the micro-batch from the state before it: it
makes the same batches with the same bytes and keys, which the publisher and `sink` recognise.
"""

from __future__ import annotations

from pyspark.sql.streaming.query import StreamingQuery

from kiln.pipelines.batch.batching import BatchConfig
from kiln.pipelines.batch.transform import OFFSET_RANGES, batch_ranges, build_range_task
from kiln.pipelines.runtime.kafka import build_sink_options
from kiln.pipelines.runtime.query_context import QueryContext

_SMALL = 2_000  # number of records up to which one task is as fast as several


def start(context: QueryContext, batching: BatchConfig) -> StreamingQuery:
    """Start the query. A `Ticker` must run next to it, or windows close only with later updates."""
    session = context.new_session("batch")
    # Most work is before the shuffle, in a task for each Kafka partition unless the micro-batch is small. Each task
    # after it costs a Python worker and a commit of state in every micro-batch.
    session.conf.set("spark.sql.shuffle.partitions", "1")
    decode = build_range_task(batching.update_filter)
    source = context.register_source("batch", session, decode, small=_SMALL)
    ranges = session.readStream.format(source).schema(OFFSET_RANGES).load()
    batches = batch_ranges(ranges, batching, context.broker.prefix)
    return (
        batches.writeStream.queryName("batch")
        .format("kafka")
        .options(**build_sink_options(context.broker))
        .option("checkpointLocation", context.checkpoint_uri("batch"))
        .trigger(processingTime=context.trigger)
        .start()
    )
