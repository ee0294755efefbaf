"""The HTTP endpoints of `kiln run`: metrics, health, readiness, the status page."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import Final, Self

from prometheus_client.metrics_core import Metric

from kiln.conf.process.exporter import Exporter
from kiln.deploy.ops.monitor.families import MonitorInputs, build_families, why_dead, why_not_ready
from kiln.deploy.ops.monitor.page import RunHistory, render_page
from kiln.deploy.ops.snapshot import Snapshot
from kiln.deploy.ops.status import TableStatus, read_lake_status
from kiln.pipelines.delta.lake import Lake

_TABLES_EVERY: Final = 15.0  # s


class Monitor:
    """A context manager that serves the newest snapshot. The thread of the run passes each snapshot to `see`."""

    def __init__(self, listen: tuple[str, int] | None, lake: Lake, version: str, hosts: Iterable[str] = ()) -> None:
        """Create the monitor; `listen` and `hosts` as for `Exporter`."""
        self._lake = lake
        self._version = version
        self._newest: tuple[Snapshot, float] | None = None
        self._tables: tuple[TableStatus, ...] = ()
        self._history = RunHistory()
        self._stop = threading.Event()
        self._exporter = Exporter(listen, self, hosts)

    def __enter__(self) -> Self:
        self._exporter.__enter__()
        if self.address:
            threading.Thread(target=self._follow_tables, name="monitor-lake", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._exporter.__exit__()

    @property
    def address(self) -> str:
        """`host:port` of the monitor; empty if it does not listen."""
        return self._exporter.address

    @property
    def error(self) -> str:
        """The reason why nothing is served; empty if there is no error."""
        return self._exporter.error

    def see(self, snapshot: Snapshot) -> None:
        """Replace the newest snapshot."""
        self._newest = snapshot, time.time()
        self._history.see(snapshot, time.monotonic())

    def metrics(self) -> Iterator[Metric]:
        """Build the metric families; none before the first snapshot."""
        facts = self._facts()
        return build_families(facts) if facts is not None else iter(())

    def why_dead(self) -> list[str]:
        return why_dead(self._facts())

    def why_not_ready(self) -> list[str]:
        return why_not_ready(self._facts())

    def page(self) -> str:
        """Render the status page."""
        return render_page(self._facts(), self._history.plots())

    def _facts(self) -> MonitorInputs | None:
        """Return the current inputs, or `None` before the first snapshot."""
        newest = self._newest
        return None if newest is None else MonitorInputs(*newest, time.time(), self._version, self._tables)

    def _follow_tables(self) -> None:
        while not self._stop.wait(_TABLES_EVERY if self._tables else 1.0):
            self._tables = read_lake_status(self._lake)
