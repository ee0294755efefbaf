"""Ticks: empty records in `kiln.updates` that advance log time, so that windows end while no updates arrive (decision
1)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from math import inf
from typing import Final

from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from kiln.conf.process.librdkafka import LIBRDKAFKA_LOG, librdkafka_options
from kiln.pipelines.batch.tick_schedule import TickSchedule
from kiln.pipelines.runtime.clocks import TrailingClock, describe_log_lag
from kiln.pipelines.runtime.kafka_offsets import LATEST, MAX_TIMESTAMP, list_partitions, read_offsets
from kiln.schemas.kafka.records import TICK

_TIMEOUT: Final = 5.0  # s for an answer of the broker
_REST: Final = 5_000  # ms from the last known end of a window to the last tick, for windows with a greater T
_PRODUCER: Final[Mapping[str, str | int]] = {"acks": "all", "linger.ms": 0, "message.timeout.ms": 5_000}


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
        self.quiet_ends: Mapping[int, int] | None = None
        """end offsets, by partition, at which no window was open, because a tick had passed the end of the last window
        of each partition; None if a window is open"""
        self._clock = TrailingClock()
        self.error: str | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10)

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
            except (KafkaException, TimeoutError) as error:
                reason = error.args[0].str() if isinstance(error, KafkaException) else error
                self.error = (
                    "the driver of batch cannot append ticks, so a window ends only when a later update arrives: "
                    f"{reason}"
                )
                self.quiet_ends = None
                self._stop.wait(max(self._interval, 0.5))

    def _tick_until_stopped(self) -> None:
        """Send ticks with librdkafka. With kafka-python, ticks took most of the CPU time of the driver's Python."""
        options = librdkafka_options(self._options)
        admin = AdminClient({**options}, logger=LIBRDKAFKA_LOG)
        producer = Producer({**options, **_PRODUCER}, logger=LIBRDKAFKA_LOG)
        try:
            names = list_partitions(admin, [self._topic])
            if not names:
                raise TimeoutError(f"the broker does not know the topic {self._topic}")
            log_times = read_log_times(admin, names)
            partitions = {
                name.partition: TickSchedule(self._span, self._span + _REST, log_times.get(name.partition, 0))
                for name in names
            }
            while not self._stop.wait(self._pause(partitions.values())):
                ends = read_offsets(admin, names, LATEST)
                due = [name for name in names if partitions[name.partition].is_due(ends[name].offset, _now())]
                for record in _send_ticks(producer, due):
                    stamp = record.timestamp()[1]
                    partitions[record.partition() or 0].record_tick(record.offset() or 0, stamp, _now())
                self._check_broker_clock(partitions.values())
                is_quiet = not due and all(state.next_at == inf for state in partitions.values())
                self.quiet_ends = {name.partition: ends[name].offset for name in names} if is_quiet else None
                self.error = None
        finally:
            producer.purge()
            producer.close()

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


def _send_ticks(producer: Producer, partitions: Iterable[TopicPartition]) -> list[Message]:
    """Send one tick to each partition, and return the ticks with the offsets and timestamps from the broker.

    Raises:
        KafkaException, TimeoutError: The broker did not accept all ticks.
    """
    delivered: list[Message] = []
    refused: list[KafkaError] = []

    def on_delivery(error: KafkaError | None, record: Message) -> None:
        if error is None:
            delivered.append(record)
        else:
            refused.append(error)

    for partition in partitions:
        producer.produce(partition.topic, TICK, partition=partition.partition, on_delivery=on_delivery)
    if producer.flush(_TIMEOUT):
        raise TimeoutError(f"the broker did not acknowledge the ticks within {_TIMEOUT:.0f} s")
    if refused:
        raise KafkaException(refused[0])
    return delivered


def read_log_times(admin: AdminClient, partitions: Iterable[TopicPartition]) -> dict[int, int]:
    """Read the log time of each partition of a topic from the broker.

    Returns:
        Log time by partition, ms. Partitions without records are missing. If the broker is older than Kafka 3.0, the
        result may be earlier times.

    Raises:
        KafkaException, TimeoutError: No broker answers.
    """
    stamps = read_offsets(admin, partitions, MAX_TIMESTAMP)
    return {partition.partition: at.timestamp for partition, at in stamps.items() if at.timestamp >= 0}
