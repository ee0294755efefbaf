"""Folders for Spark's temporary files, one per process. A later process removes the folders of killed processes."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO, Final

_LOCK: Final = "lock"
"""Name of the lock file in each folder, which its process holds until it ends, and of the lock file next to the
folders."""

_locks: list[IO[str]] = []
"""Locks held until the end of this process, as a JVM uses its first folder for all its sessions."""


def create_scratch_folder(state: Path) -> Path:
    """Create a folder for this process in `STATE/scratch`, and remove the folders of killed processes (38 MB each)."""
    root = state / "scratch"
    root.mkdir(parents=True, exist_ok=True)
    with (root / _LOCK).open("a") as root_lock:
        fcntl.flock(root_lock, fcntl.LOCK_EX)  # a new folder is not locked at once, and must not look abandoned
        for folder in root.iterdir():
            if folder.is_dir() and not _is_locked(folder):
                shutil.rmtree(folder, ignore_errors=True)
        fresh = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=root))
        lock = (fresh / _LOCK).open("a")
        fcntl.flock(lock, fcntl.LOCK_EX)
        _locks.append(lock)
    return fresh


def _is_locked(folder: Path) -> bool:
    """Return true if the process that uses the folder is alive."""
    try:
        with (folder / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:  # the process was killed before it made the lock
        return False
    return False
