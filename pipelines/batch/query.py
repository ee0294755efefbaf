"""Query `batch`: from Kafka's topic `kiln.updates` to `kiln.batches`, and records that cannot be read to
`kiln.quarantine`.

    source: decode, filter ─ shuffle by Kafka partition ─ operator: drop repeats, windows of each separator ─ Kafka

The first micro-batch begins at the oldest records in Kafka, and each later one where the previous one ended. A
micro-batch has at most `max_offsets_per_trigger` records. The query stops with an error if Kafka has deleted a record
that the query has not read. A micro-batch starts every 0.5 s (`jobs.batch.trigger`), or as soon as the previous one
ends if that one takes longer. The source is Kiln's own (`pipelines/runtime/kafka.py`): its tasks read Kafka and decode.
Each row of the source holds the updates in one partition's offset range, with the records' broker timestamps
(`LogAppendTime`).

All updates of a separator are in one partition, and the operator takes the ranges of a partition in offset order.

The event time of an update is the earlier of its capture time and log time. Log time is the greatest broker timestamp
in the Kafka partition so far. A window opens with its separator's first update, at event time t0 and log time c0. It
has the updates with an event time before t0 + T (`batch.window`), even before t0. It ends at the separator's first
update with an event time of t0 + T or later, or at any record of the partition with a log time of c0 + T +
`batch.grace` or later. If this record is an update of the separator, it opens the next window. An ended window becomes
a CIP-123 batch. While no update arrives, ticks advance log time. A tick is a record without a
value, which a `Ticker` appends to each partition of `kiln.updates`; the process that starts this query also starts the
`Ticker`. So batches depend only on the records in Kafka, and not on the time at which the query runs. The settings
`batch.authors` and `batch.only_verified` leave out updates of other authors, and updates with unconfirmed separators.

For each Kafka partition, Spark's state has the open windows and log time. It also has, for each of the two writers of
the topic, the digests of the messages in the writer's newest epoch. An epoch is a micro-batch of the query `updates`,
or what the bridge's fetcher writes between two commits of its offsets. With these digests the operator drops an update
that a writer wrote twice after a crash (`EpochGuard`).

A micro-batch has these effects, in this order.

1. Spark's offset log: which records the micro-batch has.
2. Batches and quarantine records, by Spark's Kafka sink; and the new state. A crash may leave a part of the records,
   with or without the state.
3. Spark's commit log.

After a crash, Spark repeats the micro-batch from the same records and the state before them, and makes the same batches
and quarantine records, with the same bytes and keys. So a topic may have a record twice, and `sink` stores it once. The
bridge's publisher may announce such a batch twice, which does no harm: a batch is a set of tips.

With `durability = "power"`, a thread of the driver syncs the checkpoint each second. After a power cut, Kiln sets aside
torn files at its start (`pipelines/recovery.py`). The query then repeats its newest micro-batches, not only the last,
and makes the same batches again.
"""

from __future__ import annotations

from pyspark.sql.streaming.query import StreamingQuery

from kiln.pipelines.batch.batching import BatchConfig
from kiln.pipelines.batch.transform import OFFSET_RANGES, batch_ranges, build_range_task
from kiln.pipelines.runtime.kafka import build_sink_options
from kiln.pipelines.runtime.query_context import QueryContext

_SMALL = 2_000  # number of records up to which one task is as fast as several


def start(context: QueryContext, batching: BatchConfig) -> StreamingQuery:
    """Start the query. A `Ticker` must run at the same time: without ticks, a window ends only when a later update
    arrives."""
    session = context.new_session("batch")
    # One task after the shuffle, as each one costs a Python worker and a commit of state in every micro-batch. Most
    # work is before it, in one task for each Kafka partition, or in one task if the micro-batch is small.
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
