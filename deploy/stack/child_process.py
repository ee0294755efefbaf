"""Child processes, with their environment and logs. On Linux, they end with their parent, even if it is killed.

`BridgeProcess` runs the bridge as such a process, and reads its status file.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from os import environ
from pathlib import Path
from typing import Final

from kiln.conf.process.backoff import Backoff
from kiln.conf.process.bridge_status import BridgeStatus, read_status
from kiln.conf.process.logs import is_news
from kiln.conf.settings.keys import ENV_PREFIX
from kiln.conf.settings.model import Settings
from kiln.conf.settings.reading import environment

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

    On systems other than Linux, the command is returned unchanged.

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
"""size in bytes above which a log is copied and truncated. Log and copy together can take twice as much, plus what a
process writes between two checks"""


def rotate_log(path: Path, limit: int = LIMIT) -> None:
    """Copy a log of more than `limit` bytes to `NAME.1`, over an older copy, and truncate the log.

    The log is truncated and not renamed, because a process may have it open for appending. Lines that are written
    between copy and truncation are lost. If there is no log, or no space for the copy, nothing happens.
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


def read_last_line(log: Path) -> str:
    """Read the last line of a log, apart from empty lines and lines of level info or debug."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    stripped = (line.strip(" |+-") for line in reversed(lines))
    return next((line for line in stripped if line and not is_news(line)), "it logged nothing")


_FRESH = 10.0  # s; if the status is older, the bridge hangs


class BridgeProcess:
    """Runs the bridge in a child process, whose output goes to `logs/bridge.log`.

    Call `start`, then `check` often, and `stop` at the end.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._status_file = settings.bridge_dir / "status.json"
        self._log = settings.logs / "bridge.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._backoff = Backoff()
        self.error = ""
        """reason why the bridge does not run; empty while it runs"""

    def start(self) -> None:
        """Start the bridge, and return at once."""
        self._settings.logs.mkdir(parents=True, exist_ok=True)
        self._settings.bridge_dir.mkdir(parents=True, exist_ok=True)
        self._status_file.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                bind_to_parent([sys.executable, "-m", "kiln.bridge.app.main"]),
                env=child_environment(self._settings),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must not reach the bridge, which stops after the queries
            )

    def check(self) -> None:
        """Restart the bridge after an exponential back-off if it has ended, and rotate its log."""
        if self._process is not None and self._process.poll() is not None:
            self._backoff.record_death()
            self.error = f"the bridge exited with code {self._process.returncode}: {read_last_line(self._log)}"
            self._process = None
            self._status_file.unlink(missing_ok=True)  # even a fresh status comes from the dead bridge
        if self._process is None and self._backoff.is_due:
            self.start()
        rotate_log(self._log)

    def status(self, wall: float) -> BridgeStatus | None:
        """Read the newest status of the bridge.

        Args:
            wall: Current Unix time, s.

        Returns:
            The status, or `None` if the bridge has written no status in the last 10 s.
        """
        status = read_status(self._status_file)
        if status is None or wall - status.at > _FRESH:
            return None
        self.error = ""
        self._backoff.reset()
        return status

    def end_capture(self) -> None:
        """Make the bridge stop capturing frames and keep publishing. A bridge that is still starting is stopped."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1 if self._status_file.exists() else signal.SIGTERM)

    def stop(self, patience: float = 15.0) -> None:
        """Send SIGTERM, and SIGKILL if the bridge takes longer than `patience` s to end."""
        process, self._process = self._process, None
        if process is not None:
            terminate_process(process, patience)


def child_environment(settings: Settings) -> Mapping[str, str]:
    """Build environment variables with which a child process has exactly these settings."""
    return {name: value for name, value in environ.items() if not name.startswith(ENV_PREFIX)} | environment(settings)
