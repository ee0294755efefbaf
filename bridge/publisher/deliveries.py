"""Queue of the batches to publish. Batches whose topic has peers take turns; the others are parked.

Anyone can cause batches: an update of a new stream with a new model makes a batch of its own, and most topics of such
models have no peer. A batch without a peer is therefore parked: it delays no other batch, and is not attempted. The
other batches take turns at three levels: the peer that receives them, whether their separator has reached a peer
before, and their separator. So a peer gets its batches in time, however many batches there are for other peers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Final, NamedTuple

from kiln.bridge.fair_queue import FairQueue, Path
from kiln.bridge.publisher.transition import BY_SEPARATOR
from kiln.conf.process.bounded_dict import BoundedDict
from kiln.schemas.kafka.records import BatchRecord
from kiln.schemas.wire.pubsub import write_batch_update
from kiln.schemas.wire.topics import Separator

NO_PEER: Final = "no peer on the topic"
NO_TURN: Final = "too many other batches wait, so this one had no turn"
MIN_PATIENCE: Final = 10_000_000
"""time in µs that each batch may wait for a peer or for its turn, even if too many batches wait"""
_MAX_REACHED: Final = 10_000  # separators that are known to have reached a peer
_MAX_LOOKUP: Final = 10_000  # topics in one call of `Subscribers`, which runs in the node's thread
_MAX_GIVEN_UP: Final = 5_000  # batches given up early at one check

Flow = tuple[str, Separator]
"""Topic and separator. Deliveries of the same topic and separator keep their order."""

Subscribers = Callable[[Collection[str]], Mapping[str, Collection[Hashable]]]
"""Function that returns the peers of each given topic, without the topics that have no peer."""


class OpenRecord:
    """A record of `kiln.batches` with receipts that the broker has not acknowledged."""

    __slots__ = ("missing", "offset", "partition")

    def __init__(self, partition: int, offset: int) -> None:
        self.partition = partition
        self.offset = offset
        self.missing = 1
        """number of receipts that the broker has not acknowledged; negative once another bridge has the partition"""


class PendingPublication:
    """A batch and its deliveries, one per topic."""

    __slots__ = (
        "batch",
        "data",
        "deliveries",
        "is_stored",
        "receipted_topics",
        "record",
        "separator",
        "topic",
    )

    def __init__(self, record: OpenRecord, batch: BatchRecord, batch_typ: int) -> None:
        """Build the message that announces the batch.

        Raises:
            TopicError, CidError: the separator or the CID of the batch is invalid.
        """
        self.record = record
        self.batch = batch
        self.separator = Separator(batch.separator.key, batch.separator.value)
        self.topic = BY_SEPARATOR.topics_of(batch.network, self.separator)[0]
        """the topic of the separator"""
        self.data = write_batch_update(self.separator, batch.batch_cid, batch_typ)
        """the encoded message that announces the batch"""
        self.deliveries: dict[str, TopicDelivery] = {}
        """deliveries without a receipt, by topic"""
        self.receipted_topics: frozenset[str] = frozenset()
        self.is_stored = False
        """true once the block is in IPFS"""


class TopicDelivery:
    """The delivery of one batch to one topic."""

    __slots__ = ("flow", "has_ended", "publication", "topic", "waits_since")

    def __init__(self, publication: PendingPublication, topic: str) -> None:
        self.publication = publication
        self.topic = topic
        self.flow: Flow = topic, publication.separator
        self.has_ended = False
        """true once the delivery has a receipt or needs none, even if it is still queued"""
        self.waits_since: int | None = None
        """time by the queue's clock, in µs, when the delivery was first queued; `None` before"""


class GivenUp(NamedTuple):
    """A delivery that is given up, and the error of its receipt."""

    delivery: TopicDelivery
    error: str


