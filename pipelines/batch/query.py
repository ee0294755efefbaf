"""Query `batch`: windows of each separator to CIP-123 batches on `kiln.batches`. The ticks of its driver advance log
time."""

from __future__ import annotations

from pyspark.sql.streaming.query import StreamingQuery

from kiln.pipelines.batch.batching import BatchConfig
from kiln.pipelines.batch.transform import batch_updates
from kiln.pipelines.runtime.kafka import build_sink_options, stream_topics
from kiln.pipelines.runtime.query_context import QueryContext, start_query
from kiln.schemas.queries import QUERIES


def start(context: QueryContext, batching: BatchConfig) -> StreamingQuery:
    """Start the query. A `Ticker` must run next to it, or windows close only with later updates."""
    session = context.new_session()
    # What takes long is done before the shuffle, in a task for each Kafka partition. Each task after it costs a Python
    # worker and a commit of state in every micro-batch.
    session.conf.set("spark.sql.shuffle.partitions", "1")
    records = stream_topics(session, context.broker, QUERIES["batch"].reads, context.max_records)
    rows = batch_updates(records, batching, context.broker.prefix)
    return start_query("batch", context, rows.writeStream.format("kafka").options(**build_sink_options(context.broker)))
