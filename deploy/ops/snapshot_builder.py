"""Builds snapshots of a run from counts of its queries, records in the topics, and the status of the bridge."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from kafka.errors import KafkaError

from kafka import TopicPartition
from kiln.conf.process.kafka_records import RecordReader
from kiln.conf.settings.model import JobName, Settings
from kiln.deploy.ops.snapshot import BATCH_DELAY_BUCKETS, BatchLine, BridgeInRun, QualityInRun, Snapshot
from kiln.pipelines.app.supervisor import Supervisor
from kiln.pipelines.runtime.query_status import QueryState, QueryWatch
from kiln.pipelines.runtime.topics import Ends
from kiln.schemas.kafka.records import UNREADABLE, decode_batch, decode_quarantine
from kiln.schemas.queries import CONTROL_PREFIX, QUERIES
from kiln.schemas.wire.batch_block import BlockError, read_block

_RATE_SECONDS: Final = 60.0


class SnapshotBuilder:
    """Builds snapshots of a run. Queries report counts to `count`, in any thread; the main loop calls `build`."""

    def __init__(
        self,
        settings: Settings,
        names: Sequence[JobName],
        watch: TopicWatch,
        *,
        mode: str,
        duration: timedelta | None,
        started: float,
    ) -> None:
        """Create the builder.

        Args:
            names: Queries of the run, in the order of the screen.
            watch: Counts the records in the topics.
            mode: As `Snapshot.mode`.
            duration: As `Snapshot.duration`.
            started: Start of the run, monotonic time in seconds.
        """
        self._settings = settings
        self._names = names
        self._watch = watch
        self.mode = mode
        """state of the run (values: `Snapshot.mode`); the main loop sets "draining" """
        self._duration = duration
        self._started = started
        self._messages: dict[str, int] = {}
        self._copies: int | None = None
        self._core_differences = 0
        self._control_entries: dict[str, int] = {}
        self._earlier_entries: deque[tuple[float, dict[str, int]]] = deque([(started, {})])
        self._counting = threading.Lock()
        self._watches = {name: QueryWatch(name, map(settings.kafka.topic, QUERIES[name].reads)) for name in names}
        self._first_end: int | None = None
        self._last_count: tuple[float, int] = (started, 0)  # time and number of frames
        self._rate: float | None = None
        self.frames = 0
        """frames written to Kafka since the first snapshot"""

    def count(self, query: str, counts: Mapping[str, int]) -> None:
        """Add the counts that a query has reported for a micro-batch."""
        with self._counting:
            self._core_differences += counts.get("core_differences", 0)
        if query == "archive":
            with self._counting:
                self._copies = (self._copies or 0) + counts.get("copies", 0)
                for name, number in counts.items():
                    if name.isupper():  # a message type; quarantined records are counted in their topic
                        self._messages[name] = self._messages.get(name, 0) + number
                    elif name.startswith(CONTROL_PREFIX):
                        kind = name.removeprefix(CONTROL_PREFIX)
                        self._control_entries[kind] = self._control_entries.get(kind, 0) + number

    def build(
        self,
        now: float,
        ends: Ends,
        queries: Supervisor,
        bridge: BridgeInRun | None,
        errors: Sequence[str],
        broker: str = "",
        quality: QualityInRun | None = None,
    ) -> Snapshot:
        """Build a snapshot.

        Args:
            now: Monotonic time, in seconds.
            ends: End offsets of the topics.
            queries: Supervisor of the queries.
            bridge: State of the bridge, if the run has one.
            errors: Errors of all components but the queries.
            broker: Problem with the broker, which is also in `errors`; empty if it answers.
            quality: The last quality check, if there was one.
        """
        self._count_frames(now, sum(ends.get(self._settings.kafka.topic("frames"), {}).values()))
        counts = self._watch.counts
        with self._counting:
            messages, entries = dict(self._messages), dict(self._control_entries)
            copies, core_differences = self._copies, self._core_differences
        return Snapshot(
            network=self._settings.network.name,
            is_ceramic=self._settings.is_ceramic,
            mode=self.mode,
            elapsed=timedelta(seconds=now - self._started),
            duration=self._duration,
            frames=self.frames,
            frames_rate=self._rate,
            messages=messages,
            copies=copies,
            core_differences=core_differences,
            control_entries=entries,
            control_rates=self._compute_rates(now, entries),
            open_separators=len(self._watch.open_windows),
            batches=counts.batches,
            newest_batches=tuple(counts.newest),
            window=self._settings.batch.window,
            late_p50=counts.percentile(0.5),
            late_p99=counts.percentile(0.99),
            late_by_bucket=tuple(counts.late_by_bucket),
            late_sum=counts.late_sum,
            tips=counts.tips,
            quarantine=dict(counts.quarantine),
            queries=[self._line(now, name, ends, queries) for name in self._names],
            bridge=bridge,
            quality=quality,
            broker=broker,
            errors=[*(f"{name}: {text}" for name, text in queries.errors.items()), *errors],
        )

    def _line(self, now: float, name: JobName, ends: Ends, queries: Supervisor) -> QueryState:
        return self._watches[name].build_state(
            now,
            ends,
            queries.progress.get(name),
            restarts=queries.restarts[name],
            error=queries.errors.get(name, ""),
            tripped=name in queries.held_queries,
        )

    def _compute_rates(self, now: float, entries: dict[str, int]) -> dict[str, float]:
        """Compute the control entries per second in the last minute, or since the start of a shorter run."""
        earlier = self._earlier_entries
        if now - earlier[-1][0] >= 1:
            earlier.append((now, entries))
        while len(earlier) > 1 and now - earlier[1][0] >= _RATE_SECONDS:
            earlier.popleft()
        then, before = earlier[0]
        return {kind: (number - before.get(kind, 0)) / max(1.0, now - then) for kind, number in entries.items()}

    def _count_frames(self, now: float, frames: int) -> None:
        if self._first_end is None:
            self._first_end = frames
        then, last_frames = self._last_count
        if last_frames and now > then:
            self._rate = (frames - last_frames) / (now - then)
        self._last_count = (now, frames)
        self.frames = frames - self._first_end


_POLL = 0.2  # seconds
_SHOWN = 8  # batches on the screen
_LATENESS = 20_000  # number of newest batches whose delays give the percentiles


@dataclass
class TopicCounts:
    """Counts of records in topics since the start of the run.

    Attributes:
        late: Delays of the newest live batches, in seconds (`BatchLine.late`). Batches of replayed frames have no
            delay, because their event times are those of the capture.
    """

    batches: int = 0
    newest: deque[BatchLine] = field(default_factory=lambda: deque(maxlen=_SHOWN))
    late: deque[float] = field(default_factory=lambda: deque(maxlen=_LATENESS))
    late_by_bucket: list[int] = field(default_factory=lambda: [0] * (len(BATCH_DELAY_BUCKETS) + 1))
    """number of live batches in each delay bucket (`Snapshot.late_by_bucket`)"""
    late_sum: float = 0.0
    tips: int = 0
    quarantine: Counter[tuple[str, str]] = field(default_factory=Counter)
    """number of quarantined records by stage and reason"""

    def add_batch(self, value: bytes, timestamp: int) -> None:
        """Count a record of the topic `kiln.batches`.

        Args:
            value: Value of the record.
            timestamp: The broker's timestamp, in ms.

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
        """Compute a percentile of the delay in seconds, with `share` from 0 to 1; `None` without live batches."""
        ordered = sorted(self.late)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


