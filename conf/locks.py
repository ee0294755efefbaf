"""Locks in the state folder: each query, and the bridge, is run by one process at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conf.errors import KilnError


class StateInUseError(KilnError):
    """Another process holds the lock: two would write the same checkpoint, or speak with one key."""


@contextmanager
def locked(state: Path, name: str) -> Iterator[None]:
    """Holds the lock `locks/NAME` of a state folder for this process. StateInUseError names the process that has it."""
    folder = state / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            raise StateInUseError(
                f"{name} of {state} runs in another Kiln (process {holder}): stop it, or give this one --state"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield
