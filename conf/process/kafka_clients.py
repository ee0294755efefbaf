"""Clients of kafka-python 3.0.12 that close their file descriptors promptly, and time out.

A constructor of kafka-python opens an epoll, two sockets and often a thread before it connects. If no broker answers,
the constructor raises, and these descriptors stay open for as long as the process lives. The socket of a failed
connection stays open until the garbage collector runs. A TLS handshake that the broker does not answer never ends. So
`open_client` creates every client of Kiln (`tests/unit/conf/test_kafka_clients.py` checks this).

kafka-python reports a refused password or a wrong certificate as a bootstrap timeout, and only logs the reason. So
`describe_kafka_error` connects once more, examines the error of this connection, and names the setting at fault.
"""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import ExitStack
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
    """kafka-python's sockets, but closed if they cannot connect. kafka-python finds the class by its scheme."""

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
    """kafka-python's TLS transport, but with a handshake that ends at the deadline of the connection."""

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
    """kafka-python's connection manager, but with `_Sockets` and `_TlsTransport`."""

    async def _build_transport(self, node: _Broker, timeout_at: float | None = None) -> KafkaTCPTransport:
        options, proxy = self.config["socket_options"], f"{_SCHEME}://"
        sock = await create_connection(self._net, node.host, node.port, options, proxy, timeout_at)
        with ExitStack() as opened:
            opened.enter_context(sock)  # closing a socket that was wrapped for TLS has no effect
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
    """Create a client of kafka-python. If its constructor fails, close the descriptors that it has opened.

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


_PROBES: Final = 3  # attempts: if both sides close the connection, not every attempt shows the reason

_OTHER_HOST: Final = (
    "kafka.bootstrap: the broker's certificate is for another host ({problem}). Use a host name in the certificate"
)
# OpenSSL errors and the settings at fault; {…} are client options
_TLS: Final = (
    ("Hostname mismatch", _OTHER_HOST),
    ("IP address mismatch", _OTHER_HOST),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "kafka.ssl_cafile ({ssl_cafile}): no authority there has signed the broker's certificate ({problem})",
    ),
    (
        "WRONG_VERSION_NUMBER",
        "kafka.security_protocol ({security_protocol}): the broker does not speak TLS on this port",
    ),
    ("CERTIFICATE_REQUIRED", "kafka.ssl_certfile ({ssl_certfile}): the broker requires a client certificate"),
    ("ALERT", "kafka.ssl_certfile ({ssl_certfile}): the broker rejects the client certificate ({problem})"),
)


def describe_kafka_error(error: BaseException, client_options: Mapping[str, object], patience: float = 5.0) -> str:
    """Describe an error of a kafka-python client that has these options, and name the setting at fault.

    If the error is only a timeout, connect to a broker again to find the reason, for at most `patience` seconds.
    """
    from kafka.errors import KafkaTimeoutError

    words = _describe_reason(error, client_options)
    if isinstance(error, KafkaTimeoutError):
        for _ in range(_PROBES):
            refused = None if words else _probe_connection(client_options, patience)
            if isinstance(refused, KafkaTimeoutError):  # no refusal, because brokers refuse at once
                break
            words = words if refused is None else _describe_reason(refused, client_options)
    return words or (str(error) if str(error).startswith(type(error).__name__) else f"{type(error).__name__}: {error}")


def _probe_connection(client_options: Mapping[str, object], patience: float) -> BaseException | None:
    """Connect to the first broker.

    Returns:
        The error of the connection; `None` if it works or cannot be tried.
    """
    # no public class of kafka-python reports how a connection failed
    from kafka.errors import KafkaError
    from kafka.net.selector import NetworkSelector

    try:
        net = NetworkSelector()
    except OSError:  # no descriptor is free, which is no fault of the brokers
        return None
    manager = ConnectionManager(net, **client_options)
    kafka_log = logging.getLogger("kafka")
    level = kafka_log.level
    kafka_log.setLevel(logging.CRITICAL)

    async def connect() -> None:
        broker = manager.cluster.bootstrap_brokers()[0]
        await manager.get_connection(broker.node_id, timeout_ms=int(patience * 1000), refresh_metadata_on_err=False)
        await manager.cluster.refresh_metadata(broker.node_id)

    try:
        net.run(connect)
    except (KafkaError, OSError, ValueError, AssertionError) as error:
        return error
    finally:
        manager.close()
        net.close()
        kafka_log.setLevel(level)
    return None


def _describe_reason(error: BaseException, client_options: Mapping[str, object]) -> str | None:
    from kafka import errors

    options = {"ssl_cafile": "empty", "ssl_certfile": "empty", "security_protocol": "PLAINTEXT", **client_options}
    text = str(error)
    user = options.get("sasl_plain_username", "")
    protocol = str(options["security_protocol"])
    match error:
        case errors.SaslAuthenticationFailedError():
            return (
                f"kafka.sasl_username ({user}), kafka.sasl_password, kafka.sasl_password_file: the broker rejects this "
                "user with this password"
            )
        case errors.UnsupportedSaslMechanismError():
            return (
                f"kafka.sasl_mechanism ({options.get('sasl_mechanism')}): the broker does not support this mechanism. "
                "Set another one"
            )
        case errors.IllegalSaslStateError():
            return (
                f"kafka.security_protocol ({protocol}): the broker requires no password on this port. Set "
                f"{protocol.removeprefix('SASL_')}"
            )
        case errors.TopicAuthorizationFailedError():
            return (
                f"kafka.sasl_username ({user}) lacks a right on the topic {_list_names(error)}. Grant the rights in "
                "docs/kafka-security.md"
            )
        case errors.GroupAuthorizationFailedError():
            return (
                f"kafka.sasl_username ({user}) lacks the right READ on the consumer group {_list_names(error)}. Grant "
                "the rights in docs/kafka-security.md"
            )
        case errors.AuthorizationError():
            return f"kafka.sasl_username ({user}) lacks a right: {type(error).__name__}: {text}"
    if protocol.endswith("SSL"):
        for sign, words in _TLS:
            if sign in text:
                return words.format(**options, problem=text.rpartition(": ")[2].partition(" (_ssl")[0])
        if isinstance(error, OSError):
            return (
                f"kafka.ssl_cafile ({options['ssl_cafile']}), kafka.ssl_certfile ({options['ssl_certfile']}): cannot "
                f"set up TLS: {text}"
            )
    if "Invalid frame length" in text and not protocol.endswith("SSL"):  # a TLS alert, read as Kafka's protocol
        return f"kafka.security_protocol is wrong ({protocol}): the port expects TLS. Set SSL or SASL_SSL"
    if "socket disconnected" in text:  # also after a refused login: kafka-python does not read the response
        if not protocol.startswith("SASL"):
            more = "a password" if protocol == "SSL" else "TLS or a password"
            return f"kafka.security_protocol ({protocol}): the broker closed the connection; it may expect {more}"
        tls = "" if protocol.endswith("SSL") else ", or kafka.security_protocol is wrong because the port expects TLS"
        return (
            f"kafka.sasl_username ({user}), kafka.sasl_password or kafka.sasl_password_file: the broker rejects this "
            f"user with this password, or does not support kafka.sasl_mechanism ({options.get('sasl_mechanism')}){tls}"
        )
    return None


def _list_names(error: BaseException) -> str:
    named = error.args[0] if error.args else ""
    return ", ".join(sorted(map(str, named))) if isinstance(named, set | list) else str(named)
