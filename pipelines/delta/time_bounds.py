"""Ranges of times, by which a reader skips the files of a table. This module uses neither Spark nor Java."""

from __future__ import annotations

from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

_STATISTICS_ROUNDING: Final = 1_000
"""Time in µs by which the greatest time of a file may exceed its statistic, because Spark writes statistics in ms
(PROTOCOL.md, Per-file Statistics)."""


class TimeBounds(NamedTuple):
    """Range of a timestamp column, µs: from `low` to before `high`. None means no bound."""

    column: str = "observed_at"
    low: int | None = None
    high: int | None = None

    def select_files(self, files: pa.Table) -> pa.ChunkedArray:
        """Build a mask over files, as delta-rs lists them: true for a file that may have a row in the range. A file
        without statistics may have such a row."""
        least, greatest = (_read_statistic(files, f"{of}.{self.column}") for of in ("min", "max"))
        mask = pa.chunked_array([pa.repeat(pa.scalar(True), files.num_rows)])
        if self.low is not None:
            mask = pc.and_(mask, pc.fill_null(pc.greater_equal(greatest, self.low - _STATISTICS_ROUNDING), True))
        if self.high is not None:
            mask = pc.and_(mask, pc.fill_null(pc.less(least, self.high), True))
        return mask


def _read_statistic(files: pa.Table, name: str) -> pa.ChunkedArray:
    if name not in files.column_names:  # no file has this statistic
        return pa.chunked_array([pa.nulls(files.num_rows, pa.int64())])
    return pc.cast(files[name], pa.int64())
