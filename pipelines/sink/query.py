"""Query `sink`: the topics that the other queries and the bridge write to, to their Delta tables."""

from __future__ import annotations

import msgspec
from pyspark import StorageLevel
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from kiln.pipelines.batch.log_time import LogTimeFile
from kiln.pipelines.delta.commits import WriteId
from kiln.pipelines.delta.files import DataFile, discard
from kiln.pipelines.delta.tables import read_rows, write_files
from kiln.pipelines.runtime.checkpoint import Checkpoint
from kiln.pipelines.runtime.kafka import stream_topics
from kiln.pipelines.runtime.query_plan import QueryContext, each_batch, fitted, start_query
from kiln.pipelines.sink.transform import (
    CLOCK,
    FILLED,
    RECEIVED_ROWS,
    TOPICS,
    SinkOutput,
    foreign,
    held_back,
    once_each,
    received,
    received_tips,
    table_rows,
    weighed,
    written,
    written_once,
)

_HELD_AGAINST = ("publications", "streams")


def start(plan: QueryContext) -> StreamingQuery:
    """Starts the query."""
    session = plan.new_session()
    plan.lake.create(FILLED)
    records = stream_topics(session, plan.broker, TOPICS, plan.at_most)
    remembered = plan.remembers("sink")
    rows = once_each(table_rows(records), plan.remembered) if remembered is None else records
    log_clock = LogTimeFile(plan.checkpoints / "sink" / "clock.json")
    batch_clock, checkpoint = plan.batch_clock("sink"), Checkpoint(plan.checkpoints / "sink")

    def write(rows: DataFrame, batch_id: int, query_id: str) -> None:
        batch_clock.tell(rows.sparkSession.sparkContext)
        rows, stood = fitted(rows, checkpoint.records(batch_id)), log_clock.before(batch_id)
        if remembered is None:
            out = written(rows, plan.lake, stood)
        else:
            out = written_once(rows, plan.lake, stood, remembered)
        out.persist(StorageLevel.DISK_ONLY)  # what was received is read once more, and a stage writes its files once
        try:
            told = out.where(F.col("kind") != RECEIVED_ROWS).collect()
            clocks: dict[int, int] = {}
            files: dict[str, list[DataFile]] = {}
            for row in told:
                if row.kind == CLOCK:
                    partition, at = msgspec.msgpack.decode(bytes(row.data), type=tuple[int, int])
                    clocks[partition] = max(at, clocks.get(partition, 0))
                else:
                    for file in msgspec.msgpack.decode(bytes(row.data), type=SinkOutput).files:
                        files.setdefault(file.table, []).append(file)
            seen = {table: sum(file.rows for file in files[table]) for table in FILLED if table in files}
            for table in seen:
                commit(table, files[table], WriteId(query_id, batch_id))
            of_others = out.where(F.col("kind") == RECEIVED_ROWS)
            if not of_others.isEmpty():  # after the table `streams` has what this micro-batch says of them
                ours, streams = (read_rows(session, plan.lake, name) for name in _HELD_AGAINST)
                tips = weighed(foreign(received(of_others), ours), streams)
                write = WriteId(query_id, batch_id, "received")
                for table, found in (("tips", received_tips(tips)), ("quarantine", held_back(tips))):
                    commit(table, write_files(found.coalesce(1), plan.lake, table), write)
            log_clock.move(batch_id, clocks)
        finally:
            out.unpersist()
        plan.report("sink", seen)

    def commit(table: str, files: list[DataFile], write: WriteId) -> None:
        if files and not plan.commits.commit(table, files, write):
            discard(plan.lake, files)

    return start_query("sink", plan, each_batch(rows, write, plan.kept("sink")))
