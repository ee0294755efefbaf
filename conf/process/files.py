"""Sync to disk, and the password of the embedded broker.

A file's bytes survive a power cut once the file is synced, and its name survives once its folder is synced.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


def to_disk(path: Path) -> None:
    """Sync the bytes of a file, or the entries of a folder, to disk."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically. Its bytes are synced to disk, but not its folder."""
    fresh = path.with_name(f"{path.name}.new")
    with open(fresh, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def ensure_password(broker_dir: Path) -> str:
    """Read the password of the embedded broker, or create it if it is missing.

    The broker and its clients may start in any order. If two processes create the password at the same time, both
    return the same one.

    Raises:
        OSError: The file cannot be read or created.
    """
    path = broker_dir / "password"
    while True:
        with suppress(FileNotFoundError):
            password = path.read_bytes().decode("ascii")
            if password:
                return password
            path.unlink()  # a power cut can leave an empty file
        broker_dir.mkdir(parents=True, exist_ok=True)
        fresh = private_file(path, secrets.token_urlsafe(24))
        with suppress(FileExistsError):
            os.link(fresh, path)
        fresh.unlink()


def private_file(path: Path, text: str) -> Path:
    """Write a text to a new file next to `path`, with mode 0600, sync it to disk, and return its path."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="latin-1") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    return fresh
