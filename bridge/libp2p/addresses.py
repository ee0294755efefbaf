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
    """The node cannot run with its options. The error text names the reason and the remedy."""


class BootstrapPeer:
    """A peer of `bridge.bootstrap`: its addresses, and the result of dialling it."""

    def __init__(self, peer: bytes) -> None:
        self.id = ID(peer)
        self.addresses: list[Multiaddr] = []
        self.attempts = 0
        self.error = ""
        self.streamless = 0
        """number of consecutive connections on which the peer opened no pubsub stream"""


def parse_tcp_address(text: str, use: str) -> Multiaddr:
    """Parse a TCP multiaddr.

    Args:
        use: The purpose of the address, for the error text: `listen` or `bootstrap`.

    Raises:
        NodeError: The text is not a TCP multiaddr.
    """
    try:
        address = Multiaddr(text)
        names = [protocol.name for protocol in address.protocols()]
    except ADDRESS_ERRORS as error:
        raise NodeError(
            f"cannot use {use} address {text!r} ({error}). Give a multiaddr such as /ip4/127.0.0.1/tcp/4001."
        ) from error
    if not names:
        raise NodeError(f"cannot use an empty {use} address. Give a multiaddr such as /ip4/127.0.0.1/tcp/4001.")
    if names[1:2] != ["tcp"] or any(name not in ("tcp", "p2p") for name in names[1:]):
        raise NodeError(
            f"cannot use {use} address {text!r}: only TCP is supported, not QUIC or WebSocket. Give a multiaddr such "
            "as /ip4/127.0.0.1/tcp/4001."
        )
    return address


def parse_bootstrap_peers(bootstrap: Iterable[str], own: bytes) -> list[BootstrapPeer]:
    """Parse bootstrap addresses, and group them by peer.

    Args:
        own: The node's peer id. Addresses of the node itself are left out.

    Raises:
        NodeError: An address is invalid, or has no peer id.
    """
    targets: dict[str, BootstrapPeer] = {}
    for text in bootstrap:
        address = parse_tcp_address(text, "bootstrap")
        try:
            peer = ID.from_base58(address.value_for_protocol("p2p"))
        except ADDRESS_ERRORS as error:
            raise NodeError(
                f"cannot use bootstrap address {text!r}: it has no peer id. Append /p2p/<peer id>."
            ) from error
        if peer.to_bytes() != own:
            targets.setdefault(str(peer), BootstrapPeer(peer.to_bytes())).addresses.append(address)
    return list(targets.values())


def check_listen_address(address: Multiaddr) -> None:
    """Check that no process listens on an address. libp2p sets SO_REUSEPORT, so two nodes would share a port unnoticed.

    Raises:
        NodeError: The address cannot be bound.
    """
    values = {protocol.name: value for protocol, value in address.items()}
    host, port = values.get("ip4") or values.get("ip6"), int(values["tcp"])
    if not port or host is None:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections in TIME_WAIT do not matter
        try:
            probe.bind((host, port))
        except OSError as error:
            raise NodeError(
                f"cannot listen on {address} ({error.strerror}). Stop the program that uses this port, or set "
                "bridge.listen to another address."
            ) from error


def socket_address(remote: tuple[str, int] | None) -> Multiaddr | None:
    """Convert the IP address and port of the other end of a connection to a multiaddr."""
    if remote is None:
        return None
    host, port = remote
    return Multiaddr(f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}")
