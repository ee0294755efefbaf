"""An HTTP server on loopback whose responses never end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Literal

Kind = Literal["slow headers", "slow body", "endless body"]
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
_PAUSE = 0.05  # s between two bytes


@dataclass
class EndlessServer:
    """The server's address, and the state of its last response."""

    url: str = ""
    sent: int = 0
    """bytes"""
    hung_up: threading.Event = field(default_factory=threading.Event)
    """the client has closed the connection"""


@contextmanager
def endless_server(kind: Kind) -> Iterator[EndlessServer]:
    """Serve responses of one kind: a byte now and then, in the headers or in the body, or a body as fast as it is
    read."""
    state, closed = EndlessServer(), threading.Event()

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            connection: socket.socket = self.request
            connection.recv(65536)
            first, part = {
                "slow headers": (_HEAD + b"x-filler: ", b"x"),
                "slow body": (_HEAD + b"connection: close\r\n\r\n", b" "),
                "endless body": (_HEAD + b"connection: close\r\n\r\n", b" " * 65536),
            }[kind]
            with suppress(OSError):
                connection.sendall(first)
                while not closed.wait(0 if kind == "endless body" else _PAUSE):
                    connection.sendall(part)
                    state.sent += len(part)
            state.hung_up.set()

    class Server(ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield state
        finally:
            closed.set()
            server.shutdown()
