"""Status of a streaming query: its phase and lag, and the metrics of both. Needs no Spark."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from prometheus_client.metrics_core import Metric

from kiln.schemas.metrics import build_family

if TYPE_CHECKING:  # pyspark and kafka-python, which a reader of statuses does not need
    from kiln.pipelines.runtime.progress import QueryProgress
    from kiln.pipelines.runtime.topics import Ends

QueryPhase = Literal["starting", "running", "idle", "restarting", "tripped"]

RUNS: frozenset[QueryPhase] = frozenset({"running", "idle"})


@dataclass(frozen=True)
class QueryState:
    """State of a streaming query. A value is `None` while it is unknown."""

    name: str
    phase: QueryPhase
    batch: int | None = None
    """number of the newest micro-batch"""
    lag: int | None = None
    """number of records not read yet"""
    took: float | None = None
    """duration of the last micro-batch that read records, in seconds"""
    input_rate: float | None = None
    """records of the newest micro-batch, per second since the previous micro-batch started"""
    process_rate: float | None = None
    """records of the newest micro-batch, per second of its duration"""
    restarts: int = 0
    error: str = ""
    """last failure, while the query is down; else empty"""
    lag_seconds: float | None = None
    """age in seconds of the oldest record that the query has not read"""
    records: int = 0
    """number of records read since this process started"""
    state_rows: int = 0
    state_bytes: int = 0
    phases: Mapping[str, int] = field(default_factory=dict)
    """durations of the phases of the last micro-batch that read records, in ms, by Spark's names"""


class QueryBacklog:
    """Estimator of the age of the oldest record that a query has not read.

    It keeps the times at which the topics' end offsets were first seen.
    """

    _MAX_SAMPLES = 4_000

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()  # when an end offset was first seen, and the offset

    def observe(self, now: float, end: int, lag: int) -> float:
        """Add a sample of the end offsets, and return the age in seconds of the oldest record that is not read.

        Args:
            now: Time by the monotonic clock, in seconds.
            end: Sum of the end offsets of all partitions.
            lag: Number of records not read.
        """
        if not self._samples or end > self._samples[-1][1]:
            self._samples.append((now, end))
        read = end - lag
        while self._samples and self._samples[0][1] <= read:
            self._samples.popleft()
        if len(self._samples) > self._MAX_SAMPLES:  # hours behind: half the samples are enough
            self._samples = deque([sample for number, sample in enumerate(self._samples) if not number % 2])
        return now - self._samples[0][0] if lag and self._samples else 0.0


def build_query_state(
    name: str, progress: QueryProgress | None, ends: Ends, *, restarts: int, error: str, tripped: bool = False
) -> QueryState:
    """Build the state of one query.

    Args:
        progress: Newest progress; `None` before Spark has reported any.
        ends: End offsets of the topics that the query reads.
        error: Last failure, while the query is down; else empty.
        tripped: True if the query is stopped because messages no longer decode.
    """
    down: QueryPhase = "tripped" if tripped else "restarting"
    if progress is None or not (progress.read or progress.idle):
        return QueryState(name, down if error else "starting", restarts=restarts, error=error)
    phase: QueryPhase = down if error else "running" if progress.input_rate else "idle"
    return QueryState(
        name,
        phase,
        batch=progress.batch_id,
        lag=progress.lag(ends),
        records=progress.records,
        state_rows=progress.state_rows,
        state_bytes=progress.state_bytes,
        phases=progress.phases,
        took=progress.batch_ms / 1000,
        input_rate=progress.input_rate,
        process_rate=progress.processed_rate,
        restarts=restarts,
        error=error,
    )


class QueryWatch:
    """Tracker of the status of one query, including the age of its oldest unread record."""

    def __init__(self, name: str, topics: Iterable[str]) -> None:
        """Create the tracker. `topics`: names with prefix of the topics that the query reads."""
        self._name = name
        self._topics = tuple(topics)
        self._backlog = QueryBacklog()

    def build_state(
        self, now: float, ends: Ends, progress: QueryProgress | None, *, restarts: int, error: str, tripped: bool
    ) -> QueryState:
        """Build the state of the query, with the lag in seconds.

        `now` is in seconds by the monotonic clock. The other arguments are those of `build_query_state`.
        """
        read = {topic: ends.get(topic, {}) for topic in self._topics}
        line = build_query_state(self._name, progress, read, restarts=restarts, error=error, tripped=tripped)
        if line.lag is None:
            return line
        end = sum(sum(parts.values()) for parts in read.values())
        return replace(line, lag_seconds=self._backlog.observe(now, end, line.lag))


def build_query_metrics(lines: Iterable[QueryState]) -> Iterator[Metric]:
    """Build the Prometheus metric families of queries from their states."""
    lines = list(lines)

    def gauge(name: str, values: Mapping[str, float | None]) -> Metric:
        return build_family(name, [((query,), value) for query, value in values.items() if value is not None])

    yield gauge("kiln_query_up", {line.name: float(line.phase in RUNS) for line in lines})
    yield gauge("kiln_query_breaker_tripped", {line.name: float(line.phase == "tripped") for line in lines})
    yield gauge("kiln_query_restarts", {line.name: line.restarts for line in lines})
    yield gauge("kiln_query_micro_batch_id", {line.name: line.batch for line in lines})
    yield gauge("kiln_query_records", {line.name: line.records for line in lines})
    yield gauge("kiln_query_lag_records", {line.name: line.lag for line in lines})
    yield gauge("kiln_query_lag_seconds", {line.name: line.lag_seconds for line in lines})
    yield gauge("kiln_query_state_rows", {line.name: line.state_rows for line in lines})
    yield gauge("kiln_query_state_bytes", {line.name: line.state_bytes for line in lines})
    yield build_family(
        "kiln_query_phase_duration_seconds",
        [((line.name, phase), took / 1000) for line in lines for phase, took in sorted(line.phases.items())],
    )
