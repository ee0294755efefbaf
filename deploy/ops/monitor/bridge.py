"""What `kiln bridge` says of itself over HTTP: the status that the bridge writes, as metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.metrics_core import Metric

from kiln.conf.process.bridge_status import BridgeStatus, read_status
from kiln.deploy.ops.monitor.families import build_bridge_families
from kiln.schemas.families import build_family

_FRESH = 10.0  # s; a status older than this is that of a bridge that hangs


class BridgeMonitor:
    """A bridge that no run watches."""

    def __init__(self, told: Path, network: str, version: str) -> None:
        """`told`: the file of the status."""
        self._told = told
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
        """A bridge that starts is alive."""
        starting = time.time() - self._started < _FRESH
        return [] if starting or self._status() is not None else ["the bridge says nothing"]

    def why_not_ready(self) -> list[str]:
        status = self._status()
        if status is None:
            return ["the bridge says nothing"]
        return ["the bridge's spool is full, and peers wait"] if status.spool.full else []

    def page(self) -> None:
        """None: the status file has all there is."""

    def _status(self) -> BridgeStatus | None:
        status = read_status(self._told)
        return status if status is not None and max(self._started, time.time() - _FRESH) <= status.at else None
