"""Frames into Kafka by librdkafka, whose threads are in C: a frame handed over costs half of what kafka-python takes.

What else the bridge writes are few records, and goes by kafka-python (kiln.bridge.kafka.producers).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Final

from confluent_kafka import KafkaError as LibrdkafkaError
from confluent_kafka import KafkaException, Message, Producer
from kafka.errors import BrokerResponseError, KafkaError, KafkaTimeoutError, for_code

from kiln.bridge.kafka.producers import FramesProducerError
from kiln.conf.process.kafka_errors import in_words
from kiln.conf.process.librdkafka_options import librdkafka_options
from kiln.schemas.kafka.topics import MAX_RECORD

_OPTIONS: Final[Mapping[str, str | int | bool]] = {
    "enable.idempotence": True,
    # a record that is refused must keep back all that come after it
    "enable.gapless.guarantee": True,
    # tries until it is told to stop
    "message.timeout.ms": 0,
    "message.max.bytes": MAX_RECORD,
    "batch.size": 256 * 1024,
    # for a portion of records to be whole: its threads would send the first ones by themselves
    "linger.ms": 5,
    # who sends records bounds what is under way, in bytes
    "queue.buffering.max.messages": 0,
    # the partition that every other Kafka client chooses for a key
    "partitioner": "murmur2",
}
_PATIENCE: Final = 5.0  # s for a broker to say which topics there are
_TURN: Final = 0.2  # s at most between two looks whether to end

_log = logging.getLogger("librdkafka")


class DeliveryFuture:
    """What becomes of one record: kiln.bridge.kafka.producers.SendFuture."""

    __slots__ = ("_callbacks", "_errbacks", "_error", "_lock", "_settled")

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._settled = False
        self._error: KafkaError | None = None
        self._callbacks: list[Callable[[object], None]] = []
        self._errbacks: list[Callable[[BaseException], None]] = []

    def add_callback(self, f: Callable[[object], None], /) -> None:
        """Has `f` called when the broker has the record, in the producer's thread or, if the broker has it already, at
        once."""
        with self._lock:
            self._callbacks.append(f)
            if not self._settled:
                return
        if self._error is None:
            f(None)

    def add_errback(self, f: Callable[[BaseException], None], /) -> None:
        """Has `f` called with kafka-python's name for the error, when the record is refused."""
        with self._lock:
            self._errbacks.append(f)
            if not self._settled:
                return
        if self._error is not None:
            f(self._error)

    def settle(self, error: LibrdkafkaError | None, _: Message) -> None:
        """librdkafka's report."""
        named = None if error is None else _named(error)
        with self._lock:
            self._settled, self._error = True, named
            callbacks, errbacks = self._callbacks[:], self._errbacks[:]
        if named is None:
            for callback in callbacks:
                callback(None)
        else:
            for errback in errbacks:
                errback(named)


class LibrdkafkaProducer:
    """A producer that can be made to stop in mid-stream: kiln.bridge.kafka.producers.StoppableProducer.

    The broker gets the records of a key in the order of `send`, each once, and none after a record that it refused.
    """

    def __init__(self, client_options: Mapping[str, object], topic: str) -> None:
        """`client_options`: kafka-python's. FramesProducerError: no broker answers, or has no such topic."""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        options = librdkafka_options(client_options)
        with ExitStack() as opened:
            try:
                self._producer = Producer({**options, **_OPTIONS}, logger=_log)
                opened.callback(self._producer.close)
                # of all topics: to ask for one could make the topic, with the broker's defaults
                topics = self._producer.list_topics(timeout=_PATIENCE).topics
            except (KafkaException, ValueError) as error:
                timeout = KafkaTimeoutError(f"no answer within {_PATIENCE:g} s")
                why = in_words(timeout, client_options)
                raise FramesProducerError(f"no producer for {options['bootstrap.servers']}: {why}") from error
            if topic not in topics:
                raise FramesProducerError(f"no producer for {options['bootstrap.servers']}: there is no topic {topic}")
            self._thread = threading.Thread(target=self._hear, name="librdkafka", daemon=True)
            self._thread.start()
            opened.pop_all()

    def send(self, topic: str, *, value: bytes, key: bytes) -> DeliveryFuture:
        """KafkaError: an earlier record was refused, or the producer has ended."""
        record = DeliveryFuture(self._lock)
        try:
            self._producer.produce(topic, value, key, on_delivery=record.settle)
        except KafkaException as error:
            raise _named(error.args[0]) from error
        return record

    def abandon(self) -> None:
        """Send nothing more. Does not wait, so it may be called from a callback."""
        self._producer.purge(blocking=False)

    def close(self, timeout: float) -> None:
        """Abandons the producer, and returns when it has ended or after `timeout` seconds."""
        self.abandon()
        self._ended.set()
        self._thread.join(timeout)

    def _hear(self) -> None:
        while not self._ended.is_set():
            with suppress(KafkaException):  # of a refused record, which is also told by itself
                self._producer.poll(_TURN)


def _named(error: LibrdkafkaError) -> KafkaError:
    """kafka-python's error for one of librdkafka's: its own (below 0) have no name there."""
    if error.code() < 0:
        return KafkaError(error.str())
    kind: type[BrokerResponseError] = for_code(error.code())
    return kind(error.str())
