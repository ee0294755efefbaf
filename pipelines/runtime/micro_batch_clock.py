"""Clock by which a query expires its deduplication state (decision 10).

The driver passes its time to the tasks of a micro-batch. This time never goes back: with Spark's own
`current_timestamp`, the deduplicating operators would silently drop every row as late after a wrong clock is set back.
It also never advances by more than the elapsed time: otherwise a clock that is set ahead by days would expire digests
that are a second old.
"""

from __future__ import annotations

from collections.abc import Callable

from pyspark import SparkContext, TaskContext
from pyspark.sql import DataFrame

_PROPERTY = "kiln.seenAt"


class MicroBatchClock:
    """Passes the time to the tasks of each micro-batch. Not thread-safe: for the thread that runs the micro-batches."""

    def __init__(self, now: Callable[[], int], uptime: Callable[[], int], least: int) -> None:
        """Start the clock.

        Args:
            now: The time, µs.
            uptime: A clock that is never set, µs.
            least: The newest time that the query has used before, µs.
        """
        self._now, self._uptime = now, uptime
        self._at = least
        self._set_at_uptime: int | None = None  # µs, by `uptime`

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
    """Return a local property that the driver has set for the tasks of a micro-batch. `meaning`: for the error.

    Raises:
        RuntimeError: The driver has set no such property.
    """
    context = TaskContext.get()
    text = context.getLocalProperty(name) if context is not None else None
    if text is None:
        raise RuntimeError(f"the driver did not set {meaning}")
    return text


def with_dedup_watermark(rows: DataFrame, retention: int) -> DataFrame:
    """Set the watermark on `seen_at`: later operators expire rows after `retention` µs."""
    return rows.withWatermark("seen_at", f"{retention // 1000} milliseconds")
