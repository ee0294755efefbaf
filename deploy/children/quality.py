"""`kiln quality` as a child process of a run, now and then, at the lowest priority."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from conf.settings.model import Settings
from deploy.children.bridge import child_environment
from deploy.children.logs import keep_small
from deploy.children.spawn import dies_with_parent, end

_KNOWN: Final = (0, 1)
"""exit codes of a check that was made"""


class Told(msgspec.Struct):
    """What `kiln quality --json` prints, as far as a run tells it."""

    table: str
    expectation: str
    level: str
    success: bool
    observed: str


class QualityChecks:
    """`check()` now and then, then `stop()`. Each check's JSON is in `quality/results.json`, its words in
    `logs/quality.log`. With `quality.every` of 0 there are none."""

    def __init__(self, settings: Settings, now: Callable[[], float] = time.monotonic) -> None:
        """`now`: monotonic s. The first check comes when the pause is over, so that a short run has none."""
        self._settings = settings
        self._every = settings.quality.every.total_seconds()
        self._now = now
        self._due = now() + self._every
        self._process: subprocess.Popen[bytes] | None = None
        self.errors: list[str] = []
        """the errors that the last check found, in words; warnings are in `quality_results`"""

    def check(self) -> None:
        """Starts a check that is due, and takes the results of one that has ended."""
        process = self._process
        if process is not None and process.poll() is not None:
            self._process = None
            self._due = self._now() + self._every
            self.errors = self._found(process.returncode)
        elif process is None and self._every and self._now() >= self._due:
            self._start()

    def stop(self) -> None:
        """Ends a check that is at work. The next one reads what this one had not finished."""
        process, self._process = self._process, None
        if process is not None:
            end(process, 5.0)

    def _start(self) -> None:
        self._settings.logs.mkdir(parents=True, exist_ok=True)
        self._settings.quality_dir.mkdir(parents=True, exist_ok=True)
        keep_small(self._log)
        with self._told.open("wb") as told, self._log.open("ab") as log:
            self._process = subprocess.Popen(
                dies_with_parent([*_yielding(), sys.executable, "-m", "deploy.cli", "quality", "--json"]),
                env=child_environment(self._settings),
                stdin=subprocess.DEVNULL,
                stdout=told,
                stderr=log,
                start_new_session=True,
            )

    def _found(self, code: int) -> list[str]:
        if code not in _KNOWN:
            return [f"quality: the check ended with {code}: {_last_line(self._log)}"]
        try:
            results = msgspec.json.decode(self._told.read_bytes(), type=list[Told])
        except (OSError, msgspec.DecodeError):
            return [f"quality: the check said nothing: {_last_line(self._log)}"]
        return [
            f"quality: {each.table}: {each.expectation}: {each.observed} (kiln quality says more)"
            for each in results
            if not each.success and each.level == "error"
        ]

    @property
    def _told(self) -> Path:
        return self._settings.quality_dir / "results.json"

    @property
    def _log(self) -> Path:
        return self._settings.logs / "quality.log"


def _yielding() -> list[str]:
    """Before a command: the command takes only what the queries leave of the processors, where the system can do so."""
    found = {name: shutil.which(name) for name in ("chrt", "nice")}
    if found["chrt"]:
        return [found["chrt"], "--idle", "0"]
    return [found["nice"], "-n", "19"] if found["nice"] else []


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return next((line for line in reversed(lines) if line.strip()), "it said nothing")
