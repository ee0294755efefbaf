"""Child processes that end with their parent, even if the parent is killed; their termination, and their logs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

# Run in a fresh interpreter between fork and exec: the kernel's own way to end a child whose parent was killed. A
# `preexec_fn` could deadlock in a parent with threads.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def bind_to_parent(command: Sequence[str]) -> list[str]:
    """Wrap a command so that its process gets SIGTERM when the thread that starts it ends.

    Does nothing on other systems than Linux.

    Args:
        command: A command line that begins with a full path.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]


def terminate_process(process: subprocess.Popen[bytes] | subprocess.Popen[str], patience: float) -> None:
    """Send SIGTERM, and SIGKILL if the process takes longer than `patience` s to end."""
    process.terminate()
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


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
