"""Query `updates`. It writes each new update, with its separator, to `kiln.updates`. It writes requests for blocks to
`kiln.wanted`.

    kiln.frames ─ source: decode ─ foreachBatch: sort by capture time, drop repeats ─ Kafka

On one machine one task of the micro-batch drops repeats, with the state of deduplication in a file. On a cluster,
Spark's state drops them before foreachBatch, by stream. Either way a micro-batch ends as rows of topic, key and value,
sorted by capture time.

A micro-batch takes effect in this order: the records are written to Kafka, the offsets are committed for a consumer
group, and Spark commits the checkpoint. After a crash between two of them, Spark repeats the micro-batch. Kafka may
then have it twice, under the same epoch (decision 7), and `batch` and `sink` drop the second.
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
    copies = session.readStream.format(source).schema(steps.source_schema).load()
    stream = steps.deduplicate(copies)

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
        stream.writeStream.queryName("updates")
        .foreachBatch(write_in_order(write, context.find_durable_checkpoint("updates")))
        .option("checkpointLocation", context.checkpoint_uri("updates"))
        .trigger(processingTime=context.trigger)
        .start()
    )
