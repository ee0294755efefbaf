"""A clock for a process that a file moves: libfaketime, which Debian has as a package, and what librdkafka needs beside
it (`faketime/waits.c`), which the C compiler makes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from kit.foreign_peer import BUILT

_LIBRARY = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")
_SOURCE = Path(__file__).with_name("faketime")


def absent() -> str:
    """Why this machine cannot move a clock; "": it can."""
    if not _LIBRARY.exists():
        return "libfaketime is not installed"
    return "" if shutil.which("cc") else "no C compiler"


def build(built: Path = BUILT) -> str:
    """What to preload into the process. CalledProcessError."""
    waits = built / "faketime" / "waits.so"
    waits.parent.mkdir(parents=True, exist_ok=True)
    fresh = waits.with_suffix(".new")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", fresh, _SOURCE / "waits.c"], check=True)
    fresh.replace(waits)
    return f"{waits}:{_LIBRARY}"


def environment(preload: str, moved_by: Path, path: str) -> dict[str, str]:
    """For a Python process whose clock is wrong by the seconds in a file, such as "+0". `path`: its PYTHONPATH."""
    return {
        "PYTHONPATH": f"{_SOURCE}:{path}",
        "LD_PRELOAD": preload,
        "FAKETIME_TIMESTAMP_FILE": str(moved_by),
        "FAKETIME_CACHE_DURATION": "1",  # s; to read the file at each call takes most of a core
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
