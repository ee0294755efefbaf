"""Query `batch`: windows of each separator to CIP-123 batches on `kiln.batches`. Its driver ticks the log's clock."""

from __future__ import annotations

from pyspark.sql.streaming.query import StreamingQuery

from pipelines.batcher import Batching
from pipelines.plan import Plan, start_query
from pipelines.sinks import sink_options
from pipelines.sources import stream_topics
from pipelines.transforms.batch import batches


def start(plan: Plan, batching: Batching) -> StreamingQuery:
    """Starts the query; a `Ticker` must run beside it, or windows close only with later updates."""
    records = stream_topics(plan.session(), plan.broker, ["updates"], plan.at_most)
    rows = batches(records, batching, plan.broker.prefix)
    return start_query("batch", plan, rows.writeStream.format("kafka").options(**sink_options(plan.broker)))


if __name__ == "__main__":
    from pipelines.alone import main

    raise SystemExit(main("batch"))
