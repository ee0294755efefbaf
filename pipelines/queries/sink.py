"""Query `sink`: the topics that the other queries and the bridge write to, to their Delta tables."""

from __future__ import annotations

from pathlib import Path

from pyspark import StorageLevel
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from pipelines.lake.append import Write, append_once, read_table
from pipelines.queries.plan import Plan, each_batch, start_query
from pipelines.spark.kafka import stream_topics
from pipelines.spark.log_clock import LogClock
from pipelines.transforms.sink import (
    FILLED,
    TOPICS,
    at_the_clock,
    foreign,
    held_back,
    once_each,
    received_tips,
    rows_of,
    table_rows,
    weighed,
)

_HELD_AGAINST = ("publications", "streams")


def start(plan: Plan) -> StreamingQuery:
    """Starts the query."""
    session = plan.new_session()
    plan.lake.create(FILLED)
    records = stream_topics(session, plan.broker, TOPICS, plan.at_most)
    rows = once_each(table_rows(records), plan.remembered)
    clock = LogClock(Path(plan.checkpoints) / "sink" / "clock.json")

    def write(rows: DataFrame, batch_id: int, query_id: str) -> None:
        rows.persist(StorageLevel.DISK_ONLY)  # rows may be large, and are read once more or twice
        try:
            found = rows.groupBy("table", "clock.log_partition").agg(
                F.count("*").alias("rows"), F.max(F.unix_micros("clock.at")).alias("at")
            )
            counted = found.collect()
            clocks = {row.log_partition: row["at"] for row in counted if row.table == "clock"}
            seen = {row.table: row["rows"] for row in counted if row.table != "clock"}
            for table in FILLED:
                if seen.get(table):
                    of_table = rows_of(rows, table)
                    if table == "updates":
                        of_table = at_the_clock(of_table, clock.before(batch_id))
                    append_once(of_table.coalesce(1), plan.lake, table, Write(query_id, batch_id))
            if seen.get("received"):  # after the table `streams` has what this micro-batch says of them
                ours, streams = (read_table(session, plan.lake, name) for name in _HELD_AGAINST)
                tips = weighed(foreign(rows_of(rows, "received"), ours), streams)
                received = Write(query_id, batch_id, "received")
                append_once(received_tips(tips).coalesce(1), plan.lake, "tips", received)
                append_once(held_back(tips).coalesce(1), plan.lake, "quarantine", received)
            clock.move(batch_id, clocks)
            plan.report("sink", seen)
        finally:
            rows.unpersist()

    return start_query("sink", plan, each_batch(rows, write))
