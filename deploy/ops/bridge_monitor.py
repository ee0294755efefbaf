"""The HTTP endpoints of `kiln bridge`: its status as metrics."""

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
from kiln.conf.process.kafka_records import librdkafka_options
from kiln.deploy.ops.metric_families import build_bridge_families
from kiln.schemas.metrics import build_family

_FRESH = 10.0  # seconds; an older status means that the bridge hangs
_PROBE_EVERY = 1.0  # seconds
_PROBE_TIMEOUT = 2.0  # seconds
_LOG = logging.getLogger("librdkafka")


class BrokerProbe:
    """Requests the broker's metadata at most once a second, over one connection. `find_problem` is thread-safe."""

    def __init__(self, client_options: Callable[[], Mapping[str, object]]) -> None:
        self._client_options = client_options
        self._lock = threading.Lock()
        self._client: AdminClient | None = None
        self._asked_at = -_PROBE_EVERY
        self._problem = ""

    def find_problem(self) -> str:
        """Return why the broker does not answer, within two seconds; empty if it answers."""
        with self._lock:
            if time.monotonic() - self._asked_at >= _PROBE_EVERY:
                self._problem = self._ask()
                self._asked_at = time.monotonic()
            return self._problem

    def _ask(self) -> str:
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
    """Monitor of a bridge that runs without `kiln run`."""

    def __init__(
        self, status_file: Path, network: str, version: str, client_options: Callable[[], Mapping[str, object]]
    ) -> None:
        """Create the monitor.

        Args:
            status_file: File with the status of the bridge.
            network: Name of the network.
            version: Version of Kiln.
            client_options: Returns kafka-python's options of the broker, or raises KilnError.
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
        """Describe why the bridge is not alive; a starting bridge counts as alive."""
        starting = time.time() - self._started < _FRESH
        return [] if starting or self._status() is not None else ["the bridge does not report its status"]

    def why_not_ready(self) -> list[str]:
        """Describe why the bridge is not ready. While the broker is unreachable, the bridge captures, but its frames do
        not reach Kafka."""
        status = self._status()
        if status is None:
            return ["the bridge does not report its status"]
        full = ["the bridge's spool is full, and it does not read from peers"] if status.spool.full else []
        return [*full, *([problem] if (problem := self._broker.find_problem()) else [])]

    def page(self) -> None:
        """Serve no page: the status file has all values."""

    def _status(self) -> BridgeStatus | None:
        status = read_status(self._status_file)
        return status if status is not None and max(self._started, time.time() - _FRESH) <= status.at else None
