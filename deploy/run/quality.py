"""`kiln quality` as a periodic child process of a run, at the lowest priority."""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from kiln.conf.process.small_files import read_small_file
from kiln.conf.settings.model import Settings
from kiln.deploy.ops.snapshot import QualityInRun
from kiln.deploy.stack.bridge_process import child_environment
from kiln.deploy.stack.periodic_process import ChildCommand, PeriodicProcess

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
