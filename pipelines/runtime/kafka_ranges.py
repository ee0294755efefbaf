"""Reader of offset ranges of Kafka topics for Spark's Python workers. It uses librdkafka, returns Arrow record batches,
and imports no Spark."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from kiln.conf.process.librdkafka import READ_OPTIONS, UNDECODABLE, describe_undecodable
from kiln.schemas.times import MIN_MICROS

ClientOptions = tuple[tuple[str, str | int | bool], ...]
"""librdkafka's options for the broker, as (name, value) pairs. librdkafka requires `group.id`, although the consumer
does not join that group."""

RECORDS: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("stamp", pa.int64()),
        ("key", pa.binary()),
        ("value", pa.binary()),
    ]
)
"""Schema of Kafka records. `topic`: the topic's name without its prefix. `stamp`: the broker's timestamp, in µs."""

ArrowTask = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""Function that a Spark task applies to its record batches, as in `mapInArrow`."""

_CHUNK: Final = 10_000  # records
_POLL: Final = 0.1  # seconds; in this time librdkafka delivers no more than some 50 MB
_PATIENCE: Final = 60.0  # seconds without a record, as long as Spark's Kafka source waits
_OPTIONS: Final[dict[str, str | int | bool]] = {
    **READ_OPTIONS,
    "auto.offset.reset": "error",
    "fetch.wait.max.ms": 100,
    "fetch.queue.backoff.ms": 5,
    "queued.max.messages.kbytes": 32 << 10,
}
_LOST: Final = frozenset(
    (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE, KafkaError.UNKNOWN_TOPIC_OR_PART)
)
_LOG = logging.getLogger("librdkafka")
_LOG.addHandler(logging.NullHandler())  # else, in a worker, each line would go to stderr


_PartitionKey = tuple[str | None, int | None]
"""topic and partition"""


class OffsetRange(NamedTuple):
    """Offsets of one partition, from `first` (inclusive) to `end` (exclusive). `topic` includes the prefix."""

    topic: str
    partition: int
    first: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.first


class LostRecordsError(RuntimeError):
    """Records of an offset range are missing in Kafka, or Kafka does not send them."""


def read_ranges(ranges: Iterable[OffsetRange], options: ClientOptions, prefix: str = "") -> Iterator[pa.RecordBatch]:
    """Read offset ranges of Kafka partitions, at most one range per partition.

    Records of a partition come in the order of their offsets. Records of aborted transactions are skipped.

    A record that librdkafka cannot decode still gets a row. Its value is a description of the error, which Kiln's
    decoders reject, so the record ends up in quarantine. Its stamp is the earliest valid time.

    Args:
        prefix: Prefix of the topic names. The column `topic` omits it.

    Yields:
        Record batches with the schema RECORDS, each of one partition.

    Raises:
        LostRecordsError: Kafka's retention has removed the first records of a range, a partition ends before its range,
            or no record has arrived for 60 s.
    """
    unread: dict[_PartitionKey, OffsetRange] = {
        (offsets.topic, offsets.partition): offsets for offsets in ranges if offsets.size
    }
    if not unread:
        return
    consumer = _open_consumer(options)
    try:
        consumer.assign(
            [TopicPartition(offsets.topic, offsets.partition, offsets.first) for offsets in unread.values()]
        )
        received_at, problem = time.monotonic(), ""
        while unread:
            messages: dict[_PartitionKey, list[Message]] = {}
            log_ends: dict[_PartitionKey, int] = {}
            faults: dict[_PartitionKey, KafkaError] = {}
            for message in consumer.consume(min(_CHUNK, sum(offsets.size for offsets in unread.values())), _POLL):
                key, error = (message.topic(), message.partition()), message.error()
                if error is None:
                    messages.setdefault(key, []).append(message)
                elif error.code() == KafkaError._PARTITION_EOF:
                    log_ends[key] = _get_offset(message)
                elif error.code() in UNDECODABLE:
                    faults[key] = error
                elif key in unread and (error.code() in _LOST or error.fatal()):
                    raise LostRecordsError(
                        f"cannot read {_name([unread[key]])}: {error.str()}. See 'A query gave up' in docs/RUNBOOK.md"
                    )
                else:
                    problem = error.str()
            for key, wanted in unread.items():  # other partitions may have sent records before they were unassigned
                received = messages.get(key, [])
                after = _get_offset(received[-1]) + 1 if received else wanted.first
                if after > wanted.end:
                    received = [message for message in received if _get_offset(message) < wanted.end]
                if received:
                    yield _build_batch(wanted.topic.removeprefix(prefix), wanted.partition, received)
                if key in faults and after < wanted.end:
                    yield _build_undecodable(wanted.topic.removeprefix(prefix), wanted.partition, after, faults[key])
                    after += 1
                    consumer.incremental_unassign([TopicPartition(wanted.topic, wanted.partition)])
                    consumer.incremental_assign([TopicPartition(wanted.topic, wanted.partition, after)])
                log_end = log_ends.get(key)
                if log_end is not None:  # offsets without records may follow the last record
                    if log_end < wanted.end:
                        raise LostRecordsError(
                            f"cannot read {_name([wanted])}: the partition ends at the offset {log_end:,}. The topic "
                            "was created again, or has lost records: run kiln recover, which lists the repairs"
                        )
                    after = log_end
                unread[key] = wanted._replace(first=min(after, wanted.end))
            done = [offsets for offsets in unread.values() if not offsets.size]
            unread = {key: offsets for key, offsets in unread.items() if offsets.size}
            if done and unread:
                consumer.incremental_unassign([TopicPartition(offsets.topic, offsets.partition) for offsets in done])
            if messages or faults:
                received_at = time.monotonic()
            elif time.monotonic() > received_at + _PATIENCE:
                raise LostRecordsError(
                    f"cannot read {_name(unread.values())}: no record arrived from Kafka for {_PATIENCE:g} s. Check "
                    f"that the broker runs{problem and f'. Its last error: {problem}'}"
                )
    finally:
        consumer.unassign()


def _name(ranges: Iterable[OffsetRange]) -> str:
    return ", ".join(
        f"the offsets {offsets.first:,} to {offsets.end - 1:,} of {offsets.topic}-{offsets.partition}"
        for offsets in ranges
    )


def _get_offset(message: Message) -> int:
    return message.offset() or 0  # never None, in spite of the type


def _build_batch(topic: str, partition: int, messages: Sequence[Message]) -> pa.RecordBatch:
    count = len(messages)
    columns = (
        [topic] * count,
        [partition] * count,
        [message.offset() for message in messages],
        [message.timestamp()[1] * 1000 for message in messages],
        [message.key() for message in messages],
        [message.value() for message in messages],
    )
    arrays = [pa.array(column, field.type) for column, field in zip(columns, RECORDS, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=RECORDS)


def _build_undecodable(topic: str, partition: int, offset: int, error: KafkaError) -> pa.RecordBatch:
    value = describe_undecodable(error)
    row = {"topic": topic, "partition": partition, "offset": offset, "stamp": MIN_MICROS, "value": value}
    return pa.RecordBatch.from_pylist([row], schema=RECORDS)


@lru_cache(maxsize=1)  # all tasks of a Python worker share the consumer
def _open_consumer(options: ClientOptions) -> Consumer:
    return Consumer({**_OPTIONS, **dict(options)}, logger=_LOG)
