"""Metrics, health and readiness of `kiln bridge`, for the HTTP exporter."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from prometheus_client.metrics_core import Metric

from kiln.conf.process.bridge_status import BridgeStatus, read_status
from kiln.conf.process.errors import KilnError
from kiln.conf.process.librdkafka import librdkafka_options
from kiln.deploy.ops.metric_families import FULL_SPOOL, SILENT_BRIDGE, build_bridge_families
from kiln.schemas.metrics import build_family

_FRESH = 10.0  # age of a status, in seconds, above which the bridge counts as hanging
_PROBE_EVERY = 1.0  # seconds
_PROBE_TIMEOUT = 2.0  # seconds
_LOG = logging.getLogger("librdkafka")


class BrokerProbe:
    """Checks that the Kafka broker answers, at most once a second and over one connection. Threads may share it."""

    def __init__(self, client_options: Callable[[], Mapping[str, object]]) -> None:
        self._client_options = client_options
        self._lock = threading.Lock()
        self._client: AdminClient | None = None
        self._requested_at = -_PROBE_EVERY
        self._problem = ""

    def find_problem(self) -> str:
        """Return the reason why the broker does not answer; empty if it answers. Takes at most two seconds."""
        with self._lock:
            if time.monotonic() - self._requested_at >= _PROBE_EVERY:
                self._problem = self._request_metadata()
                self._requested_at = time.monotonic()
            return self._problem

    def _request_metadata(self) -> str:
        try:
            if self._client is None:
                self._client = AdminClient({**librdkafka_options(self._client_options())}, logger=_LOG)
            self._client.list_topics(timeout=_PROBE_TIMEOUT)
        except KafkaException as error:
            return f"the broker does not answer: {error.args[0].str()}"
        except (KilnError, ValueError) as error:
            return f"the broker does not answer: {error}"
        return ""


class BridgeMonitor:
    """State of a bridge that runs as `kiln bridge`, read from its status file."""

    def __init__(
        self, status_file: Path, network: str, version: str, client_options: Callable[[], Mapping[str, object]]
    ) -> None:
        """Create the monitor.

        Args:
            status_file: File to which the bridge writes its status.
            client_options: Returns kafka-python's options for the broker, or raises KilnError.
        """
        self._status_file = status_file
        self._network = network
        self._version = version
        self._broker = BrokerProbe(client_options)
        self._started = time.time()

    def metrics(self) -> Iterator[Metric]:
        status = self._status()
        yield build_family("kiln_info", [((self._version, self._network, "bridge"), 1)])
        yield build_family("kiln_uptime_seconds", [((), time.time() - self._started)])
        yield build_family("kiln_problems", [((), len(status.errors) if status is not None else 1)])
        yield from build_bridge_families(status)

    def why_dead(self) -> list[str]:
        """Return the reason why the bridge hangs; empty if it does not, or is starting."""
        starting = time.time() - self._started < _FRESH
        return [] if starting or self._status() is not None else [SILENT_BRIDGE]

    def why_not_ready(self) -> list[str]:
        """Return the reasons why frames do not reach Kafka; empty if they do. Without a broker, the bridge captures
        frames, but they wait on disk."""
        status = self._status()
        if status is None:
            return [SILENT_BRIDGE]
        full = [FULL_SPOOL] if status.spool.full else []
        return [*full, *([problem] if (problem := self._broker.find_problem()) else [])]

    def page(self) -> None:
        """Return `None`: there is no status page, because the status file has all values."""

    def _status(self) -> BridgeStatus | None:
        status = read_status(self._status_file)
        return status if status is not None and max(self._started, time.time() - _FRESH) <= status.at else None
