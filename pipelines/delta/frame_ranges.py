"""Ranges of sequence numbers, to recognise frames that are already stored. The connection, the direction and the
sequence number identify a frame (docs/design/contracts.md, Frame).

The ranges in the table `frames` are read with delta-rs. With Spark, each start would load all classes of Delta.
"""

from __future__ import annotations

import sqlite3
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import pyarrow as pa

from kiln.pipelines.delta.lake import Lake, LakeError, read_rows
from kiln.schemas.kafka.frames import DIRECTIONS

Ranges = list[tuple[int, int]]
"""Sequence numbers as closed ranges, in ascending order and with gaps between them. A connection without loss has one
range."""

FrameRanges = dict[bytes, Ranges]
"""Sequence numbers of frames, by connection and direction (`build_range_key`)"""

_LAST = 2**63


def build_range_key(connection: bytes, direction: str) -> bytes:
    """Build the key of `FrameRanges` for one direction of a connection. `direction`: "IN" or "OUT"."""
    return connection + bytes((DIRECTIONS.index(direction),))


def insert(ranges: Ranges, low: int, high: int) -> bool:
    """Add the numbers from `low` to `high` to `ranges`. Return false if `ranges` already had all of them."""
    if ranges and low == ranges[-1][1] + 1:  # nearly always
        ranges[-1] = (ranges[-1][0], high)
        return True
    at = bisect_right(ranges, (low, _LAST))  # the first range that begins after `low`
    if at and ranges[at - 1][1] >= high:
        return False
    first = at - 1 if at and ranges[at - 1][1] >= low - 1 else at
    last = at
    while last < len(ranges) and ranges[last][0] <= high + 1:
        last += 1
    if first < last:
        low = min(low, ranges[first][0])
        high = max(high, ranges[last - 1][1])
    ranges[first:last] = [(low, high)]
    return True


def contains(ranges: Ranges, sequence: int) -> bool:
    """Return true if a sequence number is in one of the ranges."""
    at = bisect_right(ranges, (sequence, _LAST)) - 1
    return at >= 0 and ranges[at][1] >= sequence


def merge(into: FrameRanges, added: Mapping[bytes, Iterable[tuple[int, int]]]) -> FrameRanges:
    """Add the frames in `added` to `into`, which is changed and returned."""
    for key, ranges in added.items():
        merged = into.setdefault(key, [])
        for low, high in ranges:
            insert(merged, low, high)
    return into


def overlap(stored: Mapping[bytes, Ranges], frames: Mapping[bytes, Iterable[tuple[int, int]]]) -> bool:
    """Return true if at least one of the frames is in `stored`."""
    return any(
        _overlaps(stored[key], low, high) for key, ranges in frames.items() if key in stored for low, high in ranges
    )


def _overlaps(ranges: Ranges, low: int, high: int) -> bool:
    at = bisect_right(ranges, (high, _LAST)) - 1  # the last range that begins at `high` or before
    return at >= 0 and ranges[at][1] >= low


Span = tuple[int, int, int]
"""Kafka partition, first and last offset"""

_SIDE = ["connection", "direction"]
_LAST_SEQUENCE = 2**63 - 1  # the greatest sequence, and the greatest number of SQLite


class StoredFrameRanges:
    """Ranges of all frames in the lake, in a temporary SQLite database on this machine's disk.

    Memory use and lookup time depend on the ranges that are looked up, not on the number of stored ranges. SQLite
    removes the file when the process ends. Every method raises `LakeError` if the disk is full.
    """

    def __init__(self) -> None:
        """Create the database in the folder of the environment variable SQLITE_TMPDIR or TMPDIR, or else in
        /var/tmp."""
        # Spark calls in several threads, but never in two at the same time.
        self._file = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._file.execute("PRAGMA journal_mode = OFF")  # each process has a new file
        self._file.execute(
            "CREATE TABLE ranges (side BLOB, low INTEGER, high INTEGER, PRIMARY KEY (side, low)) WITHOUT ROWID"
        )

    def find_near(self, frame_ranges: Mapping[bytes, Iterable[tuple[int, int]]]) -> FrameRanges:
        """Return the stored ranges that overlap or adjoin one of these ranges."""
        all_near: FrameRanges = {}
        with _wrap_errors():
            for key, ranges in frame_ranges.items():
                near = {
                    row
                    for low, high in ranges
                    for row in self._file.execute(_NEAR, (key, low - 1, min(high + 1, _LAST_SEQUENCE)))
                }
                if near:
                    all_near[key] = sorted(near)
        return all_near

    def add(self, frame_ranges: Mapping[bytes, Iterable[tuple[int, int]]]) -> None:
        near = self.find_near(frame_ranges)
        replaced = [(key, low) for key, ranges in near.items() for low, _ in ranges]
        merged = merge(near, frame_ranges)
        rows = [(key, low, high) for key, ranges in merged.items() for low, high in ranges]
        with _wrap_errors():
            self._file.executemany("DELETE FROM ranges WHERE side = ? AND low = ?", replaced)
            self._file.executemany("INSERT INTO ranges VALUES (?, ?, ?)", rows)


# Ranges that overlap ?2 to ?3. The last condition lets SQLite begin at the last range that begins at ?2 or before.
_NEAR = """
SELECT low, high FROM ranges WHERE side = ?1 AND low <= ?3 AND high >= ?2
AND low >= ifnull((SELECT max(low) FROM ranges WHERE side = ?1 AND low <= ?2), ?2)
"""


@contextmanager
def _wrap_errors() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise LakeError(
            f"cannot store the index of the lake's frames in the temporary folder ({error}). Free space in /var/tmp, "
            "or set SQLITE_TMPDIR to a folder with free space"
        ) from error


def read_frame_ranges(lake: Lake, excluded: Iterable[Span] = ()) -> StoredFrameRanges:
    """Read the ranges of the frames in the table `frames`.

    Args:
        excluded: Offset ranges of the Kafka records whose frames are left out.

    Raises:
        LakeError: The table cannot be read, or the disk is full.
    """
    skipped = [f"(kafka_partition = {at} AND kafka_offset BETWEEN {low} AND {high})" for at, low, high in excluded]
    others = f"NOT ({' OR '.join(skipped)})" if skipped else "true"
    stored = StoredFrameRanges()
    for batch in read_rows(lake.open("frames"), [*_SIDE, "sequence"], others):
        if batch.num_rows:
            stored.add(_build_ranges(pa.Table.from_batches([batch])))
    return stored


def _build_ranges(rows: pa.Table) -> FrameRanges:
    frame_ranges: FrameRanges = {}
    sides = rows.group_by(_SIDE).aggregate(
        [("sequence", "min"), ("sequence", "max"), ("sequence", "count_distinct"), ("sequence", "list")]
    )
    names = (*_SIDE, "sequence_min", "sequence_max", "sequence_count_distinct")
    for index, (connection, direction, low, high, frames) in enumerate(
        zip(*(sides[name].to_pylist() for name in names), strict=True)
    ):
        ranges: Ranges = [(low, high)]
        if frames != high - low + 1:
            ranges = []
            for sequence in sorted(sides["sequence_list"][index].as_py()):
                insert(ranges, sequence, sequence)
        frame_ranges[build_range_key(connection, direction)] = ranges
    return frame_ranges
