"""Frames into Kafka: a thin, bounded kafka-python producer (docs/design/contracts.md, `kiln.frames`).

Records keep their order within a connection (its id is the key), are acknowledged by all replicas and written once by
the idempotent producer. What Kafka does not take is never dropped in silence: the next send, flush or close raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, Protocol, Self, cast

from kafka.errors import KafkaError
from kafka.partitioner import DefaultPartitioner, Partitioner

from kafka import KafkaProducer
from kiln.conf.process.errors import PrerequisiteError
from kiln.conf.process.kafka_clients import open_client
from kiln.conf.process.kafka_errors import in_words
from kiln.schemas.kafka.topics import MAX_RECORD
from kiln.schemas.proto.kiln import frame_pb2

_OPTIONS: Final[Mapping[str, object]] = {
    "acks": "all",
    "enable_idempotence": True,
    "max_request_size": MAX_RECORD,
    "batch_size": 256 * 1024,
    "linger_ms": 5,
    # topics are made with their own settings; a made-up one would have the broker's defaults
    "allow_auto_create_topics": False,
    # nobody reads them, and each request writes two dozen
    "metrics_enabled": False,
}
_REMEMBERED: Final = 1024  # keys


class FramesProducerError(PrerequisiteError):
    """Frames that Kafka did not take: how many are not acknowledged, and the first error."""


class SendFuture(Protocol):
    """The future of one record: what is used of kafka-python's."""

    def add_callback(self, f: Callable[[object], None], /) -> object: ...
    def add_errback(self, f: Callable[[BaseException], None], /) -> object: ...


class Producer(Protocol):
    """What is used of kafka-python's KafkaProducer."""

    def send(self, topic: str, *, value: bytes, key: bytes) -> SendFuture: ...
    def flush(self, timeout: float | None = None) -> None: ...
    def close(self, timeout: float | None = None) -> None: ...


class _Cluster(Protocol):
    def partitions_for_topic(self, topic: str) -> set[int] | None: ...


class CachingPartitioner:
    """kafka-python's own choice of partition, made once for each key: its murmur2 is written in Python."""

    def __init__(self) -> None:
        self._default = DefaultPartitioner()
        self._known: dict[tuple[str, bytes | None], tuple[set[int], int]] = {}

    @property
    def remembered(self) -> int:
        """How many keys."""
        return len(self._known)

    def partition(
        self, topic: str, key: object, serialized_key: bytes | None, value: object, data: bytes, cluster: _Cluster
    ) -> int:
        """As kafka.partitioner.Partitioner."""
        partitions = cluster.partitions_for_topic(topic)
        place = (topic, serialized_key)
        known = self._known.get(place)
        if known is not None and known[0] == partitions:
            return known[1]
        chosen: int = self._default.partition(topic, key, serialized_key, value, data, cluster)
        if serialized_key is not None and partitions is not None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[place] = (partitions, chosen)
        return chosen


Partitioner.register(CachingPartitioner)


def connect(bootstrap_servers: str | Sequence[str], client_options: Mapping[str, object] | None = None) -> Producer:
    """A KafkaProducer with Kiln's settings; `client_options` (security_protocol, sasl_…, ssl_…) override them.

    FramesProducerError if no broker answers or an option is wrong.
    """
    try:
        producer = open_client(
            KafkaProducer,
            bootstrap_servers=bootstrap_servers,
            **{**_OPTIONS, "partitioner": CachingPartitioner(), **(client_options or {})},
        )
    # kafka-python asserts that it knows every option; a RuntimeError says that no thread can be started
    except (KafkaError, AssertionError, ValueError, RuntimeError) as error:
        options = {**(client_options or {}), "bootstrap_servers": bootstrap_servers}
        why = in_words(error, options) if isinstance(error, KafkaError) else repr(error)
        raise FramesProducerError(f"no producer for {bootstrap_servers}: {why}") from error
    return cast(Producer, producer)


