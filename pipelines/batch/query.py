"""Query `batch`: windows of each separator to CIP-123 batches on `kiln.batches`. Its driver ticks the log's clock."""

from __future__ import annotations

from pyspark.sql.streaming.query import StreamingQuery

from kiln.pipelines.batch.batching import BatchConfig
from kiln.pipelines.batch.transform import batch_updates
from kiln.pipelines.runtime.kafka import sink_options, stream_topics
from kiln.pipelines.runtime.query_context import QueryContext, start_query
from kiln.schemas.queries import QUERIES


def start(plan: QueryContext, batching: BatchConfig) -> StreamingQuery:
    """Starts the query. A `Ticker` must run beside the query, or windows close only with later updates."""
    session = plan.new_session()
    # What takes long is done before the shuffle, in a task for each Kafka partition. Each task after it costs a Python
    # worker and a commit of state in every micro-batch.
    session.conf.set("spark.sql.shuffle.partitions", "1")
    records = stream_topics(session, plan.broker, QUERIES["batch"].reads, plan.at_most)
    rows = batch_updates(records, batching, plan.broker.prefix)
    return start_query("batch", plan, rows.writeStream.format("kafka").options(**sink_options(plan.broker)))
