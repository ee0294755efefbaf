"""Rotation of the logs of child processes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

LIMIT: Final = 8 << 20
"""bytes; log and copy together have at most twice as much, plus what a process writes between two checks"""


def rotate_log(path: Path, limit: int = LIMIT) -> None:
    """Copy a log of more than `limit` bytes to `NAME.1`, over an older copy, and truncate the log.

    The log stays the same file, because a process may have it open for appending. What a process writes between copy
    and truncation is lost. Does nothing if there is no log, or no space for the copy.
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
        copy.unlink(missing_ok=True)  # a partial copy would take scarce space
        return
    os.truncate(path, 0)
