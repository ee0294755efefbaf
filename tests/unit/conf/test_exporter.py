"""kiln.conf.process.exporter: clients that hold connections open."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

import httpx
import pytest

from kiln.conf.process import exporter
from kiln.conf.process.exporter import Exporter, ObservedProcess
from kiln.pipelines.app.submit import SubmittedQuery

CONNECTIONS: Final = 300
AT_ONCE: Final = 50
"""Connections that fit into the queue of a listening socket."""
STEPS: Final = 600
"""Bytes of a client that sends one in 0.1 s, until it is taken for one that is never cut off."""


class BusyProcess(SubmittedQuery):
    """A process that takes longer to find out about itself than any client waits."""

    def __init__(self, answer: threading.Event) -> None:
        super().__init__("archive", "local-test")
        self._answer = answer

    def why_dead(self) -> list[str]:
        self._answer.wait()
        return []


@pytest.fixture
def clients() -> Iterator[ExitStack]:
    with ExitStack() as clients:
        yield clients


def connect(clients: ExitStack, server: Exporter, request: bytes) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    connection = clients.enter_context(socket.create_connection((host, int(port))))
    connection.sendall(request)
    return connection


def start(clients: ExitStack, process: ObservedProcess) -> Exporter:
    return clients.enter_context(Exporter(("127.0.0.1", 0), process))


def test_clients_that_hold_connections_take_few_threads_and_descriptors(clients: ExitStack) -> None:
    """Probes are answered meanwhile. The connections wait in one queue, so a probe comes after those before it."""
    server = start(clients, SubmittedQuery("archive", "local-test"))
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(CONNECTIONS // AT_ONCE):
        for _ in range(AT_ONCE):
            connect(clients, server, b"GET /met")
        assert httpx.get(f"http://{server.address}/health").status_code == 200
    assert threading.active_count() - threads <= 64
    assert len(os.listdir("/proc/self/fd")) - descriptors - CONNECTIONS <= 64


def test_answers_that_take_long_are_no_more_threads(clients: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that builds an answer cannot be stopped, so the connections beyond 64 are closed."""
    monkeypatch.setattr(exporter, "_WAIT_FOR_THREAD", 0.01)
    answer = threading.Event()
    server = start(clients, BusyProcess(answer))
    clients.callback(answer.set)
    threads = threading.active_count()
    connections = [connect(clients, server, b"GET /health HTTP/1.0\r\n\r\n") for _ in range(70)]
    assert connections[-1].recv(1) == b""
    assert threading.active_count() - threads == 64


def test_a_request_that_never_ends_is_cut_off(clients: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "_PATIENCE", 0.5)
    connection = connect(clients, start(clients, SubmittedQuery("archive", "local-test")), b"GET / HTTP/1.0\r\n")
    for _ in range(STEPS):
        if select.select([connection], [], [], 0.1)[0]:
            break
        connection.sendall(b"a")
    else:
        pytest.fail("the connection is still open")
