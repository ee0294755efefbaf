"""Logs of child processes, kept from growing without end."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

LIMIT: Final = 8 << 20
"""bytes; log and copy together have at most twice as much, and what a process writes between two looks"""


def keep_small(path: Path, limit: int = LIMIT) -> None:
    """Copies a log of more than `limit` bytes to `NAME.1`, over an older copy, and empties the log.

    The log stays the same file, because a process may have it open for appending. What a process writes between the
    copy and the emptying is lost. Where there is no log, nothing happens.
    """
    try:
        if path.stat().st_size <= limit:
            return
    except FileNotFoundError:
        return
    shutil.copyfile(path, path.with_name(path.name + ".1"))
    os.truncate(path, 0)
