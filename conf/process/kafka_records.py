"""Reading of Kafka records with librdkafka, and conversion of kafka-python's options to those of librdkafka.

kafka-python needs further packages to decompress snappy, lz4 and zstd, and never gets past a record with a header key
that is not UTF-8. librdkafka supports each codec of Kafka, and decodes headers on request only. So Kiln uses
kafka-python for groups and topics, but reads records here, or in bulk in kiln.pipelines.runtime.kafka_ranges
(`tests/unit/conf/test_kafka_clients.py` checks this).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Set
from typing import TYPE_CHECKING, Final, NamedTuple

from confluent_kafka import Consumer, KafkaException
from confluent_kafka import KafkaError as LibrdkafkaError
from confluent_kafka import TopicPartition as Assignment

if TYPE_CHECKING:  # not at the top: kafka-python is slow to import, and Spark starts a dozen processes that need none
    from kafka.errors import BrokerResponseError, KafkaError

    from kafka import TopicPartition

READ_OPTIONS: Final[Mapping[str, str | int | bool]] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    # skip the records of aborted transactions, and wait for the end of open ones
    "isolation.level": "read_committed",
    "enable.partition.eof": True,
    "check.crcs": True,
    "allow.auto.create.topics": False,
}
"""Options of every consumer of librdkafka in Kiln."""

UNDECODABLE: Final = frozenset((LibrdkafkaError._BAD_MSG, LibrdkafkaError._BAD_COMPRESSION))
"""Errors of a record batch of Kafka that no client can decode, such as after damage on the broker's disk. librdkafka
repeats them until it is assigned an offset after the record batch."""

_REFUSED: Final = frozenset((LibrdkafkaError.TOPIC_AUTHORIZATION_FAILED, LibrdkafkaError.GROUP_AUTHORIZATION_FAILED))
_ELECTING: Final = frozenset((LibrdkafkaError.NOT_LEADER_FOR_PARTITION, LibrdkafkaError.LEADER_NOT_AVAILABLE))
"""Errors while a partition has no leader: it is new, or its leader changes."""
_ELECTION_POLL = 0.1  # s
LIBRDKAFKA_LOG: Final = logging.getLogger("librdkafka")
"""Log of every client of librdkafka in Kiln."""
LIBRDKAFKA_LOG.addHandler(logging.NullHandler())  # else, in a Python worker, each line would go to stderr


class KafkaRecord(NamedTuple):
    """A record of a partition. `timestamp` is its Kafka timestamp in ms."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None


