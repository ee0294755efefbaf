"""What goes through the topics while Kiln runs, for the screen: batches, open windows, quarantine."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from kafka.errors import KafkaError

from kafka import KafkaConsumer, TopicPartition
from kiln.conf.process.kafka_clients import open_client
from kiln.deploy.ops.snapshot import BatchLine
from kiln.schemas.exposition import BATCH_DELAY_BUCKETS
from kiln.schemas.kafka.records import UNREADABLE, decode_batch, decode_quarantine
from kiln.schemas.wire.batch_block import BlockError, read_block

_KEPT = 8  # batches to show
_LATENESS = 20_000  # newest batches to take percentiles of


@dataclass
class TopicCounts:
    """What was seen since the watch began.

    `late`: of live batches, how many s later than T after the first update was heard the broker had the batch. A
    replayed capture was heard before Kiln had it, perhaps years before: its batches say nothing of how fast Kiln is.
    """

    batches: int = 0
    newest: deque[BatchLine] = field(default_factory=lambda: deque(maxlen=_KEPT))
    late: deque[float] = field(default_factory=lambda: deque(maxlen=_LATENESS))
    late_by_bucket: list[int] = field(default_factory=lambda: [0] * (len(BATCH_DELAY_BUCKETS) + 1))
    """how many were as late as each of LATENESS_BUCKETS at most and later than the one before; at the end, the rest"""
    late_sum: float = 0.0
    tips: int = 0
    quarantine: Counter[tuple[str, str]] = field(default_factory=Counter)
    """by stage and reason"""

    def take(self, value: bytes, stamp: int) -> None:
        """A record of `kiln.batches`; `stamp`: the broker's, in ms. UNREADABLE, BlockError: it cannot be read."""
        batch = decode_batch(value)
        tips = read_block(batch.block)
        late = stamp / 1000 - batch.closed_at / 1_000_000 if batch.origin == "LIVE" else None
        self.batches += 1
        if late is not None:
            self.late.append(late)
            self.late_by_bucket[bisect_left(BATCH_DELAY_BUCKETS, late)] += 1
            self.late_sum += late
        separator, streams, count = batch.separator, len(tips), sum(map(len, tips.values()))
        self.tips += count
        line = BatchLine(separator.key, separator.value, streams, count, batch.batch_cid, late)
        self.newest.appendleft(line)

    def percentile(self, share: float) -> float | None:
        """The lateness that this share of batches keeps within."""
        ordered = sorted(self.late)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


class OpenWindows:
    """How many windows are open, counted anew from the log without reading its values: one for each key, from an update
    that finds none until T + G after it by the broker's stamps, when log time ends the window (decision 1)."""

    def __init__(self, window: float) -> None:
        """`window`: T + G in s."""
        self._window = window * 1000
        self._closing: dict[int, dict[bytes, float]] = {}

    def take(self, partition: int, key: bytes | None, stamp: int) -> None:
        """A record of `kiln.updates`, in order; `stamp` in ms, no key: a tick."""
        closing = self._closing.setdefault(partition, {})
        while closing:
            oldest = next(iter(closing))
            if closing[oldest] > stamp:
                break
            del closing[oldest]
        if key and b"/" in key:  # with no separator, the key is the stream
            closing.setdefault(key, stamp + self._window)

    def __len__(self) -> int:
        return sum(map(len, self._closing.values()))


class TopicWatch:
    """Reads the topics from their ends on, in a thread of its own. While the broker is away it tries again."""

    def __init__(self, client_options: Mapping[str, object], prefix: str, window: float) -> None:
        """`window`: T + G in s."""
        self._options = dict(client_options)
        self._topics = {prefix + name: name for name in ("updates", "batches", "quarantine")}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.seen = TopicCounts()
        self.open = OpenWindows(window)
        self.first_batch = threading.Event()

    def start(self) -> None:
        """Returns once the ends are known, so that nothing written from now on is missed."""
        consumer = self._consumer()
        self._thread = threading.Thread(target=self._run, args=(consumer,), name="watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def _consumer(self) -> KafkaConsumer:
        # a tick comes each 100 ms: to fetch twice a second costs a screen nothing, and broker and process less
        consumer = open_client(
            KafkaConsumer,
            **self._options,
            max_partition_fetch_bytes=16 << 20,
            fetch_min_bytes=1 << 20,
            fetch_max_wait_ms=500,
        )
        with ExitStack() as opened:
            opened.callback(consumer.close)
            parts = [
                TopicPartition(topic, partition)
                for topic in self._topics
                for partition in consumer.partitions_for_topic(topic) or ()
            ]
            consumer.assign(parts)
            consumer.seek_to_end(*parts)
            for part in parts:
                consumer.position(part)
            opened.pop_all()
        return consumer

    def _run(self, consumer: KafkaConsumer) -> None:
        while not self._stop.is_set():
            try:
                for part, records in consumer.poll(timeout_ms=200).items():
                    for record in records:
                        self._take(self._topics[part.topic], part.partition, record.key, record.value, record.timestamp)
            except KafkaError:
                self._stop.wait(1.0)
        consumer.close()

    def _take(self, topic: str, partition: int, key: bytes | None, value: bytes | None, stamp: int) -> None:
        if topic == "updates":
            self.open.take(partition, key, stamp)
            return
        try:
            if topic == "batches":
                self.seen.take(value or b"", stamp)
                self.first_batch.set()
            else:
                fault = decode_quarantine(value or b"")
                self.seen.quarantine[fault.stage, fault.reason] += 1
        except (*UNREADABLE, BlockError):
            self.seen.quarantine["sink", "record_malformed"] += 1
