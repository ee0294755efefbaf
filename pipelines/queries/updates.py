"""Query `updates`: the first good copy of every UPDATE, with its separator, to `kiln.updates`; what must be fetched
first to `kiln.wanted`."""

from __future__ import annotations

from pyspark.sql.streaming.query import StreamingQuery

from pipelines.logic.breaker import check_samples
from pipelines.queries.plan import Plan, start_query
from pipelines.spark.kafka import sink_options, stream_topics
from pipelines.transforms.updates import first_copies, updates
from schemas.queries import QUERIES


def start(plan: Plan) -> StreamingQuery:
    """Starts the query. DecodingBrokenError: messages that are known to be good do not decode.

    After a crash, Kafka may hold a micro-batch twice, under the same epoch (decision 7).
    """
    check_samples()
    records = stream_topics(plan.new_session(), plan.broker, QUERIES["updates"].reads, plan.at_most)
    rows = first_copies(updates(records, plan.decoding, plan.separating), plan.remembered, plan.broker.prefix)
    return start_query("updates", plan, rows.writeStream.format("kafka").options(**sink_options(plan.broker)))
