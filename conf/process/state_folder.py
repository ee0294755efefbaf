"""The state folder: its format version, its permissions, and the locks of the processes that use it."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final
from uuid import uuid4

from kiln.conf.process.errors import KilnError
from kiln.conf.process.files import to_disk

STATE_VERSION: Final = 4
"""Version of the files, checkpoints and tables in a state folder. Raise it only for an incompatible change."""

_FILE = "version"
_CONTENT = ("broker", "checkpoints")
"""Folders that only Kiln fills. If one has files, Kiln has used the state folder; an empty one may be a mounted disk.
`bridge` is left out because a user may copy it to keep a node's keys, and `lake` because its tables have a version of
their own."""

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class StateVersionError(KilnError):
    """A Kiln of another version wrote the state folder."""


def check_state_version(state: Path) -> None:
    """Check that this version of Kiln can read a state folder, without changing it. The folder need not exist.

    Raises:
        StateVersionError: An older or a newer Kiln wrote the folder.
        OSError: The folder cannot be read.
    """
    _read_version(state)


def claim_state_folder(state: Path) -> None:
    """Create a state folder and write its version, before anything else is written to it.

    Only the user can read a new folder, because it will contain keys and network data. An empty folder of this user
    gets the same permissions. The permissions of any other folder stay as they are, because other programs may depend
    on them; `kiln doctor` reports them.

    Raises:
        StateVersionError: An older or a newer Kiln wrote the folder. Nothing is changed.
        OSError: The folder cannot be written.
    """
    version = _read_version(state)
    if version == STATE_VERSION:
        return
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = state.stat()
    is_ours = status.st_uid == os.geteuid() and not status.st_mode & stat.S_ISVTX
    if is_ours and status.st_mode & _OTHERS and not _is_filled(state):
        state.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS)
    fresh = state / f".version-{uuid4().hex}"  # other processes may claim the folder at the same time
    fresh.write_text(f"{STATE_VERSION}\n", encoding="ascii")
    to_disk(fresh)
    fresh.replace(state / _FILE)
    to_disk(state)


def is_private(state: Path) -> bool:
    """Return true if the folder is accessible to its user alone."""
    return not state.stat().st_mode & _OTHERS


def _read_version(state: Path) -> int | None:
    """Read the version of a state folder.

    Returns:
        `None` if the folder has no state yet.
    """
    path = state / _FILE
    try:
        text = path.read_bytes().decode("ascii", errors="replace").strip()
    except FileNotFoundError:
        text = ""
    if text == str(STATE_VERSION):
        return STATE_VERSION
    if re.fullmatch(r"[0-9]{1,9}", text) and int(text) > STATE_VERSION:
        raise StateVersionError(
            f"the state folder {state} has version {text}, and this Kiln reads version {STATE_VERSION}. Use the newer "
            "Kiln that wrote it, or pass another folder with --state"
        )
    if text or any(_is_filled(state / name) for name in _CONTENT):
        raise StateVersionError(
            f"the state folder {state} has {f'version {text[:20]}' if text else 'no version'}, and this Kiln reads "
            f"version {STATE_VERSION}. Keep it for the older Kiln that wrote it, and pass another folder with --state. "
            "To process old frames again in the new folder, read those still in Kafka, replay captures, or copy the "
            f"table {state / 'lake' / 'frames'} into its lake and run kiln backfill run --source frames "
            "(docs/RUNBOOK.md, Versions)"
        )
    return None


def _is_filled(folder: Path) -> bool:
    return folder.is_dir() and any(entry.name != "lost+found" for entry in folder.iterdir())


_RETRY_EVERY = 0.5  # s


class StateInUseError(KilnError):
    """Another process holds the lock. The lock keeps two processes from writing one checkpoint or using one key."""


def read_lock_holders(state: Path) -> set[int]:
    """Read the ids of the processes that hold a lock of a state folder."""
    folder = state / "locks"
    holders = map(read_lock_holder, folder.iterdir() if folder.is_dir() else ())
    return {holder for holder in holders if holder is not None}


def read_lock_holder(path: Path) -> int | None:
    """Read the id of the process that holds a lock. The lock file may be read-only.

    Returns:
        `None` if no process holds the lock; 0 if the holder has not written its id.
    """
    try:
        with path.open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                number = lock.read(20)
                return int(number) if number.isdigit() else 0
    except (FileNotFoundError, NotADirectoryError):
        pass
    return None


def try_lock(lock: IO[str]) -> bool:
    """Lock a file, with retries for 0.2 s, and return true if that worked."""
    # a process that only checks the lock holds it for an instant
    for _ in range(20):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.01)
    return False


@contextmanager
def lock_state(state: Path, name: str, patience: float = 0.0) -> Iterator[None]:
    """Claim a state folder, and hold its lock `locks/NAME` for this process.

    Args:
        name: Name of the lock.
        patience: Seconds to wait for another process to release the lock.

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
                f"cannot lock {name}: process {holder} holds this lock of the state folder {state}. Stop the process, "
                "or pass another folder with --state"
            )
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield
