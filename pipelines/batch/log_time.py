"""Where the clock of `kiln.updates` stood after a micro-batch, kept beside the checkpoint (decision 1)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kiln.conf.process.location import Location

LogTimes = Mapping[int, int]
"""By partition: the greatest stamp so far, µs."""


class _SavedTimes(msgspec.Struct):
    batch_id: int
    before: dict[int, int]
    after: dict[int, int]


class LogTimeFile:
    """The clock before each micro-batch. A micro-batch that a crash repeats finds the clock where it stood before."""

    def __init__(self, path: Location) -> None:
        """`path`: of the file, in the folder of the query's checkpoint. A missing file: the log begins."""
        self._path = path
        self._saved = msgspec.json.decode(path.read(), type=_SavedTimes) if path.exists() else _SavedTimes(-1, {}, {})

    def read_start(self, batch_id: int) -> LogTimes:
        """Where the clock stood when the micro-batch began."""
        return self._saved.before if self._saved.batch_id == batch_id else self._saved.after

    def advance(self, batch_id: int, seen: LogTimes) -> None:
        """Keeps where the clock stands after a micro-batch that saw these stamps; it never goes back."""
        before = dict(self.read_start(batch_id))
        after = before | {partition: max(at, before.get(partition, 0)) for partition, at in seen.items()}
        self._saved = _SavedTimes(batch_id, before, after)
        self._path.write([msgspec.json.encode(self._saved)])
