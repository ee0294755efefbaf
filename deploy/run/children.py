"""Child processes that run periodically during a run: table maintenance and quality checks."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final

import msgspec

from kiln.conf.settings.model import Settings
from kiln.deploy.ops.snapshot import QualityInRun
from kiln.deploy.stack.child_process import (
    bind_to_parent,
    child_environment,
    read_last_line,
    rotate_log,
    terminate_process,
)

_PATIENCE = 5.0  # s until a child that does not end is killed


class PeriodicProcess(ABC):
    """Runs a child process periodically, with a pause before each start. Call `check` often, and `stop` at the end."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        output: Path,
        every: timedelta,
        now: Callable[[], float],
    ) -> None:
        """Prepare the process, without starting a child.

        Args:
            command: Command line of a child.
            environment: Environment of a child.
            log: File for stderr.
            output: File for stdout, which may be the log.
            every: Pause before each child. The first child also waits, so a short run starts none. Zero for no child.
            now: Returns monotonic time, in seconds.
        """
        self._command = command
        self._environment = environment
        self._log = log
        self._output = output
        self._every = every.total_seconds()
        self._now = now
        self._due = now() + self._every
        self._process: subprocess.Popen[bytes] | None = None
        self.errors: list[str] = []
        """errors of the last child that ended; empty if it succeeded"""

    @abstractmethod
    def _read_errors(self, code: int) -> list[str]:
        """Return the errors of a child that has ended with an exit code."""

    def check(self) -> None:
        """Read the errors of a child that has ended, and start the next one when its pause is over."""
        if self._process is not None and self._process.poll() is not None:
            code, self._process = self._process.returncode, None
            self._due = self._now() + self._every
            self.errors = self._read_errors(code)
            rotate_log(self._log)
        if self._every and self._process is None and self._now() >= self._due:
            self._start()

    def stop(self) -> None:
        """End the running child, if any. The children of a later run do its work."""
        process, self._process = self._process, None
        if process is not None:
            terminate_process(process, _PATIENCE)

    def _start(self) -> None:
        for path in (self._log, self._output):
            path.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log, self._output.open("ab" if self._output == self._log else "wb") as out:
            self._process = subprocess.Popen(
                bind_to_parent(self._command),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                start_new_session=True,  # Ctrl-C must reach only this process
            )


_SMALL = {"TOKIO_WORKER_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
"""Environment that saves memory: one thread for delta-rs, and an Arrow allocator that returns freed memory at once."""


class MaintenanceProcess(PeriodicProcess):
    """Runs table maintenance in a child process. Its output is in `logs/maintain.log`."""

    def __init__(self, settings: Settings, now: Callable[[], float] = time.monotonic) -> None:
        command, log = [sys.executable, "-m", "kiln.deploy.ops.maintenance"], settings.logs / "maintain.log"
        environment = {**child_environment(settings), **_SMALL}
        super().__init__(command, environment, log, log, settings.maintenance.interval, now)

    def _read_errors(self, code: int) -> list[str]:
        if not code:
            return []
        return [f"table maintenance failed (exit code {code}, see {self._log}): {read_last_line(self._log)}"]


_COMPLETED: Final = (0, 1)
"""Exit codes of a completed check: 0 if all expectations of level error passed, else 1."""


class QualityReport(msgspec.Struct):
    """Result of an expectation, with the fields of `kiln quality --json` that a run reads."""

    table: str
    expectation: str
    level: str
    success: bool
    observed: str


class QualityChecks(PeriodicProcess):
    """Runs `kiln quality` in a child process. Its JSON is in `quality/results.json`, its log in `logs/quality.log`.

    `errors` has the failed expectations of level error. Those of level warn are only in the table `quality_results`.
    """

    def __init__(self, settings: Settings, now: Callable[[], float] = time.monotonic) -> None:
        command = [*_find_low_priority(), sys.executable, "-m", "kiln.deploy.cli", "quality", "--recent", "--json"]
        log, output = settings.logs / "quality.log", settings.quality_dir / "results.json"
        super().__init__(command, child_environment(settings), log, output, settings.quality.interval, now)
        self.last_check: QualityInRun | None = None
        """the last completed check, `None` before the first"""

    def _read_errors(self, code: int) -> list[str]:
        if code not in _COMPLETED:
            return [f"quality: the check failed (exit code {code}, see {self._log}): {read_last_line(self._log)}"]
        try:
            results = msgspec.json.decode(self._output.read_bytes(), type=list[QualityReport])
        except (OSError, msgspec.DecodeError):
            return [f"quality: the check wrote no results (see {self._log}): {read_last_line(self._log)}"]
        outcomes = Counter((result.table, "passed" if result.success else result.level) for result in results)
        self.last_check = QualityInRun(time.time(), outcomes)
        return [
            f"quality: {result.table}: {result.expectation}: {result.observed} (to see the rows: kiln quality)"
            for result in results
            if not result.success and result.level == "error"
        ]


def _find_low_priority() -> list[str]:
    """Return a command prefix that runs a program at the lowest priority, so that it does not delay the queries."""
    if chrt := shutil.which("chrt"):
        return [chrt, "--idle", "0"]
    nice = shutil.which("nice")
    return [nice, "-n", "19"] if nice else []
