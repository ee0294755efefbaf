"""Log time of `kiln.updates` before and after a micro-batch (decision 1). It is saved next to the checkpoint, and
passed to the tasks of the next micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
from pyspark import SparkContext

from kiln.conf.process.location import Location
from kiln.pipelines.runtime.clocks import get_task_property

LogTimes = Mapping[int, int]
"""Log time by partition, µs: the greatest broker timestamp so far."""

_PROPERTY = "kiln.logTimes"


class _SavedTimes(msgspec.Struct):
    batch_id: int
    before: dict[int, int]
    after: dict[int, int]


class LogTimeFile:
    """File with the log time before and after the last micro-batch. A micro-batch that is repeated after a crash starts
    with the same log time."""

    def __init__(self, path: Location, read_initial: Callable[[], dict[int, int]] = dict) -> None:
        """Read the file, which is in the folder of the query's checkpoint.

        `read_initial`: called if there is no file; returns log time by partition. The default returns no log time, as
        for a query that has read no records.
        """
        self._path = path
        self._saved = (
            msgspec.json.decode(path.read(), type=_SavedTimes) if path.exists() else _SavedTimes(-1, {}, read_initial())
        )

    def read_start(self, batch_id: int) -> LogTimes:
        """Return log time at the start of a micro-batch."""
        return self._saved.before if self._saved.batch_id == batch_id else self._saved.after

    def advance(self, batch_id: int, stamps: LogTimes) -> None:
        """Save log time after a micro-batch. Log time never goes back. `stamps`: greatest timestamp of the new records
        by partition, µs."""
        before = dict(self.read_start(batch_id))
        after = before | {partition: max(at, before.get(partition, 0)) for partition, at in stamps.items()}
        self._saved = _SavedTimes(batch_id, before, after)
        self._path.write([msgspec.json.encode(self._saved)])


def set_log_times(context: SparkContext, times: LogTimes) -> None:
    """Pass log time at the start of a micro-batch to its tasks. Call it before the first Spark job of the
    micro-batch."""
    context.setLocalProperty(_PROPERTY, msgspec.json.encode(times).decode())


def get_log_times() -> LogTimes:
    """Return log time at the start of the micro-batch that this task belongs to.

    Raises:
        RuntimeError: The driver has set no log time.
    """
    text = get_task_property(_PROPERTY, "log time at the start of this micro-batch")
    return msgspec.json.decode(text, type=dict[int, int])
