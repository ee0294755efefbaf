"""The planner of Spark's source of Kafka, with an answer that no real broker gives on demand."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from confluent_kafka import TopicCollection, TopicPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable

from kiln.pipelines.runtime import kafka
from kiln.pipelines.runtime.kafka import KafkaReader, KafkaSource

TOPIC = "kiln.updates"


class Admin:
    """A client of a broker that has just come back, and does not know the offset of a partition."""

    def __init__(self, options: Mapping[str, object], logger: object) -> None:
        pass

    def describe_topics(self, topics: TopicCollection, **options: object) -> Mapping[str, Future[SimpleNamespace]]:
        described = Future[SimpleNamespace]()
        described.set_result(SimpleNamespace(partitions=[SimpleNamespace(id=0), SimpleNamespace(id=1)]))
        return {TOPIC: described}

    def poll(self, timeout: float) -> None:
        pass

    def list_offsets(
        self, partitions: Mapping[TopicPartition, object], **options: object
    ) -> Mapping[TopicPartition, Future[SimpleNamespace]]:
        futures = {}
        for partition in partitions:
            futures[partition] = Future[SimpleNamespace]()
            futures[partition].set_result(SimpleNamespace(offset=(-1001, 70)[partition.partition]))
        return futures


def test_an_offset_that_the_broker_does_not_know_is_no_lost_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka, "AdminClient", Admin)
    start = {TOPIC: {"0": 1_012, "1": 60}}
    assert KafkaReader(KafkaSource((TOPIC,), "", (), 0), {}, b"").latestOffset(start, ReadAllAvailable()) == start
