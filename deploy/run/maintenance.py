"""Table maintenance as a periodic child process: `python -m kiln.deploy.run.maintenance`.

It takes no memory between runs, and has the lowest priority, so that no query waits for it
(docs/design/24-table-maintenance.md).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import pyarrow as pa

from kiln.conf.process.errors import KilnError
from kiln.conf.process.locks import lock_state
from kiln.conf.settings.model import Settings
from kiln.conf.settings.reading import load
from kiln.deploy.ops.maintenance import LOCK, encode_maintenance, maintain_tables
from kiln.deploy.stack.bridge_process import child_environment
from kiln.deploy.stack.periodic_process import ChildCommand, PeriodicProcess

_SMALL = {"TOKIO_WORKER_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
"""One thread for delta-rs, and an Arrow allocator that returns memory to the system at once."""
_LOWEST_PRIORITY = 19


class MaintenanceProcess:
    """Runs table maintenance in a child process, whose output goes to `logs/maintain.log`.

    Call `child.check()` periodically, and `child.stop()` at the end.
    """

    def __init__(self, settings: Settings, now: Callable[[], float] = time.monotonic) -> None:
        command = ChildCommand(
            [sys.executable, "-m", "kiln.deploy.run.maintenance"],
            {**child_environment(settings), **_SMALL},
            settings.logs / "maintain.log",
        )
        self.child = PeriodicProcess(command, settings.maintenance.interval, self._record_exit, now)
        self.error = ""
        """why the last child failed; empty if it succeeded"""

    def _record_exit(self, code: int) -> None:
        self.error = f"table maintenance exited with code {code}: {self.child.read_last_line()}" if code else ""


def main() -> int:
    """Maintain all tables once, with the settings of the environment, and print a line of JSON per table.

    Returns:
        The exit code: 1 if the maintenance of a table failed, which the last line explains, else 0.
    """
    os.nice(_LOWEST_PRIORITY)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    try:
        settings = load().settings
        with lock_state(settings.state, LOCK):
            tables = maintain_tables(settings, lambda _: None)
    except KilnError as error:
        print(error)
        return 1
    for table in tables:
        print(json.dumps(encode_maintenance(table)))
    errors = [table.error for table in tables if table.error]
    if errors:
        print(errors[-1])
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
