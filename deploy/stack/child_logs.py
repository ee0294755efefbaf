"""Logs of child processes, kept from growing without end."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

LIMIT: Final = 8 << 20
"""bytes; log and copy together have at most twice as much, and what a process writes between two looks"""


def rotate_log(path: Path, limit: int = LIMIT) -> None:
    """Copies a log of more than `limit` bytes to `NAME.1`, over an older copy, and empties the log.

    The log stays the same file, because a process may have it open for appending. What a process writes between the
    copy and the emptying is lost. Where there is no log, and where a full disk has no room for the copy, nothing
    happens: whoever looks after processes goes on.
    """
    try:
        if path.stat().st_size <= limit:
            return
    except FileNotFoundError:
        return
    copy = path.with_name(path.name + ".1")
    try:
        shutil.copyfile(path, copy)
    except OSError:
        copy.unlink(missing_ok=True)  # a part of it would take the room that others need
        return
    os.truncate(path, 0)
