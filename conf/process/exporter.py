"""HTTP server for a process's `/metrics`, `/health`, `/ready`, and an optional status page."""

from __future__ import annotations

import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Final, Protocol, Self, cast
from urllib.parse import urlsplit

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_LOG: Final = logging.getLogger(__name__)
_PATIENCE: Final = 10.0  # s for a whole request and its answer
_MAX_CONNECTIONS: Final = 64
_WAIT_FOR_THREAD: Final = 1.0  # s until a new connection is refused

_Request = socket.socket | tuple[bytes, socket.socket]  # the tuple: a datagram, which the base class allows
_Address = tuple[str, int] | str


class ObservedProcess(Protocol):
    """State of a process, read from threads of the exporter."""

    def metrics(self) -> Iterable[Metric]:
        """Build the metric families."""

    def why_dead(self) -> list[str]:
        """Describe why the process is not alive; empty if it is alive."""

    def why_not_ready(self) -> list[str]:
        """Describe why the process is not ready; empty if it is ready."""

    def page(self) -> str | None:
        """Render the status page, or return `None` if there is none."""


class Exporter:
    """A context manager that serves from its own threads. If it cannot listen, the process continues without it."""

    def __init__(self, listen: tuple[str, int] | None, process: ObservedProcess, hosts: Iterable[str] = ()) -> None:
        """Create the exporter.

        Args:
            listen: Host and port, with port 0 for any free one; `None` serves nothing.
            process: State to serve.
            hosts: Host names that clients may use, in addition to those of loopback; "*" for any.
        """
        self._listen = listen
        self._process = process
        self._hosts = HostNames(listen[0] if listen is not None else "", hosts)
        self._server: _Server | None = None
        self.error = ""
        """reason why nothing is served; empty if there is no error"""

    def __enter__(self) -> Self:
        if self._listen is None:
            return self
        host, port = self._listen
        try:
            self._server = _Server(self._process, (host, port), self._hosts)
        except OSError as error:
            self.error = (
                f"cannot serve metrics at {host}:{port} ({error.strerror or error}). Set another monitor.listen"
            )
            return self
        threading.Thread(target=self._server.serve_forever, name="monitor", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    @property
    def address(self) -> str:
        """`host:port` of the exporter; empty if it does not listen."""
        return "" if self._server is None else "{}:{}".format(*self._server.server_address[:2])


def render_metrics(families: Iterable[Metric]) -> bytes:
    """Render the text of `/metrics`."""
    registry = CollectorRegistry()
    registry.register(_Families(families))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class HostNames:
    """The host names under which a server may be requested.

    The check protects a server on loopback from DNS rebinding: in a browser on this machine, a web page whose host name
    resolves to loopback could otherwise read the responses.
    """

    def __init__(self, listens: str, others: Iterable[str]) -> None:
        """Create the list.

        Args:
            listens: Host that the server listens on. If it is not on loopback and `others` is empty, any name is
                accepted.
            others: Names that are accepted in addition to those of loopback; "*" for any.
        """
        self._others = {name.lower() for name in others}
        is_private = _is_loopback(listens)
        self._any = "*" in self._others or not (is_private or self._others)

    def accept(self, header: str | None) -> bool:
        """Return true if a request may be answered, given its header `Host`.

        A request without the header may be answered: it is not from a browser, since browsers always send the header.
        """
        if self._any or header is None:
            return True
        try:
            name = urlsplit(f"//{header}").hostname or ""
        except ValueError:
            return False
        return name in self._others or _is_loopback(name)


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class _Server(ThreadingHTTPServer):
    """A server with at most 64 connections, each with a thread and a descriptor.

    At this limit, a new connection closes the oldest one, so that idle clients do not delay a liveness probe.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = _MAX_CONNECTIONS

    def __init__(self, process: ObservedProcess, listen: tuple[str, int], hosts: HostNames) -> None:
        self.address_family = socket.AF_INET6 if ":" in listen[0] else socket.AF_INET
        self.process = process
        self.hosts = hosts
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._deadlines: dict[socket.socket, float] = {}  # the oldest connection first
        # so that no thread shuts down a socket that another one has closed: its descriptor may be in use again
        self._lock = threading.Lock()
        super().__init__(listen, _Handler)

    def process_request(self, request: _Request, client_address: _Address) -> None:
        assert isinstance(request, socket.socket)
        if not self._free.acquire(blocking=False):
            with self._lock:
                for oldest in list(self._deadlines)[:1]:
                    self._end(oldest)
            if not self._free.acquire(timeout=_WAIT_FOR_THREAD):  # the oldest thread is still busy
                super().shutdown_request(request)
                return
        with self._lock:
            self._deadlines[request] = time.monotonic() + _PATIENCE
        super().process_request(request, client_address)

    def shutdown_request(self, request: _Request) -> None:
        """Close a connection, at the end of its thread."""
        assert isinstance(request, socket.socket)
        with self._lock:
            self._deadlines.pop(request, None)
            super().shutdown_request(request)
        self._free.release()

    def service_actions(self) -> None:
        """End the connections that have lasted for `_PATIENCE`. The base class calls this at least twice a second."""
        now = time.monotonic()
        with self._lock:
            for connection in [idle for idle, deadline in self._deadlines.items() if deadline < now]:
                self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        del self._deadlines[connection]
        with suppress(OSError):  # the client has closed it
            connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Log errors of Kiln, but not those of clients that hang up."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            _LOG.exception("request to the monitoring endpoint failed")


class _Handler(BaseHTTPRequestHandler):
    server_version = "Kiln"
    sys_version = ""

    def do_GET(self) -> None:
        server = cast(_Server, self.server)
        process = server.process
        if not server.hosts.accept(self.headers.get("Host")):
            text = b"the host name of this request is not allowed. Use localhost, or add the name to monitor.hosts\n"
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", text)
            return
        match self.path.partition("?")[0]:
            case "/metrics":
                self._answer(HTTPStatus.OK, CONTENT_TYPE_LATEST, render_metrics(process.metrics()))
            case "/health":
                self._verdict(process.why_dead())
            case "/ready":
                self._verdict(process.why_not_ready())
            case "/" if (page := process.page()) is not None:
                self._answer(HTTPStatus.OK, "text/html; charset=utf-8", page.encode())
            case _:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"not found; see /metrics, /health and /ready\n")

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
        """Log nothing. The base class writes a line to stderr for each request."""
