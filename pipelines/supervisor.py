"""Queries in one Spark application: started from the settings, started again when they fail, stopped cleanly."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from conf.backoff import pause_after
from conf.settings.durations import micros
from conf.settings.model import JobName, Settings
from pipelines.lake.commits import SecondWriterError, Write
from pipelines.lake.lake import Lake
from pipelines.launch import launch
from pipelines.logic.breaker import DecodingBrokenError
from pipelines.queries.plan import Report, unheard
from pipelines.spark.checkpoint import Checkpoint
from pipelines.spark.progress import ProgressListener, QueryProgress
from pipelines.spark.ticks import Ticker
from schemas.queries import QUERIES
from schemas.topic_table import BundleError

_FATAL = (DecodingBrokenError.__name__, SecondWriterError.__name__)
"""Errors after which a query does harm when it goes on."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0  # s between a failure and the next start


@dataclass
class _Run:
    """How one query fares."""

    query: StreamingQuery
    failures: int = 0
    """in a row, with no finished micro-batch in between"""
    batch_id: int = -1
    """of the newest micro-batch at the last failure"""
    restart_at: float | None = None
    """when a failed query is to start again, monotonic s; None: the query runs"""
    error: str = ""
    """what ended the query last"""


class GaveUpError(RuntimeError):
    """A query must not go on: it failed more often in a row than the settings allow, or going on would do harm."""


def _refuse_tables_without_checkpoint(name: JobName, settings: Settings) -> None:
    if (settings.checkpoints / name).exists():
        return
    lake = Lake(str(settings.lake_folder))
    full = [table for table in QUERIES[name].appends if lake.has_rows(table)]
    if full:
        raise GaveUpError(
            f"{name} has no checkpoint in {settings.checkpoints}, yet the tables {', '.join(full)} in "
            f"{settings.lake_folder} hold rows: the query would write them once more. Put the checkpoint back, or move "
            "these tables away too"
        )


def _refuse_older_checkpoint(name: JobName, settings: Settings) -> None:
    """With a checkpoint from before what its tables hold, the query would take new micro-batches for old ones."""
    checkpoint = Checkpoint(settings.checkpoints / name)
    if not checkpoint.exists:
        return
    lake, query = Lake(str(settings.lake_folder)), checkpoint.query_id
    newest = checkpoint.planned
    for table in QUERIES[name].tables:
        wrote = lake.open(table).transaction_version(Write(query, 0).app_id(table)) if lake.has(table) else None
        if wrote is not None and wrote > newest:
            raise GaveUpError(
                f"the checkpoint of {name} in {checkpoint.path} is older than the table {table}: it ends with the "
                f"micro-batch {newest}, and the table has the micro-batch {wrote}. The query would skip what comes in "
                "between. Put the newest checkpoint back, or restore the lake to the time of this checkpoint, or move "
                f"checkpoint and tables of {name} away, and the query fills them anew from what Kafka holds"
            )


