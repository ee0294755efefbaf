"""Password of the embedded broker, in a file of mode 0600 in the broker's folder."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from kiln.conf.process.files import read_small_file


def ensure_password(broker_dir: Path) -> str:
    """Read the password of this folder's broker; create it if it is missing.

    The broker and its clients may start in any order. If two of them create a password at the same time, both use the
    same one.

    Raises:
        OSError: The file cannot be read or created.
    """
    path = broker_dir / "password"
    while True:
        with suppress(FileNotFoundError):
            password = read_small_file(path).decode("ascii")
            if password:
                return password
            path.unlink()  # a power cut can leave an empty file
        broker_dir.mkdir(parents=True, exist_ok=True)
        fresh = private_file(path, secrets.token_urlsafe(24))
        with suppress(FileExistsError):
            os.link(fresh, path)
        fresh.unlink()


def private_file(path: Path, text: str) -> Path:
    """Write the text to a file next to `path`, with mode 0600, and sync it to disk."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="latin-1") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    return fresh
