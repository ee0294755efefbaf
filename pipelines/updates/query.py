"""Query `updates`: from Kafka's topic `kiln.frames` to the topics `kiln.updates` and `kiln.wanted`.

An update whose message names its separator goes to `kiln.updates`. If only the genesis of the Ceramic stream tells the
separator, the update goes to `kiln.wanted` instead, and the bridge's fetcher writes it to `kiln.updates` when it has
the genesis. `kiln.wanted` also gets requests for geneses that confirm a named separator, and for the blocks of other
nodes' batches.

    source: decode, find the separator ─ select new updates, in the order of capture ─ Kafka

An announcement of a tip that was announced before is no new update (`kiln.pipelines.updates.repeats`). The digests
that tell this are kept for `dedupe.signed_ttl`. On one machine, they are in a file next to the checkpoint, and one task
of foreachBatch sorts and selects. On a cluster, they are in Spark's state with the Ceramic stream as key, and
foreachBatch sorts what was selected. Both ways select the same updates.

The effects of a micro-batch, in order. With `durability = "power"`, each is synced to disk before the next begins
(`write_in_order`); otherwise each survives a killed process.

1. Spark's offset log: the records of the micro-batch.
2. The digests, each with the place of the selected copy (topic partition, offset and index).
3. The records, in one Spark job for both topics. The tasks stamp each with its epoch: the id of the query and the
   number of the micro-batch, which Spark gives to every task.
4. The end offsets in `kiln.frames`, for the consumer group `kiln.updates`.
5. Spark's commit log.

After a crash, Spark repeats the micro-batch, with the same records and ids.

- On one machine, the copies whose places the file has are selected again. On a cluster, Spark's state begins again
  without the digests of the micro-batch.
- A topic may then have a record twice, under one epoch. `batch`, and the fetcher in `kiln.wanted`, drop the second one
  in an epoch (decision 7). `sink` stores a message once. The same holds for a task that Spark runs twice.
- Without a checkpoint, `kiln recover` makes one that begins before the offsets of 4. Its first micro-batch reads the
  frames of the last `dedupe.signed_ttl` again, and writes only the digests.
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
    deduplication = context.find_deduplication("updates")
    steps = build_steps(deduplication, decoding, separating, prefix, replaced_epoch, differences.add)
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