class Supervisor:
    """Runs the named queries in one Spark session. Call `start()`, then `check()` every second or so, then `stop()`."""

    def __init__(
        self,
        spark: SparkSession,
        settings: Settings,
        names: Iterable[JobName],
        report: Report = unheard,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`report` hears the counts of the queries that count; `now`: a monotonic clock in s."""
        self._spark = spark
        self._settings = settings
        self._names = sorted(names, key=lambda name: QUERIES[name].starts)
        self._report = report
        self._now = now
        self._runs: dict[JobName, _Run] = {}
        self._listener = ProgressListener()
        self.ticker: Ticker | None = None

    def start(self) -> None:
        """Starts every query, and the ticks where `batch` is among them. GaveUpError: a query must not start."""
        for name in self._names:
            _refuse_tables_without_checkpoint(name, self._settings)
            _refuse_older_checkpoint(name, self._settings)
        if "batch" in self._names:
            kafka = self._settings.kafka
            self.ticker = Ticker(
                kafka.client_options(),
                kafka.topic("updates"),
                interval=self._settings.batch.tick.total_seconds(),
                window=micros(self._settings.batch.window + self._settings.batch.grace),
            )
            self.ticker.start()
        for name in self._names:
            self._runs[name] = _Run(self._start(name))

    def _start(self, name: JobName) -> StreamingQuery:
        try:
            return launch(name, self._spark, self._settings, self._listener, self._report)
        except (DecodingBrokenError, BundleError) as error:
            raise GaveUpError(f"{name} stopped: {error}") from error

    def check(self) -> None:
        """Starts failed queries again, each from its checkpoint, after a pause that doubles.

        GaveUpError: a query failed more than `jobs.restarts` times with no finished micro-batch in between, or says
        that decoding is broken, or that another driver runs the query.
        """
        for name, run in self._runs.items():
            if run.restart_at is None and not run.query.isActive:
                self._failed(name, run)
            elif run.restart_at is not None and self._now() >= run.restart_at:
                run.restart_at = None
                run.query = self._start(name)

    def _failed(self, name: JobName, run: _Run) -> None:
        run.error = failure_text(run.query.exception())
        progress = self._listener.snapshot().get(name)
        newest = progress.batch_id if progress else -1
        run.failures = run.failures + 1 if newest <= run.batch_id else 1
        run.batch_id = newest
        if any(fatal in run.error for fatal in _FATAL) or run.failures > self._settings.jobs.restarts:
            raise GaveUpError(f"{name} stopped: {run.error}")
        run.restart_at = self._now() + pause_after(run.failures, _SHORTEST_PAUSE, _LONGEST_PAUSE)

    @property
    def progress(self) -> dict[str, QueryProgress]:
        """By query. A query that has not reported yet is missing."""
        return self._listener.snapshot()

    @property
    def errors(self) -> dict[str, str]:
        """What ended each query that waits for its restart, and under "ticks" what keeps the ticks from the log."""
        found: dict[str, str] = {name: run.error for name, run in self._runs.items() if run.restart_at is not None}
        if self.ticker is not None and self.ticker.error:
            found["ticks"] = self.ticker.error
        return found

    @property
    def restarts(self) -> dict[str, int]:
        """How many times in a row each query failed."""
        return {name: run.failures for name, run in self._runs.items()}

    def caught_up(self, ends: Mapping[str, Mapping[int, int]]) -> bool:
        """Whether no query lags behind `ends` (full topic names) and the ticks have passed the last window."""
        if self.ticker is not None and not self.ticker.quiet:
            return False
        progress = self.progress
        for name in self._names:
            topics = {full: ends[full] for full in map(self._settings.kafka.topic, QUERIES[name].reads) if full in ends}
            if name not in progress or progress[name].lag(topics) or self._runs[name].restart_at is not None:
                return False
        return True

    def stop(self, patience: float = 45.0) -> None:
        """Stops every query between two micro-batches, or after `patience` s in the middle of one.

        Nothing is lost either way: a query does an unfinished micro-batch anew at its next start.
        """
        if self.ticker is not None:
            self.ticker.stop()
        deadline = self._now() + patience
        for run in self._runs.values():
            while run.query.isActive and run.query.status["isTriggerActive"] and self._now() < deadline:
                time.sleep(0.01)
            run.query.stop()


def failure_text(error: BaseException | None) -> str:
    """One line that says what ended a query: the last line of a Python traceback, else the first of Spark's message."""
    if error is None:
        return "the query ended by itself"
    said = str(error).partition("=== Streaming Query ===")[0]  # after it: which query, and its plan
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    python = [
        line
        for line in lines
        if line[:1].isalpha() and ": " in line and line.split(": ", 1)[0].replace(".", "").isidentifier()
    ]
    text = (python or lines or [type(error).__name__])[-1 if python else 0]
    return text if len(text) <= 300 else text[:299] + "…"
