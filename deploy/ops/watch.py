"""Counts of batches, open windows and quarantined records from the topics, for the screen."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from kafka.errors import KafkaError

from kafka import TopicPartition
from kiln.conf.process.kafka_records import RecordReader
from kiln.deploy.ops.snapshot import BATCH_DELAY_BUCKETS, BatchLine
from kiln.schemas.kafka.records import UNREADABLE, decode_batch, decode_quarantine
from kiln.schemas.wire.batch_block import BlockError, read_block

_POLL = 0.2  # s
_SHOWN = 8  # batches on the screen
_LATENESS = 20_000  # newest batches for percentiles


@dataclass
class TopicCounts:
    """Counts since the start of the watch.

    Attributes:
        late: Delays of live batches, s (`BatchLine.late`). Batches of replayed captures do not count, because their
            event times come from the capture.
    """

    batches: int = 0
    newest: deque[BatchLine] = field(default_factory=lambda: deque(maxlen=_SHOWN))
    late: deque[float] = field(default_factory=lambda: deque(maxlen=_LATENESS))
    late_by_bucket: list[int] = field(default_factory=lambda: [0] * (len(BATCH_DELAY_BUCKETS) + 1))
    """batches by delay: up to each bound of BATCH_DELAY_BUCKETS, and above the last one"""
    late_sum: float = 0.0
    tips: int = 0
    quarantine: Counter[tuple[str, str]] = field(default_factory=Counter)
    """by stage and reason"""

    def add_batch(self, value: bytes, timestamp: int) -> None:
        """Count a record of `kiln.batches`.

        Args:
            value: Value of the record.
            timestamp: The broker's, ms.

        Raises:
            UNREADABLE: The record cannot be parsed.
            BlockError: The block cannot be parsed.
        """
        batch = decode_batch(value)
        tips = read_block(batch.block)
        late = timestamp / 1000 - batch.closed_at / 1_000_000 if batch.origin == "LIVE" else None
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
        """Compute a percentile of the delay, with `share` from 0 to 1."""
        ordered = sorted(self.late)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


class OpenWindows:
    """Number of open windows, derived only from keys and times of the log.

    A window per key opens with an update and ends T + G later in log time (decision 1).
    """

    def __init__(self, window: float) -> None:
        """Create the counter; `window` is T + G in s."""
        self._window = window * 1000
        self._ends: dict[int, dict[bytes, float]] = {}

    def add_update(self, partition: int, key: bytes | None, timestamp: int) -> None:
        """Count a record of `kiln.updates`, in order; `timestamp` in ms. A record without key is a tick."""
        ends = self._ends.setdefault(partition, {})
        while ends:
            oldest = next(iter(ends))
            if ends[oldest] > timestamp:
                break
            del ends[oldest]
        if key and b"/" in key:  # without a separator, the key is the stream
            ends.setdefault(key, timestamp + self._window)

    def __len__(self) -> int:
        return sum(map(len, self._ends.values()))


class TopicWatch:
    """Reads the topics from their end offsets in a thread, and retries while the broker is down."""

    def __init__(self, client_options: Mapping[str, object], prefix: str, window: float) -> None:
        """Create the watch.

        Args:
            client_options: kafka-python's options.
            prefix: Prefix of the topics.
            window: T + G in s.
        """
        self._options = dict(client_options)
        self._group = f"{prefix}watch"
        self._topics = {prefix + name: name for name in ("updates", "batches", "quarantine")}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.counts = TopicCounts()
        self.open_windows = OpenWindows(window)
        self.first_batch = threading.Event()
        self._positions: dict[str, dict[int, int]] = {}

    def has_read(self, ends: Mapping[str, Mapping[int, int]]) -> bool:
        """Return true if all records before `ends` (by full topic name) are counted."""
        return all(
            self._positions.get(topic, {}).get(partition, 0) >= end
            for topic in self._topics
            for partition, end in ends.get(topic, {}).items()
        )

    def start(self) -> None:
        """Start the thread, and return once the end offsets are known, so that later records are not missed."""
        reader = self._open_reader()
        self._thread = threading.Thread(target=self._run, args=(reader,), name="watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def _open_reader(self) -> RecordReader:
        """Open a reader at the end of the topics.

        Raises:
            KafkaError: No broker answers.
        """
        reader = RecordReader(self._options, self._group)
        with ExitStack() as cleanup:
            cleanup.callback(reader.close)
            ends = {part: reader.read_end(part) for topic in self._topics for part in reader.list_partitions(topic)}
            reader.assign(ends)
            for part, end in ends.items():
                self._positions.setdefault(part.topic, {})[part.partition] = end
            cleanup.pop_all()
        return reader

    def _run(self, reader: RecordReader) -> None:
        while not self._stop.is_set():
            try:
                polled = reader.poll(_POLL)
            except KafkaError:
                self._stop.wait(1.0)
                continue
            for part, records in polled.items():
                for record in records:
                    self._count(self._topics[part.topic], part.partition, record.key, record.value, record.timestamp)
            for topic, offsets in self._positions.items():
                for partition in offsets:
                    offsets[partition] = reader.position(TopicPartition(topic, partition))
        reader.close()

    def _count(self, topic: str, partition: int, key: bytes | None, value: bytes | None, timestamp: int) -> None:
        if topic == "updates":
            self.open_windows.add_update(partition, key, timestamp)
            return
        try:
            if topic == "batches":
                self.counts.add_batch(value or b"", timestamp)
                self.first_batch.set()
            else:
                fault = decode_quarantine(value or b"")
                self.counts.quarantine[fault.stage, fault.reason] += 1
        except (*UNREADABLE, BlockError):
            self.counts.quarantine["sink", "record_malformed"] += 1
