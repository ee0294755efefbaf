"""Ticks on `kiln.updates`: empty records that move the log's clock on, so that windows close (decision 1)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from math import inf
from typing import Final

import confluent_kafka as librdkafka
from confluent_kafka import KafkaError as LibrdkafkaError
from confluent_kafka import KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec
from kafka.errors import KafkaError, KafkaTimeoutError, UnsupportedVersionError
from kafka.protocol.consumer import OffsetSpec as OldOffsetSpec

from kafka import KafkaAdminClient, TopicPartition
from kiln.conf.process.kafka_clients import open_client
from kiln.conf.process.librdkafka_options import librdkafka_options
from kiln.pipelines.batch.tick_schedule import TickSchedule
from kiln.pipelines.runtime.trailing_clock import TrailingClock, describe_log_lag
from kiln.schemas.kafka.records import TICK

_PATIENCE: Final = 5.0  # s for an answer of the broker
_REST: Final = 5_000  # ms after the last window that is known to end
_PRODUCER: Final[Mapping[str, str | int]] = {"acks": "all", "linger.ms": 0, "message.timeout.ms": 5_000}

_LATEST: Final = OffsetSpec.latest()  # type: ignore[no-untyped-call]  # confluent-kafka gives it no types

_log = logging.getLogger("librdkafka")


class Ticker:
    """Ticks all partitions of a topic from a thread of its own, from `start()` to `stop()`.

    While the broker is away, the thread tries again at each interval, and `error` says what went wrong last. `error` is
    None while all is well.
    """

    def __init__(self, client_options: Mapping[str, object], topic: str, *, interval: float, window: int) -> None:
        """`interval`: between looks at the topic, s; `window`: T + G in µs; `client_options`: kafka-python's."""
        self._options = dict(client_options)
        self._topic = topic
        self._interval = interval
        self._span = -(-window // 1000)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ticker", daemon=True)
        self._is_quiet = False
        self._clock = TrailingClock()
        self.error: str | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10)

    @property
    def is_quiet(self) -> bool:
        """Whether no window can be open: in every partition, a tick has passed the end of the last window."""
        return self._is_quiet

    @property
    def clock_error(self) -> str | None:
        """What it means that the broker's stamps trail the log's clock; None: they do not."""
        clock = self._clock
        return None if clock.since is None else describe_log_lag(self._topic, clock.now, clock.newest, clock.since)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._tick_until_stopped()
            except (KafkaError, KafkaException, TimeoutError) as error:
                said = error.args[0].str() if isinstance(error, KafkaException) else error
                self.error = f"no ticks, so no batches: {said}"
                self._is_quiet = False
                self._stop.wait(max(self._interval, 0.5))

    def _tick_until_stopped(self) -> None:
        """By librdkafka: with kafka-python, ticks took most of what the driver's Python takes."""
        options = librdkafka_options(self._options)
        admin = AdminClient({**options}, logger=_log)
        producer = Producer({**options, **_PRODUCER}, logger=_log)
        try:
            found = producer.list_topics(timeout=_PATIENCE).topics.get(self._topic)
            names = [TopicPartition(self._topic, partition) for partition in (found.partitions if found else ())]
            stood = read_log_times(self._options, names)
            partitions = {
                name.partition: TickSchedule(self._span, self._span + _REST, stood.get(name.partition, 0))
                for name in names
            }
            while not self._stop.wait(self._pause(partitions.values())):
                ends = _read_ends(admin, names)
                due = [each for each in names if partitions[each.partition].is_due(ends[each.partition], _now())]
                for record in _send_ticks(producer, due):
                    stamp = record.timestamp()[1]
                    partitions[record.partition() or 0].record_tick(record.offset() or 0, stamp, _now())
                self._check_broker_clock(partitions.values())
                self._is_quiet = bool(names) and not due and all(each.next_at == inf for each in partitions.values())
                self.error = None
        finally:
            # an error of kafka-python's is in a cycle of objects, and holds this frame until garbage is collected
            producer.purge()
            producer.close()
            del admin

    def _pause(self, partitions: Iterable[TickSchedule]) -> float:
        """Until the next look, s: at the moment when a window ends, where that comes first."""
        first = min((each.next_at for each in partitions), default=inf) - _now()
        return min(self._interval, first / 1000) if first >= 0 else self._interval

    def _check_broker_clock(self, partitions: Iterable[TickSchedule]) -> None:
        worst = max(partitions, key=lambda each: each.log_time - each.stamp, default=None)
        if worst is not None and worst.stamp:
            self._clock.observe(worst.stamp * 1000, worst.log_time * 1000)


def _now() -> int:
    """ms, of a clock that nobody sets."""
    return int(time.monotonic() * 1000)


def _read_ends(admin: AdminClient, partitions: Iterable[TopicPartition]) -> dict[int, int]:
    """The end offset of each partition. KafkaException, TimeoutError."""
    admin.poll(0)  # what librdkafka has to log waits for this
    wanted = {librdkafka.TopicPartition(each.topic, each.partition): _LATEST for each in partitions}
    asked = admin.list_offsets(wanted, request_timeout=_PATIENCE)
    return {place.partition: answer.result(_PATIENCE).offset for place, answer in asked.items()}


def _send_ticks(producer: Producer, partitions: Iterable[TopicPartition]) -> list[Message]:
    """The records of one tick to each partition, as the broker took them. KafkaException, KafkaTimeoutError."""
    taken: list[Message] = []
    refused: list[LibrdkafkaError] = []

    def told(error: LibrdkafkaError | None, record: Message) -> None:
        if error is None:
            taken.append(record)
        else:
            refused.append(error)

    for each in partitions:
        producer.produce(each.topic, TICK, partition=each.partition, on_delivery=told)
    if producer.flush(_PATIENCE):
        raise KafkaTimeoutError("the broker takes none")
    if refused:
        raise KafkaException(refused[0])
    return taken


def read_log_times(client_options: Mapping[str, object], partitions: Iterable[TopicPartition]) -> dict[int, int]:
    """Where the clock of each partition of a topic stands, by what the broker holds of it, ms; nothing for partitions
    without records, or where the broker is too old to be asked (before Kafka 3.0). KafkaError."""
    admin = open_client(KafkaAdminClient, **client_options)
    try:
        found = admin.list_partition_offsets(dict.fromkeys(partitions, OldOffsetSpec.MAX_TIMESTAMP))
    except UnsupportedVersionError:
        return {}
    finally:
        admin.close()
    return {place.partition: at.timestamp for place, at in found.items() if at.timestamp >= 0}
