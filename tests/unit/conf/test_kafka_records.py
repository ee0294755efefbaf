"""The end of a partition while its leader is elected."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException
from kafka.errors import NotLeaderForPartitionError

from kafka import TopicPartition
from kiln.conf.process import kafka_records
from kiln.conf.process.kafka_records import RecordReader

PART = TopicPartition("topic", 0)


class Electing:
    """Stands in for librdkafka's consumer: the first answers are that no broker leads the partition yet."""

    def __init__(self, options: object, logger: object = None) -> None:
        self.refusals = [KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE]

    def get_watermark_offsets(self, part: object, timeout: float, *, cached: bool) -> tuple[int, int]:
        if self.refusals:
            raise KafkaException(KafkaError(self.refusals.pop(0)))
        return 3, 7


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> RecordReader:
    monkeypatch.setattr(kafka_records, "Consumer", Electing)
    return RecordReader({"bootstrap_servers": "127.0.0.1:1"}, "group")


def test_the_end_of_a_partition_is_read_once_a_broker_leads_it(reader: RecordReader) -> None:
    assert reader.read_end(PART) == 7


def test_a_partition_that_no_broker_leads_is_an_error_after_the_timeout(reader: RecordReader) -> None:
    with pytest.raises(NotLeaderForPartitionError):
        reader.read_end(PART, timeout=0.0)