class RecordReader:
    """A reader of partitions from given offsets, in order, without a consumer group. For one thread.

    In place of bytes that cannot be decoded, it returns records whose value describes the error
    (`describe_undecodable`). The caller's decoder must reject such values.
    """

    def __init__(self, client_options: Mapping[str, object], group: str) -> None:
        """Create a reader, which connects in the background.

        Args:
            client_options: kafka-python's options.
            group: name of a group; librdkafka requires a name, but no group is joined.
        """
        options = {"auto.offset.reset": "earliest", "queued.max.messages.kbytes": 16 << 10, "fetch.queue.backoff.ms": 5}
        self._consumer = Consumer(
            {**librdkafka_options(client_options), **READ_OPTIONS, **options, "group.id": group}, logger=LIBRDKAFKA_LOG
        )
        self._positions: dict[TopicPartition, int] = {}
        self._paused: set[TopicPartition] = set()

    def assign(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Read only these partitions, from these offsets on. If the broker has deleted an offset, reading begins at the
        first one that it still has."""
        self._positions, self._paused = dict(offsets), set()
        self._consumer.assign([Assignment(part.topic, part.partition, offset) for part, offset in offsets.items()])

    @property
    def partitions(self) -> Set[TopicPartition]:
        """All partitions, paused or not."""
        return self._positions.keys()

    @property
    def active_positions(self) -> dict[TopicPartition, int]:
        """Offset of the next record to read, for each partition that is not paused."""
        return {part: offset for part, offset in self._positions.items() if part not in self._paused}

    def position(self, part: TopicPartition) -> int:
        """Return the offset after the last record that was read.

        At the end of the partition it is the end offset, even if transaction markers follow the last record.
        """
        return self._positions[part]

    def pause(self, parts: Iterable[TopicPartition]) -> None:
        """Pause reading these partitions until `resume`."""
        added = self._positions.keys() & set(parts) - self._paused
        if added:
            self._consumer.incremental_unassign([Assignment(part.topic, part.partition) for part in added])
            self._paused |= added

    def resume(self, parts: Iterable[TopicPartition]) -> None:
        """Continue with paused partitions at their positions."""
        removed = self._paused & set(parts)
        if removed:
            self._paused -= removed
            self._consumer.incremental_assign(
                [Assignment(part.topic, part.partition, self._positions[part]) for part in removed]
            )

    def poll(self, timeout: float, max_records: int = 10_000) -> dict[TopicPartition, list[KafkaRecord]]:
        """Return the available records, at most `max_records`. If there are none, wait up to `timeout` s for one.

        Raises:
            KafkaError: the broker refuses a request.
        """
        from kafka import TopicPartition

        first = self._consumer.poll(timeout)  # `consume` would wait until it has the maximum number of records
        messages = [] if first is None else [first]
        if first is not None and max_records > 1:
            messages += self._consumer.consume(max_records - 1, 0)
        records: dict[TopicPartition, list[KafkaRecord]] = {}
        undecodable: set[TopicPartition] = set()
        for message in messages:
            error, offset = message.error(), message.offset() or 0
            part = TopicPartition(message.topic(), message.partition())
            if error is not None and (error.code() in _REFUSED or error.fatal()):
                raise to_kafka_error(error)
            position = self._positions.get(part)
            if position is None or part in self._paused:
                continue  # fetched before the partition was paused
            if error is None and offset >= position:
                record = KafkaRecord(offset, message.timestamp()[1], message.key(), message.value())
            elif error is not None and error.code() in UNDECODABLE and part not in undecodable:
                undecodable.add(part)
                record = KafkaRecord(position, 0, None, describe_undecodable(error))
            else:
                if error is not None and error.code() == LibrdkafkaError._PARTITION_EOF:
                    self._positions[part] = max(position, offset)
                continue  # librdkafka reconnects by itself after other errors
            records.setdefault(part, []).append(record)
            self._positions[part] = record.offset + 1
        self.pause(undecodable)
        self.resume(undecodable)
        return records

    def list_partitions(self, topic: str, timeout: float = 30.0) -> list[TopicPartition]:
        """Return the partitions of a topic in order; none if there is no such topic.

        Raises:
            KafkaError: no broker answers within `timeout` s.
        """
        from kafka import TopicPartition

        try:
            found = self._consumer.list_topics(timeout=timeout).topics  # a request for one topic could create it
        except KafkaException as error:
            raise to_kafka_error(error.args[0]) from error
        return [TopicPartition(topic, number) for number in sorted(found[topic].partitions)] if topic in found else []

    def read_end(self, part: TopicPartition, timeout: float = 30.0) -> int:
        """Return the end offset of a partition, or the offset of its first open transaction, if there is one.

        Raises:
            KafkaError: no broker answers within `timeout` s, or the partition has no leader during that time.
        """
        from kafka.errors import KafkaError

        assignment, deadline = Assignment(part.topic, part.partition), time.monotonic() + timeout
        while True:
            try:
                bounds = self._consumer.get_watermark_offsets(assignment, timeout, cached=False)
                break
            except KafkaException as error:
                if error.args[0].code() not in _ELECTING or time.monotonic() >= deadline:
                    raise to_kafka_error(error.args[0]) from error
                time.sleep(_ELECTION_POLL)
        if bounds is None:
            raise KafkaError(
                f"cannot read the end offset of {part.topic}-{part.partition}: no broker answered within {timeout:g} s"
            )
        end: int = bounds[1]
        return end

    def close(self) -> None:
        self._consumer.close()


def describe_undecodable(error: LibrdkafkaError) -> bytes:
    """Return a value for a record that cannot be decoded. The decoder of each Kiln topic rejects this value."""
    return f"no record can be decoded here: {error.str()}".encode()


def to_kafka_error(error: LibrdkafkaError) -> KafkaError:
    """Convert an error of librdkafka to one of kafka-python. Codes below 0 become a plain `KafkaError`."""
    from kafka.errors import KafkaError, for_code

    if error.code() < 0:
        return KafkaError(error.str())
    kind: type[BrokerResponseError] = for_code(error.code())
    return kind(error.str())


_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "security_protocol": ("security.protocol",),
    "sasl_mechanism": ("sasl.mechanism",),
    "sasl_plain_username": ("sasl.username",),
    "sasl_plain_password": ("sasl.password",),
    "ssl_cafile": ("ssl.ca.location",),
    # PEM, with the key in the same file
    "ssl_certfile": ("ssl.certificate.location", "ssl.key.location"),
}

_ALWAYS: Final[Mapping[str, str | int | bool]] = {
    # so that a broker that is available again is found within a second
    "reconnect.backoff.max.ms": 1_000,
    # brokers may request metrics of clients (KIP-714); Kiln's metrics are at monitor.listen
    "enable.metrics.push": False,
}


def librdkafka_options(client_options: Mapping[str, object]) -> dict[str, str | int | bool]:
    """Convert kafka-python's options, as `Kafka.client_options` of the settings returns them, to librdkafka's.

    Argument and result contain the password in clear text: never print them.

    Raises:
        KeyError: An option is unknown.
    """
    servers = client_options["bootstrap_servers"]
    options: dict[str, str | int | bool] = {
        **_ALWAYS,
        "bootstrap.servers": ",".join(servers) if isinstance(servers, list) else str(servers),
    }
    for name, value in client_options.items():
        if name != "bootstrap_servers":
            options |= dict.fromkeys(_NAMES[name], str(value))
    return options
