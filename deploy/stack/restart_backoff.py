"""When to start a process again that has died."""

from __future__ import annotations

import time
from collections.abc import Callable

from kiln.conf.process.backoff import pause_after

_SHORTEST_PAUSE = 1.0  # s
_LONGEST_PAUSE = 30.0


class Backoff:
    """A pause after each death of a process: each twice as long as the pause before, until the process is well
    again."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """`now`: monotonic s."""
        self._now = now
        self.deaths = 0
        """deaths since the process was well"""
        self._at = 0.0

    def record_death(self) -> None:
        """The process has died: `is_due` is false until the pause is over."""
        self.deaths += 1
        self._at = self._now() + pause_after(self.deaths, _SHORTEST_PAUSE, _LONGEST_PAUSE)

    def reset(self) -> None:
        """The process does its work: the next pause is the shortest again."""
        self.deaths = 0

    @property
    def is_due(self) -> bool:
        """Whether the process may be started now."""
        return self._now() >= self._at
