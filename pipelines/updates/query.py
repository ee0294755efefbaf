"""Query `updates`: from Kafka's topic `kiln.frames` to the topics `kiln.updates` and `kiln.wanted`.

An update whose message names its separator goes to `kiln.updates`. If only the genesis of the Ceramic stream names the
separator, the update goes to `kiln.wanted` instead. The bridge's fetcher then fetches the genesis, and writes the
update to `kiln.updates`. `kiln.wanted` also has requests for the blocks of other nodes' batches, and for geneses that
are to confirm the separators in messages. The updates of these messages do not wait.

    on one machine   source: decode, find the separator ─ foreachBatch: one task sorts by capture time, and selects
                     new updates ─ Kafka
    on a cluster     source: decode, find the separator ─ operator with the Ceramic stream as key: select new updates
                     ─ foreachBatch: sort by capture time ─ Kafka

The first micro-batch begins at the oldest records in Kafka, and each later one where the previous one ended. A
micro-batch has at most `max_offsets_per_trigger` records. The query stops with an error if Kafka has deleted a record
that the query has not read. A micro-batch starts every 0.9 s (`jobs.updates.trigger`), or as soon as the previous one
ends if that one takes longer. The source is Kiln's own (`pipelines/runtime/kafka.py`): its tasks read Kafka, decode,
and find separators.

A tip that was announced before is usually no new update (`kiln.pipelines.updates.repeats`). This rule needs the digests
of the announcements of the last `dedupe.signed_ttl`. On one machine, a file next to the checkpoint stores them, each
with the position of the selected copy (partition, offset, index in the frame). On a cluster, Spark's state stores them.
Both ways select the same updates, because both take a stream's copies in the order of capture time. A micro-batch has
one time, which the driver's clock gives at its start and which never goes back. Digests expire by this time, after at
least `dedupe.signed_ttl` and at most twice that.

A micro-batch has these effects, in this order. With `durability = "power"`, `write_in_order` syncs the checkpoint
after 1 and after 4, and Kafka must sync its own log. A power cut then has the same effects as a crash.

1. Spark's offset log: which records the micro-batch has.
2. The digests, in the file or in Spark's state.
3. The records of both topics. On one machine, the task alternates between 2 and 3: it stores the digests of a few
   thousand copies, and then writes their records. On a cluster, the state is complete before the first record is
   written. Each record has the epoch in which it was written: the id of the query and the number of the micro-batch.
4. The offsets in `kiln.frames` at which the micro-batch ended, committed for the consumer group that is named after the
   query, with the ids of the query and the micro-batch. Only `kiln recover` reads them.
5. Spark's commit log.

After a crash, Spark repeats the micro-batch, with the same records and ids.

- The same updates are selected, unless the stop was so long that digests have expired. On one machine, the file
  has the positions of the selected copies; on a cluster, Spark begins with the state before the micro-batch.
- So a topic may have a record twice, with the same epoch. This also happens if Spark runs a task twice. The readers of
  the topics drop the second record: `batch` and the fetcher keep the digests of the messages in the newest epoch of
  each writer (`EpochGuard`), and `sink` stores a message once.
- If the checkpoint is lost, `kiln recover` makes a new one from the newest commit of step 4. Micro-batch 0 reads the
  frames of the last `dedupe.signed_ttl` before the committed offsets, and writes only digests. Micro-batch 1 begins at
  these offsets. It writes under the id of the old query, with the epoch number after the committed one
  (`replaced_epoch`), and later micro-batches continue this numbering. So if the old query had begun to write this
  epoch, readers drop what they already have of it.
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
from kiln.pipelines.updates.transform import SMALL, build_steps


def start(context: QueryContext, decoding: DecodeConfig, separating: SeparatorConfig) -> StreamingQuery:
    """Start the query.

    Raises:
        DecodingBrokenError: Messages that are known to be valid do not decode.
    """
    check_samples()
    session = context.new_session("updates")
    checkpoint = Checkpoint(context.checkpoints / "updates")
    replaced_epoch = checkpoint.replaced_epoch
    differences = session.sparkContext.accumulator(0)
    prefix = context.broker.prefix
    deduplication = context.find_deduplication("updates")
    steps = build_steps(deduplication, decoding, separating, prefix, replaced_epoch, differences.add)
    source = context.register_source("updates", session, steps.source_task, small=SMALL)
    decoded = session.readStream.format(source).schema(steps.source_schema).load()
    copies = steps.deduplicate(decoded)

    clock = context.create_clock("updates")
    marker = ProgressMarker(context.client_options, context.broker.topic("updates"))

    def write(rows: DataFrame, batch_id: int, query_id: str) -> None:
        clock.set_time(rows.sparkSession.sparkContext)  # the time by which digests expire
        rows = steps.run_in_micro_batch(rows, checkpoint.count_records(batch_id))
        if batch_id == 0 and replaced_epoch is not None:
            rows.write.format("noop").mode("append").save()  # the tasks write digests, and nothing goes to Kafka
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
