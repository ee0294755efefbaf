"""When a partition of `kiln.updates` needs a tick (decision 1). Pure: the broker's answers in, yes or no out."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class TickSchedule:
    """Decides when one partition needs a tick, from what the broker answered alone: offsets, and stamps in ms.

    Ticks go on until the broker stamps a tick `rest` ms after the newest other record. `rest` must be well over T, so
    that no window is open then.
    """

    rest: int
    _last: int = -1  # offset of our newest tick
    _stamp: int = 0  # its stamp
    _busy: int | None = field(default=None)  # stamp of the first tick after the newest other record

    def due(self, end_offset: int) -> bool:
        """Whether the partition, which ends before `end_offset`, needs a tick."""
        return self._busy is None or end_offset > self._last + 1 or self._stamp < self._busy + self.rest

    def ticked(self, offset: int, stamp: int) -> None:
        """Takes in where the broker put a tick, and when. A gap after the last tick is other records."""
        if self._busy is None or offset != self._last + 1:
            # the log's clock, which does not go back when the broker's does
            self._busy = max(stamp, self._stamp)
        self._last, self._stamp = offset, max(stamp, self._stamp)
