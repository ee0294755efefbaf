"""Locks in the state folder: one process at a time runs each query and the bridge."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from kiln.conf.process.errors import KilnError
from kiln.conf.process.small_files import open_regular_file
from kiln.conf.process.state_version import claim_state_folder

_RETRY_EVERY = 0.5  # s


class StateInUseError(KilnError):
    """Another process holds the lock; two processes would write the same checkpoint, or use the same key."""


def read_lock_holders(state: Path) -> set[int]:
    """Read the process numbers of the Kilns that use a state folder: those that hold one of its locks."""
    holders: set[int] = set()
    folder = state / "locks"
    for path in folder.iterdir() if folder.is_dir() else ():
        with open_regular_file(path) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                number = lock.read(20)
                holders.add(int(number) if number.isdigit() else 0)  # the holder may not have written it yet
    return holders


def is_locked(state: Path, name: str) -> bool:
    """Return true if a process holds the lock `locks/NAME` of a state folder, which may be read-only."""
    try:
        with open_regular_file(state / "locks" / name) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False
    return False


def try_lock(lock: IO[str]) -> bool:
    """Lock a file without waiting, and return true if that worked."""
    # a process that checks the lock holds it for an instant, hence the retries
    for _ in range(20):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.01)
    return False


@contextmanager
def lock_state(state: Path, name: str, patience: float = 0.0) -> Iterator[None]:
    """Hold the lock `locks/NAME` of a state folder for this process, and claim the folder.

    Args:
        state: The state folder.
        name: Name of the lock.
        patience: Time to wait for another process to release the lock, s.

    Raises:
        StateInUseError: Another process, which the message names, holds the lock.
        StateVersionError: An older or a newer Kiln wrote the folder.
    """
    claim_state_folder(state)
    folder = state / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("a+") as lock:
        until = time.monotonic() + patience
        while not (is_held := try_lock(lock)) and time.monotonic() < until:
            time.sleep(_RETRY_EVERY)
        if not is_held:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            raise StateInUseError(
                f"cannot lock {name}: process {holder} runs it in the state folder {state}. Stop it, or pass another "
                "folder with --state"
            )
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield
