"""kiln.conf.process.stop_signal: a signal stops a waiting thread, wherever it interrupts the thread."""

from __future__ import annotations

import os
import signal
import sys
import threading
from itertools import count
from types import FrameType
from typing import TYPE_CHECKING

import pytest

from kiln.conf.process.stop_signal import StopSignal, stop_on_signals

if TYPE_CHECKING:
    from _typeshed import TraceFunction


def test_it_can_be_set_at_each_line_of_a_wait_and_of_another_set() -> None:
    for at in count():
        stop = StopSignal()
        if not interrupt(stop, at):
            break
        assert stop.is_set()
        assert stop.wait(0)
    assert at > 5


def interrupt(stop: StopSignal, at: int) -> bool:
    """Run `wait` and then `set`, and `set` once more before line number `at` of them. Return false if they have
    fewer."""
    lines = count()

    def trace(frame: FrameType, event: str, _: object) -> TraceFunction:
        if event == "line" and next(lines) == at:
            sys.settrace(None)
            stop.set()
        return trace

    sys.settrace(trace)
    try:
        stop.wait(0.001)
        stop.set()
    finally:
        is_done = sys.gettrace() is None
        sys.settrace(None)
    return is_done


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_and_a_second_ctrl_c_is_raised(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_on_signals() as stop:
        assert not stop.wait(0.001)
        threading.Timer(0.02, os.kill, (os.getpid(), number)).start()
        assert stop.wait()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(number) is before
