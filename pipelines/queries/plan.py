"""What a query is started with, and how it is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.listener import StreamingQueryListener
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from pipelines.lake.lake import Lake
from pipelines.logic.batching import Batching
from pipelines.logic.breaker import Breaker
from pipelines.logic.decode import Decoding
from pipelines.spark.kafka import Broker
from pipelines.transforms.updates import Separating

Report = Callable[[str, Mapping[str, int]], None]
"""Takes (query, counts by name) after each micro-batch of a query that counts what it sees."""


def unheard(query: str, counts: Mapping[str, int]) -> None:
    """For a query whose counts nobody asks for."""


@dataclass(frozen=True)
class Plan:
    """All that a query may be started with, as plain values; each query takes what it needs.

    `trigger`, `remembered`: Spark intervals; `at_most`: records a micro-batch, 0 for no bound.
    """

    spark: SparkSession
    broker: Broker
    lake: Lake
    checkpoints: str
    trigger: str
    at_most: int
    state_partitions: int
    remembered: str
    """how long a digest is remembered, by which copies are known (decision 10)"""
    decoding: Decoding
    separating: Separating
    batching: Batching
    breaker: Breaker
    report: Report = field(default=unheard)
    listener: StreamingQueryListener | None = None

    def session(self) -> SparkSession:
        """A session of the query's own: the number of state partitions is a session's, and for life in a checkpoint."""
        session = self.spark.newSession()
        session.conf.set("spark.sql.shuffle.partitions", str(self.state_partitions))
        if self.listener is not None:  # heard only of queries of the session it is added to
            session.streams.addListener(self.listener)
        return session


def start_query(name: str, plan: Plan, writer: DataStreamWriter) -> StreamingQuery:
    """Starts a query under its name, with its checkpoint, in a FAIR pool of its own so that none waits for another."""
    plan.spark.sparkContext.setLocalProperty("spark.scheduler.pool", name)
    return (
        writer.queryName(name)
        .option("checkpointLocation", f"{plan.checkpoints}/{name}")
        .trigger(processingTime=plan.trigger)
        .start()
    )


def each_batch(frame: DataFrame, write: Callable[[DataFrame, int, str], None]) -> DataStreamWriter:
    """A `foreachBatch` that also hands on the query's id, by which writes are known to be repeats."""

    def call(rows: DataFrame, batch_id: int) -> None:
        query_id = rows.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        if query_id is None:
            raise RuntimeError("foreachBatch outside a streaming query")
        write(rows, batch_id, query_id)

    return frame.writeStream.foreachBatch(call)
