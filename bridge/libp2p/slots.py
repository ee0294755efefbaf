"""Slots of inbound connections, and which connection gives up its slot to a new one when all are taken."""

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
_LARGEST_SHARE: Final = 4  # a prefix with more than one of this many slots has no protected connections


class PeerValue(IntEnum):
    """Value of a peer to the node."""

    UNKNOWN = 0
    """a peer that has delivered no message, or has not shown its identity"""
    USEFUL = 1
    """a peer that was the first to deliver some messages"""
    RESERVED = 2
    """a bootstrap peer, which keeps its slot"""


@dataclass(eq=False, slots=True)
class Slot:
    """An inbound connection."""

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

    If all slots are taken, a new connection takes the slot of another one, so that silent connections cannot keep
    others out. The other one is in the network prefix with the most connections, there at the address with the most,
    and if possible of a peer that delivered nothing. Useful peers keep their slots while others exist, unless their
    prefix has a quarter of all slots: one attacker with many peers could make them all useful. The quarter is for
    global addresses, since many peers may share a private network or loopback. A new connection is refused if every
    slot is protected.
    """

    def __init__(self, limit: int, value: Callable[[bytes], PeerValue] = lambda peer: PeerValue.UNKNOWN) -> None:
        """Create the slots.

        Args:
            value: The present value of a connected peer.
        """
        self._limit = limit
        self._value = value
        self._slots: dict[ReadWriteCloser, Slot] = {}
        self.counters = {"connections_evicted": 0, "connections_refused": 0, "handshakes_failed": 0}

    def __len__(self) -> int:
        return len(self._slots)

    def take(self, stream: ReadWriteCloser, address: str) -> Slot | None:
        """Give a new connection a slot, and return the connection to close for it, if any: perhaps the new one.

        Args:
            address: The IP address of the other end.
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
        """Record the identity that the other end of a connection proved."""
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
