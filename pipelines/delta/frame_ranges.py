"""Which frames the lake holds: each is known by (connection, direction, sequence) and held once (contracts, Frame)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping

Ranges = list[tuple[int, int]]
"""Sequences as ascending closed ranges that do not touch: a connection with no loss is one range."""

FrameRanges = dict[bytes, Ranges]
"""The ranges by connection and direction, as `side()` writes the two."""

_LAST = 2**63


def build_range_key(connection: bytes, direction: int) -> bytes:
    """One direction of one connection, as the key of `FrameRanges`."""
    return connection + bytes((direction,))


def insert(ranges: Ranges, low: int, high: int) -> bool:
    """Adds low…high to `ranges` in place; False if all of it was there."""
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
    """Whether a sequence lies in one of the ranges."""
    at = bisect_right(ranges, (sequence, _LAST)) - 1
    return at >= 0 and ranges[at][1] >= sequence


class FrameRangeFilter:
    """Lets each frame through once: a frame that is not in `held` and did not pass before. `taken`: what passed."""

    def __init__(self, held: Mapping[bytes, Ranges]) -> None:
        self._held = held
        self.taken: FrameRanges = {}

    def passes(self, connection: bytes, direction: int, sequence: int) -> bool:
        """Whether a frame may pass. A second call for the same frame says no."""
        key = build_range_key(connection, direction)
        held = self._held.get(key)
        if held is not None and contains(held, sequence):
            return False
        taken = self.taken.get(key)
        if taken is None:
            taken = self.taken[key] = []
        return insert(taken, sequence, sequence)


def merge(into: FrameRanges, taken: Mapping[bytes, Iterable[tuple[int, int]]]) -> FrameRanges:
    """Adds `taken` to `into`, in place."""
    for key, ranges in taken.items():
        kept = into.setdefault(key, [])
        for low, high in ranges:
            insert(kept, low, high)
    return into


def overlap(held: Mapping[bytes, Ranges], taken: Mapping[bytes, Iterable[tuple[int, int]]]) -> bool:
    """Whether a frame of `taken` is in `held`."""
    return any(_touches(held[key], low, high) for key, ranges in taken.items() if key in held for low, high in ranges)


def _touches(ranges: Ranges, low: int, high: int) -> bool:
    at = bisect_right(ranges, (high, _LAST)) - 1  # the last range that begins at `high` or before
    return at >= 0 and ranges[at][1] >= low
