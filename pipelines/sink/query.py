"""Query `sink`: the topics that the other queries and the bridge write to, to their Delta tables."""

from __future__ import annotations

import msgspec
from pyspark import StorageLevel
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from kiln.pipelines.batch.log_time import LogTimeFile
from kiln.pipelines.delta.commits import WriteId
from kiln.pipelines.delta.files import DataFile, delete_files
from kiln.pipelines.delta.tables import read_rows, write_files
from kiln.pipelines.runtime.checkpoint import Checkpoint
from kiln.pipelines.runtime.kafka import stream_topics
from kiln.pipelines.runtime.query_context import QueryContext, coalesce_small, start_query, write_micro_batches
from kiln.pipelines.sink.transform import (
    LOG_TIME,
    OUTPUT_TABLES,
    RECEIVED_ROWS,
    TOPICS,
    SinkOutput,
    decode_table_rows,
    deduplicate_rows,
    exclude_own_batches,
    join_verified_separators,
    quarantine_contradicted_tips,
    read_received_tips,
    select_received_tips,
    sink_records,
    write_tables,
)

_HELD_AGAINST = ("publications", "streams")


def start(context: QueryContext) -> StreamingQuery:
    """Starts the query."""
    session = context.new_session()
    context.lake.create(OUTPUT_TABLES)
    records = stream_topics(session, context.broker, TOPICS, context.max_records)
    remembered = context.find_dedup_store("sink")
    rows = deduplicate_rows(decode_table_rows(records), context.dedup_retention) if remembered is None else records
    log_clock = LogTimeFile(context.checkpoints / "sink" / "clock.json")
    batch_clock, checkpoint = context.create_clock("sink"), Checkpoint(context.checkpoints / "sink")

    def write(rows: DataFrame, batch_id: int, query_id: str) -> None:
        batch_clock.set_time(rows.sparkSession.sparkContext)
        rows, stood = coalesce_small(rows, checkpoint.count_records(batch_id)), log_clock.read_start(batch_id)
        if remembered is None:
            out = write_tables(rows, context.lake, stood)
        else:
            out = sink_records(rows, context.lake, stood, remembered)
        out.persist(StorageLevel.DISK_ONLY)  # what was received is read once more, and a stage writes its files once
        try:
            told = out.where(F.col("kind") != RECEIVED_ROWS).collect()
            clocks: dict[int, int] = {}
            files: dict[str, list[DataFile]] = {}
            for row in told:
                if row.kind == LOG_TIME:
                    partition, at = msgspec.msgpack.decode(bytes(row.data), type=tuple[int, int])
                    clocks[partition] = max(at, clocks.get(partition, 0))
                else:
                    for file in msgspec.msgpack.decode(bytes(row.data), type=SinkOutput).files:
                        files.setdefault(file.table, []).append(file)
            seen = {table: sum(file.rows for file in files[table]) for table in OUTPUT_TABLES if table in files}
            for table in seen:
                commit(table, files[table], WriteId(query_id, batch_id))
            of_others = out.where(F.col("kind") == RECEIVED_ROWS)
            if not of_others.isEmpty():  # after the table `streams` has what this micro-batch says of them
                ours, streams = (read_rows(session, context.lake, name) for name in _HELD_AGAINST)
                tips = join_verified_separators(exclude_own_batches(read_received_tips(of_others), ours), streams)
                write = WriteId(query_id, batch_id, "received")
                for table, found in (
                    ("tips", select_received_tips(tips)),
                    ("quarantine", quarantine_contradicted_tips(tips)),
                ):
                    commit(table, write_files(found.coalesce(1), context.lake, table), write)
            log_clock.advance(batch_id, clocks)
        finally:
            out.unpersist()
        context.report("sink", seen)

    def commit(table: str, files: list[DataFile], write: WriteId) -> None:
        if files and not context.commits.commit(table, files, write):
            delete_files(context.lake, files)

    return start_query("sink", context, write_micro_batches(rows, write, context.find_durable_checkpoint("sink")))
