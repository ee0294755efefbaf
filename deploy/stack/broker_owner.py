"""Ownership of a state folder's embedded broker: the owner is the Kiln process that stops the broker when it ends.

The owner locks `STATE/broker/owner`, a file with its process number. The kernel releases the lock when the owner ends,
also after SIGKILL, and the next Kiln process to take it is the owner of the broker that the process then starts.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import IO

from kiln.conf.process.locks import try_lock
from kiln.conf.process.small_files import open_regular_file


class BrokerOwnership:
    """Ownership of a state folder's broker, for this process to claim and release."""

    def __init__(self, state: Path) -> None:
        self._path = state / "broker" / "owner"
        self._lock: IO[str] | None = None

    @property
    def is_held(self) -> bool:
        """True if this process owns the broker."""
        return self._lock is not None

    def claim(self) -> bool:
        """Claim the broker if it has no owner.

        Returns:
            True if this process owns the broker now.

        Raises:
            OSError: The file cannot be created.
        """
        if self._lock is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock = self._path.open("a+", encoding="ascii")
            if not try_lock(lock):
                lock.close()
                return False
            self._lock = lock
            with suppress(OSError):  # on a full disk: the number only informs users
                os.ftruncate(lock.fileno(), 0)
                os.pwrite(lock.fileno(), str(os.getpid()).encode(), 0)
        return True

    def release(self) -> None:
        """Give up the broker, if this process owns it."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()


def read_owner(state: Path) -> int | None:
    """Read the process number of the Kiln that owns this state folder's broker; `None` if there is no owner."""
    try:
        with open_regular_file(state / "broker" / "owner") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                number = lock.read(20)
                return int(number) if number.isdigit() else 0  # the owner may not have written it yet
    except FileNotFoundError:
        return None
    return None
