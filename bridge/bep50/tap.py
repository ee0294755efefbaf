"""Make a Frame (docs/design/contracts.md) from each datagram that contains an item."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final

from kiln.bridge.bep50.core import ItemTransfer
from kiln.bridge.capture.tap import ConnectionTap
from kiln.schemas.dht.krpc import DhtAddress, Family
from kiln.schemas.kafka.frames import BEP50, CONNECTION_BYTES

MAX_OPEN: Final = 1024
"""Maximum number of open connections. Beyond it, the least recently used one is closed, because an attacker could open
any number from many addresses."""


class ItemTap:
    """Makes a Frame from each datagram with an item, and numbers the Frames of each connection.

    UDP has no connections. In a Frame, a connection is the traffic between another node and us about one topic. It
    begins with the first datagram. Its id is new each time, also after a restart, because connection, direction and
    number together identify a Frame.

    Args:
        node: Our node id.
        local: Our listen addresses.
        put: Called with the id of a connection and a serialized Frame.
    """

    def __init__(
        self, network: str, node: bytes, local: Mapping[Family, DhtAddress], put: Callable[[bytes, bytes], None]
    ) -> None:
        self._network = network
        self._node = node
        self._local = local
        self._put = put
        self._open: OrderedDict[tuple[bytes, DhtAddress, bytes], ConnectionTap] = OrderedDict()
        self._last_start = 0
        self.frames_in = 0
        self.frames_out = 0

    def record(self, transfer: ItemTransfer, now: int) -> None:
        """Make a Frame from a datagram, and pass it to `put`.

        Args:
            now: Unix time in ns.
        """
        if transfer.address.family not in self._local:  # no socket reaches the node, so the item is not sent
            return
        key = (transfer.target, transfer.address, transfer.node)
        connection = self._open.get(key)
        if connection is None:
            if len(self._open) >= MAX_OPEN:
                self._close(self._open.popitem(last=False)[1], now)
            connection = self._open[key] = self._open_connection(*key, now)
        self._open.move_to_end(key)
        if transfer.direction == "in":
            self.frames_in += 1
            self._put(connection.id, connection.frame("IN", transfer.datagram, now))
        else:
            self.frames_out += 1
            self._put(connection.id, connection.frame("OUT", transfer.datagram, now))

    def close(self, now: int) -> None:
        """Close all connections, and pass their closing Frames to `put`."""
        while self._open:
            self._close(self._open.popitem(last=False)[1], now)

    def _open_connection(self, target: bytes, remote: DhtAddress, node: bytes, now: int) -> ConnectionTap:
        self._last_start = max(now, self._last_start + 1)
        local = self._local[remote.family]
        name = local.compact + remote.compact + target + self._last_start.to_bytes(8, "big")
        connection = hashlib.sha256(name).digest()[:CONNECTION_BYTES]
        return ConnectionTap(self._network, connection, self._node, node, BEP50, remote.compact)

    def _close(self, connection: ConnectionTap, now: int) -> None:
        for frame in connection.close(now):
            self._put(connection.id, frame)
