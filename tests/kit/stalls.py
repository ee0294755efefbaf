"""Stalls of threads at random calls of functions, as on a busy machine: `TEST_STALLS=7 make test`, where 7 is a seed.

A test that fails with them depends on the speed of the machine.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

_MOST: Final = 12  # stalls of a block
_SHORTEST: Final = 0.02  # s
_LONGEST: Final = 0.08  # s
_CHECKOUT: Final = str(Path(__file__).parents[2])


@contextmanager
def stalls(seed: str) -> Iterator[None]:
    """Stop a thread of this process now and then, while the block runs, when it calls a function of the checkout.

    The first calls are the most likely to stop, so that both short and long blocks get some stalls.

    Args:
        seed: Determines at which calls, and for how long. The order in which threads make these calls is still chance.
    """
    chance = random.Random(seed)
    calls = made = 0

    def stall(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls, made
        file = frame.f_code.co_filename
        if event != "call" or made >= _MOST or not file.startswith(_CHECKOUT) or "/.venv/" in file:
            return
        calls += 1
        if chance.random() < min(0.06, 6 / calls):
            made += 1
            time.sleep(chance.uniform(_SHORTEST, _LONGEST))

    threading.setprofile(stall)
    sys.setprofile(stall)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
