"""Run a query until it has read all records, and record the durations of its micro-batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple

from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import StreamingQueryProgress

from bench.ground import Ends
from bench.runs import BenchError
from kiln.conf.settings.model import Job, JobName, Settings
from kiln.pipelines.app.launch import launch
from kiln.pipelines.app.supervisor import describe_failure
from kiln.pipelines.runtime.progress import ProgressListener
from kiln.schemas.queries import QUERIES

_PATIENCE = 300.0  # s without a micro-batch


class MicroBatch(NamedTuple):
    """A micro-batch: number of records read, and seconds from trigger to commit."""

    records: int
    seconds: float


def in_micro_batches(settings: Settings, records: int, *names: JobName) -> Settings:
    """Return settings with which these queries run micro-batches of at most `records` without pause; 0 for no limit."""
    job = Job(trigger=timedelta(), max_offsets_per_trigger=records)
    return settings.model_copy(update={"jobs": settings.jobs.model_copy(update=dict.fromkeys(names, job))})


class CaughtUp(ProgressListener):
    """Records the micro-batches of one query.

    `reached` is set once the query has read to `ends`, and `moved` each time it has read new records.
    """

    def __init__(self, ends: Mapping[str, Ends]) -> None:
        super().__init__()
        self._ends = ends
        self._left = sum(sum(partitions.values()) for partitions in ends.values())
        self.micro_batches: list[MicroBatch] = []
        self.reached = threading.Event()
        self.moved = threading.Event()

    def record(self, progress: StreamingQueryProgress) -> None:
        super().record(progress)
        known = self.snapshot().get(progress.name or "")
        if known is None or not known.read:
            return
        # Spark counts a record in each pass over a micro-batch; the offsets count each record once
        left = known.lag(self._ends)
        if left < self._left:
            seconds = progress.durationMs.get("triggerExecution", 0) / 1000
            self.micro_batches.append(MicroBatch(self._left - left, seconds))
            self._left = left
            self.moved.set()
        if not left:
            self.reached.set()


def catch_up(
    spark: SparkSession, settings: Settings, name: JobName, ends: Mapping[str, Ends], patience: float = _PATIENCE
) -> list[MicroBatch]:
    """Run the query `name` until it has read its topics from offset 0 to `ends` (by topic, without prefix).

    Raises:
        BenchError: The query failed, or made no progress for `patience` s.
    """
    listener = CaughtUp({settings.kafka.topic(topic): ends[topic] for topic in QUERIES[name].reads})
    query = launch(name, spark, settings, listener)
    try:
        moved = time.monotonic()
        while not listener.reached.wait(0.1):
            if not query.isActive:
                raise BenchError(f"the query {name} stopped: {describe_failure(query.exception())}")
            if listener.moved.is_set():
                listener.moved.clear()
                moved = time.monotonic()
            if time.monotonic() - moved > patience:
                raise BenchError(f"the query {name} read no records for {patience:g} s")
    finally:
        query.stop()
    return listener.micro_batches