class OpenWindows:
    """Counts the open windows from the keys and timestamps of the records in `kiln.updates`.

    The first update of a separator opens a window, which ends after T + G in log time
    (docs/design/01-windows-by-the-log.md).
    """

    def __init__(self, window: float) -> None:
        """Create the counter; `window` is T + G (`batch.window` plus `batch.grace`), in seconds."""
        self._window = window * 1000
        self._ends: dict[int, dict[bytes, float]] = {}

    def add_update(self, partition: int, key: bytes | None, timestamp: int) -> None:
        """Process the next record of a partition of `kiln.updates`.

        Args:
            key: Key of the record: separator or stream of an update; `None` for a tick.
            timestamp: The broker's timestamp, in ms.
        """
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
    """Counts the records that a run writes to `updates`, `batches` and `quarantine`.

    A thread reads the records that are written after `start`. While the broker is down, the thread retries.
    """

    def __init__(self, client_options: Mapping[str, object], prefix: str, window: float) -> None:
        """Create the watch.

        Args:
            client_options: kafka-python's options for the broker.
            prefix: Prefix of the topics.
            window: T + G (`batch.window` plus `batch.grace`), in seconds.
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
        """Return true if all records before these end offsets are counted. Topics have full names."""
        return all(
            self._positions.get(topic, {}).get(partition, 0) >= end
            for topic in self._topics
            for partition, end in ends.get(topic, {}).items()
        )

    def start(self) -> None:
        """Read the end offsets of the topics, and start the thread, which counts all later records.

        Raises:
            KafkaError: No broker answers.
        """
        reader = self._open_reader()
        self._thread = threading.Thread(target=self._run, args=(reader,), name="watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def _open_reader(self) -> RecordReader:
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
