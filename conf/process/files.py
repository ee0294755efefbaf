"""Small files that are read whole, such as settings and passwords, and sync to disk.

A file's bytes survive a power cut once the file is synced, and its name survives once its folder is synced.

Every room may import this file.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

SMALL: Final = 16 << 20
"""maximum size of a file that `read_small_file` reads by default, in bytes"""


def open_regular_file(path: Path) -> BinaryIO:
    """Open a file to read it. A pipe or device of that name could block the process, or have no end.

    Raises:
        OSError: The file cannot be opened, or is not a regular one.
    """
    # non-blocking, because opening a FIFO waits for a writer
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(number, "rb")


def read_small_file(path: Path, limit: int = SMALL) -> bytes:
    """Read a regular file.

    Args:
        path: The file.
        limit: Its maximum size in bytes.

    Raises:
        OSError: The file cannot be read, is not a regular one, or is larger than `limit`.
    """
    with open_regular_file(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit:,} bytes", str(path))
    return data


def to_disk(path: Path) -> None:
    """Sync the bytes of a file, or the entries of a folder, to disk."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
