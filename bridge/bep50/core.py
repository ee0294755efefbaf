"""What the nodes on one UDP port share: an id, settings, chance, timers, and what there is to send and to tell.

Nothing here reads a clock or touches a socket: whoever drives the machine says what time it is (seconds of any
monotonic clock) and carries away the output. The same calls at the same times, with the same seed, give the same
datagrams.
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
    """How an overlay behaves. Times in seconds."""

    timeout: float = 2.0
    """A query without an answer after this time is lost."""
    refresh: float = 45.0
    """How often each contact is asked for the item. It renews write tokens, heals losses, and keeps the mapping of a
    NAT open, which may close after 60 s without traffic."""
    token_use: float = 240.0
    """For how long another node's write token is used. BEP 5: it is taken for 5 minutes at least."""
    announce: float = 900.0
    """How often peers are looked up in the plain DHT, and we are announced there."""
    plain_put: float = 3600.0
    """How often a publisher's item is put into the plain DHT (BEP 44: once an hour)."""
    silence: float = 30.0
    """For how long an address that did not answer is not probed again, unless it asks us something."""
    nodes: int = 8
    """How many nodes a response names at most. BEP 50's K = 1 can be read as one; with more a node joins sooner."""
    probes: int = 16
    """How many addresses of a topic are probed at a time."""
    per_ip: int = 2
    """How many contacts of one IP a routing table takes; 0: any number."""
    bound_ids: bool = False
    """Whether contacts must have an id that BEP 42 allows their IP. Behind a NAT a node may not know its IP, and so not
    have one."""
    rate: float = 200.0
    """Queries a second answered to one IPv4 address, or one /64 of IPv6; it also bounds what a host is sent under whose
    address others ask."""
    burst: float = 400.0
    """Queries answered to it at once."""


Via = Literal["put", "get", "plain", "publish"]


class ItemTransfer(NamedTuple):
    """A datagram that carries an item of a topic went in or out; nothing in it was checked yet."""

    target: bytes
    direction: Literal["in", "out"]
    datagram: bytes
    address: DhtAddress
    node: bytes
    """The other node's id; empty where it is not known."""


class ItemUpdate(NamedTuple):
    """A topic has a new item, verified: keep it (BEP 50, Subscribing to topics), before the output is sent."""

    target: bytes
    item: Item
    via: Via
    source: DhtAddress | None
    kept: Item | None
    """The one that it replaces."""


class ItemConflict(NamedTuple):
    """An item, well signed, that should not be there.

    Another value under the sequence number of the kept item, which stays. Or, with ``ours``, any newer item where we
    publish under that key: somebody else does too, and our publishing has stopped.
    """

    target: bytes
    kept: Item
    other: Item
    ours: bool
    source: DhtAddress | None


class ItemAcknowledgement(NamedTuple):
    """A contact has our published item."""

    target: bytes
    sequence: int
    address: DhtAddress


class PlainStoreResult(NamedTuple):
    """So many nodes of the plain DHT took our item."""

    target: bytes
    sequence: int
    nodes: int


class ConnectivityChange(NamedTuple):
    """A topic has its first contact, or has lost its last one."""

    target: bytes
    connected: bool


Event: TypeAlias = (
    ItemTransfer | ItemUpdate | ItemConflict | ItemAcknowledgement | PlainStoreResult | ConnectivityChange
)


class Datagram(NamedTuple):
    """Bytes to send to an address."""

    data: bytes
    address: DhtAddress


class OverlayEffects(NamedTuple):
    """What a call resulted in: tell the events first, then send the datagrams."""

    datagrams: list[Datagram]
    events: list[Event]


class OverlayCore:
    """Time, chance, timers and output of one UDP port."""

    def __init__(self, node_id: bytes, port: int, random: Random, settings: OverlaySettings, now: float) -> None:
        self.id = node_id
        """BEP 50: "Nodes for different topics with the same listen address SHOULD use the same node id"."""
        self.port = port
        self.random = random
        self.settings = settings
        self.now = now
        self.datagram = b""
        """The datagram that is being taken in, as it came."""
        self.dropped: Counter[str] = Counter()
        """Datagrams that changed nothing, by reason."""
        self._datagrams: list[Datagram] = []
        self._events: list[Event] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def send(self, message: Message, address: DhtAddress, node: bytes = b"", target: bytes | None = None) -> None:
        """Send a message. ``target`` is that of an item in it, where its topic does not say: in the plain DHT."""
        data = write_message(message)
        target = message.topic or target
        self._datagrams.append(Datagram(data, address))
        fields = message.arguments if isinstance(message, KrpcQuery) else None
        fields = message.values if isinstance(message, KrpcResponse) else fields
        if target is not None and fields is not None and b"v" in fields:
            self.emit(ItemTransfer(target, "out", data, address, node))

    def send_error(self, error: KrpcError, address: DhtAddress) -> None:
        """Answer with an error, and count it."""
        self.dropped[f"refused_{error.refusal.code}"] += 1
        self.send(error, address)

    def emit(self, event: Event) -> None:
        self._events.append(event)

    def schedule(self, delay: float, action: Callable[[], None]) -> None:
        """Call ``action`` in ``delay`` seconds."""
        self._count += 1  # timers of one instant run in the order they were set
        heapq.heappush(self._timers, (self.now + delay, self._count, action))

    def jitter(self, delay: float) -> float:
        """The delay, up to a tenth more or less: nodes started together shall not act together for ever."""
        return delay * self.random.uniform(0.9, 1.1)

    @property
    def deadline(self) -> float | None:
        """When the next timer is due."""
        return self._timers[0][0] if self._timers else None

    def advance(self, now: float) -> None:
        """Let time pass: run every timer that is due, each at its own time. Time never goes back."""
        while self._timers and self._timers[0][0] <= now:
            due, _, action = heapq.heappop(self._timers)
            self.now = max(self.now, due)
            action()
        self.now = max(self.now, now)

    def pop_effects(self) -> OverlayEffects:
        """Take the output that has gathered."""
        output = OverlayEffects(self._datagrams, self._events)
        self._datagrams, self._events = [], []
        return output
