"""Producer of librdkafka for frames. Its threads are in C, so a frame costs half the CPU of kafka-python.

The bridge's other records are few and use kafka-python (kiln.bridge.kafka.producers).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from confluent_kafka import KafkaException, Producer
from kafka.errors import KafkaTimeoutError

from kiln.bridge.kafka.producers import FramesProducerError
from kiln.conf.process.kafka_clients import describe_kafka_error
from kiln.conf.process.kafka_records import librdkafka_options
from kiln.schemas.kafka.topics import MAX_RECORD

_OPTIONS: Final[Mapping[str, str | int | bool]] = {
    "enable.idempotence": True,
    # a refused record must hold back all later ones
    "enable.gapless.guarantee": True,
    # no limit: it retries until its records are purged
    "message.timeout.ms": 0,
    "message.max.bytes": MAX_RECORD,
    "batch.size": 256 * 1024,
    # lets a portion of records fill a request; otherwise the first records would be sent alone
    "linger.ms": 5,
    # the caller limits the bytes in flight
    "queue.buffering.max.messages": 0,
    # the partition that every other Kafka client chooses for a key
    "partitioner": "murmur2",
    # callbacks cost Python time
    "delivery.report.only.error": True,
}
_METADATA_TIMEOUT: Final = 5.0  # s for a broker to list the topics

_log = logging.getLogger("librdkafka")


def open_frames_producer(client_options: Mapping[str, object], topic: str) -> Producer:
    """Open a producer that is connected. Kafka gets the records of a key in their order, each once, and none after a
    refused record. Only refused records have a delivery report.

    Args:
        client_options: Options as kafka-python names them.

    Raises:
        FramesProducerError: No broker answers, or the topic does not exist.
    """
    options = librdkafka_options(client_options)
    producer: Producer | None = None
    try:
        producer = Producer({**options, **_OPTIONS}, logger=_log)
        # all topics, because a request for one topic could create it with the broker's defaults
        topics = producer.list_topics(timeout=_METADATA_TIMEOUT).topics
    except (KafkaException, ValueError) as error:
        producer = None  # closes its sockets at once
        timeout = KafkaTimeoutError(f"no answer within {_METADATA_TIMEOUT:g} s")
        reason = describe_kafka_error(timeout, client_options)
        raise FramesProducerError(f"cannot write to Kafka at {options['bootstrap.servers']}: {reason}") from error
    if topic not in topics:
        producer = None
        raise FramesProducerError(
            f"cannot write to Kafka at {options['bootstrap.servers']}: topic {topic} does not exist"
        )
    return producer
