"""A clock for a process that a file moves: a library of ours (`clock/wrong_clock.c`), which the C compiler makes.

libfaketime does not do for the bridge: its lock takes most of a core, and its sleeps fail on a busy machine.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from kit.foreign_peer import BUILT

_SOURCE = Path(__file__).with_name("clock") / "wrong_clock.c"


def absent() -> str:
    """Why this machine cannot move a clock; "": it can."""
    return "" if shutil.which("cc") else "no C compiler"


def build(built: Path = BUILT) -> str:
    """What to preload into the process. CalledProcessError."""
    library = built / "clock" / "wrong_clock.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    fresh = library.with_suffix(".new")
    # cc names dlsym's library where the C library does not have it
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-Wall", "-o", fresh, _SOURCE, "-ldl"], check=True)
    fresh.replace(library)
    return str(library)


def environment(preload: str, moved_by: Path) -> dict[str, str]:
    """For a process whose clock is wrong by the whole seconds in a file, such as "+0"."""
    return {"LD_PRELOAD": preload, "WRONG_CLOCK_FILE": str(moved_by)}
