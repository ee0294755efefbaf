"""The care of the tables as a child process now and then: it takes no memory in between, and has the lowest priority,
so that no query waits for it (docs/design/24-table-care.md)."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from conf.settings.model import Settings
from deploy.children.bridge import child_environment
from deploy.children.logs import keep_small
from deploy.children.spawn import dies_with_parent, end

_SMALL = {"TOKIO_WORKER_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
"""One thread for delta-rs, and memory of Arrow that goes back at once."""


class CareProcess:
    """`check()` now and then, then `stop()`. What each child says is in `logs/maintain.log`."""

    def __init__(self, settings: Settings, now: Callable[[], float] = time.monotonic) -> None:
        """`now`: monotonic s. The first child starts one `maintain.every` from now; none, where that is 0."""
        self._settings = settings
        self._now = now
        self._every = settings.maintain.every.total_seconds()
        self._at = now() + self._every
        self._process: subprocess.Popen[bytes] | None = None
        self.error = ""
        """in words why the last child did not do its work; empty: it did"""

    def check(self) -> None:
        """Starts a child when it is time, and hears how the last one did."""
        if self._process is not None and self._process.poll() is not None:
            code, self._process = self._process.returncode, None
            self.error = f"the care of the tables ended with {code}: {self._last_words()}" if code else ""
            self._at = self._now() + self._every
            keep_small(self._log)
        if self._every and self._process is None and self._now() >= self._at:
            self._start()

    @property
    def running(self) -> bool:
        """Whether a child is at work, as far as `check` knows."""
        return self._process is not None

    def stop(self, patience: float = 5.0) -> None:
        """Ends a child. What it was about to do, a later one does."""
        process, self._process = self._process, None
        if process is not None:
            end(process, patience)

    def _start(self) -> None:
        self._settings.logs.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                dies_with_parent([sys.executable, "-m", "deploy.maintain.background"]),
                env={**child_environment(self._settings), **_SMALL},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us
            )

    def _last_words(self) -> str:
        lines = (line.strip() for line in reversed(self._log.read_text(errors="replace").splitlines()))
        return next((line for line in lines if line), "it said nothing")

    @property
    def _log(self) -> Path:
        return self._settings.logs / "maintain.log"
