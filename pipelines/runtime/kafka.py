"""Kafka topics as streaming and batch DataFrames."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from kiln.schemas.kafka import topics as log
from kiln.schemas.kafka.topics import MAX_RECORD


@dataclass(frozen=True)
class Broker:
    """Where Kafka is. `prefix` stands before each topic's name; `options`: Spark's, `kafka.…`."""

    servers: str
    prefix: str = "kiln."
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    def topic(self, name: str) -> str:
        return self.prefix + name


def stream_topics(spark: SparkSession, broker: Broker, topics: Sequence[str], at_most: int) -> DataFrame:
    """A stream of all records since the log's beginning; `at_most` records a micro-batch, 0 for no bound.

    Out: topic (without prefix), partition int, offset bigint, stamp bigint (the broker's, µs), key, value binary.
    A record that retention took before it was read stops the query: loss is never silent.
    """
    reader = (
        spark.readStream.format("kafka")
        .options(**_options(broker, topics))
        .option("startingOffsets", "earliest")
        .option("failOnDataLoss", "true")
    )
    if at_most:
        reader = reader.option("maxOffsetsPerTrigger", str(at_most))
    return _records(reader.load(), broker)


def read_topics(spark: SparkSession, broker: Broker, topics: Sequence[str]) -> DataFrame:
    """The same columns as a batch: everything that the topics hold now."""
    return _records(spark.read.format("kafka").options(**_options(broker, topics)).load(), broker)


def read_range(spark: SparkSession, broker: Broker, topic: str, first: log.Offsets, end: log.Offsets) -> DataFrame:
    """The same columns as a batch: the records of a topic from `first` up to before `end`, both by full topic name and
    with the same partitions. A record that retention took fails the read."""
    reader = (
        spark.read.format("kafka")
        .options(**_options(broker, [topic]))
        .option("startingOffsets", _offsets(first))
        .option("endingOffsets", _offsets(end))
    )
    return _records(reader.load(), broker)


def _offsets(offsets: log.Offsets) -> str:
    return json.dumps({topic: {str(part): at for part, at in parts.items()} for topic, parts in offsets.items()})


def _options(broker: Broker, topics: Sequence[str]) -> dict[str, str]:
    return {
        "kafka.bootstrap.servers": broker.servers,
        # A frame may be as large as the broker takes; the defaults fetch 1 MiB a partition.
        "kafka.max.partition.fetch.bytes": str(16 << 20),
        # After each poll Spark asks where the topic ends. The broker answers a consumer in turn, and so only when the
        # fetch that the poll has begun for the next records is answered: by default half a second, where none come.
        "kafka.fetch.max.wait.ms": "1",
        **broker.options,
        "subscribe": ",".join(broker.topic(name) for name in topics),
    }


def _records(source: DataFrame, broker: Broker) -> DataFrame:
    return source.select(
        F.substring("topic", len(broker.prefix) + 1, 255).alias("topic"),
        "partition",
        "offset",
        F.unix_micros("timestamp").alias("stamp"),
        "key",
        "value",
    )


def sink_options(broker: Broker) -> dict[str, str]:
    """Options of Spark's Kafka sink, streaming or batch."""
    return {
        "kafka.bootstrap.servers": broker.servers,
        "kafka.max.request.size": str(MAX_RECORD),
        "kafka.enable.idempotence": "true",
        **broker.options,
    }


def write_records(records: DataFrame, broker: Broker) -> None:
    """Appends key, value to the topic that each row names without prefix; at least once."""
    topic = F.concat(F.lit(broker.prefix), "topic").alias("topic")
    records.select(topic, "key", "value").write.format("kafka").options(**sink_options(broker)).save()


def write_topic(records: DataFrame, broker: Broker, topic: str) -> None:
    """Appends key, value to a topic; at least once."""
    records.select("key", "value").write.format("kafka").options(**sink_options(broker)).option(
        "topic", broker.topic(topic)
    ).save()
