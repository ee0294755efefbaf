"""Windows of one separator in a backfill run, computed from rows of the table `updates` (decisions 1 and 21). Pure.

The rows are sorted by log time, then by the partition and offset that they had in the topic `kiln.updates`. Log time
never goes back within a partition, so the rows of a partition keep their order. Rows of one separator may come from
several partitions, because an update may have claimed a wrong separator. Rows from capture files were never in the
topic.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kiln.pipelines.batch.offset_range import WindowKey
from kiln.pipelines.batch.windows import PartitionWindows, Window

_END: Final = 2**62
"""log time that closes every window, µs"""


class SeparatorWindows:
    """Windows of one separator. Add the batches of the live table before the updates in them. Times are µs."""

    def __init__(self, key: WindowKey, length: int, grace: int, begin: int) -> None:
        """Begin without open windows.

        Args:
            key: Separator of the windows.
            length: Length T of a window.
            grace: Grace G: log time after the end of a window in which it still accepts late updates.
            begin: Start of the run's time range. Updates before it only determine where the windows begin.
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
        """Add a batch of the live table `batches`. If its window has the full length, a window of the run may begin at
        the same time."""
        self._emitted_at.setdefault((opened_at, batch_cid), emitted_at)
        if not self._is_aligned and closed_at - opened_at == self._length:
            self._anchors.add(opened_at)

    def add_update(self, observed_at: int, log_time: int, stream: str, tip: bytes) -> Iterator[Window]:
        """Add the next update, and yield the windows that it closes.

        The start of a window depends on the windows before it, which the run may not know for its first updates. So
        windows are certain only after a pause as long as a window, or from an update at the start of a live batch's
        window of full length.
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

    def close(self) -> Iterator[Window]:
        """Close the open windows after the last update, and yield them."""
        yield from self._windows.advance(_END)

    def take_emitted_at(self, opened_at: int, batch_cid: str) -> int | None:
        """Return the time at which a batch of the live table was emitted, and forget the batch.

        Args:
            opened_at: Start of the batch's window, µs.
            batch_cid: CID of the batch.

        Returns:
            None if the live table has no such batch.
        """
        return self._emitted_at.pop((opened_at, batch_cid), None)
