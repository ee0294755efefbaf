"""BEP 50, publish/subscribe over the BitTorrent DHT, as a state machine: datagrams and the time go in, datagrams and
events come out. No clock, no socket: `kiln.bridge.bep50.socket` has both.

BEP 50 modifies the DHT's protocol so that a mutable item (BEP 44) is pushed to whoever follows it. Those who follow one
item, a topic, form an overlay of their own, found through the plain DHT. All nodes on one UDP port share an id; the key
``c`` of a message says whose it is:

    c absent            the plain DHT's                              kiln.bridge.bep50.plain
    c = target          the topic's with this target                 kiln.bridge.bep50.topic
    c = another         nobody's here: a query is refused, an answer dropped
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

from kiln.bridge.bep50.core import OverlayCore, OverlayEffects, OverlaySettings
from kiln.bridge.bep50.limits import RateLimits, WriteTokens
from kiln.bridge.bep50.plain import PlainNode
from kiln.bridge.bep50.topic import ItemPublishError, TopicNode
from kiln.schemas.dht.items import Item
from kiln.schemas.dht.items import target as target_of
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
    """All nodes of one UDP port.

    ``now`` is the caller's monotonic clock, in seconds. ``random`` draws transactions and secrets: `SystemRandom` in
    earnest, a seeded `Random` in a test. ``port`` is announced. ``bootstrap`` are nodes of the plain DHT; with none the
    plain DHT is not used, and topics are joined by their contacts alone.
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
        """By target."""
        self._core = OverlayCore(node_id, port, random, self.settings, now)
        self._tokens = WriteTokens(random.randbytes(32))
        self._rates = RateLimits(self.settings.rate, self.settings.burst)
        self.plain = PlainNode(self._core, bootstrap, self._item)
        self.dropped = self._core.dropped
        """Datagrams that were dropped or refused, by reason."""

    @property
    def node_id(self) -> bytes:
        return self._core.id

    @property
    def deadline(self) -> float | None:
        """When `advance` must be called at the latest; None: only a call or a datagram can change anything."""
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
        """Join the topic of a key and a salt; nothing happens if it is joined already.

        ``stored`` is the newest item of an earlier run, which is served at once; ``contacts`` are addresses to begin
        with: those of an earlier run, or some given in the settings. ``publishing``: the topic is ours, and ``stored``
        the last item that we have published in it. Raises ValueError if ``stored`` is another topic's.
        """
        if stored is not None and (stored.key, stored.salt) != (key, salt):
            raise ValueError(f"the stored item is of {stored.target.hex()}, not of {target_of(key, salt).hex()}")
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

        Raises PublishError if the topic is not joined, if the item is not newer than the topic's or not well signed, or
        if another publisher of its key was seen.
        """
        self._core.advance(now)
        topic = self.topics.get(item.target)
        if topic is None:
            raise ItemPublishError(f"topic {item.target.hex()} is not joined: subscribe to it first")
        topic.publish(item)
        return self._core.pop_effects()

    def advance(self, now: float) -> OverlayEffects:
        """Let time pass."""
        self._core.advance(now)
        return self._core.pop_effects()

    def receive(self, datagram: bytes, source: DhtAddress, now: float) -> OverlayEffects:
        """Take in a datagram. Raises nothing, whatever is in it."""
        self._core.advance(now)
        self._core.datagram = datagram
        message = read_message(datagram)
        if not source.usable:
            self.dropped["unusable_source"] += 1
        elif isinstance(message, MalformedDatagram):
            self._refuse_malformed(message, source)
        elif not isinstance(message, KrpcQuery):
            taker = self.plain if message.topic is None else self.topics.get(message.topic)
            if taker is None or not taker.handle_response(message, source):
                self.dropped["not_asked_for"] += 1
        elif not self._rates.allows(source.ip, self._core.now):  # answers are bounded by what we ask
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
