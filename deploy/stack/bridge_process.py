"""The bridge as a child process: started, started again when it dies, known by the status file that it writes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from os import environ
from pathlib import Path

from kiln.conf.process.bridge_status import BridgeStatus, read_status
from kiln.conf.process.logs import is_news
from kiln.conf.settings.keys import ENV_PREFIX
from kiln.conf.settings.model import Settings
from kiln.conf.settings.reading import environment
from kiln.deploy.stack.child_logs import rotate_log
from kiln.deploy.stack.restart_backoff import Backoff
from kiln.deploy.stack.spawn import bind_to_parent, terminate_process

_FRESH = 10.0  # s; a status older than this is that of a bridge that hangs


class BridgeProcess:
    """`start()`, then `check()` now and then, then `stop()`. What the bridge prints is in
    `logs/bridge.log`."""

    def __init__(self, settings: Settings, now: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._backoff = Backoff(now)
        self._error = ""

    def start(self) -> None:
        """Starts the bridge, and returns at once."""
        self._settings.logs.mkdir(parents=True, exist_ok=True)
        self._settings.bridge_dir.mkdir(parents=True, exist_ok=True)
        self._told.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                bind_to_parent([sys.executable, "-m", "kiln.bridge.app.main"]),
                env=child_environment(self._settings),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us: the bridge stops after the queries
            )

    def check(self) -> None:
        """Starts the bridge again when it has died, after a pause that doubles. Keeps the log small."""
        if self._process is not None and self._process.poll() is not None:
            self._backoff.record_death()
            self._error = f"the bridge ended with {self._process.returncode}: {self._read_last_line()}"
            self._process = None
            self._told.unlink(missing_ok=True)  # fresh as the status may be, it is of a dead bridge
        if self._process is None and self._backoff.is_due:
            self.start()
        rotate_log(self._log)

    def status(self, wall: float) -> BridgeStatus | None:
        """What the bridge said last. None: nothing yet, or nothing for 10 s. `wall`: unix seconds now."""
        status = read_status(self._told)
        if status is None or wall - status.at > _FRESH:
            return None
        self._error = ""
        self._backoff.reset()
        return status

    @property
    def error(self) -> str:
        """In words why the bridge does not run; empty: the bridge runs."""
        return self._error

    def stop(self, patience: float = 15.0) -> None:
        """Sends SIGTERM, and SIGKILL when the bridge takes longer than `patience` s to end."""
        process, self._process = self._process, None
        if process is not None:
            terminate_process(process, patience)

    def _read_last_line(self) -> str:
        lines = (line.strip(" |+-") for line in reversed(self._log.read_text(errors="replace").splitlines()))
        return next((line for line in lines if line and not is_news(line)), "it said nothing")

    @property
    def _told(self) -> Path:
        return self._settings.bridge_dir / "status.json"

    @property
    def _log(self) -> Path:
        return self._settings.logs / "bridge.log"


def child_environment(settings: Settings) -> Mapping[str, str]:
    """The environment that gives a child process just these settings."""
    return {name: value for name, value in environ.items() if not name.startswith(ENV_PREFIX)} | environment(settings)
