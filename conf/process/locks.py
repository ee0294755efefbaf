"""Locks in the state folder: one process at a time runs each query and the bridge."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kiln.conf.process.errors import KilnError
from kiln.conf.process.state_version import claim_state_folder


class StateInUseError(KilnError):
    """Another process holds the lock; two processes would write the same checkpoint, or use the same key."""


def read_lock_holders(state: Path) -> set[int]:
    """Read the process numbers of the Kilns that use a state folder: those that hold one of its locks."""
    holders: set[int] = set()
    folder = state / "locks"
    for path in folder.iterdir() if folder.is_dir() else ():
        with path.open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                holders.add(int(lock.read() or 0))  # 0 if the holder has not written its number yet
    return holders


@contextmanager
def lock_state(state: Path, name: str) -> Iterator[None]:
    """Hold the lock `locks/NAME` of a state folder for this process, and claim the folder.

    Raises:
        StateInUseError: Another process, which the message names, holds the lock.
        StateVersionError: An older or a newer Kiln wrote the folder.
    """
    claim_state_folder(state)
    folder = state / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            raise StateInUseError(
                f"{name} of the state folder {state} is locked by process {holder}. Stop it, or pass another folder "
                "with --state"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield
