"""Kafka producers of librdkafka, which needs half the CPU of kafka-python for a record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Final, Self

from confluent_kafka import KafkaError, KafkaException, Message, Producer
from kafka.errors import KafkaTimeoutError

from kiln.conf.process.errors import PrerequisiteError
from kiln.conf.process.kafka_clients import describe_kafka_error
from kiln.conf.process.librdkafka import LIBRDKAFKA_LOG, librdkafka_options
from kiln.schemas.kafka.topics import MAX_RECORD
from kiln.schemas.proto.kiln import frame_pb2

Options = Mapping[str, str | int | bool]
"""Options of librdkafka, by name."""

_OPTIONS: Final[Options] = {
    "enable.idempotence": True,
    # a refused record must hold back all later ones
    "enable.gapless.guarantee": True,
    # no limit: librdkafka retries until its records are purged
    "message.timeout.ms": 0,
    "message.max.bytes": MAX_RECORD,
    "batch.size": 256 * 1024,
    # time for a portion of records to fill a request; otherwise the first records would be sent alone
    "linger.ms": 5,
    # the caller limits the bytes in flight
    "queue.buffering.max.messages": 0,
    "queue.buffering.max.kbytes": 2**31 - 1,
    # the partition that every other Kafka client chooses for a key
    "partitioner": "murmur2",
    # errors only: otherwise each start warns that the gapless guarantee is experimental
    "log_level": 3,
}
ONLY_REFUSALS: Final[Options] = {"delivery.report.only.error": True}
"""Option to call back only for refused records, because each callback costs CPU in Python."""
_BULK: Final[Options] = {**ONLY_REFUSALS, "queue.buffering.max.kbytes": 64 * 1024, "message.timeout.ms": 120_000}
_METADATA_TIMEOUT: Final = 5.0  # seconds for a broker to list the topics


class FramesProducerError(PrerequisiteError):
    """A producer cannot connect, or Kafka refused a record."""


def open_producer(
    client_options: Mapping[str, object], topics: Iterable[str], options: Options | None = None
) -> Producer:
    """Create a connected producer. Kafka gets each record once, in order for each key. After Kafka refuses a record, it
    gets no further one.

    Args:
        client_options: Connection options, by the names of kafka-python.
        topics: Topics that must exist. A record could otherwise create a missing topic with the broker's defaults.
        options: Options of librdkafka that override the defaults of this module.

    Raises:
        FramesProducerError: No broker answers, or a topic does not exist.
    """
    connection = librdkafka_options(client_options)
    failure = f"cannot write to Kafka at {connection['bootstrap.servers']}"
    producer: Producer | None = None
    try:
        producer = Producer({**connection, **_OPTIONS, **(options or {})}, logger=LIBRDKAFKA_LOG)
        # all topics, because a request for one topic could create it with the broker's defaults
        existing = producer.list_topics(timeout=_METADATA_TIMEOUT).topics
    except (KafkaException, ValueError) as error:
        producer = None  # closes its sockets at once
        timeout = KafkaTimeoutError(f"no answer within {_METADATA_TIMEOUT:g} s")
        raise FramesProducerError(f"{failure}: {describe_kafka_error(timeout, client_options)}") from error
    for topic in topics:
        if topic not in existing:
            producer = None
            raise FramesProducerError(f"{failure}: topic {topic} does not exist. Start kiln bridge, which creates it.")
    return producer


def close_producer(producer: Producer, timeout: float) -> None:
    """Drop all unacknowledged records, and wait up to `timeout` seconds for the callbacks that report them."""
    producer.purge()
    producer.flush(timeout)


class FramesProducer:
    """A producer of many frames for one topic. Not thread-safe.

    `send` blocks while 64 MiB of frames are queued. A frame that the broker does not acknowledge for two minutes counts
    as refused. After a refused frame no further one is sent, so that a connection's frames have no gap in Kafka.
    """

    def __init__(self, producer: Producer, topic: str) -> None:
        self._producer = producer
        self._topic = topic
        self._sent = 0
        self._refused = 0
        self._first_error: KafkaError | None = None

    def send(self, frame: frame_pb2.Frame) -> None:
        """Queue a frame to be sent.

        Raises:
            FramesProducerError: this or an earlier frame was refused.
        """
        self.send_record(frame.connection, frame.SerializeToString())

    def send_record(self, key: bytes, value: bytes) -> None:
        """Queue a serialized frame to be sent. `key` is the id of its connection. Raises the errors of `send`."""
        is_sent = False
        while not is_sent:
            self._raise_if_refused()
            try:
                self._producer.produce(self._topic, value, key, on_delivery=self._record_refusal)
                is_sent = True
            except BufferError:  # the queue is full
                self._producer.poll(1)
            except KafkaException as error:
                raise FramesProducerError(
                    f"cannot write a frame of {len(value)} bytes to {self._topic}: {error.args[0].str()}"
                ) from error
        self._sent += 1
        self._producer.poll(0)

    def flush(self) -> None:
        """Wait until the broker has acknowledged all queued frames.

        Raises:
            FramesProducerError: a frame was refused.
        """
        self._producer.flush()
        self._raise_if_refused()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.flush()
        else:
            close_producer(self._producer, 0)  # the raised error matters more than the buffered frames

    def _record_refusal(self, error: KafkaError | None, _: Message) -> None:
        self._refused += 1
        self._first_error = self._first_error or error

    def _raise_if_refused(self) -> None:
        if self._first_error is not None:
            raise FramesProducerError(
                f"cannot write to {self._topic}: the broker refused {self._refused} of {self._sent} frames; first "
                f"error: {self._first_error.str()}"
            )


def connect(client_options: Mapping[str, object], topic: str) -> FramesProducer:
    """Create a connected producer of many frames for a topic.

    Args:
        client_options: Connection options, by the names of kafka-python.

    Raises:
        FramesProducerError: No broker answers, or the topic does not exist.
    """
    return FramesProducer(open_producer(client_options, (topic,), _BULK), topic)
