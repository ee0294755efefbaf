"""Windows of one separator over its rows of the table `updates`, in log order (decisions 1 and 21). Pure.

The rows of a separator may be in several partitions: an update with a false claim is in the partition of the claimed
separator, and history was never in `kiln.updates`. They are sorted by log time (`log_time`), then by partition and
offset. Log time never goes back within a partition, so this is the order of each partition.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kiln.pipelines.batch.offset_range import WindowKey
from kiln.pipelines.batch.windows import ClosedWindow, PartitionWindows

_END: Final = 2**62
"""log time that closes every window, µs"""


class SeparatorWindows:
    """Windows of one separator. Add a live batch before the updates that it holds. Times are µs."""

    def __init__(self, key: WindowKey, length: int, grace: int, begin: int) -> None:
        """Begin without open windows.

        Args:
            key: Separator of the windows.
            length: Window length T.
            grace: Grace G.
            begin: Begin of the range. Updates before it only decide where windows begin.
        """
        self._key = key
        self._length = length
        self._grace = grace
        self._begin = begin
        self._emitted_at: dict[tuple[int, str], int] = {}
        self._anchors: set[int] = set()
        self._windows = PartitionWindows(length, grace=grace)
        self._log_time: int | None = None
        self._event_time = 0
        self._is_aligned = False

    def add_live_batch(self, opened_at: int, closed_at: int, batch_cid: str, emitted_at: int) -> None:
        """Add a batch of the live table."""
        self._emitted_at.setdefault((opened_at, batch_cid), emitted_at)
        if not self._is_aligned and closed_at - opened_at == self._length:
            self._anchors.add(opened_at)

    def add_update(self, observed_at: int, log_time: int, stream: str, tip: bytes) -> Iterator[ClosedWindow]:
        """Add the next update, and yield the windows that it closes.

        A window depends on the windows before it. If the first updates are in the middle of windows, the windows are
        aligned after the first silence, or at the first live window of full length.
        """
        event_time = min(observed_at, log_time)
        if self._log_time is None:
            self._is_aligned = event_time >= self._begin or event_time in self._anchors
        elif not self._is_aligned:
            quiet_since_event = event_time >= self._event_time + self._length
            silent = quiet_since_event or log_time >= self._log_time + self._length + self._grace
            if not silent and event_time in self._anchors:
                yield from self.close()
                self._windows = PartitionWindows(self._length, grace=self._grace)
            self._is_aligned = silent or event_time in self._anchors
        self._log_time = log_time
        self._event_time = max(event_time, self._event_time)
        yield from self._windows.advance(log_time)
        yield from self._windows.add(self._key, stream, tip, event_time)

    def close(self) -> Iterator[ClosedWindow]:
        """Close the windows that are open, at the end of history."""
        yield from self._windows.advance(_END)

    def take_emitted_at(self, opened_at: int, batch_cid: str) -> int | None:
        """Return when a batch of the live table was emitted, and forget that batch; `None` if the table lacks it."""
        return self._emitted_at.pop((opened_at, batch_cid), None)
