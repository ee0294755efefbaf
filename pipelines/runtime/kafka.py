"""Kafka topics as DataFrames. `kafka_source` streams topics."""

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
    """Address and options of Kafka."""

    servers: str
    prefix: str = "kiln."
    """prefix of each topic's name"""
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Spark's options, `kafka.…`"""

    def topic(self, name: str) -> str:
        return self.prefix + name


def read_topics(spark: SparkSession, broker: Broker, topics: Sequence[str]) -> DataFrame:
    """Read all records that the topics have now.

    Returns:
        Columns topic (without prefix), partition int, offset bigint, stamp bigint (the broker's, µs), key and value
        binary.
    """
    return _select_columns(spark.read.format("kafka").options(**_build_source_options(broker, topics)).load(), broker)


def read_range(spark: SparkSession, broker: Broker, topic: str, first: log.Offsets, end: log.Offsets) -> DataFrame:
    """Read the records of a topic from `first` up to before `end`, with the columns of `read_topics`.

    A record that Kafka's retention has removed fails the read.

    Args:
        spark: The session.
        broker: The broker.
        topic: Name without prefix.
        first: First offsets by full topic name and partition.
        end: End offsets of the same partitions.
    """
    reader = (
        spark.read.format("kafka")
        .options(**_build_source_options(broker, [topic]))
        .option("startingOffsets", _format_offsets(first))
        .option("endingOffsets", _format_offsets(end))
    )
    return _select_columns(reader.load(), broker)


def _format_offsets(offsets: log.Offsets) -> str:
    return json.dumps({topic: {str(part): at for part, at in parts.items()} for topic, parts in offsets.items()})


def _build_source_options(broker: Broker, topics: Sequence[str]) -> dict[str, str]:
    return {
        "kafka.bootstrap.servers": broker.servers,
        # A frame may be as large as the broker accepts; by default Kafka fetches 1 MiB of each partition.
        "kafka.max.partition.fetch.bytes": str(16 << 20),
        # After each poll Spark requests the end offsets. The broker answers a consumer's requests in order, so only
        # after the fetch of the next records: by default half a second, if there are none.
        "kafka.fetch.max.wait.ms": "1",
        "kafka.isolation.level": "read_committed",
        **broker.options,
        "subscribe": ",".join(broker.topic(name) for name in topics),
    }


def _select_columns(source: DataFrame, broker: Broker) -> DataFrame:
    return source.select(
        F.substring("topic", len(broker.prefix) + 1, 255).alias("topic"),
        "partition",
        "offset",
        F.unix_micros("timestamp").alias("stamp"),
        "key",
        "value",
    )


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
    """Append key and value to the topic that each row names in full, at least once. Other columns are ignored."""
    records.write.format("kafka").options(**build_sink_options(broker)).save()


def write_topic(records: DataFrame, broker: Broker, topic: str) -> None:
    """Append key and value to a topic, at least once."""
    records.select("key", "value").write.format("kafka").options(**build_sink_options(broker)).option(
        "topic", broker.topic(topic)
    ).save()
