"""Waiting by polling, for conditions that have no event to wait for, such as the state of another process.

If there is an event, wait for the event instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import trio

PATIENCE = 240.0
"""default timeout in s, long enough for a start of Spark on one core with other work"""


def awaited(true: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Poll a condition, and return true if it becomes true within `seconds`."""
    began = time.monotonic()
    while True:
        asked = time.monotonic()
        if true():
            return True
        answered = time.monotonic()
        if answered - began > seconds:
            return False
        time.sleep(_pause(answered - began, answered - asked))


def wait_until(true: Callable[[], bool], what: str | Callable[[], str], seconds: float = PATIENCE) -> None:
    """Wait until a condition is true. If it is not true in time, raise AssertionError with `what`, or with the text
    that `what` returns."""
    if not awaited(true, seconds):
        raise _never(what, seconds)


async def until(true: Callable[[], bool], what: str | Callable[[], str], seconds: float = PATIENCE) -> None:
    """Wait like `wait_until`, but without blocking other trio tasks."""
    began = trio.current_time()
    with trio.move_on_after(seconds):
        while not true():
            await trio.sleep(_pause(trio.current_time() - began, 0.0))
        return
    raise _never(what, seconds)


def _pause(waited: float, cost: float) -> float:
    """Return the pause before the next poll: a twentieth of the time waited so far, or four times that of an expensive
    poll, such as a query of a table. All times are in s."""
    return max(min(max(waited / 20, 0.002), 0.25), min(4 * cost, 2.0))


def _never(what: str | Callable[[], str], seconds: float) -> AssertionError:
    return AssertionError(f"not within {seconds:g} s: {what if isinstance(what, str) else what()}")
