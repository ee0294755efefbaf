"""The state folder: for its user alone, and each query, and the bridge, is run by one process at a time."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kiln.conf.process.errors import KilnError
from kiln.conf.process.state_version import take_on

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class StateInUseError(KilnError):
    """Another process holds the lock: two would write the same checkpoint, or speak with one key."""


def keep_private(state: Path) -> None:
    """Create the state folder, readable only by its user: it has keys and network data.

    A folder of another user, and one that is for all on purpose (/tmp), stays as it is: `kiln doctor` speaks of it.
    """
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = state.stat()
    if found.st_mode & _OTHERS and found.st_uid == os.geteuid() and not found.st_mode & stat.S_ISVTX:
        state.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS)


def is_private(state: Path) -> bool:
    """Return true if nobody but its user may enter the folder."""
    return not state.stat().st_mode & _OTHERS


@contextmanager
def locked(state: Path, name: str) -> Iterator[None]:
    """Holds the lock `locks/NAME` of a state folder for this process. StateInUseError names the process that has it.

    NewerStateError: a newer Kiln has written the folder.
    """
    keep_private(state)
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
        take_on(state)
        yield
