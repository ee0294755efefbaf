"""Query `batch`: from Kafka's topic `kiln.updates` to `kiln.batches`, and records that cannot be read to
`kiln.quarantine`.

    source: decode, filter ─ shuffle by Kafka partition ─ windows of each separator ─ Kafka

A window begins with an update, by capture time, and ends T later by log time, the greatest broker stamp in the
partition so far. It becomes a CIP-123 batch. While no update comes, records without a value move log time on (ticks,
which the `Ticker` in the driver's process writes). Therefore a batch follows from the log alone, whenever the query
runs. The filter (`batch.authors`, `batch.only_verified`) leaves out updates of other authors or with unconfirmed
separators.

Spark's state has for each partition the open windows, log time, and the digests of the messages in the newest epoch of
each writer. By these the query drops an update that a repeated micro-batch of `updates` wrote twice (decision 7).

The effects of a micro-batch, in order:

1. Spark's offset log: which records it reads.
2. The batches, by Spark's Kafka sink, and the new state; neither waits for the other.
3. Spark's commit log.

After a crash, Spark repeats the micro-batch from the records of 1 and the state before it, and makes the same batches,
with the same bytes and keys. Kafka may then have a batch twice: the bridge's publisher may announce it twice, and
`sink` stores it once.
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
