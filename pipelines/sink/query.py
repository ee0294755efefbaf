"""Query `sink`: from six of Kafka's topics to Delta.

    kiln.updates, kiln.batches, kiln.publications, kiln.streams, kiln.quarantine → the tables of the same names
    kiln.updates, kiln.blocks → `tips`: tips that Kiln received as updates, and in the batches of other nodes

    on one machine   source: decode, accept each row once, write files ─ foreachBatch: received tips, commits
    on a cluster     source: decode ─ dropDuplicatesWithinWatermark ─ foreachBatch: write files, received tips, commits

The first micro-batch begins at the oldest records in Kafka, and each later one where the previous one ended. A
micro-batch has at most `max_offsets_per_trigger` records. The query stops with an error if Kafka has deleted a record
that the query has not read. A micro-batch starts every 10 s (`jobs.sink.trigger`), or as soon as the previous one ends
if that one takes longer.

The source is Kiln's own (`pipelines/runtime/kafka.py`): its tasks read Kafka and decode, and no partition is divided
between two tasks. Tasks write the rows of tables into files. The driver gets the names of these files, the log time of
each partition, and received tips. The column `kind` tells them apart.

A row is accepted unless a row with the same digest was accepted within `dedupe.signed_ttl`. The digest covers the
columns that identify a row in its table. On one machine, a file next to the checkpoint stores the digests, each with
the position of the accepted row (topic, partition, offset, index in the record). On a cluster, Spark's state stores
them. A micro-batch has one time, which the driver's clock gives at its start and which never goes back. Digests expire
by this time, after at least `dedupe.signed_ttl` and at most twice that.

*Received tips* are the tips in the batches of other nodes (`kiln.blocks`). foreachBatch compares them with the tables
`publications` and `streams`, including the rows that this micro-batch adds to these tables. In a repeat, the tables may
already have these rows; the comparison then sees them twice, which changes nothing. If `publications` has the batch, it
is Kiln's own, which a peer sent back, and its tips are dropped. If `streams` has another separator for the stream, the
tip becomes a row of `quarantine`. Every other tip becomes a row of `tips`.

A micro-batch has these effects, in this order. With `durability = "power"`, `write_in_order` syncs the checkpoint
after 1 and after 4, and tasks and commits sync their files. So a power cut has the same effects as a crash.

1. Spark's offset log: which records the micro-batch has.
2. The tasks store the digests, in the file or in Spark's state, and write files of rows, which no table names yet.
3. A Delta commit to each table with new rows. If there are received tips, a second commit to `tips` and to `quarantine`
   follows. The transaction identifier of a commit (`txn`) holds the ids of the query and the micro-batch, and `append`
   or `received` for the first or the second commit.
4. The file `clock.json`, with the log time of each partition of `kiln.updates` before this micro-batch (for a repeat)
   and after it. Log time is the greatest broker timestamp so far. The column `updates.log_time` is computed from it.
   The file is replaced by rename. If it is missing, log time is read from the table `updates`.
5. Spark's commit log.

After a crash, Spark repeats the micro-batch, with the same records and ids, and with log time as before it.

- The same rows are accepted, unless the stop was so long that digests have expired. On one machine, the file has the
  positions of the accepted rows; on a cluster, Spark begins with the state before the micro-batch.
- Rows go into new files. `kiln maintain` deletes files that no commit names.
- A table that already has the transaction ignores the commit. Until the repeat, some tables have the rows of the
  micro-batch and others do not.
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
        clock.set_time(rows.sparkSession.sparkContext)  # the time by which digests expire
        set_log_times(rows.sparkSession.sparkContext, log_time_file.read_start(batch_id))
        out = steps.run_in_micro_batch(rows, checkpoint.count_records(batch_id))
        out.persist(StorageLevel.DISK_ONLY)  # received tips are read again, and the tasks must write files only once
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
            received_rows = out.where(F.col("kind") == RECEIVED_ROWS)
            if not received_rows.isEmpty():
                publications, streams = (
                    read_rows(session, context.lake, name).unionByName(
                        read_files(session, context.lake, name, files.get(name, [])), allowMissingColumns=True
                    )
                    for name in ("publications", "streams")
                )
                foreign_tips = exclude_own_batches(read_received_tips(received_rows), publications)
                tips = join_verified_separators(foreign_tips, streams)
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
