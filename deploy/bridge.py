"""The bridge as a process beside the queries: started, started again when it dies, known by its status file."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from os import environ

from bridge.status import BridgeStatus, read_status
from conf.settings import ENV_PREFIX, Settings, environment
from deploy.tied import end, tied

_LONGEST_PAUSE = 30.0  # s
_FRESH = 10.0  # s; a status older than this is that of a bridge that hangs


class BridgeProcess:
    """`start()`, then `check()` now and then, then `stop()`. What it prints is in `logs/bridge.log`."""

    def __init__(self, settings: Settings, now: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._now = now
        self._process: subprocess.Popen[bytes] | None = None
        self._failures = 0
        self._again_at = 0.0
        self._error = ""

    def start(self) -> None:
        """Starts it, and returns at once."""
        self._settings.logs.mkdir(parents=True, exist_ok=True)
        self._settings.bridge_dir.mkdir(parents=True, exist_ok=True)
        (self._settings.bridge_dir / "status.json").unlink(missing_ok=True)
        with (self._settings.logs / "bridge.log").open("ab") as log:
            self._process = subprocess.Popen(
                tied([sys.executable, "-m", "bridge.main"]),
                env=child_environment(self._settings),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us: it stops after the queries have said so
            )

    def check(self) -> None:
        """Starts it again when it has died, after a pause that doubles."""
        if self._process is not None and self._process.poll() is not None:
            self._failures += 1
            self._error = f"the bridge ended with {self._process.returncode}: {self._last_words()}"
            self._again_at = self._now() + min(2.0 ** (self._failures - 1), _LONGEST_PAUSE)
            self._process = None
        if self._process is None and self._now() >= self._again_at:
            self.start()

    def status(self, wall: float) -> BridgeStatus | None:
        """What it said last; None while there is none, or an old one. `wall`: unix seconds now."""
        status = read_status(self._settings.bridge_dir / "status.json")
        if status is None or wall - status.at > _FRESH:
            return None
        self._error = ""
        self._failures = 0
        return status

    @property
    def error(self) -> str:
        """Why it is not running, in words; empty when it is."""
        return self._error

    def stop(self, patience: float = 15.0) -> None:
        """SIGTERM, and SIGKILL when that takes longer than `patience` s."""
        process, self._process = self._process, None
        if process is not None:
            end(process, patience)

    def _last_words(self) -> str:
        text = (self._settings.logs / "bridge.log").read_text(errors="replace").strip()
        return text.splitlines()[-1] if text else "it said nothing"


def child_environment(settings: Settings) -> Mapping[str, str]:
    """The environment of a process of Kiln's that is to have just these settings."""
    return {name: value for name, value in environ.items() if not name.startswith(ENV_PREFIX)} | environment(settings)
