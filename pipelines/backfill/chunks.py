"""How a run is cut: how far beyond its range it reads, and into which chunks. Pure; times are µs."""

from __future__ import annotations

from itertools import pairwise
from typing import Final, NamedTuple

_LATENESS: Final = 600_000_000
"""How far an update may be out of order in the log, for windows at the edges of a run to come out right."""

UPDATES_AT_ONCE: Final = 2_000_000
"""Updates of the windows that are made in one step."""


class TimeRange(NamedTuple):
    """From `low` on and before `high`."""

    low: int
    high: int

    def __contains__(self, at: object) -> bool:
        return isinstance(at, int) and self.low <= at < self.high


def reach(window: int, grace: int) -> int:
    """How far beyond both edges of the range a run reads: windows that are open across an edge, and what is out of
    order there."""
    return _LATENESS + window + grace


def pieces(count: int, size: int) -> int:
    """How many pieces of `size` there are for `count`; one at least."""
    return max(1, -(-count // size))


def cut(whole: TimeRange, inner: list[int]) -> list[TimeRange]:
    """A span in chunks: between its ends and the places within it. Chunks without room are left out."""
    edges = [whole.low, *sorted({at for at in inner if whole.low < at < whole.high}), whole.high]
    return [TimeRange(low, high) for low, high in pairwise(edges)]
