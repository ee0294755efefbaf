"""BEP 50, publish/subscribe over the BitTorrent DHT, as a state machine: datagrams and the time go in, datagrams and
events come out. `kiln.bridge.bep50.socket` provides the clock and the sockets.

BEP 50 pushes a mutable item (BEP 44), called a topic, to its subscribers. The subscribers of a topic form an overlay of
their own, and find each other through the plain DHT. On one UDP port, we have a node for the plain DHT and one for each
joined topic. All have the same id, so the key ``c`` of a message selects the node:

    c absent            the node in the plain DHT                    kiln.bridge.bep50.plain
    c = target          the node of the topic with this target       kiln.bridge.bep50.topic
    c = another         none: a query is refused, a response dropped
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

from kiln.bridge.bep50.core import OverlayCore, OverlayEffects, OverlaySettings
from kiln.bridge.bep50.limits import RateLimits, WriteTokens
from kiln.bridge.bep50.plain import PlainNode
from kiln.bridge.bep50.topic import ItemPublishError, TopicNode
from kiln.schemas.dht.items import Item
from kiln.schemas.dht.items import compute_target as target_of
from kiln.schemas.dht.krpc import (
    MALFORMED,
    UNKNOWN_TOPIC,
    DhtAddress,
    KrpcError,
    KrpcQuery,
    MalformedDatagram,
    read_message,
)


class Overlay:
    """All our nodes on one UDP port.

    Args:
        port: The port to announce.
        random: Source of transaction ids and secrets: `SystemRandom` in production, a seeded `Random` in a test.
        now: The current time, in seconds of the caller's monotonic clock.
        bootstrap: Nodes of the plain DHT. If there are none, the plain DHT is not used, and topics are joined only
            through known contacts.
    """

    def __init__(
        self,
        node_id: bytes,
        port: int,
        random: Random,
        now: float,
        settings: OverlaySettings | None = None,
        bootstrap: Iterable[DhtAddress] = (),
    ) -> None:
        self.settings = settings or OverlaySettings()
        self.topics: dict[bytes, TopicNode] = {}
        """Joined topics by target."""
        self._core = OverlayCore(node_id, port, random, self.settings, now)
        self._tokens = WriteTokens(random.randbytes(32))
        self._rates = RateLimits(self.settings.rate, self.settings.burst)
        self.plain = PlainNode(self._core, bootstrap, self._item)
        self.dropped = self._core.dropped
        """Number of datagrams that were dropped or refused, by reason."""

    @property
    def node_id(self) -> bytes:
        return self._core.id

    @property
    def deadline(self) -> float | None:
        """Time at which `advance` must be called next; `None` if no timer is set."""
        return self._core.deadline

    def subscribe(
        self,
        key: bytes,
        salt: bytes,
        now: float,
        stored: Item | None = None,
        contacts: Sequence[DhtAddress] = (),
        publishing: bool = False,
    ) -> OverlayEffects:
        """Join the topic of a key and a salt, unless it is joined already.

        Args:
            stored: The newest item of an earlier run, if any. Other nodes get it at once.
            contacts: Addresses of nodes to try first, from an earlier run or from the settings.
            publishing: True if the topic is ours, so that ``stored`` is the last item that we published.

        Raises:
            ValueError: ``stored`` belongs to another topic.
        """
        if stored is not None and (stored.key, stored.salt) != (key, salt):
            raise ValueError(
                f"cannot join topic {target_of(key, salt).hex()}: the stored item has the target {stored.target.hex()}"
            )
        self._core.advance(now)
        if target_of(key, salt) not in self.topics:
            topic = TopicNode(self._core, self.plain, self._tokens, key, salt, stored, contacts, publishing)
            self.topics[topic.target] = topic
        return self._core.pop_effects()

    def unsubscribe(self, target: bytes, now: float) -> OverlayEffects:
        """Leave a topic."""
        self._core.advance(now)
        topic = self.topics.pop(target, None)
        if topic is not None:
            topic.close()
        return self._core.pop_effects()

    def publish(self, item: Item, now: float) -> OverlayEffects:
        """Publish an item in its topic (BEP 50: a publisher "SHOULD also subscribe to the topic").

        Raises:
            ItemPublishError: The topic is not joined, the item is not newer than the topic's or not correctly signed,
                or another publisher uses the topic's key.
        """
        self._core.advance(now)
        topic = self.topics.get(item.target)
        if topic is None:
            raise ItemPublishError(f"cannot publish in topic {item.target.hex()}: it is not joined")
        topic.publish(item)
        return self._core.pop_effects()

    def advance(self, now: float) -> OverlayEffects:
        """Set the time to ``now``, and run all timers that are due."""
        self._core.advance(now)
        return self._core.pop_effects()

    def receive(self, datagram: bytes, source: DhtAddress, now: float) -> OverlayEffects:
        """Process a received datagram. An invalid one is dropped or refused, and raises no exception."""
        self._core.advance(now)
        self._core.datagram = datagram
        message = read_message(datagram)
        if not source.usable:
            self.dropped["unusable_source"] += 1
        elif isinstance(message, MalformedDatagram):
            self._refuse_malformed(message, source)
        elif not isinstance(message, KrpcQuery):
            node = self.plain if message.topic is None else self.topics.get(message.topic)
            if node is None or not node.transactions.handle_response(message, source):
                self.dropped["not_asked_for"] += 1
        elif not self._rates.allows(source.ip, self._core.now):  # responses are bounded by our queries
            self.dropped["too_many_queries"] += 1
        elif message.topic is None:
            self.plain.handle_query(message, source)
        elif message.topic in self.topics:
            self.topics[message.topic].handle_query(message, source)
        else:
            self._core.send_error(KrpcError(message.transaction, UNKNOWN_TOPIC, message.topic), source)
        return self._core.pop_effects()

    def _refuse_malformed(self, message: MalformedDatagram, source: DhtAddress) -> None:
        self.dropped[message.reason] += 1
        if message.transaction is not None and self._rates.allows(source.ip, self._core.now):
            self._core.send_error(KrpcError(message.transaction, MALFORMED, message.topic), source)

    def _item(self, target: bytes) -> Item | None:
        topic = self.topics.get(target)
        return topic.item if topic is not None else None
