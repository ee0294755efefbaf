"""Resources that a streaming query needs to start, its writer of Delta tables, and its function for foreachBatch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Final, NamedTuple

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.listener import StreamingQueryListener

from kiln.conf.process.librdkafka import librdkafka_options
from kiln.conf.process.location import Location
from kiln.pipelines.delta.commits import BatchProgress, WriteId
from kiln.pipelines.delta.delta_rs import DeltaRsCommits
from kiln.pipelines.delta.files import DataFile, delete_files
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.checkpoint import Checkpoint, DurableCheckpoint, read_topic_ids
from kiln.pipelines.runtime.clocks import MicroBatchClock
from kiln.pipelines.runtime.deduplication import Deduplication, find_deduplication
from kiln.pipelines.runtime.kafka import Broker, KafkaSource, register_source
from kiln.pipelines.runtime.kafka_ranges import ArrowTask
from kiln.pipelines.runtime.table_ages import TABLES_FILE, read_table_writes
from kiln.schemas.queries import QUERIES

_NEWEST: Final = 2
"""number of micro-batches that `TABLES_FILE` has for each write: two, because Spark may yet repeat the newest one"""


class TableOutput(NamedTuple):
    """Data files of one write to a table. `name` distinguishes two writes to one table in one micro-batch."""

    table: str
    files: Sequence[DataFile]
    name: str = "append"


class TableWriter:
    """Writer that commits the micro-batches of one query to its Delta tables. For one thread."""

    def __init__(self, lake: Lake, commits: DeltaRsCommits, checkpoint: Checkpoint) -> None:
        self._lake = lake
        self._commits = commits
        self._checkpoint = checkpoint
        self._path = checkpoint.path / TABLES_FILE
        self._saved = read_table_writes(checkpoint.path)
        self._committed = dict(self._saved)

    def commit(self, query_id: str, batch_id: int, outputs: Sequence[TableOutput]) -> None:
        """Commit all writes of a micro-batch to the tables, and save this in the checkpoint.

        Spark records the micro-batch as done afterwards. If the micro-batch is repeated after a crash, a write that the
        table already has is not committed again, and its new files are deleted.

        Each commit contains the list of all writes, and the offsets of the micro-batch. So `kiln recover` can find out
        from the tables alone where the query continues.
        """
        outputs = [output for output in outputs if output.files]
        progress = self._read_progress(query_id, batch_id, outputs) if outputs else None
        for table, files, name in outputs:
            write_id = WriteId(query_id, batch_id, name)
            if not self._commits.commit(table, files, write_id, progress):
                delete_files(self._lake, files)
            app_id = write_id.app_id(table)
            batches = {*self._committed.get(app_id, ()), batch_id}
            self._committed[app_id] = sorted(batches)[-_NEWEST:]
        self._committed = {
            app_id: batches for app_id, batches in self._committed.items() if app_id.startswith(f"{query_id}:")
        }
        if self._committed != self._saved:
            self._path.write([msgspec.json.encode(self._committed)])
            self._saved = dict(self._committed)

    def _read_progress(self, query_id: str, batch_id: int, outputs: Sequence[TableOutput]) -> BatchProgress:
        checkpoint = self._checkpoint
        return BatchProgress(
            generation=checkpoint.generation,
            query_id=query_id,
            batch=batch_id,
            writes=[f"{output.table}:{output.name}" for output in outputs],
            starts=checkpoint.starts(batch_id),
            ends=checkpoint.ends(batch_id),
            topics=read_topic_ids(checkpoint.path),
        )


Report = Callable[[str, Mapping[str, int]], None]
"""Callback that receives a query's name and its counts by name, after each micro-batch."""


def ignore_report(query: str, counts: Mapping[str, int]) -> None:
    """Ignore the counts. This is the default `Report`."""


