"""Schedule of the ticks of one partition of `kiln.updates` (decision 1). It does no I/O.

The caller passes the broker's timestamps, and the current time by its own clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple

_MAX_WAIT: Final = 10_000
"""Longest wait between two ticks, in ms, while the broker's clock is behind log time. The clock may be corrected during
the wait."""


class _WindowEnd(NamedTuple):
    """A log time at which windows end. Ticks are sent until log time has reached it."""

    log_time: int
    """log time, ms, by which all windows that were opened before a certain tick have ended"""
    at: int
    """time at which the broker's clock should reach `log_time`, ms, by the caller's clock"""


@dataclass
class TickSchedule:
    """Schedule that decides when one partition needs a tick.

    A tick is needed after records of other writers, because its timestamp shows log time; `span` (T + G) later, when
    the windows that these records opened end; and once more `rest` after the records.

    The schedule waits by the caller's clock, but windows end by the broker's. So ticks are repeated until the broker's
    timestamps have reached the end of the windows. Each repeat is due when the broker's clock should reach that end,
    but at most `_MAX_WAIT` after the previous tick.

    `rest` must be well over `span`, so that windows that were opened with a greater T have also ended by then.
    """

    span: int
    """T + G, ms"""
    rest: int
    """time from records of other writers until their last tick, ms"""
    log_time: int = 0
    """greatest timestamp so far, ms, of the records in the partition and of our ticks"""
    stamp: int = 0
    """timestamp of our newest tick, ms; 0 if there is none. It is below log time if the broker's clock went back."""
    _last: int = -1  # offset of our newest tick
    _ends: deque[_WindowEnd] = field(default_factory=deque)  # ascending
    _rest: _WindowEnd | None = None  # after the newest other record

    def is_due(self, end_offset: int, now: int) -> bool:
        """Return true if the partition, whose last record is before `end_offset`, needs a tick. `now`: ms, by the
        caller's clock."""
        return self.stamp == 0 or end_offset > self._last + 1 or self.next_at <= now

    @property
    def next_at(self) -> float:
        """Time of the next tick if no other writer appends records before, in ms by the caller's clock; infinite if
        there is none."""
        first = self._ends[0] if self._ends else self._rest
        return inf if first is None else first.at

    def record_tick(self, offset: int, stamp: int, now: int) -> None:
        """Record a tick that was sent. A gap between its offset and that of the previous tick means that others
        wrote records.

        Args:
            offset: Offset of the tick.
            stamp: The broker's timestamp of the tick, ms.
            now: Time by the caller's clock, ms, after the broker received the tick.
        """
        has_others = self.stamp == 0 or offset != self._last + 1
        self.log_time = max(stamp, self.log_time)
        self._last, self.stamp = offset, stamp
        while self._ends and self._ends[0].log_time <= self.log_time:
            self._ends.popleft()
        if has_others:
            if not self._ends or self._ends[-1].log_time < self.log_time + self.span:  # else log time did not advance
                self._ends.append(_WindowEnd(self.log_time + self.span, now + self.span))
            self._rest = _WindowEnd(self.log_time + self.rest, now + self.rest)
        elif self._rest is not None and self._rest.log_time <= self.log_time:
            self._rest = None
        if self._ends and self._ends[0].at <= now:
            self._ends[0] = self._postpone(self._ends[0], now)
        elif not self._ends and self._rest is not None and self._rest.at <= now:
            self._rest = self._postpone(self._rest, now)

    def _postpone(self, end: _WindowEnd, now: int) -> _WindowEnd:
        """Return an end that the last tick did not reach, with a new time at which the broker's clock should reach
        it."""
        return end._replace(at=now + min(end.log_time - self.stamp, _MAX_WAIT))
