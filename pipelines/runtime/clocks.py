"""The clock by which a query expires its deduplication state (decision 10), and detection of clocks that are behind
stored times.

The driver passes its time to the tasks of a micro-batch. This time never goes back: with Spark's own
`current_timestamp`, the deduplicating operators would silently drop every row as late after a wrong clock is set back.
While the query runs, this time also never advances by more than the elapsed time: otherwise a clock that is set ahead
by days would expire digests that are a second old.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame

_PROPERTY = "kiln.seenAt"


class MicroBatchClock:
    """Passes the time to the tasks of each micro-batch. Not thread-safe: for the thread that runs the micro-batches."""

    def __init__(self, now: Callable[[], int], uptime: Callable[[], int], least: int) -> None:
        """Start the clock.

        Args:
            now: Returns the time, in µs.
            uptime: Returns the time of a clock that is never set, in µs.
            least: The newest time that the query has used before, in µs.
        """
        self._now, self._uptime = now, uptime
        self._at = least
        self._set_at_uptime: int | None = None  # time of `uptime` then, in µs

    def set_time(self, context: SparkContext) -> None:
        """Set the time of a micro-batch, before its first job. The first micro-batch after a start uses the machine's
        time."""
        now, uptime = self._now(), self._uptime()
        if self._set_at_uptime is not None:
            now = min(now, self._at + uptime - self._set_at_uptime)
        self._at, self._set_at_uptime = max(self._at, now), uptime
        context.setLocalProperty(_PROPERTY, str(self._at))


def get_batch_time() -> int:
    """Return the time of this task's micro-batch, µs.

    Raises:
        RuntimeError: The driver has set no time.
    """
    return int(get_task_property(_PROPERTY, "the time of this micro-batch"))


def get_task_property(name: str, meaning: str) -> str:
    """Return a local property that the driver has set for the tasks of a micro-batch. `meaning`: text for errors.

    Raises:
        RuntimeError: The driver has set no such property.
    """
    from pyspark import TaskContext  # `kiln status` reads the clocks without Spark

    context = TaskContext.get()
    text = context.getLocalProperty(name) if context is not None else None
    if text is None:
        raise RuntimeError(f"the driver did not set {meaning}")
    return text


def with_dedup_watermark(rows: DataFrame, retention: int) -> DataFrame:
    """Set the watermark on `seen_at`: later operators expire rows after `retention` µs."""
    return rows.withWatermark("seen_at", f"{retention // 1000} milliseconds")


_TOLERANCE = 1_000_000
"""difference that clocks of one cluster may have, in µs"""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass
class TrailingClock:
    """Comparison of a clock with the newest time that was recorded."""

    since: int | None = None
    """time, by that clock, at which the clock was first seen to be behind; `None` if it is not behind"""
    now: int = 0
    newest: int = 0

    def observe(self, now: int, newest: int) -> None:
        """Compare the clock with the newest time that was recorded."""
        self.now, self.newest = now, newest
        if not is_trailing(now, newest):
            self.since = None
        elif self.since is None:
            self.since = now


def is_trailing(now: int, newest: int) -> bool:
    """Return true if `now` trails `newest` by more than the tolerance."""
    return newest - now > _TOLERANCE


def describe_log_lag(topic: str, now: int, newest: int, since: int | None) -> str:
    """Describe the consequence, and what to do, if the broker's stamps trail log time (decision 1)."""
    return (
        f"the broker's clock is {_format_seconds(newest - now)} behind the newest timestamp in {topic}"
        f"{_format_since(since)}: the clock was ahead when it gave that timestamp. Windows wait for log time, so "
        f"batches are late until the broker's clock has passed {_format_time(newest)}. Nothing is lost. If the "
        "broker's clock is wrong, correct it; else wait"
    )


def describe_watermark_lag(queries: Iterable[str], now: int, newest: int, since: int | None) -> str:
    """Describe the consequence, and what to do, if this machine's clock trails the time a query has used (decision
    5)."""
    return (
        f"the clock of this machine is {_format_seconds(newest - now)} behind the watermark of {', '.join(queries)}"
        f"{_format_since(since)}: the clock was ahead before. Nothing is lost: until the clock has passed "
        f"{_format_time(newest)}, deduplication state is kept longer. If this clock is wrong, correct it; else wait"
    )


def _format_seconds(length: int) -> str:
    return f"{length / 1_000_000:,.0f} s"


def _format_since(at: int | None) -> str:
    return "" if at is None else f", since {_format_time(at)}"


def _format_time(at: int) -> str:
    return f"{_EPOCH + timedelta(microseconds=at):%Y-%m-%d %H:%M:%S} UTC"
