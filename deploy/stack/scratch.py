"""Where Spark keeps temporary files: a folder for each process. The next one removes what a killed process leaves."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO, Final

_LOCK: Final = "lock"
"""A file in each folder, whose process holds it until it ends; and one beside the folders."""

_held: list[IO[str]] = []
"""until the end of this process: a JVM uses its first folder for all its sessions"""


def create_scratch_folder(state: Path) -> Path:
    """A folder of this process in `STATE/scratch`. What others left there that were killed goes first: 38 MB each."""
    place = state / "scratch"
    place.mkdir(parents=True, exist_ok=True)
    with (place / _LOCK).open("a") as of_all:
        fcntl.flock(of_all, fcntl.LOCK_EX)  # else a folder is taken for one that is left, before its lock is held
        for folder in place.iterdir():
            if folder.is_dir() and not _is_held(folder):
                shutil.rmtree(folder, ignore_errors=True)
        fresh = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=place))
        lock = (fresh / _LOCK).open("a")
        fcntl.flock(lock, fcntl.LOCK_EX)
        _held.append(lock)
    return fresh


def _is_held(folder: Path) -> bool:
    """Whether the process lives that uses the folder."""
    try:
        with (folder / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:  # the process was killed before it made the lock
        return False
    return False