class FramesProducer:
    """Sends Frames to one topic.

    kafka-python bounds no buffer, so this class does: `send` waits while `max_buffered` bytes are not acknowledged, for
    at most `patience` seconds (longer than kafka-python's own delivery timeout of 120 s, after which kafka-python gives
    up). After the first error nothing more is sent: later frames of a connection must not overtake a lost frame.
    One thread at a time may call send.
    """

    def __init__(
        self, producer: Producer, topic: str, max_buffered: int = 64 * 1024 * 1024, patience: float = 150.0
    ) -> None:
        self._producer = producer
        self._topic = topic
        self._max_buffered = max_buffered
        self._patience = patience
        self._changed = threading.Condition()
        self._buffered = 0  # bytes
        self._sent = 0
        self._acknowledged = 0
        self._error: BaseException | None = None

    @property
    def acknowledged(self) -> int:
        """How many frames the broker has taken so far."""
        return self._acknowledged

    def send(self, frame: frame_pb2.Frame) -> None:
        """Hand one frame to the producer.

        Returns before the broker has it. FramesProducerError: it or an earlier one was refused.
        """
        self.send_record(frame.connection, frame.SerializeToString())

    def send_record(self, key: bytes, value: bytes) -> None:
        """As `send`, for a Frame that is serialized already; `key`: its connection."""
        size = len(value)
        with self._changed:
            room = self._changed.wait_for(
                lambda: self._error is not None or not self._buffered or self._buffered + size <= self._max_buffered,
                self._patience,
            )
            self._raise_if_failed()
            if not room:
                raise FramesProducerError(f"{self._topic}: no room for {self._patience:g} s; {self._waiting()}")
            self._buffered += size
            self._sent += 1
        try:
            record = self._producer.send(self._topic, value=value, key=key)
        except KafkaError as error:
            self._settled(size, error)
            raise FramesProducerError(f"{self._topic}: a frame of {size} bytes was refused: {error!r}") from error
        record.add_callback(lambda _: self._settled(size, None))
        record.add_errback(lambda error: self._settled(size, error))

    def flush(self, timeout: float | None = None) -> None:
        """Return when the broker has every frame sent so far.

        FramesProducerError if it has not within `timeout` seconds.
        """
        try:
            self._producer.flush(timeout)
        except KafkaError as error:
            raise FramesProducerError(f"{self._topic}: {self._waiting()}: {error!r}") from error
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not self._buffered, timeout)
            self._raise_if_failed()
            if self._acknowledged != self._sent:
                raise FramesProducerError(f"{self._topic}: {self._waiting()}")

    def close(self, timeout: float | None = None) -> None:
        """Flush, then close the producer, in any case."""
        try:
            self.flush(timeout)
        finally:
            self._producer.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._producer.close(0)  # the error that is under way matters more than what is still buffered

    def _settled(self, size: int, error: BaseException | None) -> None:
        with self._changed:
            self._buffered -= size
            if error is None:
                self._acknowledged += 1
            elif self._error is None:
                self._error = error
            self._changed.notify_all()

    def _waiting(self) -> str:
        return f"{self._sent - self._acknowledged} of {self._sent} frames are not acknowledged"

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise FramesProducerError(
                f"{self._topic}: {self._waiting()}; first error: {self._error!r}"
            ) from self._error


_STOPPABLE: Final[Mapping[str, object]] = {
    # kafka-python would give up a batch after 120 s and go on with the next one, out of order
    "delivery_timeout_ms": 2**31 - 1,
    # who sends many records hands them over in portions; to wait for more would cost turns of kafka-python's thread
    "linger_ms": 0,
    # a broker that is back is found at once
    "reconnect_backoff_max_ms": 1_000,
    # so that a stop need not wait long
    "bootstrap_timeout_ms": 5_000,
    "max_block_ms": 5_000,
}


class StoppableProducer(Protocol):
    """What a sink needs of a producer: StoppableKafkaProducer, or another in tests."""

    def send(self, topic: str, *, value: bytes, key: bytes) -> SendFuture: ...
    def abandon(self) -> None: ...
    def close(self, timeout: float) -> None: ...


class StoppableKafkaProducer:
    """A KafkaProducer that can be made to stop in mid-stream."""

    def __init__(self, bootstrap_servers: str | Sequence[str], client_options: Mapping[str, object]) -> None:
        """`client_options` (security_protocol, sasl_…, ssl_…) override Kiln's. FramesProducerError: no broker."""
        self._producer = connect(bootstrap_servers, {**_STOPPABLE, **client_options})

    def send(self, topic: str, *, value: bytes, key: bytes) -> SendFuture:
        """The future of one record. KafkaError."""
        return self._producer.send(topic, value=value, key=key)

    def flush(self, timeout: float) -> None:
        """Returns when the broker has answered for every record sent so far. KafkaError."""
        self._producer.flush(timeout)

    def abandon(self) -> None:
        """Send nothing more. Does not wait, so it may be called from a callback."""
        # close(0) of kafka-python 3.0.12 raises when records are under way and leaves the producer running; only the
        # thread that sends can be told to drop them, and no public method does
        cast(_HasSender, self._producer)._sender.force_close()

    def close(self, timeout: float) -> None:
        """Abandons the producer, and returns when it has ended or after `timeout` seconds."""
        self.abandon()
        with suppress(KafkaError):  # it waits for records that it has just been told to drop
            self._producer.close(timeout)


class _Sender(Protocol):
    def force_close(self) -> None: ...


class _HasSender(Protocol):
    _sender: _Sender
