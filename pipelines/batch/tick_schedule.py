"""When a partition of `kiln.updates` needs a tick (decision 1).

Pure: the broker's answers and the time in, yes or no out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple


class _End(NamedTuple):
    """An end of windows that a tick is to make known."""

    log_time: int
    """of the log, ms: every window ends here that was opened before the tick that found this end"""
    at: int
    """when the broker's clock should be there, by the caller's time, ms"""


@dataclass
class TickSchedule:
    """Decides when one partition needs a tick: where somebody else wrote, where windows end, and at rest.

    The first tick after other records says where the log's clock stands. All windows that these records opened end
    `span` (T + G) later by that clock. The schedule waits by the caller's time, and goes by the broker's stamps: while
    the stamps have not come so far, the tick stays due. A last tick comes `rest` ms after the first. `rest` must be
    well over `span`, so that windows that were opened with a greater T end then too.
    """

    span: int
    """ms"""
    rest: int
    """ms"""
    log_time: int = 0
    """the log's clock, the greatest stamp so far: of what was in the partition before, and of our ticks since"""
    stamp: int = 0
    """of our newest tick; 0: there is none. Stamps less than the clock are those of a broker whose clock went back."""
    _last: int = -1  # offset of our newest tick
    _ends: deque[_End] = field(default_factory=deque)  # ascending
    _rest: _End | None = None  # after the newest other record

    def is_due(self, end_offset: int, now: int) -> bool:
        """Whether the partition, which ends before `end_offset`, needs a tick at `now`."""
        return self.stamp == 0 or end_offset > self._last + 1 or self.next_at <= now

    @property
    def next_at(self) -> float:
        """When a tick is due if nobody else writes, by the caller's time, ms; infinite: never."""
        first = self._ends[0] if self._ends else self._rest
        return inf if first is None else first.at

    def record_tick(self, offset: int, stamp: int, now: int) -> None:
        """Takes in where the broker put a tick, and with which stamp. A gap after the last tick is other records.

        `now`: a moment after the broker stamped the tick.
        """
        others = self.stamp == 0 or offset != self._last + 1
        self.log_time = max(stamp, self.log_time)
        self._last, self.stamp = offset, stamp
        while self._ends and self._ends[0].log_time <= self.log_time:
            self._ends.popleft()
        if others:
            if not self._ends or self._ends[-1].log_time < self.log_time + self.span:  # else the clock stood still
                self._ends.append(_End(self.log_time + self.span, now + self.span))
            self._rest = _End(self.log_time + self.rest, now + self.rest)
        elif self._rest is not None and self._rest.log_time <= self.log_time:
            self._rest = None
