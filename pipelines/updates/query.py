"""Query `updates`: from Kafka's topic `kiln.frames` to `kiln.updates` and `kiln.wanted`.

Each new update goes to `kiln.updates` with its separator. An update whose separator only the stream's genesis tells
goes to `kiln.wanted`, as do requests for the blocks of other nodes' batches; the bridge fetches these blocks.

    source: decode, find the separator ─ select new updates, in the order of capture ─ foreachBatch: Kafka

An announcement of a tip that was announced before is no new update (`kiln.pipelines.updates.repeats`). The selection
needs the digests of earlier announcements. On one machine they are in a file, and one task of foreachBatch sorts and
selects. On a cluster they are in Spark's state of each stream, and foreachBatch sorts what was selected. Both select
the same updates.

The effects of a micro-batch, in order. With `durability = "power"`, each is on disk before the next begins
(`write_in_order`).

1. Spark's offset log: which records it reads.
2. The digests, each with the place of the copy that was selected.
3. The records, in one Spark job for both topics. Each has the epoch of its writer: the id of the query, and the
   number of the micro-batch.
4. The end offsets in `kiln.frames`, for the consumer group `kiln.updates`. `kiln recover` continues from them.
5. Spark's commit log.

After a crash, Spark repeats the micro-batch with the records of 1, and selects the same copies, by 2. Kafka may then
have a record twice, under one epoch. `batch` and the bridge's fetcher drop the second in an epoch (decision 7), and
`sink` stores a message once.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from kiln.pipelines.decode.breaker import check_samples
from kiln.pipelines.decode.decoder import DecodeConfig
from kiln.pipelines.runtime.checkpoint import Checkpoint
from kiln.pipelines.runtime.kafka import write_records
from kiln.pipelines.runtime.query_context import QueryContext, write_in_order
from kiln.pipelines.runtime.topics import ProgressMarker
from kiln.pipelines.updates.separators import SeparatorConfig
from kiln.pipelines.updates.transform import SMALL, build_stages


def start(context: QueryContext, decoding: DecodeConfig, separating: SeparatorConfig) -> StreamingQuery:
    """Start the query.

    After `kiln recover`, the first micro-batch only fills the deduplication state (decision 19).

    Raises:
        DecodingBrokenError: Messages that are known to be valid do not decode.
    """
    check_samples()
    session = context.new_session("updates")
    checkpoint = Checkpoint(context.checkpoints / "updates")
    replaced_epoch = checkpoint.replaced_epoch
    differences = session.sparkContext.accumulator(0)
    prefix = context.broker.prefix
    stages = build_stages(decoding, separating, prefix, replaced_epoch, differences.add)
    steps = context.find_deduplication("updates").accept_by_rule(stages)
    source = context.register_source("updates", session, steps.source_task, small=SMALL)
    decoded = session.readStream.format(source).schema(steps.source_schema).load()
    copies = steps.deduplicate(decoded)

    clock = context.create_clock("updates")
    marker = ProgressMarker(context.client_options, context.broker.topic("updates"))

    def write(rows: DataFrame, batch_id: int, query_id: str) -> None:
        clock.set_time(rows.sparkSession.sparkContext)
        rows = steps.finish(rows, checkpoint.count_records(batch_id))
        if batch_id == 0 and replaced_epoch is not None:
            rows.write.format("noop").mode("append").save()  # runs the tasks, which fill the deduplication state
        else:
            write_records(rows, context.broker)
        marker.commit(query_id, batch_id, checkpoint.ends(batch_id))
        found = differences.value
        differences.value = 0
        context.report("updates", {"core_differences": found})

    return (
        copies.writeStream.queryName("updates")
        .foreachBatch(write_in_order(write, context.find_durable_checkpoint("updates")))
        .option("checkpointLocation", context.checkpoint_uri("updates"))
        .trigger(processingTime=context.trigger)
        .start()
    )
