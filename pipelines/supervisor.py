"""Queries in one Spark application: started from the settings, started again when they fail, stopped cleanly."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from conf.settings.durations import micros
from conf.settings.model import JobName, Settings
from pipelines.lake.lake import Lake
from pipelines.launch import launch
from pipelines.logic.breaker import DecodingBrokenError
from pipelines.queries.plan import Report, unheard
from pipelines.spark.progress import ProgressListener, QueryProgress
from pipelines.spark.ticks import Ticker
from schemas.queries import QUERIES
from schemas.topic_table import BundleError

_LONGEST_PAUSE = 30.0  # s between two attempts to start a query again


@dataclass
class _Running:
    query: StreamingQuery
    failures: int = 0
    batch_id: int = -1  # of the newest micro-batch when it failed last
    again_at: float | None = None  # monotonic s; None while it runs
    error: str = ""


class GaveUpError(RuntimeError):
    """A query failed more often in one place than the settings allow, or said itself that going on would do harm."""


def _refuse_half_a_state(name: JobName, settings: Settings) -> None:
    if (settings.checkpoints / name).exists():
        return
    lake = Lake(str(settings.lake))
    full = [table for table in QUERIES[name].appends if lake.has_rows(table)]
    if full:
        raise GaveUpError(
            f"{name} has no checkpoint in {settings.checkpoints}, yet the tables {', '.join(full)} in {settings.lake} "
            "hold rows: it would write them once more. Put the checkpoint back, or move these tables away too"
        )


class Supervisor:
    """The queries named, on one session. `start()`, then `check()` now and then, then `stop()`.

    `report` hears the counts of those that count; `now` is a monotonic clock in s.
    """

    def __init__(
        self,
        spark: SparkSession,
        settings: Settings,
        names: Iterable[JobName],
        report: Report = unheard,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spark = spark
        self._settings = settings
        self._names = sorted(names, key=lambda name: QUERIES[name].starts)
        self._report = report
        self._now = now
        self._running: dict[JobName, _Running] = {}
        self._listener = ProgressListener()
        self.ticker: Ticker | None = None

    def start(self) -> None:
        """Raises GaveUpError where a query cannot or must not start."""
        for name in self._names:
            _refuse_half_a_state(name, self._settings)
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
            self._running[name] = _Running(self._start(name))

    def _start(self, name: JobName) -> StreamingQuery:
        try:
            return launch(name, self._spark, self._settings, self._listener, self._report)
        except (DecodingBrokenError, BundleError) as error:
            raise GaveUpError(f"{name} stopped: {error}") from error

    def check(self) -> None:
        """Starts failed queries again, each from its checkpoint, after a pause that doubles.

        Raises GaveUpError when one fails more than `jobs.restarts` times without a micro-batch in between.
        """
        for name, running in self._running.items():
            if running.again_at is None and not running.query.isActive:
                self._failed(name, running)
            elif running.again_at is not None and self._now() >= running.again_at:
                running.again_at = None
                running.query = self._start(name)

    def _failed(self, name: JobName, running: _Running) -> None:
        running.error = in_words(running.query.exception())
        progress = self._listener.snapshot().get(name)
        newest = progress.batch_id if progress else -1
        running.failures = running.failures + 1 if newest <= running.batch_id else 1
        running.batch_id = newest
        if DecodingBrokenError.__name__ in running.error or running.failures > self._settings.jobs.restarts:
            raise GaveUpError(f"{name} stopped: {running.error}")
        running.again_at = self._now() + min(2.0 ** (running.failures - 1), _LONGEST_PAUSE)

    @property
    def progress(self) -> dict[str, QueryProgress]:
        """By query; one that has not reported yet is missing."""
        return self._listener.snapshot()

    @property
    def errors(self) -> dict[str, str]:
        """What went wrong with a query that is not running now, or with the ticks, in words."""
        found: dict[str, str] = {
            name: running.error for name, running in self._running.items() if running.again_at is not None
        }
        if self.ticker is not None and self.ticker.error:
            found["ticks"] = self.ticker.error
        return found

    @property
    def restarts(self) -> dict[str, int]:
        """How many times in a row each query was started again."""
        return {name: running.failures for name, running in self._running.items()}

    def caught_up(self, ends: Mapping[str, Mapping[int, int]]) -> bool:
        """Whether no query lags behind `ends` (full topic names) and the ticks have passed the last window."""
        if self.ticker is not None and not self.ticker.quiet:
            return False
        progress = self.progress
        for name in self._names:
            topics = {full: ends[full] for full in map(self._settings.kafka.topic, QUERIES[name].reads) if full in ends}
            if name not in progress or progress[name].lag(topics) or self._running[name].again_at is not None:
                return False
        return True

    def stop(self, patience: float = 45.0) -> None:
        """Stops every query between two micro-batches, or after `patience` s in the middle of one: nothing is lost."""
        if self.ticker is not None:
            self.ticker.stop()
        deadline = self._now() + patience
        for running in self._running.values():
            while running.query.isActive and running.query.status["isTriggerActive"] and self._now() < deadline:
                time.sleep(0.01)
            running.query.stop()


def in_words(error: BaseException | None) -> str:
    """One line that says what ended a query: the last line of a Python traceback, else the first of Spark's message."""
    if error is None:
        return "it ended by itself"
    said = str(error).partition("=== Streaming Query ===")[0]  # after it: which query, and its plan
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    python = [
        line
        for line in lines
        if line[:1].isalpha() and ": " in line and line.split(": ", 1)[0].replace(".", "").isidentifier()
    ]
    text = (python or lines or [type(error).__name__])[-1 if python else 0]
    return text if len(text) <= 300 else text[:299] + "…"
