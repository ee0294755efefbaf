"""Write frames to Kafka with a thin, bounded kafka-python producer (docs/design/contracts.md, `kiln.frames`).

Records keep their order within a connection (its id is the key), are acknowledged by all replicas, and are written once
by the idempotent producer. A refused record is never dropped silently: the next send, flush or close raises.
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
from kiln.conf.process.kafka_clients import describe_kafka_error, open_client
from kiln.schemas.kafka.topics import MAX_RECORD
from kiln.schemas.proto.kiln import frame_pb2

_OPTIONS: Final[Mapping[str, object]] = {
    "acks": "all",
    "enable_idempotence": True,
    "max_request_size": MAX_RECORD,
    "batch_size": 256 * 1024,
    "linger_ms": 5,
    # topics are created with their own settings; an auto-created one would have the broker's defaults
    "allow_auto_create_topics": False,
    # metrics are not used, and each request writes two dozen
    "metrics_enabled": False,
}
_MAX_CACHED_KEYS: Final = 1024  # keys


class FramesProducerError(PrerequisiteError):
    """Frames that Kafka refused: the number of unacknowledged frames, and the first error."""


class SendFuture(Protocol):
    """The part of kafka-python's future of one record that Kiln uses."""

    def add_callback(self, f: Callable[[object], None], /) -> object: ...
    def add_errback(self, f: Callable[[BaseException], None], /) -> object: ...


class Producer(Protocol):
    """The part of kafka-python's `KafkaProducer` that Kiln uses."""

    def send(self, topic: str, *, value: bytes, key: bytes) -> SendFuture: ...
    def flush(self, timeout: float | None = None) -> None: ...
    def close(self, timeout: float | None = None) -> None: ...


class _Cluster(Protocol):
    def partitions_for_topic(self, topic: str) -> set[int] | None: ...


class CachingPartitioner:
    """kafka-python's default partitioner with a cache by key, because its murmur2 is written in Python."""

    def __init__(self) -> None:
        self._default = DefaultPartitioner()
        self._chosen: dict[tuple[str, bytes | None], tuple[set[int], int]] = {}

    @property
    def cached_count(self) -> int:
        """Number of cached keys."""
        return len(self._chosen)

    def partition(
        self, topic: str, key: object, serialized_key: bytes | None, value: object, data: bytes, cluster: _Cluster
    ) -> int:
        """Choose a partition: `kafka.partitioner.Partitioner`."""
        partitions = cluster.partitions_for_topic(topic)
        cache_key = (topic, serialized_key)
        known = self._chosen.get(cache_key)
        if known is not None and known[0] == partitions:
            return known[1]
        chosen: int = self._default.partition(topic, key, serialized_key, value, data, cluster)
        if serialized_key is not None and partitions is not None:
            if len(self._chosen) >= _MAX_CACHED_KEYS:
                self._chosen.clear()
            self._chosen[cache_key] = (partitions, chosen)
        return chosen


Partitioner.register(CachingPartitioner)


def connect(bootstrap_servers: str | Sequence[str], client_options: Mapping[str, object] | None = None) -> Producer:
    """Create a `KafkaProducer` with Kiln's settings.

    Args:
        client_options: options (security_protocol, sasl_…, ssl_…) that override Kiln's.

    Raises:
        FramesProducerError: no broker answers, or an option is wrong.
    """
    try:
        producer = open_client(
            KafkaProducer,
            bootstrap_servers=bootstrap_servers,
            **{**_OPTIONS, "partitioner": CachingPartitioner(), **(client_options or {})},
        )
    # kafka-python asserts that it knows every option; a RuntimeError means that no thread can be started
    except (KafkaError, AssertionError, ValueError, RuntimeError) as error:
        options = {**(client_options or {}), "bootstrap_servers": bootstrap_servers}
        reason = describe_kafka_error(error, options) if isinstance(error, KafkaError) else repr(error)
        raise FramesProducerError(f"cannot write to Kafka at {bootstrap_servers}: {reason}") from error
    return cast(Producer, producer)


