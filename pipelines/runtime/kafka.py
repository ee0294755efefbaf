"""Kafka topics as sinks of DataFrames, and as a streaming data source in Python (decision 30).

The tasks of the streaming source read records with librdkafka in a Python worker, apply the query's function there, and
return only its output to Spark. Spark's own Kafka source would move each record through the JVM to the worker, which
takes more CPU than most queries do. In checkpoints and progress reports, offsets have the format of Spark's own source.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows
from pyspark.sql.types import StructType

from kiln.pipelines.runtime.checkpoint import FIRST_OFFSETS_FILE, Checkpoint, format_first_offsets
from kiln.pipelines.runtime.kafka_offsets import EARLIEST, LATEST, list_partitions, read_offsets
from kiln.pipelines.runtime.kafka_ranges import ArrowTask, ClientOptions, LostRecordsError, OffsetRange, read_ranges
from kiln.schemas.kafka.topics import MAX_RECORD


@dataclass(frozen=True)
class Broker:
    """Address and options of Kafka."""

    servers: str
    prefix: str = "kiln."
    """prefix of each topic's name"""
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """options of Spark's Kafka sink, with the prefix `kafka.`"""

    def topic(self, name: str) -> str:
        return self.prefix + name


def build_sink_options(broker: Broker) -> dict[str, str]:
    """Build the options of Spark's Kafka sink, streaming or batch."""
    return {
        "kafka.bootstrap.servers": broker.servers,
        "kafka.max.request.size": str(MAX_RECORD),
        "kafka.enable.idempotence": "true",
        "kafka.batch.size": str(256 << 10),  # Kafka's default of 16 KiB gives each large batch a request of its own
        **broker.options,
    }


def write_records(records: DataFrame, broker: Broker) -> None:
    """Append the key and value of each row to the topic in its column `topic`, at least once.

    Topic names include the prefix. Other columns are ignored.
    """
    records.write.format("kafka").options(**build_sink_options(broker)).save()


def write_topic(records: DataFrame, broker: Broker, topic: str) -> None:
    """Append the key and value of each row to one topic, at least once. `topic`: its name without prefix."""
    records.select("key", "value").write.format("kafka").options(**build_sink_options(broker)).option(
        "topic", broker.topic(topic)
    ).save()


Offsets = dict[str, dict[str, int]]
"""Offsets by topic name (with prefix) and partition number, which is text as in JSON."""

_FORMAT: Final = "kiln-kafka"
_PATIENCE: Final = 60.0  # seconds without an answer until the query fails
_LIST_EVERY: Final = 10.0  # seconds between two checks for new partitions
_LOG = logging.getLogger("librdkafka")


@dataclass(frozen=True)
class KafkaSource:
    """The topics that a query reads, and the sizes of its micro-batches and tasks."""

    topics: tuple[str, ...]
    """names with prefix"""
    prefix: str
    """prefix of the topic names"""
    options: ClientOptions = field(repr=False)
    max_records: int = 0
    """limit of records per micro-batch; 0 for none"""
    small: int = 20_000
    """number of records below which one task reads a micro-batch: each task has a startup cost"""
    tasks: int = 0
    """maximum number of tasks; 0: one per partition"""


def register_source(session: SparkSession, source: KafkaSource, task: ArrowTask, checkpoint: Checkpoint) -> str:
    """Register the source in a session, for `session.readStream.format(…).schema(…).load()`.

    A query without a checkpoint begins at the oldest records in Kafka. If retention removes a record that the query
    has not read, the query fails instead of skipping the record.

    Args:
        task: Builds the rows of the source from record batches with the schema `kafka_ranges.RECORDS`.

    Returns:
        Name of the format in this session.

    Raises:
        KafkaException: No broker answers.
    """
    first, packed = load_first_offsets(checkpoint, source), pack_task(task)

    class KafkaDataSource(DataSource):
        @classmethod
        def name(cls) -> str:
            return _FORMAT

        def streamReader(self, schema: StructType) -> DataSourceStreamReader:
            return KafkaReader(source, first, packed)

    session.dataSource.register(KafkaDataSource)
    return _FORMAT


def pack_task(task: ArrowTask) -> bytes:
    """Pickle the function of a task with Spark's cloudpickle."""
    packed: bytes = cloudpickle.dumps(task)  # type: ignore[no-untyped-call]  # PySpark's copy has no types
    return packed


def load_first_offsets(checkpoint: Checkpoint, source: KafkaSource) -> Offsets:
    """Load from a query's checkpoint the offsets at which its first micro-batch begins.

    At the query's first start, they are the oldest offsets in Kafka, and are saved in the checkpoint: retention may
    have changed the oldest offsets when Spark repeats the first micro-batch.
    """
    saved = checkpoint.first_offsets
    if saved is not None:
        return _collect((topic, part, at) for topic, parts in saved.items() for part, at in parts.items())
    admin = AdminClient(dict(source.options), logger=_LOG)
    first = _read_offsets(admin, _list_partitions(admin, source.topics), EARLIEST)
    path = checkpoint.path / FIRST_OFFSETS_FILE
    if path.folder is not None:
        path.folder.parent.mkdir(parents=True, exist_ok=True)
    path.write([format_first_offsets(first).encode()])
    return first


class TaskRanges(InputPartition):
    """Offset ranges that one task reads."""

    def __init__(self, ranges: Sequence[OffsetRange]) -> None:
        super().__init__(ranges)
        self.ranges = ranges


