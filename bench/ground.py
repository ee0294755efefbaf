"""Resources that measurements share: a broker and a Spark session in a temporary folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kafka.admin import KafkaAdminClient
from pyspark.sql import SparkSession

from bench.runs import Say
from kafka import KafkaConsumer, TopicPartition
from kiln.bridge.kafka.producers import FramesProducer, connect
from kiln.conf.settings.model import Kafka, Network, Settings
from kiln.deploy.stack.kafka_broker import make_topics, start_broker
from kiln.deploy.stack.ports import find_free_ports
from kiln.deploy.stack.spark import spark_session
from kiln.pipelines.runtime.kafka import Broker

Ends = dict[int, int]
"""Offset after the last record, by partition."""


class LogRecord(NamedTuple):
    """A record read from Kafka. `stamp` is the broker's timestamp in Unix ms."""

    stamp: int
    key: bytes | None
    value: bytes


@dataclass(frozen=True)
class Ground:
    """A Spark session, the settings of a broker, and a folder for data. `say` prints a line of progress."""

    spark: SparkSession
    kafka: Kafka
    folder: Path
    say: Say

    def plot(self, name: str, partitions: int | None = None) -> Settings:
        """Create topics with the prefix `name`, and return default settings with these topics and a new state folder.

        Args:
            name: Prefix of the topics, and name of the state folder.
            partitions: Number of partitions of `frames` and of `updates`, by default that of the default settings.
        """
        kafka = self.kafka.model_copy(update={"bootstrap": self.kafka.servers, "prefix": f"{name}."})
        if partitions is not None:
            kafka = kafka.model_copy(update={"frames_partitions": partitions, "updates_partitions": partitions})
        make_topics(kafka, kafka.servers)
        return Settings(state=self.folder / name, network=Network(name="local-bench"), kafka=kafka)

    def broker(self, settings: Settings) -> Broker:
        return Broker(settings.kafka.servers, settings.kafka.prefix, settings.kafka.spark_options())

    def producer(self, settings: Settings, topic: str) -> FramesProducer:
        """Create a producer for a topic. It is the bridge's producer of Frames, which sends any record."""
        return connect(settings.kafka.client_options(), settings.kafka.topic(topic))

    def ends(self, settings: Settings, topic: str) -> Ends:
        consumer = KafkaConsumer(**settings.kafka.client_options())
        try:
            return _ends(consumer, settings.kafka.topic(topic))
        finally:
            consumer.close()

    def read(self, settings: Settings, topic: str, first: Ends, last: Ends) -> list[LogRecord]:
        """Read the records with offsets from `first` to before `last`, sorted by timestamp."""
        consumer = KafkaConsumer(**settings.kafka.client_options(), max_partition_fetch_bytes=16 << 20)
        parts = {TopicPartition(settings.kafka.topic(topic), partition): end for partition, end in last.items()}
        log: list[LogRecord] = []
        try:
            consumer.assign(list(parts))
            for part in parts:
                consumer.seek(part, first[part.partition])
            while any(consumer.position(part) < end for part, end in parts.items()):
                for part, records in consumer.poll(timeout_ms=1_000).items():
                    log += [
                        LogRecord(record.timestamp, record.key, record.value or b"")
                        for record in records
                        if record.offset < parts[part]
                    ]
        finally:
            consumer.close()
        return sorted(log, key=lambda record: record.stamp)

    @contextmanager
    def fresh(self, settings: Settings, *topics: str) -> Iterator[Settings]:
        """Yield settings with a new lake and new checkpoints. At the end, delete both, and all records of the topics.

        No folder is used twice, because a state store may still write after its query has stopped. The offsets of new
        records follow those of the deleted records.
        """
        settings.state.mkdir(parents=True, exist_ok=True)
        state = Path(tempfile.mkdtemp(dir=settings.state))
        yield settings.model_copy(update={"state": state})  # after a failure, the whole folder is deleted
        shutil.rmtree(state, ignore_errors=True)
        self.empty(settings, *topics)

    def empty(self, settings: Settings, *topics: str) -> None:
        """Delete all records of topics. The offsets of new records follow those of the deleted records."""
        upto = {
            TopicPartition(settings.kafka.topic(topic), partition): end
            for topic in topics
            for partition, end in self.ends(settings, topic).items()
        }
        if upto:
            with KafkaAdminClient(**settings.kafka.client_options()) as admin:
                admin.delete_records(upto)


def _ends(consumer: KafkaConsumer, topic: str) -> Ends:
    parts = [TopicPartition(topic, partition) for partition in consumer.partitions_for_topic(topic) or ()]
    return {part.partition: end for part, end in consumer.end_offsets(parts).items()}


@contextmanager
def prepared(folder: Path, say: Say) -> Iterator[Ground]:
    """Start a broker and a Spark session for the duration of the context, with default settings except the ports.

    Raises:
        JavaError: There is no usable Java.
        JarsError: The jars cannot be fetched.
        BrokerError: The broker cannot be started.
        TopicsError: A topic cannot be created.
    """
    port, controller_port = find_free_ports()
    kafka = Kafka(embedded_port=port, embedded_controller_port=controller_port)
    settings = Settings(state=folder / "ground", kafka=kafka)
    with start_broker(settings, say):
        say("starting Spark")
        with spark_session(settings) as spark:
            send_bench(spark, folder)
            yield Ground(spark, settings.broker, folder, say)


def send_bench(spark: SparkSession, folder: Path) -> None:
    """Send the package `bench` to Spark's workers, which do not import from the current folder."""
    sources = Path(__file__).parent
    spark.sparkContext.addPyFile(shutil.make_archive(str(folder / "bench"), "zip", sources.parent, sources.name))