@dataclass(frozen=True)
class QueryContext:
    """Resources that every streaming query needs to start. Parameters of a single query belong to its own `start`."""

    spark: SparkSession
    broker: Broker
    client_options: Mapping[str, object] = field(repr=False)
    """options of kafka-python for the same broker"""
    lake: Lake
    checkpoints: Location
    """the folder in which each query has its checkpoint"""
    trigger: str
    """interval between the starts of two micro-batches, in Spark's notation"""
    max_records: int
    """limit of records per micro-batch; 0 for none"""
    state_partitions: int
    dedup_retention: int
    """time for which a query recognises repeated messages, in µs (decision 10)"""
    now: Callable[[], int]
    """returns the time, in µs"""
    uptime: Callable[[], int]
    """returns the time since the machine's start, in µs"""
    durable: bool = False
    """true to sync all effects of a micro-batch to disk before Spark records the micro-batch as done"""
    report: Report = field(default=ignore_report)
    listener: StreamingQueryListener | None = None

    def create_clock(self, query: str) -> MicroBatchClock:
        """Create the clock of a query, which continues from the newest time in the query's checkpoint."""
        checkpoint = Checkpoint(self.checkpoints / query)
        return MicroBatchClock(self.now, self.uptime, checkpoint.newest_time(self.dedup_retention))

    def create_table_writer(self, query: str) -> TableWriter:
        """Create the writer of the Delta tables of a query that is about to start."""
        return TableWriter(
            self.lake, DeltaRsCommits(self.lake, durable=self.durable), Checkpoint(self.checkpoints / query)
        )

    def find_deduplication(self, query: str) -> Deduplication:
        """Choose the deduplication of a query: by a file on one machine, or by Spark's state store on a cluster."""
        checkpoint, master = self.checkpoints / query, self.spark.sparkContext.master or ""
        return find_deduplication(checkpoint, master, self.dedup_retention, durable=self.durable)

    def find_durable_checkpoint(self, query: str) -> DurableCheckpoint | None:
        """Return the query's checkpoint if Kiln must sync it to disk, else None. An object store needs no sync."""
        folder = (self.checkpoints / query).folder
        return DurableCheckpoint(folder) if self.durable and folder is not None else None

    def register_source(
        self, query: str, session: SparkSession, task: ArrowTask, *, small: int = 20_000, tasks: int = 0
    ) -> str:
        """Register the Kafka topics of a query as a streaming source of its session.

        Args:
            task: Builds the rows of the source from record batches of Kafka records (`kafka_ranges.RECORDS`).
            small: Number of records below which one task reads a micro-batch, because each task has a startup cost.
            tasks: Maximum number of tasks; 0: one per partition.

        Returns:
            Name of the source's format, for `readStream.format`.
        """
        topics = tuple(self.broker.topic(topic) for topic in QUERIES[query].reads)
        options = (*librdkafka_options(self.client_options).items(), ("group.id", self.broker.topic("reader")))
        source = KafkaSource(topics, self.broker.prefix, options, self.max_records, small, tasks)
        return register_source(session, source, task, Checkpoint(self.checkpoints / query))

    def checkpoint_uri(self, query: str) -> str:
        """Return the folder of a query's checkpoint as a URI for Spark."""
        return (self.checkpoints / query).spark_uri

    def new_session(self, query: str) -> SparkSession:
        """Create the Spark session of a query.

        The query gets a FAIR scheduler pool of its own, so that no query waits for another. The session sets the number
        of state partitions, which Spark then fixes in the query's checkpoint.
        """
        self.spark.sparkContext.setLocalProperty("spark.scheduler.pool", query)
        session = self.spark.newSession()
        session.conf.set("spark.sql.shuffle.partitions", str(self.state_partitions))
        conf = self.spark.sparkContext.getConf()
        for key, value in _INTERPRETED.items():
            if not conf.contains(key):  # `spark.conf` in the settings takes precedence
                session.conf.set(key, value)
        if self.listener is not None:  # Spark calls a listener only for the queries of its session
            session.streams.addListener(self.listener)
        return session


_INTERPRETED: Final = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
"""Settings that disable Spark's code generation. Compiling classes costs more than it saves, because a micro-batch has
few rows and little work in the JVM."""


_write_locks: Final = defaultdict[str, Lock](Lock)
"""locks by query id, each held while a micro-batch is written"""


def write_in_order(
    write: Callable[[DataFrame, int, str], None], checkpoint: DurableCheckpoint | None = None
) -> Callable[[DataFrame, int], None]:
    """Build a function for `foreachBatch` that calls `write(rows, batch_id, query_id)`.

    `write` can recognise a repeated micro-batch by the two ids. Two calls for the same query never overlap, even if one
    still runs after its JVM has ended and another JVM was started.

    Args:
        write: Writes the rows of a micro-batch.
        checkpoint: The checkpoint to sync, if any (decision 19): before `write`, so that the offsets of the micro-batch
            are on disk before its output, and after `write`, so that its state is on disk before Spark records it as
            done.
    """

    def call(rows: DataFrame, batch_id: int) -> None:
        query_id = rows.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        if query_id is None:
            raise RuntimeError("cannot write a micro-batch: Spark's thread has no id of a streaming query")
        with _write_locks[query_id]:
            if checkpoint is not None:
                checkpoint.sync()
            write(rows, batch_id, query_id)
            if checkpoint is not None:
                checkpoint.sync()

    return call
