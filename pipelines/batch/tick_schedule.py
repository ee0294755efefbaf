"""Schedule of the ticks of a partition of `kiln.updates` (decision 1).

It does no I/O and reads no clock: the caller passes the broker's stamps and the time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple

_MAX_WAIT: Final = 10_000
"""longest wait between two ticks while the broker's clock trails, ms: the clock may be corrected during the wait"""


class _WindowEnd(NamedTuple):
    """A log time at which windows end, to be reached by a tick."""

    log_time: int
    """log time, ms, at which all windows end that were opened before the tick that recorded this end"""
    at: int
    """the caller's time, ms, at which the broker's clock should reach it"""


@dataclass
class TickSchedule:
    """Decides when one partition needs a tick: after other writers' records, when windows end, and once more after a
    pause.

    The first tick after other records reports log time. All windows that these records opened end `span` (T + G) later
    in log time. The schedule waits by the caller's time, but ticks go on until the broker's stamps have reached that
    log time: the next tick is due when they should reach it, or after `_MAX_WAIT` while the broker's clock trails by
    more. A last tick is due `rest` ms after the first. `rest` must be well over `span`, so that windows that were
    opened with a greater T also end then.
    """

    span: int
    """ms"""
    rest: int
    """ms"""
    log_time: int = 0
    """greatest stamp so far, ms, of the earlier records in the partition and of our ticks"""
    stamp: int = 0
    """stamp of our newest tick; 0 if there is none. If it is below log time, the broker's clock went back."""
    _last: int = -1  # offset of our newest tick
    _ends: deque[_WindowEnd] = field(default_factory=deque)  # ascending
    _rest: _WindowEnd | None = None  # after the newest other record

    def is_due(self, end_offset: int, now: int) -> bool:
        """Return true if the partition, which ends before `end_offset`, needs a tick at `now`."""
        return self.stamp == 0 or end_offset > self._last + 1 or self.next_at <= now

    @property
    def next_at(self) -> float:
        """Time of the next tick if nothing else is written, by the caller's time, ms; infinite if none is due."""
        first = self._ends[0] if self._ends else self._rest
        return inf if first is None else first.at

    def record_tick(self, offset: int, stamp: int, now: int) -> None:
        """Record the offset and the stamp of a tick. A gap after the previous tick means that others wrote records.

        Args:
            offset: Offset of the tick.
            stamp: The broker's stamp, ms.
            now: A moment after the broker stamped the tick, ms.
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
        """Return an end that the last tick should have reached, with a new time at which the broker's clock should
        reach it."""
        return end._replace(at=now + min(end.log_time - self.stamp, _MAX_WAIT))
