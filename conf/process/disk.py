"""Sync to disk: a file's bytes survive a power cut once the file is synced, and its name survives once its folder is
synced.

Every room may import this file.
"""

from __future__ import annotations

import os
from pathlib import Path


def to_disk(path: Path) -> None:
    """Sync the bytes of a file, or the entries of a folder, to disk."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
