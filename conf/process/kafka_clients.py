"""Clients of kafka-python 3.0.12 that close their file descriptors promptly, and time out.

A constructor of kafka-python opens an epoll, two sockets and often a thread before it connects. When no broker answers,
it raises and leaves them all to the thread, which keeps them for as long as the process lives. The socket of each
connection that fails is in a cycle of Python objects, and stays open until garbage is collected. A TLS handshake
that the broker does not answer never ends. So every client of Kiln is created here
(`tests/unit/conf/test_kafka_clients.py` looks for others).
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Protocol, TypeVar, cast

from kafka.errors import KafkaConnectionError, KafkaError
from kafka.net.compat import KafkaNetClient
from kafka.net.inet import KafkaNetSocket, create_connection
from kafka.net.manager import KafkaConnectionManager
from kafka.net.selector import NetworkSelector
from kafka.net.transport import KafkaSSLTransport, KafkaTCPTransport

_SCHEME: Final = "kiln"
_Client = TypeVar("_Client")


class _Broker(Protocol):
    host: str
    port: int


class _Network(Protocol):
    def close(self) -> None: ...


class _Sockets(KafkaNetSocket):  # type: ignore[misc]  # kafka-python has no types
    """kafka-python's sockets, closed if they do not connect. kafka-python finds the class by its scheme."""

    SCHEMES = (_SCHEME,)

    async def sock_connect(
        self, net: object, sock: socket.socket, sockaddr: object, timeout_at: float | None = None
    ) -> socket.socket:
        with ExitStack() as opened:
            opened.enter_context(sock)
            await super().sock_connect(net, sock, sockaddr, timeout_at=timeout_at)
            opened.pop_all()
        return sock


class _TlsTransport(KafkaSSLTransport):  # type: ignore[misc]  # as above
    """kafka-python's transport, with a handshake that ends at the deadline of the connection."""

    timeout_at: float | None = None

    async def handshake(self) -> None:
        while True:
            try:
                self._sock.do_handshake()
            except ssl.SSLWantReadError:
                await self._net.wait_read(self._sock, self.timeout_at)
            except ssl.SSLWantWriteError:
                await self._net.wait_write(self._sock, self.timeout_at)
            else:
                return


class ConnectionManager(KafkaConnectionManager):  # type: ignore[misc]  # as above
    """kafka-python's connection manager, with the two classes above."""

    async def _build_transport(self, node: _Broker, timeout_at: float | None = None) -> KafkaTCPTransport:
        options, proxy = self.config["socket_options"], f"{_SCHEME}://"
        sock = await create_connection(self._net, node.host, node.port, options, proxy, timeout_at)
        with ExitStack() as opened:
            opened.enter_context(sock)  # once it is wrapped for TLS, closing it has no effect
            if self.ssl_enabled:
                of_tls = {name: value for name, value in self.config.items() if name.startswith("ssl_")}
                transport = _TlsTransport(self._net, sock, host=node.host, **of_tls)
                transport.timeout_at = timeout_at
            else:
                transport = KafkaTCPTransport(self._net, sock, host=node.host)
            opened.callback(transport.close)
            try:
                await transport.handshake()
            except (KafkaError, OSError, ValueError) as error:
                raise KafkaConnectionError(f"Handshake failed: {error}") from error
            opened.pop_all()
        return transport


def open_client(kind: Callable[..., _Client], **options: object) -> _Client:
    """Create a client. If its constructor fails, close the descriptors that it has opened.

    Args:
        kind: `KafkaConsumer`, `KafkaProducer` or `KafkaAdminClient`.
        options: kafka-python's options of this kind of client.

    Raises:
        kafka.errors.KafkaError: No broker answers, or none accepts the password.
        OSError: No file descriptor is free.
        AssertionError: kafka-python does not know an option.
        ValueError: An option has a wrong value.
        RuntimeError: No thread can be started.
    """
    for name in ("ssl_cafile", "ssl_certfile"):
        file = options.get(name)
        if isinstance(file, str) and Path(file).exists() and not Path(file).is_file():
            raise ValueError(f"kafka.{name}: {file} is not a regular file")  # OpenSSL would wait for a writer of a FIFO
    with ExitStack() as opened:

        def open_network(**config: object) -> _Network:
            selector = NetworkSelector(**config)
            opened.callback(selector.close)
            network = cast(_Network, KafkaNetClient(selector, ConnectionManager(selector, **config), **config))
            opened.callback(network.close)
            return network

        client = kind(**options, kafka_client=open_network)
        opened.pop_all()
    return client