class DeliveryQueue:
    """The deliveries that are not sent yet.

    A delivery that has waited for a peer for `patience` is given up. Time while publishing is paused does not count. If
    too many deliveries wait, a delivery is given up after `MIN_PATIENCE`, even if it only waits for its turn, unless an
    earlier one of its topic and separator has reached a peer. This early end does not apply while no delivery at all
    reaches a peer.
    """

    def __init__(self, patience: int, retry_every: int, subscribers: Subscribers | None = None) -> None:
        """Create an empty queue.

        Args:
            patience: longest wait for a peer, in µs.
            retry_every: time between two checks for peers, in µs.
            subscribers: finds the peers of topics. If it is `None`, only an attempt shows whether a topic has a peer.
                Each delivery is then attempted before it is given up, since the transport may keep it for a peer that
                comes later.
        """
        self._patience = patience
        self._retry_every = retry_every
        self._subscribers = subscribers
        self._ready: FairQueue[TopicDelivery] = FairQueue()
        self._paths: dict[Flow, Path] = {}  # paths of the flows in `_ready`
        self._parked: dict[Flow, list[TopicDelivery]] = {}  # without a peer
        self._parked_count = 0
        self._reasons: dict[Flow, str] = {}  # reasons of the parked flows that were attempted
        self._reached = BoundedDict[Flow, int](_MAX_REACHED)  # when a peer was last reached; the oldest first
        self._clock = 0  # total time in µs without pauses
        self._advanced_at: int | None = None  # `None` while publishing is paused
        self._check_at = 0

    def __len__(self) -> int:
        return len(self._ready) + self._parked_count

    @property
    def has_ready(self) -> bool:
        """True if there is a delivery that can be attempted."""
        return len(self._ready) > 0

    @property
    def parked_flows(self) -> Collection[Flow]:
        """Topics and separators without a peer, longest wait first. The view changes with the queue."""
        return self._parked.keys()

    def time_to_check(self, now: int) -> int:
        """Return the time until the next check for peers, in µs."""
        return max(0, self._check_at - now)

    def advance(self, now: int) -> None:
        """Advance the queue's clock by the time since the last call, unless `pause` was called in between."""
        if self._advanced_at is not None:
            self._clock += max(0, now - self._advanced_at)
        self._advanced_at = now

    def pause(self) -> None:
        """Stop the queue's clock until the next `advance`. The next `check` then looks for peers at once."""
        self._advanced_at = None
        self._check_at = 0

    def add(self, deliveries: Sequence[TopicDelivery]) -> None:
        """Add deliveries, each after the earlier ones of its topic and separator."""
        peers = self._find_peers({delivery.topic for delivery in deliveries})
        for delivery in deliveries:
            if delivery.waits_since is None:
                delivery.waits_since = self._clock
            flow = delivery.flow
            if flow in self._parked or (peers is not None and delivery.topic not in peers and flow not in self._paths):
                self._park(flow, [delivery])
            else:
                self._ready.extend(self._choose_path(flow, peers), [delivery])

    def take(self, limit: int) -> list[TopicDelivery]:
        """Remove and return the next deliveries, at most `limit`, in the order of their turns."""
        taken = [self._ready.pop() for _ in range(min(limit, len(self._ready)))]
        for flow in {delivery.flow for delivery in taken}:
            if not self._ready.count(self._paths[flow]):
                del self._paths[flow]
        return taken

    def drain(self) -> list[TopicDelivery]:
        """Remove and return all deliveries."""
        taken = [*self.take(len(self._ready)), *(delivery for parked in self._parked.values() for delivery in parked)]
        self._parked.clear()
        self._reasons.clear()
        self._parked_count = 0
        return taken

    def record_reached(self, delivery: TopicDelivery) -> None:
        """Record that an attempt reached a peer."""
        self._reached[delivery.flow] = self._clock

    def give_up(self, delivery: TopicDelivery, reason: str) -> GivenUp | None:
        """Give up a delivery, after an attempt that reached no peer, if it has waited for `patience`.

        Args:
            reason: why the attempt reached no peer.

        Returns:
            `None` if the delivery may wait longer.
        """
        waited = self._waited(delivery)
        return GivenUp(delivery, _describe(reason, waited)) if waited >= self._patience else None

    def put_back(self, deliveries: Sequence[TopicDelivery], reason: str) -> None:
        """Put deliveries back, after an attempt that reached no peer. They then wait for a peer, and come
        before the queued deliveries of their topic and separator.

        Args:
            deliveries: deliveries of one topic and separator.
            reason: why the attempt reached no peer.
        """
        flow = deliveries[0].flow
        behind = [*self._remove_ready(flow), *self._remove_parked(flow)]
        self._park(flow, [*deliveries, *behind])
        self._reasons[flow] = reason

    def check(self, now: int, is_full: bool = False) -> list[GivenUp]:
        """Look for peers of the deliveries that wait for one, at most once per `retry_every`. Return the deliveries
        given up.

        Args:
            is_full: true if too many deliveries wait, so that some are given up early.
        """
        if now < self._check_at:
            return []
        self._check_at = now + self._retry_every
        peers = self._find_peers({topic for topic, _ in self._parked})
        given_up: list[GivenUp] = []
        for flow in list(self._parked):
            if peers is None or flow[0] in peers:
                self._ready.extend(self._choose_path(flow, peers), self._remove_parked(flow))
            elif self._waited(self._parked[flow][0]) >= self._patience:
                given_up += self._give_up_parked(flow, self._patience)
        # if no peer was reached lately, waiting deliveries delay no others
        is_sending = self._clock - next(reversed(self._reached.values()), -self._patience) < self._patience
        return given_up + self._give_up_early() if is_full and is_sending else given_up

    def _find_peers(self, topics: Collection[str]) -> dict[str, Collection[Hashable]] | None:
        if self._subscribers is None:
            return None
        peers: dict[str, Collection[Hashable]] = {}
        names = list(topics)
        for start in range(0, len(names), _MAX_LOOKUP):
            peers |= self._subscribers(names[start : start + _MAX_LOOKUP])
        return peers

    def _choose_path(self, flow: Flow, peers: Mapping[str, Collection[Hashable]] | None) -> Path:
        path = self._paths.get(flow)
        if path is None:
            # choose the peer with the fewest waiting deliveries: a peer that is on all topics delays no other
            receivers = (peers or {}).get(flow[0], ())
            receiver = min(receivers, key=lambda peer: self._ready.count((peer,)), default=None)
            path = self._paths[flow] = (receiver, flow in self._reached, flow)
        return path

    def _park(self, flow: Flow, deliveries: list[TopicDelivery]) -> None:
        self._parked.setdefault(flow, []).extend(deliveries)
        self._parked_count += len(deliveries)

    def _remove_ready(self, flow: Flow) -> Sequence[TopicDelivery]:
        path = self._paths.pop(flow, None)
        return () if path is None else self._ready.remove(path)

    def _remove_parked(self, flow: Flow) -> list[TopicDelivery]:
        deliveries = self._parked.pop(flow, [])
        self._parked_count -= len(deliveries)
        self._reasons.pop(flow, None)
        return deliveries

    def _waited(self, delivery: TopicDelivery) -> int:
        return self._clock - max(delivery.waits_since or 0, self._reached.get(delivery.flow, 0))

    def _give_up_parked(self, flow: Flow, patience: int) -> list[GivenUp]:
        reason = self._reasons.get(flow, NO_PEER)
        deliveries = self._remove_parked(flow)
        count = sum(self._waited(delivery) >= patience for delivery in deliveries)  # the first ones have waited longest
        if count < len(deliveries):
            self._park(flow, deliveries[count:])
            self._reasons[flow] = reason
        return [GivenUp(delivery, _describe(reason, self._waited(delivery))) for delivery in deliveries[:count]]

    def _give_up_early(self) -> list[GivenUp]:
        """Give up deliveries of flows that have reached no peer: first parked ones, then ones that wait for a turn."""
        given_up: list[GivenUp] = []
        patience = min(self._patience, MIN_PATIENCE)
        for flow in [flow for flow in self._parked if flow not in self._reached]:
            if self._waited(self._parked[flow][0]) < patience or len(given_up) >= _MAX_GIVEN_UP:
                break
            given_up += self._give_up_parked(flow, patience)
        for flow in [flow for flow in self._paths if flow not in self._reached]:
            first = self._ready.peek(self._paths[flow])
            if first is None or self._waited(first) < patience or len(given_up) >= _MAX_GIVEN_UP:
                break
            given_up += self._give_up_ready(flow, patience)
        return given_up

    def _give_up_ready(self, flow: Flow, patience: int) -> list[GivenUp]:
        path = self._paths[flow]
        deliveries = list(self._remove_ready(flow))
        count = sum(self._waited(delivery) >= patience for delivery in deliveries)
        if count < len(deliveries):
            self._paths[flow] = path
            self._ready.extend(path, deliveries[count:])
        return [GivenUp(delivery, _describe(NO_TURN, self._waited(delivery))) for delivery in deliveries[:count]]


def _describe(reason: str, waited: int) -> str:
    return f"{reason} for {waited / 1e6:.0f} s"
