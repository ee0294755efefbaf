"""Query `batch`: from Kafka's topic `kiln.updates` to `kiln.batches`, and records that cannot be read to
`kiln.quarantine`.

    source: decode, filter ─ shuffle by Kafka partition ─ drop repeats, windows of each separator ─ Kafka

A window begins at the capture time of its first update. It ends when log time has passed that by T (`batch.window`).
Log time is the greatest broker stamp in the Kafka partition so far. A window that has ended becomes a CIP-123 batch.
While no update comes, records without a value advance log time: ticks, which a `Ticker` in the driver's process writes.
So the batches follow from the log alone, and it does not matter when the query runs. The filter (`batch.authors`,
`batch.only_verified`) leaves out updates of other authors, or with unconfirmed separators.

For each Kafka partition, Spark's state has the open windows, log time, and for each writer of the topic the digests of
the messages in its newest epoch. By these digests the query drops an update that the writer wrote twice after a crash
(decision 7).

The effects of a micro-batch, in order. With `durability = "power"`, the driver syncs the checkpoint each second, and
after a power cut the query begins again at the newest intact state.

1. Spark's offset log: the records of the micro-batch.
2. Batches and faults, by Spark's Kafka sink; and the new state. Neither waits for the other.
3. Spark's commit log.

After a crash, Spark repeats the micro-batch from the same records and the state before them, and makes the same
batches and faults, with the same bytes and keys. A topic may then have one twice. The bridge's publisher may announce
such a batch twice, and `sink` stores batches and faults once.
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
