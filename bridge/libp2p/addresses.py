"""Parsing and checks of the addresses in the settings."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Final

from libp2p.peer.id import ID
from multiaddr import Multiaddr
from multiaddr.exceptions import BinaryParseError, ProtocolLookupError, StringParseError

ADDRESS_ERRORS: Final = (ValueError, StringParseError, BinaryParseError, ProtocolLookupError)


class NodeError(Exception):
    """The node cannot run with these options; the message says why, and what to do."""


class BootstrapPeer:
    """A peer of `bridge.bootstrap`: its addresses, and the result of dialling it."""

    def __init__(self, peer: bytes) -> None:
        self.id = ID(peer)
        self.addresses: list[Multiaddr] = []
        self.attempts = 0
        self.error = ""
        self.streamless = 0
        """connections in a row on which the peer opened no pubsub stream"""


def parse_tcp_address(text: str, use: str) -> Multiaddr:
    """Parse a TCP multiaddr.

    Args:
        use: The setting that the address belongs to, for the error.

    Raises:
        NodeError: The text is no TCP multiaddr.
    """
    try:
        address = Multiaddr(text)
        names = [protocol.name for protocol in address.protocols()]
    except ADDRESS_ERRORS as error:
        raise NodeError(
            f"cannot use {use} address {text!r} ({error}). Give a multiaddr such as /ip4/127.0.0.1/tcp/4001"
        ) from error
    if not names:
        raise NodeError(f"cannot use an empty {use} address. Give a multiaddr such as /ip4/127.0.0.1/tcp/4001")
    if names[1:2] != ["tcp"] or any(name not in ("tcp", "p2p") for name in names[1:]):
        raise NodeError(
            f"cannot use {use} address {text!r}: only TCP is supported, not QUIC or WebSocket. Give a multiaddr such "
            "as /ip4/127.0.0.1/tcp/4001"
        )
    return address


def parse_bootstrap_peers(bootstrap: Iterable[str], own: bytes) -> list[BootstrapPeer]:
    """Parse the bootstrap peers, each with all its addresses, which the node tries in turn until one answers.

    Raises:
        NodeError: An address is invalid, or names no peer.
    """
    targets: dict[str, BootstrapPeer] = {}
    for text in bootstrap:
        address = parse_tcp_address(text, "bootstrap")
        try:
            peer = ID.from_base58(address.value_for_protocol("p2p"))
        except ADDRESS_ERRORS as error:
            raise NodeError(
                f"cannot use bootstrap address {text!r}: the peer's identity is missing. Append /p2p/<peer id>"
            ) from error
        if peer.to_bytes() != own:
            targets.setdefault(str(peer), BootstrapPeer(peer.to_bytes())).addresses.append(address)
    return list(targets.values())


def check_listen_address(address: Multiaddr) -> None:
    """Check that no process listens on the address: with libp2p's SO_REUSEPORT two nodes would share a port unnoticed.

    Raises:
        NodeError: The address cannot be bound.
    """
    host, port = host_port(address)
    if not port or host is None:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections in TIME_WAIT do not matter
        try:
            probe.bind((host, port))
        except OSError as error:
            raise NodeError(
                f"cannot listen on {address} ({error.strerror}). Stop the other program, or set bridge.listen."
            ) from error


def host_port(address: Multiaddr) -> tuple[str | None, int]:
    """Return the IP address, or `None` for a host name, and the port."""
    values = {protocol.name: value for protocol, value in address.items()}
    return values.get("ip4") or values.get("ip6"), int(values["tcp"])


def socket_address(remote: tuple[str, int] | None) -> Multiaddr | None:
    """Return the multiaddr of the other end of a TCP connection."""
    if remote is None:
        return None
    host, port = remote
    return Multiaddr(f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}")
