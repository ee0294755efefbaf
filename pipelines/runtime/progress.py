"""Progress of the running streaming queries, collected from Spark's query listener."""

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
"""Offset of the next record to read, by topic and partition."""


@dataclass(frozen=True)
class QueryProgress:
    """Newest micro-batch of a query, and totals since the listener was created.

    Times are in ms, rates in records per second.
    """

    name: str
    read: Offsets
    batch_id: int = -1
    began_at: int = 0
    """start of the newest micro-batch or poll; 0 if there was none"""
    input_rate: float = 0.0
    processed_rate: float = 0.0
    records: int = 0
    state_rows: int = 0
    state_bytes: int = 0
    phases: Mapping[str, int] = field(default_factory=dict)
    """durations of the newest micro-batch that read records, by Spark's names"""
    idle: bool = False
    """true if the last poll found no records"""

    @property
    def batch_ms(self) -> int:
        return self.phases.get("triggerExecution", 0)

    def lag(self, ends: log.Offsets) -> int:
        """Count the records that the query has not read yet. `ends`: end offsets of its topics."""
        # a query that starts without records reports no offsets
        return 0 if self.idle and not self.read else log.count_unread(self.read, ends)


class _JsonListener(JStreamingQueryListener):
    """Listener that fetches the progress of a micro-batch from the JVM as one JSON text.

    PySpark's own listener calls the JVM for each value: hundreds of calls, which take a fifth of a core in Python and
    another fifth in the JVM.
    """

    def onQueryProgress(self, jevent: JavaObject) -> None:
        progress = StreamingQueryProgress.fromJson(json.loads(jevent.progress().json()))
        self.pylistener.onQueryProgress(QueryProgressEvent(progress))


class ProgressListener(StreamingQueryListener):
    """Streaming query listener that keeps the newest progress of every named query. Thread-safe."""

    def __init__(self, read_dedup_state: Callable[[str], DedupStoreState] = lambda query: DedupStoreState()) -> None:
        """Create the listener. `read_dedup_state`: reads the state of a query's deduplication file, by query name."""
        self._read_dedup_state = read_dedup_state
        self._registered: JavaObject | None = None
        self._lock = threading.Lock()
        self._queries: dict[str, QueryProgress] = {}
        self._runs: dict[str, UUID] = {}  # ids of the newest runs, by query name

    @property
    def _jlistener(self) -> JavaObject:
        """Java object that PySpark registers as the listener. This property overrides a private one of PySpark."""
        if self._registered is None:
            jvm = cast(JVMView, SparkContext._jvm)
            self._registered = jvm.PythonStreamingQueryListenerWrapper(_JsonListener(self))
        return self._registered

    def snapshot(self) -> dict[str, QueryProgress]:
        with self._lock:
            return dict(self._queries)

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Clear the offsets, durations and rates of the query's earlier start, and keep the totals."""
        with self._lock:
            if event.name is not None:
                self._runs[event.name] = event.runId
                before = self._queries.get(event.name, QueryProgress(event.name, {}))
                self._queries[event.name] = replace(
                    before, read={}, phases={}, input_rate=0.0, processed_rate=0.0, idle=False
                )

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        self.record(event.progress)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Mark the query as idle, and keep the offsets of its last report."""
        with self._lock:
            for name in [name for name, run in self._runs.items() if run == event.runId]:
                self._queries[name] = replace(self._queries[name], idle=True, input_rate=0.0, processed_rate=0.0)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Do nothing. The supervisor reads the error from the query itself."""

    def record(self, progress: StreamingQueryProgress) -> None:
        """Store Spark's report of one micro-batch, or of a poll that found no records."""
        if progress.name is None:
            return
        dedup_state = self._read_dedup_state(progress.name)
        starts = _merge_offsets([source.startOffset for source in progress.sources])
        ends = _merge_offsets([source.endOffset for source in progress.sources])
        records = log.count_unread(starts, ends)  # Spark would count the rows that tasks make from the records
        with self._lock:
            before = self._queries.get(progress.name, QueryProgress(progress.name, {}))
            if self._runs.get(progress.name, progress.runId) != progress.runId:  # a late report of an earlier run
                self._queries[progress.name] = replace(before, records=before.records + records)
                return
            began_at = int(datetime.fromisoformat(progress.timestamp).timestamp() * 1000)
            self._queries[progress.name] = replace(
                before,
                read=ends or before.read,
                batch_id=progress.batchId,
                began_at=began_at,
                phases=dict(progress.durationMs) if records else before.phases,
                input_rate=_divide(records, began_at - before.began_at if before.began_at else 0),
                processed_rate=_divide(records, progress.durationMs.get("triggerExecution", 0)),
                records=before.records + records,
                state_rows=dedup_state.rows + sum(operator.numRowsTotal for operator in progress.stateOperators),
                state_bytes=dedup_state.size + sum(operator.memoryUsedBytes for operator in progress.stateOperators),
                idle=records == 0,
            )


def _merge_offsets(ends: list[str | None]) -> Offsets:
    offsets: Offsets = {}
    for end in ends:
        for topic, partitions in ((json.loads(end) if end else None) or {}).items():
            offsets[topic] = {int(partition): offset for partition, offset in partitions.items()}
    return offsets


def _divide(records: int, milliseconds: int) -> float:
    return records * 1000 / milliseconds if milliseconds > 0 else 0.0
