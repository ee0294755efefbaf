"""For a process under libfaketime 0.9.10, whose `clock_nanosleep` fails with EINVAL when the moment to wake has passed
already: on a busy machine `time.sleep` would raise OSError now and then. Its children have the right clock."""

import os
import select
import time
from typing import SupportsIndex


def sleep(seconds: float | SupportsIndex, /) -> None:
    """As `time.sleep`, by another call of the system."""
    select.select([], [], [], seconds if isinstance(seconds, float) else seconds.__index__())


time.sleep = sleep
os.environ.pop("LD_PRELOAD", None)
