"""A thread that works as a member of a Kafka consumer group.

Kafka gives each partition to one bridge of the group (assignor `cooperative-sticky`), and to another one when that one
sends no heartbeat for SESSION. A bridge is a static member (KIP-345): if it restarts within this time, it keeps its
partitions. The broker refuses offsets of a member that it has given up.

librdkafka reads, because kafka-python stays before a record that it cannot decode (kiln.conf.process.kafka_records).
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Final, NamedTuple

from confluent_kafka import Consumer, KafkaException, Message
from confluent_kafka import KafkaError as LibrdkafkaError
from confluent_kafka import TopicPartition as Assignment

from kafka import TopicPartition
from kiln.bridge.kafka.producers import FramesProducerError, StoppableKafkaProducer
from kiln.bridge.kafka.thread import END_TIMEOUT, SESSION, KafkaConfig, KafkaThread
from kiln.conf.process.kafka_records import (
    LIBRDKAFKA_LOG,
    READ_OPTIONS,
    UNDECODABLE,
    KafkaRecord,
    describe_undecodable,
    to_kafka_error,
)
from kiln.conf.process.librdkafka_options import librdkafka_options

_COMMIT_EVERY: Final = 1.0  # s between two commits of changed offsets, because the broker may sync each commit
_HEARTBEAT: Final = 1.0  # s
_ANSWER_TIMEOUT: Final = 10.0  # s for the broker to answer a request
_DRAIN_TIMEOUT: Final = 2.0  # s for the broker to acknowledge what is written when the thread stops
_REJOINING: Final = frozenset(
    (LibrdkafkaError.REBALANCE_IN_PROGRESS, LibrdkafkaError.ILLEGAL_GENERATION, LibrdkafkaError.UNKNOWN_MEMBER_ID)
)
"""Errors of a commit while the group changes; what is not committed then is done again, by whom Kafka chooses."""
_FATAL: Final = frozenset(
    (
        LibrdkafkaError._ALL_BROKERS_DOWN,
        LibrdkafkaError.TOPIC_AUTHORIZATION_FAILED,
        LibrdkafkaError.GROUP_AUTHORIZATION_FAILED,
        LibrdkafkaError.UNKNOWN_TOPIC_OR_PART,
    )
)
"""Errors that end the session. librdkafka recovers from others by itself."""


class Progress(NamedTuple):
    """The offset to commit for a partition, and its metadata."""

    offset: int
    metadata: str


class KafkaWorker(KafkaThread):
    """A thread that handles the records of the partitions that Kafka assigns to it, from `start()` to `stop()`.

    A subclass handles records, works between polls, and names the offset of each partition below which all is done,
    which is committed. After a crash, the records from there on are handled again, here or in another bridge.
    """

    def __init__(
        self, name: str, consequence: str, kafka: KafkaConfig, group: str, topic: str, instance: str | None
    ) -> None:
        """Create the thread without starting it.

        Args:
            topic: topic without the prefix.
            instance: id of the static member; `None` for a member that leaves the group when it ends.
        """
        super().__init__(name, consequence, kafka, group)
        self._topic = f"{self._prefix}{topic}"
        self._instance = instance
        self._positions: dict[int, int] = {}  # offset of the next record, by assigned partition
        self._committed: dict[int, Progress] = {}
        self._commit_at = 0.0
        self._is_paused = False
        self._broker_error: LibrdkafkaError | None = None

    @abstractmethod
    def _begin(self, partition: int, committed: Progress | None, start: int) -> None:
        """Begin with a partition.

        Args:
            committed: `None` at the first start of the group.
            start: the first offset that the broker still has, or of the committed one if that is greater.
        """

    @abstractmethod
    def _end(self, partition: int) -> None:
        """Forget what is not done of a partition, which may be another bridge's now."""

    @abstractmethod
    def _record_lost_range(self, partition: int, before: int) -> None:
        """Record that the broker has deleted everything before this offset."""

    @abstractmethod
    def _handle(self, partition: int, record: KafkaRecord) -> None:
        """Handle a record."""

    @abstractmethod
    def _work(self, producer: StoppableKafkaProducer) -> int:
        """Do what is due between two polls, and return the number of records written and not acknowledged."""

    @abstractmethod
    def _next_poll(self) -> tuple[float, int]:
        """Return the longest wait of the next poll in s, and its number of records; 0 to read nothing more."""

    @abstractmethod
    def _progress(self) -> Mapping[int, Progress]:
        """Return what to commit, by assigned partition."""

    @property
    def _is_on_standby(self) -> bool:
        """Return whether other bridges have all partitions."""
        return not self._positions

    def _run_session(self) -> None:
        try:
            with ExitStack() as opened:
                producer = StoppableKafkaProducer(self._servers, self._client_options)
                opened.callback(producer.close, 2)
                consumer = self._open_group_consumer()
                opened.callback(self._end_all)
                opened.callback(consumer.close)
                if self._topic not in consumer.list_topics(timeout=_ANSWER_TIMEOUT / 2).topics:
                    raise FramesProducerError(f"topic {self._topic} does not exist")
                consumer.subscribe(
                    [self._topic], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
                )
                self._run_group(consumer, producer)
        except KafkaException as error:
            raise to_kafka_error(error.args[0]) from error

    def _run_group(self, consumer: Consumer, producer: StoppableKafkaProducer) -> None:
        while not self._stop.is_set():
            self._mark_progress()
            self._handle_messages(consumer, self._poll_group(consumer))
            self._work(producer)
            self._error = None
            if time.monotonic() >= self._commit_at:
                self._commit(consumer)
        until = time.monotonic() + _DRAIN_TIMEOUT
        while self._work(producer) and time.monotonic() < until:
            time.sleep(0.05)  # kafka-python's thread adds acknowledgements meanwhile
        self._commit(consumer)

    def _open_group_consumer(self) -> Consumer:
        self._broker_error = None
        static = {} if self._instance is None else {"group.instance.id": self._instance}
        options = {
            **librdkafka_options({**self._client_options, "bootstrap_servers": self._servers}),
            **READ_OPTIONS,
            **static,
            "group.id": self._group,
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": int(SESSION * 1_000),
            "heartbeat.interval.ms": int(_HEARTBEAT * 1_000),
            "auto.offset.reset": "earliest",
            "enable.partition.eof": False,
            "queued.max.messages.kbytes": 16 << 10,
            "fetch.queue.backoff.ms": 5,
            # partitions that are added are read
            "topic.metadata.refresh.interval.ms": 10_000,
            "error_cb": self._on_error,
        }
        return Consumer(options, logger=LIBRDKAFKA_LOG)

    # -------- the group; librdkafka calls these in this thread, while it polls or closes

    def _on_error(self, error: LibrdkafkaError) -> None:
        if error.code() in _FATAL or error.fatal():
            self._broker_error = error

    def _on_assign(self, consumer: Consumer, parts: list[Assignment]) -> None:
        for part in consumer.committed(parts, timeout=_ANSWER_TIMEOUT):
            if part.error is not None:
                raise KafkaException(part.error)
            first, end = consumer.get_watermark_offsets(part, timeout=_ANSWER_TIMEOUT, cached=False)
            # an offset behind the end is of another topic, which was deleted
            committed = Progress(part.offset, part.metadata or "") if 0 <= part.offset <= end else None
            start = first if committed is None else max(first, committed.offset)
            self._positions[part.partition] = start
            self._begin(part.partition, committed, start)
            if committed is not None:
                self._committed[part.partition] = committed
        self._commit(consumer)
        consumer.incremental_assign(
            [Assignment(self._topic, part.partition, self._positions[part.partition]) for part in parts]
        )
        self._is_paused = False

    def _on_revoke(self, consumer: Consumer, parts: list[Assignment]) -> None:
        self._commit(consumer)
        self._on_lost(consumer, parts)

    def _on_lost(self, consumer: Consumer, parts: list[Assignment]) -> None:
        for part in parts:
            self._forget(part.partition)
        consumer.incremental_unassign(parts)

    def _end_all(self) -> None:
        for partition in list(self._positions):
            self._forget(partition)

    def _forget(self, partition: int) -> None:
        if self._positions.pop(partition, None) is not None:
            self._committed.pop(partition, None)
            self._end(partition)

    # -------- records

    def _poll_group(self, consumer: Consumer) -> Sequence[Message]:
        wait, most = self._next_poll()
        if (most == 0) != self._is_paused and self._positions:
            parts = [Assignment(self._topic, partition) for partition in self._positions]
            (consumer.pause if most == 0 else consumer.resume)(parts)
            self._is_paused = most == 0
        first = consumer.poll(wait)  # `consume` would wait for as many as it may return
        messages = [] if first is None else [first, *(consumer.consume(most - 1, 0) if most > 1 else ())]
        if self._broker_error is not None:
            raise to_kafka_error(self._broker_error)
        positions = {} if self._is_paused else self._positions
        self._check_ends(
            has_records=bool(messages),
            positions={TopicPartition(self._topic, partition): offset for partition, offset in positions.items()},
            read_end=lambda part: consumer.get_watermark_offsets(
                Assignment(part.topic, part.partition), timeout=END_TIMEOUT, cached=False
            )[1],
        )
        return messages

    def _handle_messages(self, consumer: Consumer, messages: Sequence[Message]) -> None:
        undecodable: set[int] = set()
        for message in messages:
            error, partition, offset = message.error(), message.partition() or 0, message.offset() or 0
            if error is not None and (error.code() in _FATAL or error.fatal()):
                raise to_kafka_error(error)
            position = self._positions.get(partition)
            if position is None:
                continue  # it was on its way when the partition was revoked
            if error is None and offset >= position:
                if offset > position:  # offsets without records, such as the markers of transactions, are not lost
                    first, _ = consumer.get_watermark_offsets(
                        Assignment(self._topic, partition), timeout=_ANSWER_TIMEOUT, cached=False
                    )
                    self._record_lost_range(partition, min(first, offset))
                record = KafkaRecord(offset, message.timestamp()[1], message.key(), message.value())
            elif error is not None and error.code() in UNDECODABLE and partition not in undecodable:
                undecodable.add(partition)
                record = KafkaRecord(position, 0, None, describe_undecodable(error))
                consumer.seek(Assignment(self._topic, partition, position + 1))
            else:
                continue
            self._positions[partition] = record.offset + 1
            self._handle(partition, record)

    def _commit(self, consumer: Consumer) -> None:
        """Commit the offsets that have changed."""
        self._commit_at = time.monotonic() + _COMMIT_EVERY
        changed = {
            partition: progress
            for partition, progress in self._progress().items()
            if self._committed.get(partition) != progress
        }
        if not changed:
            return
        offsets = [Assignment(self._topic, partition, *progress) for partition, progress in changed.items()]
        try:
            results = consumer.commit(offsets=offsets, asynchronous=False)
            errors = [part.error for part in results if part.error is not None]
        except KafkaException as error:
            errors = [error.args[0]]
        if any(error.code() not in _REJOINING for error in errors):
            raise KafkaException(errors[0])
        if not errors:
            self._committed |= changed
