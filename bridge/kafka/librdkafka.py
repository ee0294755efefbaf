"""Write frames to Kafka with librdkafka. Its threads are in C, so a frame costs half the CPU that it does in
kafka-python.

The bridge's other records are few and use kafka-python (kiln.bridge.kafka.producers).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from confluent_kafka import KafkaError as LibrdkafkaError
from confluent_kafka import KafkaException, Message, Producer
from kafka.errors import KafkaError, KafkaTimeoutError

from kiln.bridge.kafka.producers import FramesProducerError
from kiln.conf.process.kafka_errors import describe_kafka_error
from kiln.conf.process.kafka_records import to_kafka_error
from kiln.conf.process.librdkafka_options import librdkafka_options
from kiln.schemas.kafka.topics import MAX_RECORD

_OPTIONS: Final[Mapping[str, str | int | bool]] = {
    "enable.idempotence": True,
    # a refused record must hold back all later ones
    "enable.gapless.guarantee": True,
    # no limit: it retries until it is closed
    "message.timeout.ms": 0,
    "message.max.bytes": MAX_RECORD,
    "batch.size": 256 * 1024,
    # lets a group of records fill a request; its threads would send the first ones alone
    "linger.ms": 5,
    # the caller limits the bytes in flight
    "queue.buffering.max.messages": 0,
    # the partition that every other Kafka client chooses for a key
    "partitioner": "murmur2",
}
_METADATA_TIMEOUT: Final = 5.0  # s for a broker to list the topics
_POLL_TIMEOUT: Final = 0.2  # s at most between two checks whether to end

_log = logging.getLogger("librdkafka")


class DeliveryFuture:
    """The outcome of one record: kiln.bridge.kafka.producers.SendFuture."""

    __slots__ = ("_callbacks", "_errbacks", "_error", "_lock", "_settled")

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._settled = False
        self._error: KafkaError | None = None
        self._callbacks: list[Callable[[object], None]] = []
        self._errbacks: list[Callable[[BaseException], None]] = []

    def add_callback(self, f: Callable[[object], None], /) -> None:
        """Call `f` when the broker has the record, in the producer's thread, or at once if it has it already."""
        with self._lock:
            self._callbacks.append(f)
            if not self._settled:
                return
        if self._error is None:
            f(None)

    def add_errback(self, f: Callable[[BaseException], None], /) -> None:
        """Call `f` with kafka-python's error when the record is refused."""
        with self._lock:
            self._errbacks.append(f)
            if not self._settled:
                return
        if self._error is not None:
            f(self._error)

    def set_outcome(self, error: LibrdkafkaError | None, _: Message) -> None:
        """Set the outcome from librdkafka's delivery report."""
        kafka_error = None if error is None else to_kafka_error(error)
        with self._lock:
            self._settled, self._error = True, kafka_error
            callbacks, errbacks = self._callbacks[:], self._errbacks[:]
        if kafka_error is None:
            for callback in callbacks:
                callback(None)
        else:
            for errback in errbacks:
                errback(kafka_error)


class LibrdkafkaProducer:
    """A producer that can be stopped at any time: kiln.bridge.kafka.producers.StoppableProducer.

    The broker gets the records of a key in the order of `send`, each once, and none after a refused record.
    """

    def __init__(self, client_options: Mapping[str, object], topic: str) -> None:
        """Connect to the brokers.

        Args:
            client_options: options as kafka-python names them.

        Raises:
            FramesProducerError: no broker answers, or the topic does not exist.
        """
        self._lock = threading.Lock()
        self._closed = threading.Event()
        options = librdkafka_options(client_options)
        producer: Producer | None = None
        try:
            producer = Producer({**options, **_OPTIONS}, logger=_log)
            # all topics, because a request for one could create it with the broker's defaults
            topics = producer.list_topics(timeout=_METADATA_TIMEOUT).topics
        except (KafkaException, ValueError) as error:
            producer = None  # closes its sockets at once; `close` would first log each refused connection
            timeout = KafkaTimeoutError(f"no answer within {_METADATA_TIMEOUT:g} s")
            reason = describe_kafka_error(timeout, client_options)
            raise FramesProducerError(f"cannot write to Kafka at {options['bootstrap.servers']}: {reason}") from error
        if topic not in topics:
            producer = None
            raise FramesProducerError(
                f"cannot write to Kafka at {options['bootstrap.servers']}: topic {topic} does not exist"
            )
        self._producer = producer
        self._thread = threading.Thread(target=self._poll_reports, name="librdkafka", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads
            producer.close()
            raise

    def send(self, topic: str, *, value: bytes, key: bytes) -> DeliveryFuture:
        """Send a record.

        Raises:
            KafkaError: an earlier record was refused, or the producer is closed.
        """
        record = DeliveryFuture(self._lock)
        try:
            self._producer.produce(topic, value, key, on_delivery=record.set_outcome)
        except KafkaException as error:
            raise to_kafka_error(error.args[0]) from error
        return record

    def abandon(self) -> None:
        """Send nothing more, without waiting, so that a callback may call it."""
        self._producer.purge(blocking=False)

    def close(self, timeout: float) -> None:
        """Abandon the producer, and return when it has ended or after `timeout` seconds."""
        self.abandon()
        self._closed.set()
        self._thread.join(timeout)

    def _poll_reports(self) -> None:
        while not self._closed.is_set():
            with suppress(KafkaException):  # for a refused record, which is also reported by itself
                self._producer.poll(_POLL_TIMEOUT)
