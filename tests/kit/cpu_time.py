"""CPU time that a test can compare with a bound, whatever the machine and whatever else runs on it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_STEPS = 50_000
_USUAL = 0.0021
"""CPU time in s of `_STEPS` steps on the machine, idle, on which the bounds were chosen"""


@dataclass
class CpuTime:
    """CPU time of this thread in a block, in seconds of the idle reference machine. Set when the block ends."""

    seconds: float = 0.0


@contextmanager
def measure_cpu() -> Iterator[CpuTime]:
    """Measure the block's CPU time, divided by how slow the machine is around it.

    CPU time grows with the load too: cores share caches, and virtual ones share a core.
    """
    spent = CpuTime()
    before = slowness()
    began = time.thread_time()
    yield spent
    seconds = time.thread_time() - began
    spent.seconds = seconds / max(before, slowness())


def slowness() -> float:
    """Return how many times longer plain Python takes now than on the idle reference machine; 1 at least."""
    table = [0] * 256
    began = time.thread_time()
    for number in range(_STEPS):
        table[number & 255] += number
    return max(1.0, (time.thread_time() - began) / _USUAL)
