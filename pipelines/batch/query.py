"""Query `batch`: windows of each separator to CIP-123 batches on `kiln.batches`. The ticks of its driver advance log
time."""

from __future__ import annotations

from pyspark.sql.streaming.query import StreamingQuery

from kiln.pipelines.batch.batching import BatchConfig
from kiln.pipelines.batch.transform import OFFSET_RANGES, batch_ranges, build_range_task
from kiln.pipelines.runtime.kafka import build_sink_options
from kiln.pipelines.runtime.query_context import QueryContext, start_query

_SMALL = 2_000  # number of records up to which one task is as fast as several


def start(context: QueryContext, batching: BatchConfig) -> StreamingQuery:
    """Start the query. A `Ticker` must run next to it, or windows close only with later updates."""
    session = context.new_session()
    # Most work is before the shuffle, in a task for each Kafka partition unless the micro-batch is small. Each task
    # after it costs a Python worker and a commit of state in every micro-batch.
    session.conf.set("spark.sql.shuffle.partitions", "1")
    decode = build_range_task(batching.update_filter)
    ranges = context.read_stream("batch", session, decode, OFFSET_RANGES, small=_SMALL)
    rows = batch_ranges(ranges, batching, context.broker.prefix)
    return start_query("batch", context, rows.writeStream.format("kafka").options(**build_sink_options(context.broker)))
