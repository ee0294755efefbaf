"""Records that other programs may write to Kiln's topics: with each codec, with any bytes as header keys, tombstones
and garbage. They are written and read with librdkafka, whichever client Kiln uses."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple, cast

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from kiln.conf.process.librdkafka import librdkafka_options
from kiln.schemas.kafka.topics import MAX_RECORD, TOPICS
from kit.broker_access import client

CODECS: Final = ("none", "gzip", "snappy", "lz4", "zstd")

HEADERS: Final = cast(
    "list[tuple[str, str | bytes | None]]", [(b"\xff\xfe\x00", b"\x00\xff"), (b"", b"empty"), ("name", None)]
)
"""Headers whose keys are any bytes, although the protocol declares keys as strings."""

TOMBSTONE: Final = (b"a key", None)
GARBAGE: Final[tuple[tuple[bytes | None, bytes | None], ...]] = (
    TOMBSTONE,
    (b"\xff\xfe", b""),
    (b"an object without fields", b"{}"),
    (b"another type", b"[1, null]"),
    (b"deep", b"[" * 200_000),
    (b"large numbers", b'{"network": 1e999, "observed_at": 99999999999999999999}'),
    (None, bytes(range(256)) * 3),
    (b"no UTF-8", b'{"network": "\xff\xfe"}'),
)
"""Keys and values that are no record of any topic, and no tick."""

HUGE: Final = (b"huge", b"x" * (6 << 20))
"""Garbage that is too large for one record of `kiln.quarantine`."""

_LOG = logging.getLogger("librdkafka")


class Written(NamedTuple):
    offset: int
    key: bytes | None
    value: bytes | None


class Writer:
    """Writes to partition 0 of topics with one codec."""

    def __init__(self, address: str, codec: str, transaction: str | None = None) -> None:
        options: dict[str, str | int | bool] = {
            **librdkafka_options(client(address)),
            "compression.type": codec,
            "message.max.bytes": MAX_RECORD,
            "linger.ms": 20,  # so that a group has several records, which alone is compressed as one
        }
        self._producer = Producer(
            options | ({} if transaction is None else {"transactional.id": transaction}), logger=_LOG
        )

    def write(self, topic: str, records: Iterable[tuple[bytes | None, bytes | None]]) -> list[Written]:
        """Write records, and return them with their offsets. A compacted topic rejects records without a key."""
        delivered: list[Message] = []

        def on_delivery(error: KafkaError | None, message: Message) -> None:
            assert error is None, error
            delivered.append(message)

        is_compacted = TOPICS[topic.rpartition(".")[2]].compacted
        wanted = [(key, value) for key, value in records if key is not None or not is_compacted]
        for key, value in wanted:
            self._producer.produce(topic, value, key, 0, headers=HEADERS, on_delivery=on_delivery)
        assert self._producer.flush(60) == 0
        offsets = [message.offset() for message in delivered]
        return [Written(at or 0, key, value) for at, (key, value) in zip(offsets, wanted, strict=True)]

    def abort(self, topics: Mapping[str, bytes]) -> None:
        """Write a record to each topic, all in a transaction that is then aborted."""
        self._producer.init_transactions(60)
        self._producer.begin_transaction()
        for topic, value in topics.items():
            self._producer.produce(topic, value, b"aborted", 0)
        self._producer.flush(60)
        self._producer.abort_transaction(60)


def read_all(address: str, topic: str, partition: int = 0) -> Iterator[Written]:
    """Yield the committed records of a partition up to its current end."""
    options = {"group.id": "a test", "enable.auto.commit": False, "enable.partition.eof": True}
    consumer = Consumer({**librdkafka_options(client(address)), **options})
    try:
        consumer.assign([TopicPartition(topic, partition, 0)])
        while (message := consumer.poll(60)) is not None:
            error = message.error()
            if error is not None and error.code() == KafkaError._PARTITION_EOF:
                return
            assert error is None, error
            yield Written(message.offset() or 0, message.key(), message.value())
        raise AssertionError(f"{topic}: no end came")
    finally:
        consumer.close()
