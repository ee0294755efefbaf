"""Progress of running queries, as Spark reports it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import cast
from uuid import UUID

from py4j.java_gateway import JavaObject, JVMView
from pyspark import SparkContext
from pyspark.sql.streaming.listener import (
    JStreamingQueryListener,
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)

from kiln.pipelines.runtime.dedup_store import DedupStoreState
from kiln.schemas.kafka import topics as log

Offsets = dict[str, dict[int, int]]
"""Topic to partition to the offset after the last record."""


@dataclass(frozen=True)
class QueryProgress:
    """A query's newest micro-batch, and its sums since the listener began. Times are ms, rates records a second."""

    name: str
    read: Offsets
    batch_id: int = -1
    input_rate: float = 0.0
    processed_rate: float = 0.0
    records: int = 0
    state_rows: int = 0
    state_bytes: int = 0
    phases: Mapping[str, int] = field(default_factory=dict)
    """of the newest micro-batch that read something, by Spark's names"""
    watermark: int = 0
    """before this time every row would be late, µs; 0: Spark forgets nothing by time"""
    reckoned: int = 0
    """the newest time that the query has reckoned with, where it forgets by time and not Spark, µs; else 0"""
    idle: bool = False
    """the query found nothing to read last. A query that starts with nothing to read reports no offsets."""

    @property
    def batch_ms(self) -> int:
        return self.phases.get("triggerExecution", 0)

    def lag(self, ends: log.Offsets) -> int:
        """Records that this query has not read yet; `ends`: the end offsets of the topics that the query reads."""
        return 0 if self.idle and not self.read else log.lag(self.read, ends)


class _ByOneCall(JStreamingQueryListener):
    """Fetches what a micro-batch reports as one JSON text.

    PySpark's own listener asks the JVM for each value by itself. With five queries these hundreds of calls took a fifth
    of a core on either side.
    """

    def onQueryProgress(self, jevent: JavaObject) -> None:
        progress = StreamingQueryProgress.fromJson(json.loads(jevent.progress().json()))
        self.pylistener.onQueryProgress(QueryProgressEvent(progress))


class ProgressListener(StreamingQueryListener):
    """The newest progress of every named query; `snapshot()` may be called from any thread."""

    def __init__(self, held: Callable[[str], DedupStoreState] = lambda query: DedupStoreState()) -> None:
        """`held`: what a query keeps beside Spark's state."""
        self._held = held
        self._registered: JavaObject | None = None
        self._lock = threading.Lock()
        self._queries: dict[str, QueryProgress] = {}
        self._names: dict[UUID, str] = {}  # by run

    @property
    def _jlistener(self) -> JavaObject:
        """The listener that Spark registers, and calls back. PySpark has no public name for it."""
        if self._registered is None:
            jvm = cast(JVMView, SparkContext._jvm)
            self._registered = jvm.PythonStreamingQueryListenerWrapper(_ByOneCall(self))
        return self._registered

    def snapshot(self) -> dict[str, QueryProgress]:
        with self._lock:
            return dict(self._queries)

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Forgets what an earlier run of the query reported, except the sums."""
        with self._lock:
            if event.name is not None:
                self._names[event.runId] = event.name
                before = self._queries.get(event.name, QueryProgress(event.name, {}))
                self._queries[event.name] = replace(
                    before, read={}, phases={}, input_rate=0.0, processed_rate=0.0, idle=False
                )

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        self.take(event.progress)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Notes that there is nothing to read. The offsets of the last report still hold."""
        with self._lock:
            name = self._names.get(event.runId)
            if name is not None:
                self._queries[name] = replace(self._queries[name], idle=True, input_rate=0.0, processed_rate=0.0)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Nothing: the supervisor asks the query itself what ended it."""

    def take(self, progress: StreamingQueryProgress) -> None:
        """Add the report of one micro-batch, or of a poll that found nothing to read."""
        if progress.name is None:
            return
        held = self._held(progress.name)
        with self._lock:
            before = self._queries.get(progress.name, QueryProgress(progress.name, {}))
            self._queries[progress.name] = replace(
                before,
                read=_offsets([source.endOffset for source in progress.sources]) or before.read,
                batch_id=progress.batchId,
                phases=dict(progress.durationMs) if progress.numInputRows else before.phases,
                input_rate=_rate(progress.inputRowsPerSecond),
                processed_rate=_rate(progress.processedRowsPerSecond),
                records=before.records + progress.numInputRows,
                state_rows=held.rows + sum(operator.numRowsTotal for operator in progress.stateOperators),
                state_bytes=held.size + sum(operator.memoryUsedBytes for operator in progress.stateOperators),
                reckoned=held.at,
                watermark=_micros(progress.eventTime.get("watermark")) or before.watermark,
                idle=progress.numInputRows == 0,
            )


def _offsets(ends: list[str | None]) -> Offsets:
    found: Offsets = {}
    for end in ends:
        for topic, partitions in (json.loads(end) if end else {}).items():
            found[topic] = {int(partition): offset for partition, offset in partitions.items()}
    return found


def _micros(time: str | None) -> int:
    return int(datetime.fromisoformat(time).timestamp() * 1000) * 1000 if time else 0


def _rate(value: float | None) -> float:
    """At the start Spark has no time to divide by, and reports no rate."""
    return value or 0.0
