"""The clock by which a query expires its deduplication state (decision 10), and detection of a clock that is behind.

The driver passes the time of this clock to the tasks of each micro-batch. This time differs from the machine's clock in
two ways:

- It never goes back. Otherwise, after a correction of a clock that was ahead, Spark's deduplication would silently drop
  every row as late.
- While the query runs, it advances by the elapsed time at most. Otherwise a clock that jumps ahead by days would expire
  digests that are a second old.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame

_PROPERTY = "kiln.seenAt"


class MicroBatchClock:
    """Clock that the driver passes to the tasks of each micro-batch. For the thread that runs the micro-batches."""

    def __init__(self, now: Callable[[], int], uptime: Callable[[], int], least: int) -> None:
        """Start the clock.

        Args:
            now: Returns the time by the machine's clock, in µs.
            uptime: Returns the time since the machine's start, in µs.
            least: The newest time that this clock gave before the query was restarted, in µs; 0 if there is none.
        """
        self._now, self._uptime = now, uptime
        self._at = least
        self._set_at_uptime: int | None = None  # result of `uptime` when `_at` was set

    def set_time(self, context: SparkContext) -> None:
        """Set the time of a micro-batch, before its first Spark job.

        In the first micro-batch after a start, the time is that of the machine, or `least` if that is later.
        """
        now, uptime = self._now(), self._uptime()
        if self._set_at_uptime is not None:
            now = min(now, self._at + uptime - self._set_at_uptime)
        self._at, self._set_at_uptime = max(self._at, now), uptime
        context.setLocalProperty(_PROPERTY, str(self._at))


def get_batch_time() -> int:
    """Return the time that the driver has set for this task's micro-batch, in µs.

    Raises:
        RuntimeError: The driver has set no time.
    """
    return int(get_task_property(_PROPERTY, "the time of this micro-batch"))


def get_task_property(name: str, meaning: str) -> str:
    """Return a local property of Spark that the driver has set for the tasks of a micro-batch.

    Args:
        meaning: Description of the property, for the error.

    Raises:
        RuntimeError: The driver has not set the property.
    """
    from pyspark import TaskContext  # `kiln status` reads the clocks without Spark

    context = TaskContext.get()
    text = context.getLocalProperty(name) if context is not None else None
    if text is None:
        raise RuntimeError(f"cannot run this Spark task: its driver did not set {meaning}")
    return text


def with_dedup_watermark(rows: DataFrame, retention: int) -> DataFrame:
    """Set the watermark of the column `seen_at`, so that Spark expires digests after twice `retention` (µs)."""
    return rows.withWatermark("seen_at", f"{retention // 1000} milliseconds")


_TOLERANCE = 1_000_000
"""difference between two clocks, in µs, up to which neither counts as wrong"""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass
class TrailingClock:
    """Comparison of a clock with the newest time that was recorded. Times are µs."""

    since: int | None = None
    """time, by that clock, since which the clock has been behind; `None` if it is not behind"""
    now: int = 0
    """time by the clock in the last comparison"""
    newest: int = 0
    """newest recorded time in the last comparison"""

    def observe(self, now: int, newest: int) -> None:
        """Compare the clock's time `now` with the newest recorded time, and store both. Both are µs."""
        self.now, self.newest = now, newest
        if newest - now <= _TOLERANCE:
            self.since = None
        elif self.since is None:
            self.since = now


def describe_log_lag(topic: str, now: int, newest: int, since: int) -> str:
    """Describe what happens, and what to do, if the broker's clock is behind the newest timestamp of a topic.

    Args:
        now: The broker's time, µs.
        newest: The newest timestamp in the topic, µs.
        since: Time since which the clock has been behind, µs.
    """
    return (
        f"the broker's clock is {(newest - now) / 1_000_000:,.0f} s behind the newest timestamp in {topic}, since "
        f"{_format_time(since)}: the clock was ahead when that timestamp was written. Until the clock reaches "
        f"{_format_time(newest)}, windows stay open and batches are late. Nothing is lost. If the broker's clock is "
        "wrong now, correct it; else wait"
    )


def _format_time(at: int) -> str:
    return f"{_EPOCH + timedelta(microseconds=at):%Y-%m-%d %H:%M:%S} UTC"
