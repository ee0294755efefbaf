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
    clock: int = 0
    """the log's clock, the greatest stamp so far: of what was in the partition before, and of our ticks since"""
    stamp: int = 0
    """of our newest tick; 0: there is none. Stamps less than the clock are those of a broker whose clock went back."""
    _last: int = -1  # offset of our newest tick
    _busy: int | None = field(default=None)  # the log's clock at the first tick after the newest other record

    def due(self, end_offset: int) -> bool:
        """Whether the partition, which ends before `end_offset`, needs a tick."""
        return self._busy is None or end_offset > self._last + 1 or self.clock < self._busy + self.rest

    def ticked(self, offset: int, stamp: int) -> None:
        """Takes in where the broker put a tick, and when. A gap after the last tick is other records."""
        self.clock = max(stamp, self.clock)
        if self._busy is None or offset != self._last + 1:
            self._busy = self.clock
        self._last, self.stamp = offset, stamp
