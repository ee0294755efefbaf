"""Addresses out of the settings: read, checked, and tried before libp2p gets them."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Final

from libp2p.peer.id import ID
from multiaddr import Multiaddr
from multiaddr.exceptions import BinaryParseError, ProtocolLookupError, StringParseError

ADDRESS_ERRORS: Final = (ValueError, StringParseError, BinaryParseError, ProtocolLookupError)


class NodeError(Exception):
    """The node cannot run with these options. The text says why, and what to do."""


class BootstrapPeer:
    """A peer of `bridge.bootstrap`: its addresses, and how dialling it went."""

    def __init__(self, peer: bytes) -> None:
        self.id = ID(peer)
        self.addresses: list[Multiaddr] = []
        self.attempts = 0
        self.error = ""


def tcp_address(text: str, use: str) -> Multiaddr:
    """A multiaddr of TCP. `use`: of what setting, for the error. NodeError: the text is no such address."""
    try:
        address = Multiaddr(text)
        names = [protocol.name for protocol in address.protocols()]
    except ADDRESS_ERRORS as error:
        raise NodeError(f"{use} address {text!r}: not a multiaddr such as /ip4/127.0.0.1/tcp/4001: {error}") from error
    if names[1:2] != ["tcp"] or any(name not in ("tcp", "p2p") for name in names[1:]):
        raise NodeError(
            f"{use} address {text!r}: only TCP is spoken, as in /ip4/127.0.0.1/tcp/4001, not QUIC or WebSocket"
        )
    return address


def bootstrap_peers(bootstrap: Iterable[str], own: bytes) -> list[BootstrapPeer]:
    """The bootstrap peers, each with all its addresses: the node tries these in turn until one answers.

    NodeError: an address is none, or names no peer.
    """
    targets: dict[str, BootstrapPeer] = {}
    for text in bootstrap:
        address = tcp_address(text, "bootstrap")
        try:
            peer = ID.from_base58(address.value_for_protocol("p2p"))
        except ADDRESS_ERRORS as error:
            raise NodeError(
                f"bootstrap address {text!r}: must end in /p2p/<peer id>, so that the node knows who answers"
            ) from error
        if peer.to_bytes() != own:
            targets.setdefault(str(peer), BootstrapPeer(peer.to_bytes())).addresses.append(address)
    return list(targets.values())


def free_to_listen(address: Multiaddr) -> None:
    """NodeError if a process listens there. libp2p sets SO_REUSEPORT: two nodes would share a port and not notice."""
    host, port = host_port(address)
    if not port or host is None:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections in TIME_WAIT do not matter
        try:
            probe.bind((host, port))
        except OSError as error:
            raise NodeError(f"cannot listen on {address}: {error.strerror}") from error


def host_port(address: Multiaddr) -> tuple[str | None, int]:
    """IP address and port; None for a host that is a name."""
    values = {protocol.name: value for protocol, value in address.items()}
    return values.get("ip4") or values.get("ip6"), int(values["tcp"])


def socket_address(remote: tuple[str, int] | None) -> Multiaddr | None:
    """The multiaddr of the other end of a TCP connection."""
    if remote is None:
        return None
    host, port = remote
    return Multiaddr(f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}")
