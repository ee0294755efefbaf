"""What goes through the topics while Kiln runs, for the screen: batches, open windows, quarantine."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from kafka import KafkaConsumer, TopicPartition
from kafka.errors import KafkaError

from deploy.observe.snapshot import BatchLine
from schemas.batch import BlockError, read_block
from schemas.records import UNREADABLE, decode_batch, decode_quarantine

_KEPT = 8  # batches to show
_LATENESS = 20_000  # newest batches to take percentiles of


@dataclass
class Seen:
    """What was seen since the watch began. Lateness in s beyond the end of the window."""

    batches: int = 0
    newest: deque[BatchLine] = field(default_factory=lambda: deque(maxlen=_KEPT))
    late: deque[float] = field(default_factory=lambda: deque(maxlen=_LATENESS))
    quarantine: Counter[str] = field(default_factory=Counter)

    def percentile(self, share: float) -> float | None:
        """The lateness that this share of batches keeps within."""
        ordered = sorted(self.late)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


class OpenWindows:
    """How many windows are open, counted anew from the log: by key, from a first update until T after it."""

    def __init__(self, window: float) -> None:
        """`window`: T in s."""
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


class Watch:
    """Reads the topics from their ends on, in a thread of its own. While the broker is away it tries again."""

    def __init__(self, client_options: Mapping[str, object], prefix: str, window: float) -> None:
        self._options = dict(client_options)
        self._topics = {prefix + name: name for name in ("updates", "batches", "quarantine")}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.seen = Seen()
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
        consumer = KafkaConsumer(**self._options, max_partition_fetch_bytes=16 << 20)
        parts = [
            TopicPartition(topic, partition)
            for topic in self._topics
            for partition in consumer.partitions_for_topic(topic) or ()
        ]
        consumer.assign(parts)
        consumer.seek_to_end(*parts)
        for part in parts:
            consumer.position(part)
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
                self._batch(value or b"", stamp)
            else:
                self.seen.quarantine[decode_quarantine(value or b"").reason] += 1
        except (*UNREADABLE, BlockError):
            self.seen.quarantine["record_malformed"] += 1

    def _batch(self, value: bytes, stamp: int) -> None:
        batch = decode_batch(value)
        tips = read_block(batch.block)
        late = stamp / 1000 - batch.closed_at / 1_000_000
        self.seen.batches += 1
        self.seen.late.append(late)
        self.seen.newest.appendleft(
            BatchLine(
                batch.separator.key, batch.separator.value, len(tips), sum(map(len, tips.values())), batch.cid, late
            )
        )
        self.first_batch.set()
