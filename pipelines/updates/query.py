"""Query `updates`. It writes each new update, with its separator, to `kiln.updates`, and requests for blocks to
`kiln.wanted`."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from kiln.pipelines.decode.breaker import check_samples
from kiln.pipelines.decode.decoder import DecodeConfig
from kiln.pipelines.runtime.checkpoint import Checkpoint
from kiln.pipelines.runtime.kafka import write_records
from kiln.pipelines.runtime.progress_marker import ProgressMarker
from kiln.pipelines.runtime.query_context import QueryContext, is_small, start_query, write_micro_batches
from kiln.pipelines.updates.transform import (
    COPIES_DDL,
    ROWS_DDL,
    SeparatorConfig,
    build_decode_task,
    build_select_task,
    deduplicate_updates,
    sort_by_capture_time,
)

_SMALL = 2_000  # number of records up to which one task is as fast as several


def start(context: QueryContext, decoding: DecodeConfig, separating: SeparatorConfig) -> StreamingQuery:
    """Start the query.

    After a crash, Kafka may have a micro-batch twice, under the same epoch (decision 7). After `kiln recover`, the
    first micro-batch only fills the deduplication state (decision 19).

    Raises:
        DecodingBrokenError: Messages that are known to be valid do not decode.
    """
    check_samples()
    session = context.new_session()
    checkpoint = Checkpoint(context.checkpoints / "updates")
    replaced_epoch = checkpoint.replaced_epoch
    dedup = context.find_dedup_store("updates")
    if dedup is not None:
        select = build_select_task(decoding, separating, dedup, context.broker.prefix, replaced_epoch)
        stream = context.read_stream("updates", session, select, ROWS_DDL, small=_SMALL)
    else:
        decode = build_decode_task(decoding, separating, context.broker.prefix, replaced_epoch)
        copies = context.read_stream("updates", session, decode, COPIES_DDL, small=_SMALL)
        stream = deduplicate_updates(copies, context.dedup_retention)

    clock = context.create_clock("updates")
    marker = ProgressMarker(context.client_options, context.broker.topic("updates"))

    def write(rows: DataFrame, batch_id: int, query_id: str) -> None:
        clock.set_time(rows.sparkSession.sparkContext)
        # One task writes: a micro-batch has few new updates, and a shuffle by key costs more than it saves. A small
        # micro-batch has one task anyway, and each operation on a DataFrame costs 10 to 30 ms of planning.
        if dedup is None:
            rows = rows.coalesce(1)
        elif not is_small(checkpoint.count_records(batch_id), _SMALL):
            rows = rows.repartition(1)  # several tasks decode
        if batch_id == 0 and replaced_epoch is not None:
            rows.write.format("noop").mode("append").save()  # runs the tasks, which fill the deduplication state
        else:
            write_records(sort_by_capture_time(rows), context.broker)
        marker.commit(query_id, batch_id, checkpoint.ends(batch_id))

    return start_query(
        "updates", context, write_micro_batches(stream, write, context.find_durable_checkpoint("updates"))
    )
