"""Which Kiln owns the embedded broker of a state folder: the Kiln that ends the broker when that Kiln ends.

The owner holds a lock on `STATE/broker/owner`, a file with the owner's process number. The kernel frees the lock when
the owner ends, also by SIGKILL. So a broker that outlived its Kiln has no owner, and the next Kiln that takes the lock
owns the broker.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import IO


class BrokerOwnership:
    """The place of the owner of one state folder's broker, for this process to take and to release."""

    def __init__(self, state: Path) -> None:
        self._path = state / "broker" / "owner"
        self._lock: IO[str] | None = None

    @property
    def is_held(self) -> bool:
        """Whether this process owns the broker."""
        return self._lock is not None

    def claim(self) -> bool:
        """Takes the place if it is free, and returns whether this process owns the broker now. OSError."""
        if self._lock is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock = self._path.open("a+", encoding="ascii")
            if not try_lock(lock):
                lock.close()
                return False
            self._lock = lock
            with suppress(OSError):  # a full disk: the lock counts, and the number is only for people
                os.ftruncate(lock.fileno(), 0)
                os.pwrite(lock.fileno(), str(os.getpid()).encode(), 0)
        return True

    def release(self) -> None:
        """The broker has no owner any more, if this process was the owner."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()


def read_owner(state: Path) -> int | None:
    """The process number of the live Kiln that owns this state folder's broker; None: there is no owner."""
    try:
        with (state / "broker" / "owner").open(encoding="ascii") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(lock.read() or 0)  # 0: the owner is so young that it has not written its number
    except FileNotFoundError:
        return None
    return None


def try_lock(lock: IO[str]) -> bool:
    """Whether the file is locked for this process now."""
    # a process that looks whether a lock is held locks the file for an instant, too: worth a second try
    for _ in range(20):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.01)
    return False
