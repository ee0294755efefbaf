"""Producer of frames for a broker that a Kiln under test uses, and functions that wait for records in its topics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

from conftest import free_ports
from kafka import KafkaConsumer, TopicPartition
from kiln.bridge.kafka.producers import FramesProducer, connect
from kiln.deploy.stack.kafka_broker import ensure_topics
from kiln.schemas.kafka.topics import TOPICS
from kit.awaiting import wait_until
from kit.broker_access import client, security, variables
from kit.kiln_process import Kiln


def kiln_beside(
    address: str, prefix: str, state: Path, environment: dict[str, str] | None = None, *, partitions: int = 2
) -> Kiln:
    """Create topics with the prefix `prefix` on the broker at `address`, and return a Kiln that uses them.

    Args:
        partitions: Number of partitions of `frames` and of `updates`.
    """
    ensure_topics(
        address,
        prefix,
        {name: partitions if name in ("frames", "updates") else 1 for name in TOPICS},
        dict.fromkeys(TOPICS, timedelta(days=7)),
        client_options=security(address),
    )
    settings = {**variables(address), "KILN_KAFKA__PREFIX": prefix, **(environment or {})}
    return Kiln(state, free_ports(2), settings)


def frames_producer(address: str, prefix: str) -> FramesProducer:
    return connect(client(address), f"{prefix}frames")


def alternate(*streams: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """Yield one record of each stream in turn, until all streams have ended."""
    waiting = [iter(stream) for stream in streams]
    while waiting:
        for stream in list(waiting):
            record = next(stream, None)
            if record is None:
                waiting.remove(stream)
            else:
                yield record


@contextmanager
def new_records(address: str, topic: str) -> Iterator[KafkaConsumer]:
    """Open a consumer of the records that are written to a topic from now on."""
    consumer = KafkaConsumer(topic, **client(address), auto_offset_reset="latest", group_id=None)
    try:
        while not consumer.assignment():
            consumer.poll(timeout_ms=100)
        for part in consumer.assignment():
            consumer.position(part)
        yield consumer
    finally:
        consumer.close()


def await_records(consumer: KafkaConsumer, number: int, polls: int = 120) -> None:
    """Wait for `number` records. Fail after `polls` seconds without a record."""
    idle = 0
    while number > 0:
        came = sum(map(len, consumer.poll(timeout_ms=1_000).values()))
        number -= came
        idle = 0 if came else idle + 1
        assert idle < polls, f"no record for {polls} s; {number} more were awaited"


def await_end(address: str, topic: str, number: int, patience: float) -> None:
    """Wait until `number` records in all have been written to a topic, for at most `patience` s."""
    consumer = KafkaConsumer(**client(address))
    try:
        parts = [TopicPartition(topic, part) for part in consumer.partitions_for_topic(topic) or ()]
        ended = partial(_ended, consumer, parts, number)
        wait_until(ended, f"{number} records in {topic}", patience)
    finally:
        consumer.close()


def _ended(consumer: KafkaConsumer, parts: list[TopicPartition], number: int) -> bool:
    ends: dict[TopicPartition, int] = consumer.end_offsets(parts)
    return sum(ends.values()) >= number
