"""State that all nodes on one UDP port share: id, settings, random source, timers, datagrams to send, and events.

There is no I/O. The caller passes the time, in seconds of any monotonic clock, and sends the datagrams. The same calls
at the same times, with the same seed, give the same datagrams.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Literal, NamedTuple, TypeAlias

from msgspec import Struct

from kiln.schemas.dht.items import Item
from kiln.schemas.dht.krpc import DhtAddress, KrpcError, KrpcQuery, KrpcResponse, Message, write_message


class OverlaySettings(Struct, frozen=True):
    """Settings of an overlay. Times in seconds."""

    timeout: float = 2.0
    """Time after which an unanswered query counts as lost."""
    refresh: float = 45.0
    """Interval of the gets sent to each contact. A get renews the write token, and fetches an item whose put was lost.
    It also keeps the mapping of a NAT open, which may close after 60 s without traffic."""
    token_use: float = 240.0
    """Time for which a write token from another node is used. Tokens are valid for at least 5 minutes (BEP 5)."""
    announce: float = 900.0
    """Interval of the lookups of peers in the plain DHT, and of our announcements there."""
    plain_put: float = 3600.0
    """Interval at which a publisher's item is put into the plain DHT (BEP 44: once an hour)."""
    probe_pause: float = 30.0
    """Time before an address that did not respond is probed again, unless the address sends a query."""
    nodes: int = 8
    """Maximum number of nodes that a response names. BEP 50's K = 1 could mean one node, but with more nodes in the
    responses, new nodes join faster."""
    probes: int = 16
    """Maximum number of addresses that each topic probes at a time."""
    per_ip: int = 2
    """Maximum number of contacts with one IP in a routing table; 0 is no limit."""
    rate: float = 200.0
    """Queries per second that are answered to one IPv4 address, or one IPv6 network of /64. This also limits the
    traffic to a host whose address others spoof."""
    burst: float = 400.0
    """Maximum number of queries from one address that are answered at once."""


Via = Literal["put", "get", "plain", "publish"]


class ItemTransfer(NamedTuple):
    """A datagram with an item of a topic, received or sent. The item is not verified yet."""

    target: bytes
    direction: Literal["in", "out"]
    datagram: bytes
    address: DhtAddress
    node: bytes
    """The other node's id; empty if unknown."""


class ItemUpdate(NamedTuple):
    """A new, verified item of a topic. Store it before the datagrams are sent (BEP 50, Subscribing to topics)."""

    target: bytes
    item: Item
    via: Via
    source: DhtAddress | None
    stored: Item | None
    """The item that the new item replaces, if any."""


class ItemConflict(NamedTuple):
    """A correctly signed item that conflicts with the stored item.

    If ``is_own`` is false, the two have the same sequence number and different values, and the stored item stays. If
    ``is_own`` is true, another publisher signed the item with our key, so our publishing has stopped.
    """

    target: bytes
    stored: Item
    other: Item
    is_own: bool
    source: DhtAddress | None


class PlainStoreResult(NamedTuple):
    """The number of nodes of the plain DHT that stored our item."""

    target: bytes
    sequence: int
    nodes: int


Event: TypeAlias = ItemTransfer | ItemUpdate | ItemConflict | PlainStoreResult


class Datagram(NamedTuple):
    """Bytes to send to an address."""

    data: bytes
    address: DhtAddress


class OverlayEffects(NamedTuple):
    """Output of a call: handle the events first, then send the datagrams."""

    datagrams: list[Datagram]
    events: list[Event]


class OverlayCore:
    """Time, random source, timers and output of one UDP port."""

    def __init__(self, node_id: bytes, port: int, random: Random, settings: OverlaySettings, now: float) -> None:
        self.id = node_id
        """BEP 50: "Nodes for different topics with the same listen address SHOULD use the same node id"."""
        self.port = port
        self.random = random
        self.settings = settings
        self.now = now
        self.datagram = b""
        """The datagram that is being received, unparsed."""
        self.dropped: Counter[str] = Counter()
        """Number of datagrams that were dropped or refused, by reason."""
        self._datagrams: list[Datagram] = []
        self._events: list[Event] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def send(self, message: Message, address: DhtAddress, node: bytes = b"", target: bytes | None = None) -> None:
        """Add a message to the datagrams to send. If it contains an item, also emit an `ItemTransfer`.

        Args:
            node: The receiver's id, if known.
            target: The target of the item in a message of the plain DHT, which has no topic.
        """
        data = write_message(message)
        target = message.topic or target
        self._datagrams.append(Datagram(data, address))
        fields = message.arguments if isinstance(message, KrpcQuery) else None
        fields = message.values if isinstance(message, KrpcResponse) else fields
        if target is not None and fields is not None and b"v" in fields:
            self.emit(ItemTransfer(target, "out", data, address, node))

    def send_error(self, error: KrpcError, address: DhtAddress) -> None:
        """Send an error as the response to a query, and count it in `dropped`."""
        self.dropped[f"refused_{error.refusal.code}"] += 1
        self.send(error, address)

    def emit(self, event: Event) -> None:
        self._events.append(event)

    def schedule(self, delay: float, action: Callable[[], None]) -> None:
        """Call ``action`` in ``delay`` seconds."""
        self._count += 1  # timers of one instant run in the order they were set
        heapq.heappush(self._timers, (self.now + delay, self._count, action))

    def jitter(self, delay: float) -> float:
        """Change a delay at random by up to 10 %, so that nodes that start together do not act together."""
        return delay * self.random.uniform(0.9, 1.1)

    @property
    def deadline(self) -> float | None:
        """Time of the next timer; `None` if no timer is set."""
        return self._timers[0][0] if self._timers else None

    def advance(self, now: float) -> None:
        """Run all timers that are due until ``now``, in their order, and set the time to ``now``."""
        while self._timers and self._timers[0][0] <= now:
            due, _, action = heapq.heappop(self._timers)
            self.now = max(self.now, due)
            action()
        self.now = max(self.now, now)

    def pop_effects(self) -> OverlayEffects:
        """Return the datagrams and events since the last call, and clear them."""
        output = OverlayEffects(self._datagrams, self._events)
        self._datagrams, self._events = [], []
        return output
