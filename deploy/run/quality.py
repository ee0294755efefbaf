"""`kiln quality` as a child process of a run, now and then, at the lowest priority."""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from kiln.conf.settings.model import Settings
from kiln.deploy.ops.snapshot import QualityInRun
from kiln.deploy.stack.bridge_process import child_environment
from kiln.deploy.stack.periodic_process import ChildCommand, PeriodicProcess

_KNOWN: Final = (0, 1)
"""exit codes of a check that was made"""


class QualityReport(msgspec.Struct):
    """What `kiln quality --json` prints, as far as a run tells it."""

    table: str
    expectation: str
    level: str
    success: bool
    observed: str


class QualityChecks:
    """`child.check()` now and then, then `child.stop()`. Each check's JSON is in `quality/results.json`, its words in
    `logs/quality.log`."""

    def __init__(self, settings: Settings, now: Callable[[], float] = time.monotonic) -> None:
        """`now`: monotonic s."""
        self._told = settings.quality_dir / "results.json"
        work = ChildCommand(
            [*_find_low_priority(), sys.executable, "-m", "kiln.deploy.cli", "quality", "--json"],
            child_environment(settings),
            settings.logs / "quality.log",
            self._told,
        )
        self.child = PeriodicProcess(work, settings.quality.interval, self._record_exit, now)
        self.errors: list[str] = []
        """the errors that the last check found, in words; warnings are in `quality_results`"""
        self.seen: QualityInRun | None = None
        """the last check that was made; None: none yet"""

    def _record_exit(self, code: int) -> None:
        self.errors = self._found(code)

    def _found(self, code: int) -> list[str]:
        if code not in _KNOWN:
            return [f"quality: the check ended with {code}: {self.child.read_last_line()}"]
        try:
            results = msgspec.json.decode(self._told.read_bytes(), type=list[QualityReport])
        except (OSError, msgspec.DecodeError):
            return [f"quality: the check said nothing: {self.child.read_last_line()}"]
        outcomes = Counter((each.table, "passed" if each.success else each.level) for each in results)
        self.seen = QualityInRun(time.time(), outcomes)
        return [
            f"quality: {each.table}: {each.expectation}: {each.observed} (kiln quality says more)"
            for each in results
            if not each.success and each.level == "error"
        ]


def _find_low_priority() -> list[str]:
    """Before a command: the command takes only what the queries leave of the processors, where the system can do so."""
    found = {name: shutil.which(name) for name in ("chrt", "nice")}
    if found["chrt"]:
        return [found["chrt"], "--idle", "0"]
    return [found["nice"], "-n", "19"] if found["nice"] else []
