"""Exponential back-off between attempts, and between restarts of a process."""

from __future__ import annotations

import time
from collections.abc import Callable

_SHORTEST_PAUSE = 1.0  # s
_LONGEST_PAUSE = 30.0


def pause_after(failures: int, least: float, most: float) -> float:
    """Compute the pause after a number of consecutive failures.

    The pause is `least` after the first failure, and doubles with each further failure, up to `most`.

    Returns:
        The pause in the unit of `least` and `most`; 0.0 if nothing has failed.
    """
    if failures < 1:
        return 0.0
    return min(least * 2.0 ** min(failures - 1, 64), most)  # at most 64 doublings: many more overflow a float


class Backoff:
    """Back-off for restarting a process: the pause doubles with each death, until the process works again."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.deaths = 0
        """number of deaths since the process last worked"""
        self._restart_at = 0.0

    def record_death(self) -> None:
        """Record that the process has died. `is_due` is then false until the pause is over."""
        self.deaths += 1
        self._restart_at = self._now() + pause_after(self.deaths, _SHORTEST_PAUSE, _LONGEST_PAUSE)

    def reset(self) -> None:
        """Record that the process works: the next pause is the shortest again."""
        self.deaths = 0

    @property
    def is_due(self) -> bool:
        """True if the process may be restarted now."""
        return self._now() >= self._restart_at
