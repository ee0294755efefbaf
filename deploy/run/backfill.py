"""Runs `kiln backfill run` in a Spark session of its own, even while Kiln runs, and formats its output."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta

from pyspark.sql import SparkSession

from kiln.conf.settings.model import Settings
from kiln.deploy.stack.kafka_broker import start_broker
from kiln.deploy.stack.spark import spark_session
from kiln.pipelines.app.backfill_run import execute
from kiln.pipelines.backfill.run import RunOutcome, RunProgress
from kiln.pipelines.backfill.terms import RunTerms


def run_backfill(
    settings: Settings, terms: RunTerms, say: Callable[[str], None], report: Callable[[RunProgress], None]
) -> RunOutcome:
    """Start or resume a backfill run in a Spark session of its own. If the run reads from Kafka, the embedded broker is
    started if necessary. `say` prints a message, and `report` shows progress."""

    @contextmanager
    def open_spark() -> Iterator[SparkSession]:
        with start_broker(settings, say) if terms.source == "kafka" else nullcontext():
            say("starting Spark")
            with spark_session(settings, "backfill") as spark:
                yield spark

    return execute(settings, terms, open_spark, say, report)


class ProgressFormatter:
    """Formats the progress of a backfill run: position, speed, and time left in the current step."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._step = ""
        self._step_start = 0.0
        self._first = RunProgress("", 0, 0)

    def format(self, progress: RunProgress) -> str:
        """Format the progress as a line of text."""
        now = self._now()
        if progress.step != self._step:
            self._step, self._step_start, self._first = progress.step, now, progress
        seconds, done = now - self._step_start, progress.done - self._first.done
        parts = [f"{progress.step}: {progress.done} of {progress.total}"]
        if progress.done_until is not None:
            parts.append(f"up to {_format_time(progress.done_until)}")
        if progress.rows:
            parts.append(f"{progress.rows:,} rows")
        frames = progress.frames - self._first.frames
        if frames and seconds > 0:
            parts.append(f"{frames / seconds:,.0f} frames/s")
        if done > 0 and progress.total > progress.done:
            left = timedelta(seconds=round(seconds / done * (progress.total - progress.done)))
            parts.append(f"{left} left in this step")
        return ", ".join(parts)


def describe_outcome(outcome: RunOutcome) -> str:
    """Describe the outcome of a backfill run: rows by table, and frames that are not in the run."""
    tables = ", ".join(f"{rows:,} {table}" for table, rows in sorted(outcome.rows.items()))
    text = f"run {outcome.name} is done: {tables or 'no rows'}"
    if outcome.is_repeated:
        text = f"run {outcome.name} was already done: nothing was written"
    if outcome.outside.frames:
        outside = outcome.outside
        first, last = map(_format_time, (outside.first_at, outside.last_at))
        text += f"; {outside.frames:,} frames of the files are outside the range and not in the run. Their times are "
        text += f"{first} to {last} UTC: to include them, start a run whose --from and --to enclose these times"
    if outcome.lost:
        text += f"; records that Kafka had removed before the run are missing: {'; '.join(outcome.lost)}"
    return text


def _format_time(micros: int) -> str:
    return f"{datetime.fromtimestamp(micros // 1_000_000, UTC):%Y-%m-%d %H:%M:%S}"
