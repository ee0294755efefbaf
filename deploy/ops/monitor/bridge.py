"""The HTTP endpoints of `kiln bridge`: its status as metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.metrics_core import Metric

from kiln.conf.process.bridge_status import BridgeStatus, read_status
from kiln.deploy.ops.monitor.families import build_bridge_families
from kiln.schemas.metrics import build_family

_FRESH = 10.0  # s; an older status means that the bridge hangs


class BridgeMonitor:
    """Monitor of a bridge that runs without `kiln run`."""

    def __init__(self, status_file: Path, network: str, version: str) -> None:
        self._status_file = status_file
        self._network = network
        self._version = version
        self._started = time.time()

    def metrics(self) -> Iterator[Metric]:
        status = self._status()
        yield build_family("kiln_info", [((self._version, self._network, "bridge"), 1)])
        yield build_family("kiln_uptime_seconds", [((), time.time() - self._started)])
        yield build_family("kiln_problems", [((), len(status.errors) if status is not None else 1)])
        yield from build_bridge_families(status)

    def why_dead(self) -> list[str]:
        """Describe why the bridge is not alive; a starting bridge counts as alive."""
        starting = time.time() - self._started < _FRESH
        return [] if starting or self._status() is not None else ["the bridge does not report its status"]

    def why_not_ready(self) -> list[str]:
        status = self._status()
        if status is None:
            return ["the bridge does not report its status"]
        return ["the bridge's spool is full, and it does not read from peers"] if status.spool.full else []

    def page(self) -> None:
        """Serve no page: the status file has all values."""

    def _status(self) -> BridgeStatus | None:
        status = read_status(self._status_file)
        return status if status is not None and max(self._started, time.time() - _FRESH) <= status.at else None
