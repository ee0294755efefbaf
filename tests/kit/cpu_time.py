"""CPU cost in steps of plain Python, which a test can compare with a bound on any machine, busy or idle."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

_STEPS: Final = 50_000
_SPEED: Final = float(os.environ.get("TEST_SPEED", "1"))
"""Factor by which the machine appears faster in measurements that a test compares with a constant. The variable's name
does not begin with KILN_, because Kiln rejects such variables if they are no settings."""


@dataclass
class CpuCost:
    """CPU cost of a block of code, in steps of a plain Python loop. `steps` is set when the block ends."""

    steps: float = 0.0


def cpu_clock() -> float:
    """Return the CPU time of this thread in seconds, as a machine that is TEST_SPEED times faster would."""
    return time.thread_time() / _SPEED


@contextmanager
def measure_cpu() -> Iterator[CpuCost]:
    """Measure a block's CPU cost: its CPU time, divided by the CPU time of a step measured before and after the block.

    Another machine or load changes both times alike. Under load, CPU times grow, because cores share caches and
    virtual cores share a core.
    """
    cost = CpuCost()
    before = measure_step()
    with _without_garbage_collection():
        began = cpu_clock()
        yield cost
        spent = cpu_clock() - began
    cost.steps = spent / max(before, measure_step())


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Turn garbage collection off, because a collection in the measured block would scan objects of earlier tests."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def count_steps(action: Callable[[], object]) -> float:
    """Return the CPU cost of a call, in steps."""
    with measure_cpu() as cost:
        action()
    return cost.steps


def measure_step() -> float:
    """Return the CPU time of one step of a plain Python loop, in seconds (about 40 ns on an idle core of 2024)."""
    table = [0] * 256
    began = cpu_clock()
    for number in range(_STEPS):
        table[number & 255] += number
    return (cpu_clock() - began) / _STEPS