class FramesProducer:
    """A producer of frames for one topic, used by one thread at a time.

    kafka-python does not limit its buffer, so this class does: `send` waits while `max_buffered` bytes are not
    acknowledged, for at most `patience` seconds (longer than kafka-python's own delivery timeout of 120 s). After the
    first error nothing more is sent, because later frames of a connection must not overtake a lost one.
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
        """Number of frames that the broker has acknowledged."""
        return self._acknowledged

    def send(self, frame: frame_pb2.Frame) -> None:
        """Hand one frame to the producer; this returns before the broker has it.

        Raises:
            FramesProducerError: this or an earlier frame was refused.
        """
        self.send_record(frame.connection, frame.SerializeToString())

    def send_record(self, key: bytes, value: bytes) -> None:
        """Send a serialized frame; `key` is its connection."""
        size = len(value)
        with self._changed:
            room = self._changed.wait_for(
                lambda: self._error is not None or not self._buffered or self._buffered + size <= self._max_buffered,
                self._patience,
            )
            self._raise_if_failed()
            if not room:
                raise FramesProducerError(
                    f"cannot write to {self._topic}: the buffer is full for {self._patience:g} s; "
                    f"{self._describe_unacknowledged()}"
                )
            self._buffered += size
            self._sent += 1
        try:
            record = self._producer.send(self._topic, value=value, key=key)
        except KafkaError as error:
            self._record_outcome(size, error)
            raise FramesProducerError(f"cannot write a frame of {size} bytes to {self._topic}: {error!r}") from error
        record.add_callback(lambda _: self._record_outcome(size, None))
        record.add_errback(lambda error: self._record_outcome(size, error))

    def flush(self, timeout: float | None = None) -> None:
        """Return when the broker has every frame sent so far.

        Raises:
            FramesProducerError: the broker does not have the frames within `timeout` seconds.
        """
        try:
            self._producer.flush(timeout)
        except KafkaError as error:
            raise FramesProducerError(
                f"cannot flush {self._topic}: {self._describe_unacknowledged()}: {error!r}"
            ) from error
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not self._buffered, timeout)
            self._raise_if_failed()
            if self._acknowledged != self._sent:
                raise FramesProducerError(f"cannot flush {self._topic}: {self._describe_unacknowledged()}")

    def close(self, timeout: float | None = None) -> None:
        """Flush, then close the producer even if the flush fails."""
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
            self._producer.close(0)  # the raised error matters more than the buffered frames

    def _record_outcome(self, size: int, error: BaseException | None) -> None:
        with self._changed:
            self._buffered -= size
            if error is None:
                self._acknowledged += 1
            elif self._error is None:
                self._error = error
            self._changed.notify_all()

    def _describe_unacknowledged(self) -> str:
        return f"{self._sent - self._acknowledged} of {self._sent} frames are not acknowledged"

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise FramesProducerError(
                f"cannot write to {self._topic}: {self._describe_unacknowledged()}; first error: {self._error!r}"
            ) from self._error


_STOPPABLE: Final[Mapping[str, object]] = {
    # kafka-python would give up a batch after 120 s and go on with the next one, out of order
    "delivery_timeout_ms": 2**31 - 1,
    # callers hand over many records at a time; waiting for more would cost turns of kafka-python's thread
    "linger_ms": 0,
    # a broker that returns is found at once
    "reconnect_backoff_max_ms": 1_000,
    # keeps a stop short
    "bootstrap_timeout_ms": 5_000,
    "max_block_ms": 5_000,
}


class StoppableProducer(Protocol):
    """A producer that can be stopped: `StoppableKafkaProducer`, or another in tests."""

    def send(self, topic: str, *, value: bytes, key: bytes) -> SendFuture: ...
    def abandon(self) -> None: ...
    def close(self, timeout: float) -> None: ...


class StoppableKafkaProducer:
    """A `KafkaProducer` that can be stopped at any time."""

    def __init__(self, bootstrap_servers: str | Sequence[str], client_options: Mapping[str, object]) -> None:
        """Connect to the brokers.

        Args:
            client_options: options (security_protocol, sasl_…, ssl_…) that override Kiln's.

        Raises:
            FramesProducerError: no broker answers, or an option is wrong.
        """
        self._producer = connect(bootstrap_servers, {**_STOPPABLE, **client_options})

    def send(self, topic: str, *, value: bytes, key: bytes) -> SendFuture:
        """Send a record and return its future.

        Raises:
            KafkaError: the record cannot be sent.
        """
        return self._producer.send(topic, value=value, key=key)

    def flush(self, timeout: float) -> None:
        """Return when the broker has answered for every record sent so far.

        Raises:
            KafkaError: the broker has not answered within `timeout` seconds.
        """
        self._producer.flush(timeout)

    def abandon(self) -> None:
        """Send nothing more, without waiting, so that a callback may call it."""
        # close(0) of kafka-python 3.0.12 raises when records are in flight and leaves the producer running; only the
        # sender thread can drop them, and no public method does
        cast(_HasSender, self._producer)._sender.force_close()

    def close(self, timeout: float) -> None:
        """Abandon the producer, and return when it has ended or after `timeout` seconds."""
        self.abandon()
        with suppress(KafkaError):  # close waits for the records that were just dropped
            self._producer.close(timeout)


class _Sender(Protocol):
    def force_close(self) -> None: ...


class _HasSender(Protocol):
    _sender: _Sender
