"""Query `sink`: the topics that the other queries and the bridge write to, to their Delta tables."""

from __future__ import annotations

from pyspark import StorageLevel
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from pipelines.plan import Plan, each_batch, start_query
from pipelines.sinks import Write, append_once, create_tables
from pipelines.sources import stream_topics
from pipelines.transforms.sink import FILLED, TOPICS, once_each, rows_of, table_rows


def start(plan: Plan, remembered: str) -> StreamingQuery:
    """Starts the query. It writes the tables FILLED. `remembered`: a Spark interval."""
    session = plan.session()
    create_tables(plan.lake, FILLED)
    records = stream_topics(session, plan.broker, TOPICS, plan.at_most)
    rows = once_each(table_rows(records), remembered)

    def write(rows: DataFrame, batch_id: int, query_id: str) -> None:
        rows.persist(StorageLevel.DISK_ONLY)  # rows may be large, and are read once more or twice
        try:
            seen = {row.table: row["count"] for row in rows.groupBy("table").count().collect()}
            for table in FILLED:
                if seen.get(table):
                    append_once(rows_of(rows, table).coalesce(1), plan.lake, table, Write(query_id, batch_id))
            plan.report("sink", seen)
        finally:
            rows.unpersist()

    return start_query("sink", plan, each_batch(rows, write))


if __name__ == "__main__":
    from pipelines.alone import main

    raise SystemExit(main("sink"))
