"""Query `sink`: the topics that the other queries and the bridge write, to their Delta tables.

    kiln.updates, batches, publications, quarantine, streams, blocks ─ source: decode ─ drop rows that are stored
        ─ foreachBatch: write files; compare received tips with `streams` ─ Delta

On one machine the tasks of the source decode, drop and write, with the state of deduplication in a file. On a cluster,
Spark's state drops the rows, and a stage in foreachBatch writes the files. Either way a micro-batch has rows of kind
and data: received tips, log time by partition, and the names of the files of each task.

A micro-batch takes effect in this order: files of rows, a commit to each table, log time into `clock.json`, Spark's
commit of the checkpoint. After a crash between two of them, Spark repeats the micro-batch with the same offsets and
ids, and a table that has the ids already skips it. Files without a commit are no rows, and maintenance removes them.
"""

from __future__ import annotations

import msgspec
from pyspark import StorageLevel
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from kiln.pipelines.batch.log_time import LogTimeFile, set_log_times
from kiln.pipelines.delta.files import DataFile
from kiln.pipelines.delta.tables import read_files, read_rows, write_files
from kiln.pipelines.runtime.checkpoint import Checkpoint
from kiln.pipelines.runtime.query_context import QueryContext, TableOutput, write_in_order
from kiln.pipelines.sink.rows import LOG_TIME, RECEIVED_ROWS, LogTimeRow
from kiln.pipelines.sink.transform import (
    OUTPUT_TABLES,
    build_stages,
    exclude_own_batches,
    join_verified_separators,
    quarantine_contradicted_tips,
    read_log_times,
    read_received_tips,
    select_received_tips,
)

_REFERENCE_TABLES = ("publications", "streams")
_TASKS = 2  # a task for each partition of six topics would cost more than the work itself


def start(context: QueryContext) -> StreamingQuery:
    """Start the query."""
    session = context.new_session("sink")
    context.lake.create(OUTPUT_TABLES)
    steps = context.find_deduplication("sink").accept_once(build_stages(context.lake))
    source = context.register_source("sink", session, steps.source_task, tasks=_TASKS)
    decoded = session.readStream.format(source).schema(steps.source_schema).load()
    rows = steps.deduplicate(decoded)
    log_time_file = LogTimeFile(context.checkpoints / "sink" / "clock.json", lambda: read_log_times(context.lake))
    clock, checkpoint = context.create_clock("sink"), Checkpoint(context.checkpoints / "sink")
    tables = context.create_table_writer("sink")

    def write(rows: DataFrame, batch_id: int, query_id: str) -> None:
        clock.set_time(rows.sparkSession.sparkContext)
        set_log_times(rows.sparkSession.sparkContext, log_time_file.read_start(batch_id))
        out = steps.finish(rows, checkpoint.count_records(batch_id))
        out.persist(StorageLevel.DISK_ONLY)  # received tips are read again, and a stage must write its files only once
        try:
            summaries = out.where(F.col("kind") != RECEIVED_ROWS).collect()
            stamps: dict[int, int] = {}
            files: dict[str, list[DataFile]] = {}
            for row in summaries:
                if row.kind == LOG_TIME:
                    partition, at = msgspec.msgpack.decode(bytes(row.data), type=LogTimeRow)
                    stamps[partition] = max(at, stamps.get(partition, 0))
                else:
                    for file in msgspec.msgpack.decode(bytes(row.data), type=list[DataFile]):
                        files.setdefault(file.table, []).append(file)
            counts = {table: sum(file.rows for file in files[table]) for table in OUTPUT_TABLES if table in files}
            outputs = [TableOutput(table, files[table]) for table in counts]
            foreign_rows = out.where(F.col("kind") == RECEIVED_ROWS)
            if not foreign_rows.isEmpty():
                ours, streams = (
                    read_rows(session, context.lake, name).unionByName(
                        read_files(session, context.lake, name, files.get(name, [])), allowMissingColumns=True
                    )
                    for name in _REFERENCE_TABLES
                )
                tips = join_verified_separators(exclude_own_batches(read_received_tips(foreign_rows), ours), streams)
                for table, selected in (
                    ("tips", select_received_tips(tips)),
                    ("quarantine", quarantine_contradicted_tips(tips)),
                ):
                    written = write_files(selected.coalesce(1), context.lake, table)
                    outputs.append(TableOutput(table, written, "received"))
            tables.commit(query_id, batch_id, outputs)
            log_time_file.advance(batch_id, stamps)
        finally:
            out.unpersist()
        context.report("sink", counts)

    return (
        rows.writeStream.queryName("sink")
        .foreachBatch(write_in_order(write, context.find_durable_checkpoint("sink")))
        .option("checkpointLocation", context.checkpoint_uri("sink"))
        .trigger(processingTime=context.trigger)
        .start()
    )
