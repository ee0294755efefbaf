"""Serves `/metrics`, `/health`, `/ready` and the status page while a run goes on."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final, Self, cast

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from deploy.monitor.facts import Facts, why_dead, why_not_ready
from deploy.monitor.families import families
from deploy.monitor.history import History
from deploy.monitor.page import render_page
from deploy.observe.snapshot import Snapshot
from deploy.observe.status import TableStatus, lake_status
from pipelines.lake.lake import Lake

_TABLES_EVERY: Final = 15.0  # s
_PATIENCE: Final = 10.0  # s that a client may take to ask


class Monitor:
    """A context manager. `see` takes each snapshot, from the thread of the run; other threads serve the newest."""

    def __init__(self, listen: tuple[str, int] | None, lake: Lake, version: str) -> None:
        """`listen`: host and port, None: serve nothing; port 0: any free one."""
        self._listen = listen
        self._lake = lake
        self._version = version
        self._newest: tuple[Snapshot, float] | None = None
        self._tables: tuple[TableStatus, ...] = ()
        self._history = History()
        self._stop = threading.Event()
        self._server: _Server | None = None
        self.error = ""
        """why nothing is served, in words"""

    def __enter__(self) -> Self:
        if self._listen is None:
            return self
        host, port = self._listen
        try:
            self._server = _Server(self, (host, port))
        except OSError as error:
            self.error = f"monitor.listen: nothing is served at {host}:{port}: {error.strerror or error}"
            return self
        for name, run in (("monitor", self._server.serve_forever), ("monitor-lake", self._follow_tables)):
            threading.Thread(target=run, name=name, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    @property
    def address(self) -> str:
        """`host:port` where the monitor listens; empty: nowhere."""
        return "" if self._server is None else "{}:{}".format(*self._server.server_address[:2])

    def see(self, snapshot: Snapshot) -> None:
        """Takes the newest snapshot."""
        self._newest = snapshot, time.time()
        self._history.see(snapshot, time.monotonic())

    def facts(self) -> Facts | None:
        """As of now; None: there is no snapshot yet."""
        newest = self._newest
        return None if newest is None else Facts(*newest, time.time(), self._version, self._tables)

    def page(self) -> str:
        """The status page."""
        return render_page(self.facts(), self._history.plots())

    def _follow_tables(self) -> None:
        while not self._stop.wait(_TABLES_EVERY if self._tables else 1.0):
            self._tables = lake_status(self._lake)


class _Families(Collector):
    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        return families(self._facts)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, monitor: Monitor, listen: tuple[str, int]) -> None:
        self.address_family = socket.AF_INET6 if ":" in listen[0] else socket.AF_INET
        self.monitor = monitor
        super().__init__(listen, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server_version = "Kiln"
    sys_version = ""
    timeout = _PATIENCE

    def do_GET(self) -> None:
        monitor = cast(_Server, self.server).monitor
        facts = monitor.facts()
        match self.path.partition("?")[0]:
            case "/metrics":
                self._answer(HTTPStatus.OK, CONTENT_TYPE_LATEST, exposed(facts))
            case "/health":
                self._verdict(why_dead(facts))
            case "/ready":
                self._verdict(why_not_ready(facts))
            case "/":
                self._answer(HTTPStatus.OK, "text/html; charset=utf-8", monitor.page().encode())
            case _:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"/, /metrics, /health and /ready are here\n")

    def _verdict(self, reasons: list[str]) -> None:
        status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
        body = json.dumps({"ok": not reasons, "reasons": reasons})
        self._answer(status, "application/json", f"{body}\n".encode())

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 – the name is that of the library
        """Nothing: who reads the page is not worth a line."""


def exposed(facts: Facts | None) -> bytes:
    """The text of `/metrics`; no family before the first snapshot."""
    registry = CollectorRegistry()
    if facts is not None:
        registry.register(_Families(facts))
    return generate_latest(registry)
