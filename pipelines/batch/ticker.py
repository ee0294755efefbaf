"""Ticks: empty records in `kiln.updates` that advance log time, so that windows end while no updates arrive (decision
1)."""

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
from kiln.conf.process.kafka_records import librdkafka_options
from kiln.pipelines.batch.tick_schedule import TickSchedule
from kiln.pipelines.runtime.clocks import TrailingClock, describe_log_lag
from kiln.schemas.kafka.records import TICK

_TIMEOUT: Final = 5.0  # s for an answer of the broker
_REST: Final = 5_000  # ms from the last known end of a window to the last tick, for windows with a greater T
_PRODUCER: Final[Mapping[str, str | int]] = {"acks": "all", "linger.ms": 0, "message.timeout.ms": 5_000}

_LATEST: Final = OffsetSpec.latest()  # type: ignore[no-untyped-call]  # confluent-kafka gives it no types

_log = logging.getLogger("librdkafka")


class Ticker:
    """Thread that sends ticks to all partitions of a topic, from `start()` to `stop()`.

    While the broker does not answer, the thread tries again at each interval. `error` describes the last failure, and
    is None while ticks work.
    """

    def __init__(self, client_options: Mapping[str, object], topic: str, *, interval: float, window: int) -> None:
        """Prepare the thread.

        Args:
            client_options: Options of kafka-python.
            topic: Full name of the topic.
            interval: Seconds between two checks of the topic for new records.
            window: T + G, µs.
        """
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
        """True if no window is open: in each partition, a tick has passed the end of the last window."""
        return self._is_quiet

    @property
    def clock_lag(self) -> int:
        """Time by which the broker's clock is behind log time, µs; 0 if it is not."""
        return 0 if self._clock.since is None else self._clock.newest - self._clock.now

    @property
    def clock_error(self) -> str | None:
        """Description of the delay that a broker's clock behind log time causes; None if it is not behind."""
        clock = self._clock
        return None if clock.since is None else describe_log_lag(self._topic, clock.now, clock.newest, clock.since)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._tick_until_stopped()
            except (KafkaError, KafkaException, TimeoutError) as error:
                reason = error.args[0].str() if isinstance(error, KafkaException) else error
                self.error = (
                    "the driver of batch cannot append ticks, so a window ends only when a later update arrives: "
                    f"{reason}"
                )
                self._is_quiet = False
                self._stop.wait(max(self._interval, 0.5))

    def _tick_until_stopped(self) -> None:
        """Send ticks with librdkafka. With kafka-python, ticks took most of the CPU time of the driver's Python."""
        options = librdkafka_options(self._options)
        admin = AdminClient({**options}, logger=_log)
        producer = Producer({**options, **_PRODUCER}, logger=_log)
        try:
            metadata = producer.list_topics(timeout=_TIMEOUT).topics.get(self._topic)
            names = [TopicPartition(self._topic, partition) for partition in (metadata.partitions if metadata else ())]
            log_times = read_log_times(self._options, names)
            partitions = {
                name.partition: TickSchedule(self._span, self._span + _REST, log_times.get(name.partition, 0))
                for name in names
            }
            while not self._stop.wait(self._pause(partitions.values())):
                ends = _read_ends(admin, names)
                due = [name for name in names if partitions[name.partition].is_due(ends[name.partition], _now())]
                for record in _send_ticks(producer, due):
                    stamp = record.timestamp()[1]
                    partitions[record.partition() or 0].record_tick(record.offset() or 0, stamp, _now())
                self._check_broker_clock(partitions.values())
                self._is_quiet = bool(names) and not due and all(state.next_at == inf for state in partitions.values())
                self.error = None
        finally:
            # an error of kafka-python is in a cycle of objects, and keeps this frame alive until garbage is collected
            producer.purge()
            producer.close()
            del admin

    def _pause(self, partitions: Iterable[TickSchedule]) -> float:
        """Return the time until the next check of the topic, s. It is the interval, or less if a window ends before."""
        first = min((partition.next_at for partition in partitions), default=inf) - _now()
        return min(self._interval, first / 1000) if first >= 0 else self._interval

    def _check_broker_clock(self, partitions: Iterable[TickSchedule]) -> None:
        worst = max(partitions, key=lambda state: state.log_time - state.stamp, default=None)
        if worst is not None and worst.stamp:
            self._clock.observe(worst.stamp * 1000, worst.log_time * 1000)


def _now() -> int:  # ms
    return int(time.monotonic() * 1000)


def _read_ends(admin: AdminClient, partitions: Iterable[TopicPartition]) -> dict[int, int]:
    """Return the offset after the last record of each partition.

    Raises:
        KafkaException, TimeoutError: The broker does not answer.
    """
    admin.poll(0)  # lets librdkafka log what it has queued
    wanted = {librdkafka.TopicPartition(state.topic, state.partition): _LATEST for state in partitions}
    futures = admin.list_offsets(wanted, request_timeout=_TIMEOUT)
    return {partition.partition: future.result(_TIMEOUT).offset for partition, future in futures.items()}


def _send_ticks(producer: Producer, partitions: Iterable[TopicPartition]) -> list[Message]:
    """Send one tick to each partition, and return the ticks with the offsets and timestamps from the broker.

    Raises:
        KafkaException, KafkaTimeoutError: The broker did not accept all ticks.
    """
    delivered: list[Message] = []
    refused: list[LibrdkafkaError] = []

    def on_delivery(error: LibrdkafkaError | None, record: Message) -> None:
        if error is None:
            delivered.append(record)
        else:
            refused.append(error)

    for partition in partitions:
        producer.produce(partition.topic, TICK, partition=partition.partition, on_delivery=on_delivery)
    if producer.flush(_TIMEOUT):
        raise KafkaTimeoutError(f"the broker did not acknowledge the ticks within {_TIMEOUT:.0f} s")
    if refused:
        raise KafkaException(refused[0])
    return delivered


def read_log_times(client_options: Mapping[str, object], partitions: Iterable[TopicPartition]) -> dict[int, int]:
    """Read the log time of each partition of a topic from the broker.

    Returns:
        Log time by partition, ms. Partitions without records are missing. The result is empty if the broker is older
        than Kafka 3.0.

    Raises:
        KafkaError: No broker answers.
    """
    admin = open_client(KafkaAdminClient, **client_options)
    try:
        stamps = admin.list_partition_offsets(dict.fromkeys(partitions, OldOffsetSpec.MAX_TIMESTAMP))
    except UnsupportedVersionError:
        return {}
    finally:
        admin.close()
    return {partition.partition: at.timestamp for partition, at in stamps.items() if at.timestamp >= 0}
