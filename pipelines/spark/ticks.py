"""Ticks on `kiln.updates`: empty records that move the log's clock on, so that windows close (decision 1)."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import KafkaError, UnsupportedVersionError
from kafka.protocol.consumer import OffsetSpec

from pipelines.logic.tick_schedule import TickSchedule
from pipelines.logic.trailing import TrailingClock, behind_the_log
from schemas.records import TICK


class Ticker:
    """Ticks all partitions of a topic from a thread of its own, from `start()` to `stop()`.

    While the broker is away, the thread tries again at each interval, and `error` says what went wrong last. `error` is
    None while all is well.
    """

    def __init__(self, client_options: Mapping[str, object], topic: str, *, interval: float, window: int) -> None:
        """`interval` in s; `window`: T in µs; `client_options`: kafka-python's."""
        self._options = dict(client_options)
        self._topic = topic
        self._interval = interval
        self._rest = window // 1000 + 5_000
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ticker", daemon=True)
        self._quiet = False
        self._clock = TrailingClock()
        self.error: str | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10)

    @property
    def quiet(self) -> bool:
        """Whether no window can be open: in every partition, a tick has passed the end of the last window."""
        return self._quiet

    @property
    def clock_error(self) -> str | None:
        """What it means that the broker's stamps trail the log's clock; None: they do not."""
        clock = self._clock
        return None if clock.since is None else behind_the_log(self._topic, clock.now, clock.kept, clock.since)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._tick_until_stopped()
            except KafkaError as error:
                self.error = f"no ticks, so no batches: {error}"
                self._quiet = False
                self._stop.wait(max(self._interval, 0.5))

    def _tick_until_stopped(self) -> None:
        consumer = KafkaConsumer(**self._options)
        producer = KafkaProducer(**self._options, acks="all", max_block_ms=5_000)
        try:
            found = consumer.partitions_for_topic(self._topic) or set()
            names = [TopicPartition(self._topic, partition) for partition in found]
            stood = greatest_stamps(self._options, names)
            partitions = {name.partition: TickSchedule(self._rest, stood.get(name.partition, 0)) for name in names}
            while not self._stop.wait(self._interval):
                ends = consumer.end_offsets(names)
                due = [name for name in names if partitions[name.partition].due(ends[name])]
                sent = [producer.send(name.topic, value=TICK, partition=name.partition) for name in due]
                for future in sent:
                    record = future.get(timeout=5)
                    partitions[record.partition].ticked(record.offset, record.timestamp)
                self._look_at_clock(partitions.values())
                self._quiet = not due and bool(names)
                self.error = None
        finally:
            producer.close(timeout=1)
            consumer.close()

    def _look_at_clock(self, partitions: Iterable[TickSchedule]) -> None:
        worst = max(partitions, key=lambda each: each.clock - each.stamp, default=None)
        if worst is not None and worst.stamp:
            self._clock.see(worst.stamp * 1000, worst.clock * 1000)


def greatest_stamps(client_options: Mapping[str, object], partitions: Iterable[TopicPartition]) -> dict[int, int]:
    """Where the clock of each partition of a topic stands, by what the broker holds of it, ms; nothing for partitions
    without records, or where the broker is too old to be asked (before Kafka 3.0). KafkaError."""
    admin = KafkaAdminClient(**client_options)
    try:
        found = admin.list_partition_offsets(dict.fromkeys(partitions, OffsetSpec.MAX_TIMESTAMP))
    except UnsupportedVersionError:
        return {}
    finally:
        admin.close()
    return {place.partition: at.timestamp for place, at in found.items() if at.timestamp >= 0}
