"""Refusal to use libraries with threads in a forked process. Every room may import this file.

The threads of delta-rs and DuckDB do not survive a fork: a child that uses them waits forever, or ends in a panic.
"""

from __future__ import annotations

import os

from kiln.conf.process.errors import KilnError

_pid: int | None = None
"""id of the process that first called `refuse_fork`; a forked process inherits the value"""


class ForkedProcessError(KilnError):
    """This process was forked from one that had read a lake."""


def refuse_fork() -> None:
    """Check that this process was not forked from a process that had already called this function.

    Raises:
        ForkedProcessError: It was.
    """
    global _pid
    if _pid is None:
        _pid = os.getpid()
    if _pid != os.getpid():
        raise ForkedProcessError(
            f"cannot read a lake in process {os.getpid()}, which was forked after process {_pid} had read one: the "
            'threads of delta-rs and DuckDB do not survive a fork. Start it with multiprocessing.get_context("spawn")'
        )
