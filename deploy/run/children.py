"""Child processes that run periodically during a run: table maintenance and quality checks."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

import msgspec

from kiln.conf.process.files import read_small_file
from kiln.conf.settings.model import Settings
from kiln.deploy.ops.snapshot import QualityInRun
from kiln.deploy.stack.child_process import bind_to_parent, child_environment, rotate_log, terminate_process

_PATIENCE = 5.0  # s until a child that does not end is killed


@dataclass(frozen=True)
class ChildCommand:
    """Command line, environment and output files of a child; `output` is the file for stdout, by default the log."""

    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    output: Path | None = None


class PeriodicProcess:
    """Starts a child process periodically, one at a time.

    The pause begins when a child has ended. Call `check` often, and `stop` at the end.
    """

    def __init__(
        self, command: ChildCommand, every: timedelta, on_exit: Callable[[int], None], now: Callable[[], float]
    ) -> None:
        """Create the process.

        Args:
            command: The command of a child.
            every: Pause between children, and before the first, so that a short run starts none; zero for no children.
            on_exit: Called with the exit code of each child.
            now: Monotonic clock, s.
        """
        self._command = command
        self._every = every.total_seconds()
        self._on_exit = on_exit
        self._now = now
        self._due = now() + self._every
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """True if a child runs, as of the last `check`."""
        return self._process is not None

    def check(self) -> None:
        """Start a child if one is due, and collect the exit code of the last one."""
        if self._process is not None and self._process.poll() is not None:
            code, self._process = self._process.returncode, None
            self._due = self._now() + self._every
            self._on_exit(code)
            rotate_log(self._command.log)
        if self._every and self._process is None and self._now() >= self._due:
            self._start()

    def stop(self) -> None:
        """End the child, if one runs. A later child completes its work."""
        process, self._process = self._process, None
        if process is not None:
            terminate_process(process, _PATIENCE)

    def read_last_line(self) -> str:
        """Read the last line of the log."""
        log = self._command.log
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "it logged nothing")

    def _start(self) -> None:
        command = self._command
        for path in (command.log, command.output or command.log):
            path.parent.mkdir(parents=True, exist_ok=True)
        with (
            command.log.open("ab") as log,
            (command.output or command.log).open("wb" if command.output else "ab") as out,
        ):
            self._process = subprocess.Popen(
                bind_to_parent(command.command),
                env=command.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                start_new_session=True,  # Ctrl-C must reach only this process
            )


_SMALL = {"TOKIO_WORKER_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
"""One thread for delta-rs, and an Arrow allocator that returns memory to the system at once."""


class MaintenanceProcess:
    """Runs table maintenance in a child process, whose output goes to `logs/maintain.log`.

    Call `child.check()` periodically, and `child.stop()` at the end.
    """

    def __init__(self, settings: Settings, now: Callable[[], float] = time.monotonic) -> None:
        command = ChildCommand(
            [sys.executable, "-m", "kiln.deploy.ops.maintenance"],
            {**child_environment(settings), **_SMALL},
            settings.logs / "maintain.log",
        )
        self.child = PeriodicProcess(command, settings.maintenance.interval, self._record_exit, now)
        self.error = ""
        """why the last child failed; empty if it succeeded"""

    def _record_exit(self, code: int) -> None:
        self.error = f"table maintenance exited with code {code}: {self.child.read_last_line()}" if code else ""


_COMPLETED: Final = (0, 1)
"""exit codes of a check that completed"""


class QualityReport(msgspec.Struct):
    """The fields of `kiln quality --json` that a run reads."""

    table: str
    expectation: str
    level: str
    success: bool
    observed: str


class QualityChecks:
    """Checks the tables in a child process, with its JSON in `quality/results.json` and its log in `logs/quality.log`.

    Call `child.check()` periodically, and `child.stop()` at the end.
    """

    def __init__(self, settings: Settings, now: Callable[[], float] = time.monotonic) -> None:
        self._results_file = settings.quality_dir / "results.json"
        command = ChildCommand(
            [*_find_low_priority(), sys.executable, "-m", "kiln.deploy.cli", "quality", "--recent", "--json"],
            child_environment(settings),
            settings.logs / "quality.log",
            self._results_file,
        )
        self.child = PeriodicProcess(command, settings.quality.interval, self._record_exit, now)
        self.errors: list[str] = []
        """errors of the last check; warnings are in `quality_results`"""
        self.last_check: QualityInRun | None = None
        """the last completed check, `None` before the first"""

    def _record_exit(self, code: int) -> None:
        self.errors = self._read_errors(code)

    def _read_errors(self, code: int) -> list[str]:
        if code not in _COMPLETED:
            return [f"quality: the check exited with code {code}: {self.child.read_last_line()}"]
        try:
            results = msgspec.json.decode(read_small_file(self._results_file), type=list[QualityReport])
        except (OSError, msgspec.DecodeError):
            return [f"quality: the check wrote no results: {self.child.read_last_line()}"]
        outcomes = Counter((result.table, "passed" if result.success else result.level) for result in results)
        self.last_check = QualityInRun(time.time(), outcomes)
        return [
            f"quality: {result.table}: {result.expectation}: {result.observed} (for details: kiln quality)"
            for result in results
            if not result.success and result.level == "error"
        ]


def _find_low_priority() -> list[str]:
    """Find a command prefix that runs a program at idle priority, so that it never delays the queries."""
    if chrt := shutil.which("chrt"):
        return [chrt, "--idle", "0"]
    nice = shutil.which("nice")
    return [nice, "-n", "19"] if nice else []
