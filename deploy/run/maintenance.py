"""Table maintenance as a periodic child process.

It takes no memory between runs, and has the lowest priority, so that no query waits for it
(docs/design/24-table-maintenance.md).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from kiln.conf.settings.model import Settings
from kiln.deploy.stack.bridge_process import child_environment
from kiln.deploy.stack.periodic_process import ChildCommand, PeriodicProcess

_SMALL = {"TOKIO_WORKER_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
"""One thread for delta-rs, and an Arrow allocator that returns memory to the system at once."""


class MaintenanceProcess:
    """Runs table maintenance in a child process, whose output goes to `logs/maintain.log`.

    Call `child.check()` periodically, and `child.stop()` at the end.
    """

    def __init__(self, settings: Settings, now: Callable[[], float] = time.monotonic) -> None:
        command = ChildCommand(
            [sys.executable, "-m", "kiln.deploy.run.maintenance_job"],
            {**child_environment(settings), **_SMALL},
            settings.logs / "maintain.log",
        )
        self.child = PeriodicProcess(command, settings.maintenance.interval, self._record_exit, now)
        self.error = ""
        """why the last child failed; empty if it succeeded"""

    def _record_exit(self, code: int) -> None:
        self.error = f"table maintenance exited with code {code}: {self.child.read_last_line()}" if code else ""
