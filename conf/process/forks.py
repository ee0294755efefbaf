"""A check that libraries with threads are not used in a forked process.

The threads of delta-rs and DuckDB do not survive a fork: a child that uses them waits forever, or ends in a panic.
"""

from __future__ import annotations

import os

from kiln.conf.process.errors import KilnError

_pid: int | None = None
"""id of the process that first called `refuse_fork`, which forked processes inherit"""


class ForkedProcessError(KilnError):
    """This process was forked from a process that had read Delta tables, so it cannot read any."""


def refuse_fork() -> None:
    """Check that this process was not forked from a process that had already called this function.

    Raises:
        ForkedProcessError: The process was forked.
    """
    global _pid
    if _pid is None:
        _pid = os.getpid()
    if _pid != os.getpid():
        raise ForkedProcessError(
            f"cannot read Delta tables in process {os.getpid()}, because process {_pid} had read some before the fork, "
            "and the threads of delta-rs and DuckDB do not survive a fork. Start processes with "
            'multiprocessing.get_context("spawn")'
        )
