"""The time by which a query forgets what it has let through: the driver gives it to the tasks of a micro-batch, and it
never goes back (decision 10). With a clock that was ahead and is put right, Spark's own `current_timestamp` would let
the deduplicating operators drop every row as late, in silence. Nor does it go on by more than what has passed: a clock
that somebody sets ahead by days would make a query forget what came a second ago."""

from __future__ import annotations

from collections.abc import Callable

from pyspark import SparkContext, TaskContext
from pyspark.sql import DataFrame

_PROPERTY = "kiln.seenAt"


class MicroBatchClock:
    """Tells the tasks of each micro-batch the time. For the thread that runs the query's micro-batches."""

    def __init__(self, now: Callable[[], int], uptime: Callable[[], int], least: int) -> None:
        """`now`: µs. `uptime`: a clock that nobody sets, µs. `least`: the time that the query has reckoned with before,
        µs."""
        self._now, self._uptime = now, uptime
        self._at = least
        self._told: int | None = None  # by `uptime`

    def set_time(self, context: SparkContext) -> None:
        """To be called in a micro-batch before its first job. The first one takes the time as the clock has it."""
        now, uptime = self._now(), self._uptime()
        if self._told is not None:
            now = min(now, self._at + uptime - self._told)
        self._at, self._told = max(self._at, now), uptime
        context.setLocalProperty(_PROPERTY, str(self._at))


def get_batch_time() -> int:
    """The time of this task's micro-batch, µs. RuntimeError: the driver has told none."""
    context = TaskContext.get()
    told = context.getLocalProperty(_PROPERTY) if context is not None else None
    if told is None:
        raise RuntimeError("the driver has not told this task the time of its micro-batch")
    return int(told)


def with_dedup_watermark(rows: DataFrame, remembered: int) -> DataFrame:
    """The rows, with `get_batch_time` as event time: operators after this forget what they saw `remembered` µs before."""
    return rows.withWatermark("seen_at", f"{remembered // 1000} milliseconds")
