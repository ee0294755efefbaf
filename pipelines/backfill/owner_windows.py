"""Windows of one separator over its part of the table `updates`, in the order of the log (decision 1; decision 21).
Pure.

The rows of a separator may lie in several partitions of the log: an update that a false claim sent elsewhere, and
history that was never in the log. Their order is that of `updated_at`, the log's clock C, then of partition and offset:
within a partition C never goes back, so this is the order of each log.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from kiln.pipelines.batch.offset_range import WindowKey
from kiln.pipelines.batch.windows import ClosedWindow, PartitionWindows

_END: Final = 2**62
"""µs: a clock that has ended every window"""


class LiveBatch(NamedTuple):
    """What live has of a batch. Times are µs."""

    cid: str
    emitted_at: int


class SeparatorWindows:
    """To be told the rows in order: of a batch of live before the updates that it holds. Times are µs."""

    def __init__(self, key: WindowKey, length: int, grace: int, begin: int) -> None:
        """`length`: T. `grace`: G. `begin`: of the range; updates before it are told for where windows begin alone."""
        self._key = key
        self._length = length
        self._grace = grace
        self._begin = begin
        self._live: dict[int, list[LiveBatch]] = {}
        self._anchors: set[int] = set()
        self._windows = PartitionWindows(length, grace=grace)
        self._clock: int | None = None
        self._heard = 0
        self._sure = False

    def batch(self, opened_at: int, closed_at: int, live: LiveBatch) -> None:
        """Takes note of a batch that live has."""
        self._live.setdefault(opened_at, []).append(live)
        if closed_at - opened_at == self._length:
            self._anchors.add(opened_at)

    def update(self, heard: int, clock: int, stream: str, tip: bytes) -> Iterator[ClosedWindow]:
        """Takes the next update; gives out the windows that it ends.

        A window depends on the windows before it. Where the first updates that are told stand in the middle of windows,
        the windows are right from the first silence on, or from the first window of live that is as long.
        """
        heard = min(heard, clock)
        if self._clock is None:
            self._sure = heard >= self._begin or heard in self._anchors
        elif not self._sure:
            silent = heard >= self._heard + self._length or clock >= self._clock + self._length + self._grace
            if not silent and heard in self._anchors:
                yield from self.end()
                self._windows = PartitionWindows(self._length, grace=self._grace)
            self._sure = silent or heard in self._anchors
        self._clock = clock
        self._heard = max(heard, self._heard)
        yield from self._windows.advance(clock)
        yield from self._windows.add(self._key, stream, tip, heard)

    def end(self) -> Iterator[ClosedWindow]:
        """The windows that are open: history is over."""
        yield from self._windows.advance(_END)

    def emitted_at(self, opened_at: int, cid: str) -> int | None:
        """When live emitted a batch; None: live has no such batch."""
        return next((each.emitted_at for each in self._live.get(opened_at, ()) if each.cid == cid), None)

    def forget(self, opened_at: int) -> None:
        """A window that opened then has come out."""
        self._live.pop(opened_at, None)
        self._anchors.discard(opened_at)
