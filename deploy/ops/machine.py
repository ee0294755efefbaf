"""Measurements of this machine for `kiln doctor`."""

from __future__ import annotations

import pwd
import resource
import tempfile
from pathlib import Path


def find_existing_parent(folder: Path) -> Path:
    """Return the folder itself, or its nearest parent that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def probe_writing(folder: Path) -> str:
    """Return why no file can be created there, empty if one can. Does not create the folder."""
    parent = find_existing_parent(folder)
    if not parent.is_dir():
        return f"{parent} is not a folder"
    try:
        with tempfile.TemporaryFile(dir=parent):
            return ""
    except OSError as error:
        return f"cannot be written ({error.strerror})"


def name_user(number: int) -> str:
    """Return the name of a user, or the number if this machine has no name for it."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # such as one of another container
        return str(number)


def read_available_memory() -> int | None:
    """Read the available memory in bytes; `None` if the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kibibytes = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if kibibytes is None else int(kibibytes) * 1024


def read_open_files_limit() -> int:
    """Read the greatest number of files and sockets that a process may have open.

    The JVM raises its own limit to the hard one, and Kiln does not.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 30
