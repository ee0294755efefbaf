"""Query `archive`: the exact bytes of every frame to Delta, and each copy of a message."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from pipelines.lake.append import Write, append_once, read_table, written
from pipelines.logic.held_frames import HeldFrames, merge
from pipelines.queries.plan import Plan, each_batch, start_query
from pipelines.spark.held_frames import HeldFramesParam, read_held_frames
from pipelines.spark.kafka import stream_topics
from pipelines.transforms.archive import copies, frames
from schemas.queries import QUERIES


def start(plan: Plan) -> StreamingQuery:
    """Starts the query."""
    session = plan.new_session()
    plan.lake.create(QUERIES["archive"].tables)
    archive = _Archive(plan)
    records = stream_topics(session, plan.broker, QUERIES["archive"].reads, plan.at_most)
    return start_query("archive", plan, each_batch(records, archive.write))


class _Archive:
    """Writes the micro-batches. From the first one on, the driver knows which frames the lake holds (decision 9)."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._bundles = plan.decoding.bundles
        self._held: HeldFrames | None = None

    def write(self, records: DataFrame, batch_id: int, query_id: str) -> None:
        """Writes one micro-batch. A repeat after a crash makes the same rows, and `append_once` skips them."""
        write = Write(query_id, batch_id)
        spark = records.sparkSession
        if self._held is None:
            self._held = self._held_before(spark, records, write)
        context = spark.sparkContext
        held = context.broadcast(self._held)
        taken = context.accumulator(HeldFrames(), HeldFramesParam())
        append_once(frames(records, held, taken), self._plan.lake, "frames", write)
        append_once(copies(records, held, self._bundles), self._plan.lake, "copies", write)
        merge(self._held, taken.value)
        held.destroy()

    def _held_before(self, spark: SparkSession, records: DataFrame, write: Write) -> HeldFrames:
        """What the lake held before this micro-batch. If the micro-batch is a repeat, its own frames do not count."""
        kept = read_table(spark, self._plan.lake, "frames")
        if written(self._plan.lake, "frames", write):
            own = records.select(F.col("partition").alias("kafka_partition"), F.col("offset").alias("kafka_offset"))
            kept = kept.join(own, ["kafka_partition", "kafka_offset"], how="left_anti")
        return read_held_frames(kept)
