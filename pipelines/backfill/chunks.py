"""Division of a run into chunks, and the margin that it reads around its range. Pure; times are µs."""

from __future__ import annotations

from itertools import pairwise
from typing import Final, NamedTuple

_LATENESS: Final = 600_000_000
"""Maximum disorder of updates in the log up to which windows at the edges of a run are exact."""

UPDATES_PER_STEP: Final = 2_000_000
"""Updates whose windows one step builds."""


class TimeRange(NamedTuple):
    """The times from `low` to before `high`."""

    low: int
    high: int

    def __contains__(self, at: object) -> bool:
        return isinstance(at, int) and self.low <= at < self.high


def compute_margin(window: int, grace: int) -> int:
    """Compute how far a run reads beyond both edges of its range, because of open windows and disorder there."""
    return _LATENESS + window + grace


def count_pieces(count: int, size: int) -> int:
    """Count the pieces of `size` that hold `count` items; at least one."""
    return max(1, -(-count // size))


def split_range(whole: TimeRange, split_times: list[int]) -> list[TimeRange]:
    """Split a range at the times within it. Empty chunks are left out."""
    edges = [whole.low, *sorted({at for at in split_times if whole.low < at < whole.high}), whole.high]
    return [TimeRange(low, high) for low, high in pairwise(edges)]
