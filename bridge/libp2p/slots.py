"""A limit on inbound connections. At the limit, a new connection replaces a less valuable one."""

from __future__ import annotations

import ipaddress
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from libp2p.io.abc import ReadWriteCloser

_IPV4_PREFIX: Final = 16  # bits of a prefix, which often has one operator; an attacker has many addresses in it
_IPV6_PREFIX: Final = 32
_LARGEST_SHARE: Final = 4  # connections in a prefix with over a quarter of all slots are not protected


class PeerValue(IntEnum):
    """Value of a peer to the node. Connections of more valuable peers are less likely to be replaced."""

    UNKNOWN = 0
    """a peer in the handshake, or one that was not the first to deliver any message in the last minutes"""
    USEFUL = 1
    """a peer that was the first to deliver a valid message in the last minutes"""
    RESERVED = 2
    """a bootstrap peer, whose connection is never replaced"""


@dataclass(eq=False, slots=True)
class Slot:
    """An inbound connection, with its address and the network prefix of the address."""

    stream: ReadWriteCloser
    address: str
    prefix: str = field(init=False)
    is_global: bool = field(init=False)
    peer: bytes | None = None  # known after the handshake

    def __post_init__(self) -> None:
        self.prefix, self.is_global = self.address, False
        try:
            ip = ipaddress.ip_address(self.address.partition("%")[0])  # without the zone of a link-local address
        except ValueError:
            return
        if isinstance(ip, ipaddress.IPv6Address):
            ip = ip.ipv4_mapped or ip
        bits = _IPV4_PREFIX if ip.version == 4 else _IPV6_PREFIX
        self.prefix = str(ipaddress.ip_network(f"{ip}/{bits}", strict=False))
        self.is_global = ip.is_global


class InboundSlots:
    """A limited number of inbound connections, in handshake or established.

    If all slots are taken, a new connection replaces another one, so that idle connections cannot keep new peers out.
    The replaced connection is in the network prefix with most connections, and within the prefix, at the address with
    most connections. Of the connections at this address, one whose peer is not useful is replaced first.

    Connections of useful peers are protected unless their prefix has more than a quarter of all slots, because an
    attacker could make many peers useful. The quarter does not apply to private networks and loopback, which many
    honest peers may share. Bootstrap peers are always protected. If all connections are protected, the new one is
    refused.
    """

    def __init__(self, limit: int, value: Callable[[bytes], PeerValue] = lambda peer: PeerValue.UNKNOWN) -> None:
        """Create `limit` free slots.

        Args:
            value: Returns the present value of a connected peer.
        """
        self._limit = limit
        self._value = value
        self._slots: dict[ReadWriteCloser, Slot] = {}
        self.counters = {"connections_evicted": 0, "connections_refused": 0, "handshakes_failed": 0}

    def __len__(self) -> int:
        return len(self._slots)

    def take(self, stream: ReadWriteCloser, address: str) -> Slot | None:
        """Give a slot to a new connection.

        Args:
            address: The IP address of the other end.

        Returns:
            The connection that the caller must close, which is the new one if it is refused; `None` if there is none.
        """
        slot = Slot(stream, address)
        evicted = self._find_worst() if len(self._slots) >= self._limit else None
        if evicted is not None:
            del self._slots[evicted.stream]
            self.counters["connections_evicted"] += 1
        elif len(self._slots) >= self._limit:
            self.counters["connections_refused"] += 1
            return slot
        self._slots[stream] = slot
        return evicted

    def identify(self, stream: ReadWriteCloser, peer: bytes) -> None:
        """Record the peer id of a connection after its handshake."""
        if slot := self._slots.get(stream):
            slot.peer = peer

    def release(self, stream: ReadWriteCloser) -> None:
        """Free the slot of a connection that has ended."""
        self._slots.pop(stream, None)

    def _find_worst(self) -> Slot | None:
        prefixes = Counter(slot.prefix for slot in self._slots.values())
        addresses = Counter(slot.address for slot in self._slots.values())
        worst: tuple[tuple[int, int, int, float], Slot] | None = None
        for slot in self._slots.values():
            value = PeerValue.UNKNOWN if slot.peer is None else self._value(slot.peer)
            crowd = prefixes[slot.prefix]
            crowded = slot.is_global and crowd > max(1, self._limit // _LARGEST_SHARE)
            if value == PeerValue.RESERVED or (value == PeerValue.USEFUL and not crowded):
                continue
            rank = (-crowd, -addresses[slot.address], int(value), random.random())
            if worst is None or rank < worst[0]:
                worst = rank, slot
        return worst[1] if worst is not None else None
