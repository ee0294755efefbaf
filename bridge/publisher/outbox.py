"""Which batches go out next, and what became of them: a plain object with no clock, no socket and no Kafka."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from msgspec import structs

from kiln.bridge.ipfs import BlockRefusedError, BlockStoreUnavailableError, BlockUnavailableError
from kiln.bridge.kafka.position import KafkaPosition
from kiln.bridge.publisher.ledger import PublishLedger
from kiln.bridge.publisher.pace import AuthorPacer
from kiln.bridge.publisher.pins import PinsError
from kiln.bridge.publisher.transition import BY_SEPARATOR, TopicScheme
from kiln.schemas.kafka.records import (
    MAX_DETAIL,
    UNREADABLE,
    BatchRecord,
    PublicationRecord,
    decode_batch,
    encode,
    quarantine_record_key,
    quarantine_records,
)
from kiln.schemas.wire.cid import CidError
from kiln.schemas.wire.pubsub import write_batch_update
from kiln.schemas.wire.topics import Separator, TopicError

TRANSPORT: Final = "gossipsub"


TOO_OLD: Final = "too old"


NO_PEER: Final = "no peer on the topic"


IN_DOUBT: Final = "the bridge ended before it had the receipt: this batch of a backfill run is not published again"


MALFORMED: Final = "batch_malformed"
GONE: Final = "batches_gone"


MAX_OPEN: Final = 1_000  # batches read and not yet committed: what waits for peers must not fill the memory


MAX_BLOCK_BYTES: Final = 32 << 20  # bytes of blocks that wait for IPFS; one more poll may come on top


REMEMBERED: Final = 10_000
"""Batches of live that are remembered, by partition. A query that was stopped in the middle of a micro-batch writes the
batches of the micro-batch again: these do not go out a second time."""


RUNS_AT_ONCE: Final = 20  # of MAX_OPEN, batches of runs: those of live do not wait behind history


_Closing = tuple[str, str, str, int]
"""CID, separator, and when the batch closed: the same bytes may close again later, which is another batch."""


_KEEP_AT_ONCE: Final = 20  # blocks put into IPFS before what is there goes out


_KEEP_AGAIN: Final = 5_000_000  # µs; how old the last word of IPFS may be when something is published


class PublishError(RuntimeError):
    """An injected `publish` raises this when it could not try. The batch then waits as if there were no peer."""


@dataclass(frozen=True)
class PublishingOptions:
    """Times in µs."""

    network: str
    publish_timeout: int = 60_000_000
    """how long a batch waits for a peer"""
    retry_every: int = 1_000_000
    max_age: int = 60_000_000
    """on a first start: batches that closed longer ago are not published"""
    batch_typ: int = 3
    transport: str = TRANSPORT
    target: Callable[[str], str] | None = None
    """what the transport calls a topic, where it has a name of its own for it"""


class OutboxRecord(NamedTuple):
    """A record to write because of one batch. Once the broker has the record, the caller says `done` with its place."""

    place: KafkaPosition
    topic: str
    """`publications` or `quarantine`"""
    key: bytes
    value: bytes


class BlockKeeper(Protocol):
    """Keeps blocks before they are announced: `kiln.bridge.publisher.pins.BlockPins`, or another in tests."""

    def keep(self, cid: str, block: bytes, now: int) -> None:
        """Once this returns, peers can fetch the block. Does nothing if they can already.

        BlocksAwayError, BlockUnavailableError, PinsError: wait. BlockRefusedError: never.
        """
        ...

    def unpin_expired(self, now: int) -> int:
        """Unpins blocks that were kept for their time. BlocksAwayError, PinsError: later."""
        ...

    def close(self) -> None: ...


def number_of(partition: int, of_runs: bool) -> int:
    """How an Outbox numbers a partition: of `kiln.batches` as Kafka does, of `kiln.history` from -1 down."""
    return -1 - partition if of_runs else partition


class PendingPublication:
    """One batch on its way. Pure."""

    def __init__(self, place: KafkaPosition, batch: BatchRecord, batch_typ: int) -> None:
        """TopicError, CidError: no message can be made of it."""
        self.place = place
        self.cid = batch.cid
        self.block = batch.block
        self.network = batch.network
        self.separator = Separator(batch.separator.key, batch.separator.value)
        self.topic = BY_SEPARATOR.of(batch.network, self.separator)[0]
        self.data = write_batch_update(self.separator, batch.cid, batch_typ)
        self.to: dict[str, TopicDelivery] = {}
        """by topic, what has no receipt yet"""
        self.receipted: set[str] = set()
        """topics"""

    @property
    def of_run(self) -> bool:
        """Whether a backfill run made it."""
        return self.place.partition < 0

    def refused(self, why: str, now: int) -> PublicationRecord:
        """The receipt of a batch that is not published at all."""
        return PublicationRecord(self.cid, TRANSPORT, now, topic=self.topic, error=why)


class TopicDelivery:
    """One batch on its way to one topic. Pure: time comes from the caller, in µs."""

    def __init__(self, publication: PendingPublication, topic: str) -> None:
        self.publication = publication
        self.topic = topic
        self._waited = 0
        self._tried_at: int | None = None

    def tried(self, peers: int, now: int, timeout: int, why: str = NO_PEER) -> PublicationRecord | None:
        """After a try that reached so many peers: the receipt, or None where the batch waits on."""
        cid = self.publication.cid
        if peers:
            return PublicationRecord(cid, TRANSPORT, now, topic=self.topic, peers=peers)
        if self._tried_at is not None:
            self._waited += max(0, now - self._tried_at)
        self._tried_at = now
        if self._waited < timeout:
            return None
        error = f"{why} for {self._waited / 1e6:.0f} s"
        return PublicationRecord(cid, TRANSPORT, now, topic=self.topic, peers=0, error=error)

    def is_last_try(self, now: int, timeout: int) -> bool:
        """Whether the batch is given up unless this try reaches a peer."""
        since = 0 if self._tried_at is None else max(0, now - self._tried_at)
        return self._waited + since >= timeout

    def hold_back(self) -> None:
        """Time until the next try does not count: publishing was held back."""
        self._tried_at = None


class Outbox:
    """What to do with the records of the topics of batches, and up to which record all are dealt with. Pure, but for
    its ledger.

    The caller takes records in, calls `step` again and again, writes what comes out, and says `done` of each record
    that the broker has. `number_of` numbers the partitions of both topics.

    A batch of live may go out again after a crash. A batch of a backfill run goes out once on a topic (decision 26):
    the ledger says what a run's batch was handed to the node for, and `receipts` what went out before.
    """

    def __init__(
        self,
        options: PublishingOptions,
        ledger: PublishLedger | None = None,
        receipts: Callable[[], Mapping[str, Set[str]]] = dict,
    ) -> None:
        """`receipts`: topics by CID of what went out so far; asked when the first batch of a run comes. LedgerError,
        from every method that takes or publishes batches: the ledger cannot be used."""
        self._options = options
        self._ledger = PublishLedger() if ledger is None else ledger
        self._receipts = receipts
        self._went_out: dict[str, set[str]] | None = None  # topics by CID; None: not asked for yet
        self._not_before: dict[int, int] = {}
        self._from: dict[int, int] = {}
        self._taken: dict[int, dict[_Closing, None]] = {}  # of live, by partition; the oldest come first
        self._next: dict[int, int] = {}
        self._open: dict[int, deque[int]] = {}  # offsets not yet done, by partition, in order
        self._owed: dict[KafkaPosition, int] = {}  # of an open place: receipts the broker does not have yet
        self._new: deque[PendingPublication] = deque()  # not in IPFS yet
        self._lines: dict[str, deque[TopicDelivery]] = {}  # by topic
        self._due: dict[str, int] = {}
        self._held_back = False
        self._on = BY_SEPARATOR
        self._kept_at: int | None = None  # when IPFS last answered
        self._keep_again = 0
        self.away: str | None = None
        """why nothing can be put into IPFS now"""
        self.block_bytes = 0
        """bytes of the blocks of batches that are not out yet"""
        self.published = 0
        """publications that reached a peer"""
        self.failed = 0
        """receipts with an error"""
        self.quarantined = 0
        self.lost = 0
        """records that Kafka let go before they were read"""
        self._until: dict[int, int] = {}
        self._end: dict[int, int] = {}
        self._receipted: Mapping[str, Set[str]] = {}  # topics by CID

    def start(self, partition: int, offset: int, not_before: int, until: int = 0, end: int = 0) -> None:
        """Records of this partition are dealt with from here on; those that closed before `not_before` (µs) are too
        old. The last `REMEMBERED` records before `offset` may come first: they are only remembered. `until`: the
        offset up to which batches may be out already, and `receipted` counts. `end`: the offset after the records that
        were there before this start."""
        self._next[partition] = self._from[partition] = offset
        self._not_before[partition] = not_before
        self._taken[partition] = {}
        self._until[partition] = until
        self._end[partition] = end
        self._open[partition] = deque()

    def receipted(self, topics: Mapping[str, Set[str]]) -> None:
        """These batches, by CID, have receipts of these topics. Of the batches that were there before this start, those
        with a receipt of each topic that they go out on now are not published again, and below `until` none that has
        a receipt at all."""
        self._receipted = topics

    def expects(self, partition: int) -> int:
        """The offset of the next record, if Kafka has left out none."""
        return self._next[partition]

    def gone(self, partition: int, before: int, now: int) -> OutboxRecord | None:
        """Kafka has nothing before this offset any more. What to write, if records were lost so."""
        first = self._next[partition]
        if before <= first:
            return None
        self.lost += before - first
        self._next[partition] = before
        place = KafkaPosition(partition, first)
        self._begin(place)
        topic, number, _ = _kafka_place(place)
        detail = f"records {number}/{first} to {number}/{before - 1} of {topic}"
        return self._quarantine(place, GONE, detail, b"", now)

    @property
    def open(self) -> int:
        """How many records are taken and not done."""
        return sum(map(len, self._open.values()))

    @property
    def open_of_runs(self) -> int:
        """How many of them are batches of runs."""
        return sum(len(line) for partition, line in self._open.items() if partition < 0)

    @property
    def waiting(self) -> Mapping[str, int]:
        """How many batches wait for a peer or for their turn, by topic."""
        return {topic: len(line) for topic, line in self._lines.items()}

    @property
    def unkept(self) -> int:
        """How many batches are not in IPFS yet."""
        return len(self._new)

    def take(self, place: KafkaPosition, value: bytes | None, now: int) -> OutboxRecord | None:
        """Takes the next record of a partition. What to write at once, if anything."""
        before = place.offset < self._from[place.partition]
        if not before:
            self._next[place.partition] = place.offset + 1
        try:
            batch = decode_batch(value or b"")
            if batch.origin != "LIVE" or batch.network != self._options.network:
                return None
            publication = PendingPublication(place, batch, self._options.batch_typ)
        except (*UNREADABLE, TopicError, CidError) as error:
            if before:
                return None
            self._begin(place)
            topic, number, offset = _kafka_place(place)
            detail = f"record {number}/{offset} of {topic}: {error}"
            return self._quarantine(place, MALFORMED, detail, value or b"", now)
        if self._is_repeat(batch, place.partition) or before:
            return None
        if place.offset < self._until[place.partition] and publication.cid in self._receipted:
            return None
        if self._is_others(publication):
            return None
        self._begin(place)
        if batch.closed_at < self._not_before[place.partition]:
            return self._receipt(place, publication.refused(TOO_OLD, now))
        self._new.append(publication)
        self.block_bytes += len(publication.block)
        return None

    def step(
        self,
        held_back: bool,
        keeper: BlockKeeper,
        publish: Callable[[str, bytes], int],
        now: int,
        on: TopicScheme = BY_SEPARATOR,
        pace: AuthorPacer | None = None,
    ) -> list[OutboxRecord]:
        """Puts blocks into IPFS and tries the batches that are due. `publish` says to how many peers a message went;
        PublishError: it could not try. `pace`: when a topic's author may speak. `publish` tells it what went out.

        `on`: the topics on which batches go out now. Where these change, batches that wait move to the new topics.
        """
        if on != self._on:
            self._on = on
            self._replan()
        if held_back:
            self._hold()
            return []
        outputs = self._keep(keeper, now)
        if self.away is not None:
            self._hold()
            return outputs
        self._held_back = False
        for topic in list(self._lines):
            if self._due.get(topic, now) <= now:
                outputs += self._try(topic, publish, now, pace)
        return outputs

    def wait(self, now: int, most: int) -> int:
        """How long until something is due, µs; `most` where nothing is due sooner."""
        if self._held_back or self.away is not None:
            return most
        soonest = min((self._due.get(topic, now) - now for topic in self._lines), default=most)
        return max(0, min(most, soonest))

    def done(self, place: KafkaPosition) -> None:
        """The broker has one of the records that were to be written because of this one."""
        self._settle(place, 1)

    def places(self) -> dict[int, int]:
        """The offset to go on from after a crash, by partition."""
        return {
            partition: self._open[partition][0] if self._open[partition] else at for partition, at in self._next.items()
        }

    def metadata(self, partition: int) -> str:
        """What to commit beside the place: `not_before`, and `until` where it counts still, as given to `start`."""
        until = self._until[partition]
        at = self._open[partition][0] if self._open[partition] else self._next[partition]
        return f"{self._not_before[partition]} {until}" if at < until else f"{self._not_before[partition]}"

    def _begin(self, place: KafkaPosition) -> None:
        self._open[place.partition].append(place.offset)
        self._owed[place] = 1

    def _settle(self, place: KafkaPosition, count: int) -> None:
        self._owed[place] -= count
        line = self._open[place.partition]
        while line and not self._owed[head := KafkaPosition(place.partition, line[0])]:
            del self._owed[head]
            line.popleft()

    def _hold(self) -> None:
        if not self._held_back:
            for line in self._lines.values():
                for delivery in line:
                    delivery.hold_back()
            self._due.clear()
        self._held_back = True

    def _keep(self, keeper: BlockKeeper, now: int) -> list[OutboxRecord]:
        """Puts blocks into IPFS, in their order, and their batches in line; sets `away`."""
        if self.away is not None and now < self._keep_again:
            return []
        outputs: list[OutboxRecord] = []
        try:
            for _ in range(min(len(self._new), _KEEP_AT_ONCE)):
                publication = self._new[0]
                try:
                    keeper.keep(publication.cid, publication.block, now)
                except BlockRefusedError as error:
                    why = f"IPFS does not take the block: {error}"
                    outputs.append(self._receipt(publication.place, publication.refused(why, now)))
                    self.block_bytes -= len(publication.block)
                else:
                    self._plan(publication)
                self._kept_at = now
                self._new.popleft()
            if self._lines and (self._kept_at is None or now - self._kept_at >= _KEEP_AGAIN):
                publication = next(iter(self._lines.values()))[0].publication
                keeper.keep(publication.cid, publication.block, now)
                self._kept_at = now
        except (BlockStoreUnavailableError, BlockUnavailableError, PinsError) as error:
            self.away = str(error)
            self._keep_again = now + self._options.retry_every
        else:
            self.away = None
        return outputs

    def _plan(self, publication: PendingPublication) -> None:
        topics = self._on.of(publication.network, publication.separator)
        known = publication.place.offset < self._end[publication.place.partition]
        if known and self._receipted.get(publication.cid, frozenset()) >= set(topics):
            self.block_bytes -= len(publication.block)
            self._settle(publication.place, 1)
            return
        for topic in topics:
            self._line_up(publication, topic)
        self._owed[publication.place] = len(topics)

    def _line_up(self, publication: PendingPublication, topic: str) -> None:
        delivery = TopicDelivery(publication, topic)
        publication.to[topic] = delivery
        self._lines.setdefault(topic, deque()).append(delivery)

    def _replan(self) -> None:
        """What waits on a topic that is no longer published on goes to the others, unless it was there already."""
        waiting = {d.publication.place: d.publication for line in self._lines.values() for d in line}
        for place in sorted(waiting):
            publication = waiting[place]
            wanted = set(self._on.of(publication.network, publication.separator))
            added = wanted - publication.to.keys() - publication.receipted
            dropped = publication.to.keys() - wanted
            for topic in sorted(added):
                self._line_up(publication, topic)
            for topic in dropped:
                self._out_of_line(publication.to[topic])
            self._owed[place] += len(added)
            self._settle(place, len(dropped))

    def _is_repeat(self, batch: BatchRecord, partition: int) -> bool:
        """Whether this very batch, with the moment it closed, was taken before: a micro-batch was written again. The
        ledger knows the batches of runs."""
        if partition < 0:
            return False
        taken, closing = self._taken[partition], _closing(batch)
        if closing in taken:
            return True
        taken[closing] = None
        if len(taken) > REMEMBERED:
            del taken[next(iter(taken))]
        return False

    def _is_others(self, publication: PendingPublication) -> bool:
        """Whether a batch of live has gone out as one of a run, or the other way round."""
        handed_over = publication.cid in self._ledger
        if not publication.of_run:
            return handed_over
        if self._went_out is None:
            self._went_out = {cid: set(topics) for cid, topics in self._receipts().items()}
        return publication.cid in self._went_out and not handed_over

    def _is_over(self, delivery: TopicDelivery) -> bool:
        """Whether nothing is to be done and said any more: the batch went out on this topic before."""
        publication = delivery.publication
        if self._is_others(publication):
            return True
        return publication.of_run and delivery.topic in (self._went_out or {}).get(publication.cid, ())

    def _publish(self, delivery: TopicDelivery, publish: Callable[[str, bytes], int]) -> int:
        """To how many peers it goes. PublishError."""
        publication, topic = delivery.publication, delivery.topic
        if not publication.of_run:
            return publish(topic, publication.data)
        self._ledger.begin(publication.cid, topic)
        try:
            peers = publish(topic, publication.data)
        except PublishError:
            self._ledger.undo(publication.cid, topic)
            raise
        if not peers:
            self._ledger.undo(publication.cid, topic)
        return peers

    def _out_of_line(self, delivery: TopicDelivery) -> None:
        publication = delivery.publication
        del publication.to[delivery.topic]
        if not publication.to:
            self.block_bytes -= len(publication.block)
        line = self._lines[delivery.topic]
        line.remove(delivery)
        if not line:
            del self._lines[delivery.topic]
            self._due.pop(delivery.topic, None)

    def _try(
        self, topic: str, publish: Callable[[str, bytes], int], now: int, pace: AuthorPacer | None
    ) -> Iterable[OutboxRecord]:
        outputs: list[OutboxRecord] = []
        blocked: str | None = None  # once a batch has found no peer, the next batches need not ask
        self._due[topic] = now + self._options.retry_every
        for delivery in list(self._lines[topic]):
            publication = delivery.publication
            if self._is_over(delivery):
                publication.receipted.add(topic)
                self._out_of_line(delivery)
                self._settle(publication.place, 1)
                continue
            if publication.of_run and (publication.cid, topic) in self._ledger:
                publication.receipted.add(topic)
                self._out_of_line(delivery)
                doubt = PublicationRecord(publication.cid, TRANSPORT, now, topic=topic, error=IN_DOUBT)
                outputs.append(self._receipt(publication.place, doubt))
                continue
            if pace is not None and blocked is None and now < (ready := pace.ready_at(topic)):
                self._due[topic] = ready
                if outputs:
                    self._lines[topic] = self._lines.pop(topic)  # the author's other topics come first then
                break
            peers, why = 0, NO_PEER
            if blocked is None or delivery.is_last_try(now, self._options.publish_timeout):
                try:
                    peers = self._publish(delivery, publish)
                except PublishError as error:
                    why = str(error)
                if not peers:
                    blocked = why
            receipt = delivery.tried(peers, now, self._options.publish_timeout, blocked or why)
            if receipt is not None:
                publication.receipted.add(topic)
                self._out_of_line(delivery)
                outputs.append(self._receipt(publication.place, receipt))
        return outputs

    def _receipt(self, place: KafkaPosition, receipt: PublicationRecord) -> OutboxRecord:
        if receipt.error is None:
            self.published += 1
            if self._went_out is not None and receipt.topic:
                self._went_out.setdefault(receipt.cid, set()).add(receipt.topic)
        else:
            self.failed += 1
        options = self._options
        target = options.target(receipt.topic) if options.target and receipt.topic else None
        error = receipt.error and receipt.error[:MAX_DETAIL]
        receipt = structs.replace(receipt, transport=options.transport, target=target, error=error)
        return OutboxRecord(place, "publications", receipt.cid.encode(), encode(receipt))

    def _quarantine(self, place: KafkaPosition, reason: str, detail: str, value: bytes, now: int) -> OutboxRecord:
        self.quarantined += 1
        # one output for each record: of more than a record of quarantine holds, the batch's own record has the rest
        fault = next(quarantine_records("publisher", reason, detail, value, now))
        topic, partition, offset = _kafka_place(place)
        return OutboxRecord(place, "quarantine", quarantine_record_key(topic, partition, offset), encode(fault))


def _closing(batch: BatchRecord) -> _Closing:
    return batch.cid, batch.separator.key, batch.separator.value, batch.closed_at


def _kafka_place(place: KafkaPosition) -> tuple[str, int, int]:
    """Topic, partition and offset, from what `number_of` made."""
    if place.partition < 0:
        return "history", -1 - place.partition, place.offset
    return "batches", place.partition, place.offset
