"""Partitions of Kafka topics and their offsets, read with librdkafka's admin client."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import ListOffsetsResultInfo, OffsetSpec

EARLIEST: Final = OffsetSpec.earliest()  # type: ignore[no-untyped-call]  # confluent-kafka gives it no types
LATEST: Final = OffsetSpec.latest()  # type: ignore[no-untyped-call]  # as above
MAX_TIMESTAMP: Final = OffsetSpec.max_timestamp()  # type: ignore[no-untyped-call]  # as above

_TIMEOUT: Final = 5.0  # s


def list_partitions(admin: AdminClient, topics: Iterable[str], timeout: float = _TIMEOUT) -> list[TopicPartition]:
    """List the partitions of topics, without those of topics that do not exist.

    Raises:
        KafkaException, TimeoutError: The broker does not answer.
    """
    partitions: list[TopicPartition] = []
    for topic, answer in admin.describe_topics(TopicCollection(list(topics)), request_timeout=timeout).items():
        try:
            partitions += [TopicPartition(topic, part.id) for part in answer.result(2 * timeout).partitions]
        except KafkaException as error:
            if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise
    return partitions


def read_offsets(
    admin: AdminClient, partitions: Iterable[TopicPartition], spec: OffsetSpec, timeout: float = _TIMEOUT
) -> dict[TopicPartition, ListOffsetsResultInfo]:
    """Read an offset of each partition, with its timestamp in ms.

    If a partition has an open transaction, LATEST is where the transaction begins.

    Raises:
        KafkaException, TimeoutError: The broker does not answer, or does not know an offset, as while it restarts.
    """
    admin.poll(0)  # lets librdkafka log what it has queued
    specs = dict.fromkeys(partitions, spec)
    answers = admin.list_offsets(specs, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=timeout)
    offsets = {part: answer.result(2 * timeout) for part, answer in answers.items()}
    least = -1 if spec is MAX_TIMESTAMP else 0  # -1: a partition without records
    if unknown := [f"{part.topic}-{part.partition}" for part, info in offsets.items() if info.offset < least]:
        raise TimeoutError(f"the broker does not know the offsets of {', '.join(unknown)}")
    return offsets
