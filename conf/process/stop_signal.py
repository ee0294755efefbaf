"""Requests by SIGTERM and Ctrl-C to stop, for the main thread."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Final

_NUMBERS: Final = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Flag that a signal handler sets, and that one thread waits for, which may be the thread that runs the handler.

    With threading.Event, that thread can hang: `set` needs a lock that the interrupted `wait` holds.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._wakeups: SimpleQueue[None] = SimpleQueue()  # `put` may interrupt `get` and itself

    def set(self) -> None:
        self._is_set = True
        self._wakeups.put(None)

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the flag is set, or for `timeout` seconds. Return true if it is set."""
        if not self._is_set:
            with suppress(Empty):
                self._wakeups.get(timeout=timeout)
        return self._is_set


@contextmanager
def keep_handlers() -> Iterator[None]:
    """Restore the handlers of the stop signals after a block, for libraries that replace them, such as PySpark."""
    before = {number: signal.getsignal(number) for number in _NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stop_on_signals() -> Iterator[StopSignal]:
    """Yield a flag that SIGTERM and Ctrl-C (SIGINT) set. A second Ctrl-C raises KeyboardInterrupt."""
    stop = StopSignal()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    with keep_handlers():
        for number in _NUMBERS:
            signal.signal(number, handle)
        yield stop
