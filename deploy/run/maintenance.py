"""The care of the tables as a child process now and then: it takes no memory in between, and has the lowest priority,
so that no query waits for it (docs/design/24-table-care.md)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from kiln.conf.settings.model import Settings
from kiln.deploy.stack.bridge_process import child_environment
from kiln.deploy.stack.periodic_process import ChildCommand, PeriodicProcess

_SMALL = {"TOKIO_WORKER_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
"""One thread for delta-rs, and memory of Arrow that goes back at once."""


class MaintenanceProcess:
    """`child.check()` now and then, then `child.stop()`. What each child says is in `logs/maintain.log`."""

    def __init__(self, settings: Settings, now: Callable[[], float] = time.monotonic) -> None:
        """`now`: monotonic s."""
        work = ChildCommand(
            [sys.executable, "-m", "kiln.deploy.run.maintenance_job"],
            {**child_environment(settings), **_SMALL},
            settings.logs / "maintain.log",
        )
        self.child = PeriodicProcess(work, settings.maintain.every, self._ended, now)
        self.error = ""
        """in words why the last child did not do its work; empty: it did"""

    def _ended(self, code: int) -> None:
        self.error = f"the care of the tables ended with {code}: {self.child.last_words()}" if code else ""
