"""Frames onto a broker that the test shares with a Kiln of its own, and the log watched as it grows."""

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
    """A Kiln on the broker at `address`, with topics of its own under `prefix`; they are there when this returns.

    `partitions`: of `frames` and `updates`.
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
    """One of each in turn, until all have ended."""
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
    """A consumer of what is written to a topic from here on."""
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
    """Returns when `number` records have come; fails after `polls` seconds without one."""
    idle = 0
    while number > 0:
        came = sum(map(len, consumer.poll(timeout_ms=1_000).values()))
        number -= came
        idle = 0 if came else idle + 1
        assert idle < polls, f"no record for {polls} s; {number} more were awaited"


def await_end(address: str, topic: str, number: int, patience: float) -> None:
    """Returns when so many records have been written to a topic since it was made."""
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