class KafkaReader(DataSourceStreamReader):
    """Reader of the source: plans micro-batches in a Python process of the driver, and reads records in the tasks."""

    def __init__(self, source: KafkaSource, first: Offsets, task: bytes) -> None:
        """Create the reader.

        Args:
            first: Offsets at which the first micro-batch begins.
            task: The function, pickled by `pack_task`. Only tasks unpickle it, because its imports take 30 MB.
        """
        self._source = source
        self._first = first
        self._task = task
        self._admin: AdminClient | None = None
        self._partitions: list[TopicPartition] = []
        self._listed_at = 0.0
        self._answered_at = time.monotonic()

    def initialOffset(self) -> Offsets:
        return self._first

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._source.max_records) if self._source.max_records else ReadAllAvailable()

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:
        """Return the end offsets of the next micro-batch.

        They equal `start` if there are no new records, or while the broker does not answer.

        Raises:
            KafkaException, TimeoutError: The broker has not answered for 60 s.
            LostRecordsError: A partition is gone, or ends before `start`.
        """
        now = time.monotonic()
        try:
            if self._admin is None:
                self._admin = AdminClient(dict(self._source.options), logger=_LOG)
            if not self._partitions or now > self._listed_at + _LIST_EVERY:
                self._partitions, self._listed_at = _list_partitions(self._admin, self._source.topics), now
            ends = _read_offsets(self._admin, self._partitions, LATEST)
        except (KafkaException, TimeoutError):
            if now > self._answered_at + _PATIENCE:
                raise
            return start
        self._answered_at = now
        ranges = self._list_ranges(start, ends)
        for topic, parts in start.items():
            for part, at in parts.items():
                end = ends.get(topic, {}).get(part, 0)
                if end < at:
                    raise LostRecordsError(
                        f"{topic}-{part} ends at the offset {end:,}, but was read up to {at:,}. The topic was created "
                        "again, or has lost records: run kiln recover, which lists the repairs"
                    )
        if isinstance(limit, ReadMaxRows):
            ranges = limit_ranges(ranges, limit.max_rows)
        return _collect((offsets.topic, offsets.partition, offsets.end) for offsets in ranges)

    def partitions(self, start: Offsets, end: Offsets) -> Sequence[TaskRanges]:
        ranges = [offsets for offsets in self._list_ranges(start, end) if offsets.size]
        return [TaskRanges(assigned) for assigned in assign_ranges(ranges, self._source.small, self._source.tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, TaskRanges)
        task: ArrowTask = pickle.loads(self._task)
        return task(read_ranges(partition.ranges, self._source.options, self._source.prefix))

    def _list_ranges(self, start: Offsets, end: Offsets) -> list[OffsetRange]:
        """List the offset ranges of a micro-batch. A partition that `start` lacks begins at its oldest record."""
        new = [
            TopicPartition(topic, int(part))
            for topic, parts in end.items()
            for part in parts.keys() - start.get(topic, {}).keys()
        ]
        if new:
            admin = self._admin or AdminClient(dict(self._source.options), logger=_LOG)
            first = _read_offsets(admin, new, EARLIEST)
            start = {topic: {**first.get(topic, {}), **start.get(topic, {})} for topic in end}
        return [
            OffsetRange(topic, int(part), start[topic][part], at)
            for topic, parts in end.items()
            for part, at in parts.items()
        ]


def limit_ranges(ranges: Sequence[OffsetRange], limit: int) -> list[OffsetRange]:
    """Shorten ranges in proportion to their sizes, so that together they have about `limit` records.

    Sizes are rounded up, so the sum may be slightly larger.
    """
    total = sum(offsets.size for offsets in ranges)
    if total <= limit:
        return list(ranges)
    return [offsets._replace(end=offsets.first - (-offsets.size * limit // total)) for offsets in ranges]


def assign_ranges(ranges: Sequence[OffsetRange], small: int, tasks: int) -> list[list[OffsetRange]]:
    """Distribute ranges evenly over tasks.

    Args:
        ranges: Offset ranges of a micro-batch.
        small: Number of records below which one task gets all ranges.
        tasks: Maximum number of tasks; 0: one per range.
    """
    if not ranges:
        return []
    count = 1 if sum(offsets.size for offsets in ranges) < small else min(tasks or len(ranges), len(ranges))
    groups: list[list[OffsetRange]] = [[] for _ in range(count)]
    for offsets in sorted(ranges, key=lambda offsets: offsets.size, reverse=True):
        min(groups, key=lambda group: sum(other.size for other in group)).append(offsets)
    return groups


def _list_partitions(admin: AdminClient, topics: Sequence[str]) -> list[TopicPartition]:
    partitions = list_partitions(admin, topics)
    if missing := set(topics) - {part.topic for part in partitions}:
        raise TimeoutError(f"the broker does not know the topics {', '.join(sorted(missing))}")
    return partitions


def _read_offsets(admin: AdminClient, partitions: Sequence[TopicPartition], spec: OffsetSpec) -> Offsets:
    answers = read_offsets(admin, partitions, spec)
    return _collect((part.topic, part.partition, answer.offset) for part, answer in answers.items())


def _collect(offsets: Iterator[tuple[str, int, int]]) -> Offsets:
    collected: Offsets = {}
    for topic, partition, at in offsets:
        collected.setdefault(topic, {})[str(partition)] = at
    return collected
