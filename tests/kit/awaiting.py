"""Waiting for what tells no event: another process, a thread of its own, a library. So it is asked again and again.

Where there is an event, await that.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import trio

PATIENCE = 60.0
"""s: what is awaited takes less, but the machine may be busy"""


def awaited(true: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Whether something became true in time."""
    began = time.monotonic()
    while not true():
        waited = time.monotonic() - began
        if waited > seconds:
            return False
        time.sleep(_pause(waited))
    return True


def wait_until(true: Callable[[], bool], what: str | Callable[[], str], seconds: float = PATIENCE) -> None:
    """Waits until something is true; else AssertionError with `what` never came. What finds the words is asked then."""
    if not awaited(true, seconds):
        raise _never(what, seconds)


async def until(true: Callable[[], bool], what: str | Callable[[], str], seconds: float = PATIENCE) -> None:
    """`wait_until` in trio: the other tasks go on meanwhile."""
    began = trio.current_time()
    with trio.move_on_after(seconds):
        while not true():
            await trio.sleep(_pause(trio.current_time() - began))
        return
    raise _never(what, seconds)


def _pause(waited: float) -> float:
    """Often at first, then more seldom: a look may be dear, and who waited long waits a twentieth longer."""
    return min(max(waited / 20, 0.002), 0.25)


def _never(what: str | Callable[[], str], seconds: float) -> AssertionError:
    return AssertionError(f"not within {seconds:g} s: {what if isinstance(what, str) else what()}")
