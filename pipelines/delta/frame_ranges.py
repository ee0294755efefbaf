"""Ranges of frames: a frame is identified by (connection, direction, sequence), and stored once (contracts, Frame)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping

Ranges = list[tuple[int, int]]
"""Sequence numbers as ascending closed ranges that are not adjacent: a connection without loss is one range."""

FrameRanges = dict[bytes, Ranges]
"""The ranges by connection and direction; `build_range_key` builds the key."""

_LAST = 2**63


def build_range_key(connection: bytes, direction: int) -> bytes:
    """Build the key of `FrameRanges` for one direction of one connection."""
    return connection + bytes((direction,))


def insert(ranges: Ranges, low: int, high: int) -> bool:
    """Insert low…high into `ranges` in place. Returns False if `ranges` already has all of it."""
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
    """Return true if a sequence lies in one of the ranges."""
    at = bisect_right(ranges, (sequence, _LAST)) - 1
    return at >= 0 and ranges[at][1] >= sequence


class FrameRangeFilter:
    """Filter that accepts each frame once, unless it is in `stored`."""

    def __init__(self, stored: Mapping[bytes, Ranges]) -> None:
        self._stored = stored
        self.accepted: FrameRanges = {}

    def accept(self, connection: bytes, direction: int, sequence: int) -> bool:
        """Accept a frame. A second call for the same frame returns False."""
        return self.accept_key(build_range_key(connection, direction), sequence)

    def accept_key(self, key: bytes, sequence: int) -> bool:
        """Accept a frame as `accept` does, given its key of `FrameRanges`."""
        stored = self._stored.get(key)
        if stored is not None and contains(stored, sequence):
            return False
        accepted = self.accepted.get(key)
        if accepted is None:
            accepted = self.accepted[key] = []
        return insert(accepted, sequence, sequence)


def merge(into: FrameRanges, added: Mapping[bytes, Iterable[tuple[int, int]]]) -> FrameRanges:
    """Add ranges to `into`, which is changed and returned."""
    for key, ranges in added.items():
        merged = into.setdefault(key, [])
        for low, high in ranges:
            insert(merged, low, high)
    return into


def overlap(stored: Mapping[bytes, Ranges], frames: Mapping[bytes, Iterable[tuple[int, int]]]) -> bool:
    """Return true if one of the frames is stored."""
    return any(
        _overlaps(stored[key], low, high) for key, ranges in frames.items() if key in stored for low, high in ranges
    )


def _overlaps(ranges: Ranges, low: int, high: int) -> bool:
    at = bisect_right(ranges, (high, _LAST)) - 1  # the last range that begins at `high` or before
    return at >= 0 and ranges[at][1] >= low
