"""Query `messages`: one good copy of every message to Delta; what is no message to quarantine."""

from __future__ import annotations

from pyspark import StorageLevel
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from pipelines.lake.append import Write, append_once
from pipelines.logic.breaker import Tally, check_samples
from pipelines.queries.plan import Plan, each_batch, start_query
from pipelines.spark.kafka import stream_topics, write_topic
from pipelines.transforms.messages import by_author, counts, decoded, faults, first_copies, good
from schemas.queries import QUERIES


def start(plan: Plan) -> StreamingQuery:
    """Starts the query. DecodingBrokenError: messages that are known to be good do not decode."""
    check_samples()
    session = plan.new_session()
    plan.lake.create(QUERIES["messages"].tables)
    records = stream_topics(session, plan.broker, QUERIES["messages"].reads, plan.at_most)
    rows = first_copies(decoded(records, plan.decoding), plan.remembered)

    def write(rows: DataFrame, batch_id: int, query_id: str) -> None:
        rows.persist(StorageLevel.DISK_ONLY)  # rows may be large, and are read once more or twice
        try:
            seen = {(row.type, row.reason): row.rows for row in counts(rows).collect()}
            failures = any(reason for _, reason in seen)
            if failures:
                plan.breaker.observe(Tally(*row) for row in by_author(rows).collect())
                write_topic(faults(rows), plan.broker, "quarantine")
            if any(reason is None for _, reason in seen):
                append_once(good(rows), plan.lake, "messages", Write(query_id, batch_id))
            plan.report("messages", {kind or reason: number for (kind, reason), number in seen.items()})
        finally:
            rows.unpersist()

    return start_query("messages", plan, each_batch(rows, write))
