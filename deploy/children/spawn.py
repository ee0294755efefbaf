"""Child processes that end with us, also when we are killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

# Run in a fresh interpreter between fork and exec: the kernel's own way to end a child whose parent was killed. A
# `preexec_fn` could deadlock in a parent with threads.
_TIE_TO_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def tied_to_parent(command: Sequence[str]) -> list[str]:
    """The command, changed so that it gets SIGTERM when the thread that starts it ends. It begins with a full path."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _TIE_TO_PARENT, str(os.getpid()), *command]


def end(process: subprocess.Popen[bytes] | subprocess.Popen[str], patience: float) -> None:
    """SIGTERM, and SIGKILL when that takes longer than `patience` s."""
    process.terminate()
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
