"""What child processes print, kept in files that do not grow without end."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

LIMIT: Final = 8 << 20
"""bytes; twice as much is kept at most, and what is written between two looks"""


def keep_small(path: Path, limit: int = LIMIT) -> None:
    """Moves what a log holds to `NAME.1` once it is over `limit` bytes, over what was there. None there: none to move.

    The file itself stays, and is emptied: a process may have it open, for appending. What is written to it in the
    instant between copy and emptying is lost.
    """
    try:
        if path.stat().st_size <= limit:
            return
    except FileNotFoundError:
        return
    shutil.copyfile(path, path.with_name(path.name + ".1"))
    os.truncate(path, 0)
