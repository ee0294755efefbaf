"""Selection of the batches to publish next, and their receipts. Does no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kiln.bridge.ipfs import BlockRefusedError, BlockStore, BlockStoreUnavailableError, BlockUnavailableError
from kiln.bridge.kafka.number_sets import MAX_METADATA, decode_numbers, encode_numbers
from kiln.bridge.publisher.deliveries import (
    NO_PEER,
    DeliveryQueue,
    OpenRecord,
    PendingPublication,
    Subscribers,
    TopicDelivery,
)
from kiln.bridge.publisher.pace import AuthorPacer
from kiln.bridge.publisher.transition import BY_SEPARATOR, TopicScheme
from kiln.schemas.kafka.records import (
    MAX_DETAIL,
    UNREADABLE,
    PublicationRecord,
    build_quarantine_record_key,
    build_quarantine_records,
    decode_batch,
    encode,
)
from kiln.schemas.wire.cid import CidError
from kiln.schemas.wire.topics import TopicError, network_topics

TOO_OLD: Final = "too old"
MALFORMED: Final = "batch_malformed"
RECORDS_LOST: Final = "batches_gone"
MAX_OPEN: Final = 10_000
"""Maximum number of batches whose receipts the broker has not acknowledged. A batch takes 1 kB, and its block until it
is published or given up. Above nine tenths of this number, batches are given up early if no batch of their topic and
separator has reached a peer (`DeliveryQueue`), so that other batches can still be read."""
MAX_BLOCK_BYTES: Final = 32 << 20  # bytes of the open batches' blocks; one more poll may exceed it
_MAX_SETTLED: Final = 1 << 20  # offsets that are read from metadata
MAX_TURNS_PER_STEP: Final = 20  # batches that are put into IPFS and then published, before others get a turn
_IPFS_CHECK_EVERY: Final = 5_000_000  # maximum age of the last response of IPFS when a batch is published, in µs


class PublishError(RuntimeError):
    """An attempt to publish could not be made. The batch then waits like a batch without a peer."""


@dataclass(frozen=True)
class PublishingOptions:
    """Settings of the publisher; durations in µs."""

    network: str
    publish_timeout: int = 60_000_000
    """the longest time that a batch waits for a peer"""
    retry_every: int = 1_000_000
    max_age: int = 60_000_000
    """batches that closed longer than this before the first start are not published"""
    pin_duration: int = 86_400_000_000
    """time in µs for which a block stays in IPFS after it was last stored"""
    batch_typ: int = 3
    transport: str = "gossipsub"
    target: Callable[[str], str] | None = None
    """returns the transport's own name of a topic, for the receipt; `None` if the transport has none"""


class OutputRecord(NamedTuple):
    """A receipt or a quarantine record to write to Kafka."""

    record: OpenRecord
    """record of `kiln.batches` to pass to `acknowledge` once the broker has the output"""
    topic: str
    """`publications` or `quarantine`"""
    key: bytes
    value: bytes


@dataclass
class _PartitionState:
    """Progress in a partition."""

    not_before: int
    settled: frozenset[int]  # offsets of batches that an earlier run has settled
    next_offset: int
    open: deque[OpenRecord] = field(default_factory=deque)  # in order; those behind the first may have their receipts

    @property
    def resume_offset(self) -> int:
        return self.open[0].offset if self.open else self.next_offset


class PendingBatches:
    """The batches that are read from Kafka and not published yet, and the offsets up to which all are published.

    The caller adds records, calls `step` repeatedly, writes the records of `take_outputs`, and acknowledges each record
    that the broker has. After a crash, the batches from `resume_offsets` on are published again, except those that
    `metadata` marks as settled. A batch is settled once the broker has its receipts.
    """

    def __init__(self, options: PublishingOptions, subscribers: Subscribers | None = None) -> None:
        """Create an empty collection.

        Args:
            subscribers: finds the peers of topics (`DeliveryQueue`).
        """
        self._options = options
        self._partitions: dict[int, _PartitionState] = {}
        self.open_count = 0
        """number of records with a receipt that the broker has not acknowledged"""
        self._arrivals: list[PendingPublication] = []  # not in the queue yet
        self._subscribers = subscribers
        self.queue = DeliveryQueue(options.publish_timeout, options.retry_every, subscribers)
        self._turn: deque[TopicDelivery] = deque()  # taken from the queue
        self._pace_ready_at = 0
        self._held_back = False
        self._scheme = BY_SEPARATOR
        self._ipfs_answered_at: int | None = None  # when IPFS last answered
        self._ipfs_retry_at = 0
        self.ipfs_error: str | None = None
        """the reason why nothing can be put into IPFS now"""
        self.block_bytes = 0
        """bytes of the blocks of batches that are not published yet"""
        self.published = 0
        """number of receipts of batches that reached a peer"""
        self.failed = 0
        """number of receipts with an error"""
        self.lost = 0
        """number of records that Kafka deleted before they were read"""
        self._outputs: list[OutputRecord] = []

    def start(self, partition: int, offset: int, not_before: int, settled: frozenset[int] = frozenset()) -> None:
        """Start publishing a partition from an offset.

        Args:
            not_before: batches that closed before this time, in µs, are too old to be published.
            settled: offsets of batches that are not published again.
        """
        self._partitions[partition] = _PartitionState(not_before, settled, offset)

    def end(self, partition: int) -> None:
        """Remove the batches of a partition. Another bridge continues from the committed offset."""
        for record in self._partitions.pop(partition).open:
            self.open_count -= record.missing > 0
            record.missing = -1  # receipts that are still acknowledged change nothing
        self._outputs = [output for output in self._outputs if output.record.partition != partition]
        self._arrivals = [arrival for arrival in self._arrivals if arrival.record.partition != partition]
        deliveries = [
            delivery
            for delivery in (*self._turn, *self.queue.drain())
            if delivery.publication.record.partition != partition and not delivery.has_ended
        ]
        self._turn.clear()
        self.queue.add(deliveries)
        self.block_bytes = sum(
            len(arrival.batch.block)
            for arrival in {*self._arrivals, *(delivery.publication for delivery in deliveries)}
        )

    def take_outputs(self) -> list[OutputRecord]:
        """Remove and return the records to write."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def record_lost_range(self, partition: int, before: int, now: int) -> int:
        """Quarantine the loss of records that Kafka deleted before this offset, and return their number."""
        state = self._partitions[partition]
        first = state.next_offset
        if before <= first:
            return 0
        self.lost += before - first
        state.next_offset = before
        places = f"{partition}/{first} to {partition}/{before - 1}"
        detail = f"Kafka deleted the records {places} of batches before they were read"
        self._quarantine(OpenRecord(partition, first), RECORDS_LOST, detail, b"", now)
        return before - first

    @property
    def waiting_count(self) -> int:
        """Number of batches that wait for a peer or for their turn. A batch for two topics counts twice."""
        return len(self._arrivals) + len(self._turn) + len(self.queue)

    @property
    def is_nearly_full(self) -> bool:
        """Return whether batches or their blocks take so much room that deliveries must be given up early."""
        return self.open_count > MAX_OPEN * 9 // 10 or self.block_bytes > MAX_BLOCK_BYTES * 9 // 10

    def add_record(self, partition: int, offset: int, value: bytes | None, now: int) -> None:
        """Add the next record of a partition."""
        state = self._partitions[partition]
        state.next_offset = offset + 1
        if offset in state.settled:
            return
        try:
            batch = decode_batch(value or b"")
            if batch.origin != "LIVE" or batch.network != self._options.network:
                return
            publication = PendingPublication(OpenRecord(partition, offset), batch, self._options.batch_typ)
        except (*UNREADABLE, TopicError, CidError) as error:
            detail = f"record {partition}/{offset} of batches: {error}"
            self._quarantine(OpenRecord(partition, offset), MALFORMED, detail, value or b"", now)
            return
        self._open(publication.record)
        if batch.closed_at < state.not_before:
            self._write_receipt(publication, publication.topic, now, None, TOO_OLD)
        else:
            self._arrivals.append(publication)
            self.block_bytes += len(batch.block)

    def step(
        self,
        held_back: bool,
        blocks: BlockStore,
        publish: Callable[[str, bytes], int],
        now: int,
        scheme: TopicScheme,
        pace: AuthorPacer,
    ) -> None:
        """Publish the batches that are due, after their blocks are stored in IPFS.

        Args:
            held_back: true if nothing may be published now.
            blocks: the store of the blocks.
            publish: sends a message and returns the number of peers that it was sent to. It reports each message to
                `pace`, and raises `PublishError` if no attempt could be made.
            scheme: the topics to publish on now. If they change, waiting batches move to the new topics.
            pace: decides when the next message may be sent.
        """
        if scheme != self._scheme:
            self._scheme = scheme
            self._move_to_scheme()
        self._held_back = held_back
        if held_back or (self.ipfs_error is not None and now < self._ipfs_retry_at):
            self.queue.pause()
            return
        self.queue.advance(now)
        self._enqueue_arrivals()
        for given_up in self.queue.check(now, self.is_nearly_full):
            self._end_with_receipt(given_up.delivery, now, 0, given_up.error)
        self._turn.extend(self.queue.take(MAX_TURNS_PER_STEP - len(self._turn)))
        self._store_blocks(blocks, now)
        if self.ipfs_error is not None:
            self.queue.pause()
            return
        self._publish_turn(publish, now, pace)

    def time_to_next_attempt(self, now: int, max_wait: int) -> int:
        """Return the time until something is due, in µs, or `max_wait` if nothing is due sooner."""
        if self._held_back or self.ipfs_error is not None:
            return max_wait
        if self._arrivals or self._turn or self.queue.has_ready:
            return max(0, min(max_wait, self._pace_ready_at - now))
        return min(max_wait, self.queue.time_to_check(now)) if len(self.queue) else max_wait

    def acknowledge(self, record: OpenRecord) -> None:
        """Record that the broker has acknowledged one output for this record of `kiln.batches`."""
        self._settle_receipts(record, 1)

    def resume_offsets(self) -> dict[int, int]:
        """Return the offset to resume from after a crash, by partition."""
        return {partition: state.resume_offset for partition, state in self._partitions.items()}

    def metadata(self, partition: int) -> str:
        """Return the metadata to commit with the offset, which `read_metadata` reads.

        It begins with the `not_before` of `start`. If a batch is not settled, an end offset and the unsettled offsets
        before the end follow. After a crash, all batches from the end on are published again.
        """
        state = self._partitions[partition]
        unsettled, end = [record.offset for record in state.open if record.missing], state.next_offset
        if not unsettled:
            return str(state.not_before)
        while len(text := f"{state.not_before} {end} {encode_numbers(unsettled, unsettled[0])}") > MAX_METADATA:
            # after a restart, all batches from `end` on are published again
            end, unsettled = unsettled[len(unsettled) // 2], unsettled[: len(unsettled) // 2]
        return text

    def _open(self, record: OpenRecord) -> None:
        self._partitions[record.partition].open.append(record)
        self.open_count += 1

    def _settle_receipts(self, record: OpenRecord, count: int) -> None:
        record.missing -= count
        if record.missing or not count:
            return
        self.open_count -= 1
        unsettled = self._partitions[record.partition].open
        while unsettled and not unsettled[0].missing:
            unsettled.popleft()

    def _enqueue_arrivals(self) -> None:
        deliveries: list[TopicDelivery] = []
        _, cip120_name = network_topics(self._options.network)
        is_used = (
            bool(self._arrivals)
            and self._scheme.network
            and self._subscribers is not None
            and bool(self._subscribers([cip120_name]))
        )
        for publication in self._arrivals:
            topics = self._scheme.topics_of(publication.batch.network, publication.separator)
            topics += (cip120_name,) if is_used else ()
            publication.deliveries = {topic: TopicDelivery(publication, topic) for topic in topics}
            deliveries += publication.deliveries.values()
            publication.record.missing = len(topics)
        self._arrivals.clear()
        self.queue.add(deliveries)

    def _store_blocks(self, blocks: BlockStore, now: int) -> None:
        """Store the blocks of this turn in IPFS, and set or clear `ipfs_error`.

        If IPFS has not answered for `_IPFS_CHECK_EVERY`, a stored block is stored again, to notice an outage.
        """
        try:
            for publication in dict.fromkeys(delivery.publication for delivery in self._turn):
                is_recent = self._ipfs_answered_at is not None and now - self._ipfs_answered_at < _IPFS_CHECK_EVERY
                if not publication.deliveries or (publication.is_stored and is_recent):
                    continue
                try:
                    blocks.put(publication.batch.batch_cid, publication.batch.block)
                except BlockRefusedError as error:
                    self._reject(publication, f"IPFS refused the block: {error}", now)
                publication.is_stored = True
                self._ipfs_answered_at = now
        except (BlockStoreUnavailableError, BlockUnavailableError) as error:
            self.ipfs_error = str(error)
            self._ipfs_retry_at = now + self._options.retry_every
        else:
            self.ipfs_error = None

    def _reject(self, publication: PendingPublication, reason: str, now: int) -> None:
        """Write one receipt with an error for a batch, and end all its deliveries."""
        self._settle_receipts(publication.record, len(publication.deliveries) - 1)
        for delivery in list(publication.deliveries.values()):
            self._end_delivery(delivery)
        self._write_receipt(publication, publication.topic, now, None, reason)

    def _move_to_scheme(self) -> None:
        """Move the waiting batches to the topics of the scheme, except topics for which they already have a receipt."""
        waiting = [*self._turn, *self.queue.drain()]
        self._turn.clear()
        deliveries: list[TopicDelivery] = []
        unsent = {
            delivery.publication for delivery in waiting if delivery.publication.deliveries
        }  # not refused by IPFS
        for publication in sorted(
            unsent, key=lambda publication: (publication.record.partition, publication.record.offset)
        ):
            topics = set(self._scheme.topics_of(publication.batch.network, publication.separator))
            added = topics - publication.deliveries.keys() - publication.receipted_topics
            dropped = publication.deliveries.keys() - topics
            for topic in sorted(added):
                publication.deliveries[topic] = TopicDelivery(publication, topic)
            publication.record.missing += len(added)
            for topic in dropped:
                self._end_delivery(publication.deliveries[topic])
            deliveries += publication.deliveries.values()
            self._settle_receipts(publication.record, len(dropped))
        self.queue.add(deliveries)

    def _end_delivery(self, delivery: TopicDelivery) -> None:
        publication = delivery.publication
        delivery.has_ended = True
        del publication.deliveries[delivery.topic]
        if not publication.deliveries:
            self.block_bytes -= len(publication.batch.block)

    def _publish_turn(self, publish: Callable[[str, bytes], int], now: int, pace: AuthorPacer) -> None:
        """Attempt the deliveries of this turn. If one reaches no peer, the later deliveries of its topic and separator
        wait with it."""
        self._pace_ready_at = 0
        while self._turn:
            if now < pace.ready_at:
                self._pace_ready_at = pace.ready_at
                break
            delivery = self._turn.popleft()
            if delivery.has_ended:
                continue
            peers, reason = 0, NO_PEER
            try:
                peers = publish(delivery.topic, delivery.publication.data)
            except PublishError as error:
                reason = str(error)
            if peers:
                self.queue.record_reached(delivery)
                self._end_with_receipt(delivery, now, peers, None)
            elif (given_up := self.queue.give_up(delivery, reason)) is not None:
                self._end_with_receipt(delivery, now, 0, given_up.error)
            else:
                behind = [queued for queued in self._turn if queued.flow == delivery.flow]
                self._turn = deque(queued for queued in self._turn if queued.flow != delivery.flow)
                self.queue.put_back([delivery, *behind], reason)

    def _end_with_receipt(self, delivery: TopicDelivery, now: int, peers: int, error: str | None) -> None:
        if not delivery.has_ended:
            delivery.publication.receipted_topics |= {delivery.topic}
            self._end_delivery(delivery)
            self._write_receipt(delivery.publication, delivery.topic, now, peers, error)

    def _write_receipt(
        self, publication: PendingPublication, topic: str, now: int, peers: int | None, error: str | None
    ) -> None:
        if error is None:
            self.published += 1
        else:
            self.failed += 1
        options, cid = self._options, publication.batch.batch_cid
        target = options.target(topic) if options.target else None
        error = error and error[:MAX_DETAIL]
        receipt = PublicationRecord(
            cid, options.transport, now, topic=topic, target=target, peer_count=peers, error=error
        )
        self._outputs.append(OutputRecord(publication.record, "publications", cid.encode(), encode(receipt)))

    def _quarantine(self, record: OpenRecord, reason: str, detail: str, value: bytes, now: int) -> None:
        self._open(record)
        # one output for each record: the batch's own record holds what does not fit into a quarantine record
        fault = next(build_quarantine_records("publisher", reason, detail, value, now))
        key = build_quarantine_record_key("batches", record.partition, record.offset)
        self._outputs.append(OutputRecord(record, "quarantine", key, encode(fault)))


def read_metadata(offset: int, text: str) -> tuple[int, frozenset[int]]:
    """Read `not_before` and the settled offsets from the metadata of a committed offset.

    Another program may have written the metadata. If the time cannot be read, 0 is returned; if the offsets cannot be
    read, an empty set.
    """
    limit, _, progress = text.partition(" ")
    end, _, unsettled = progress.partition(" ")
    not_before = int(limit) if limit.lstrip("-").isdecimal() else 0
    try:
        settled = range(offset, min(int(end), offset + _MAX_SETTLED))
        return not_before, frozenset(settled).difference(decode_numbers(unsettled, offset))
    except (ValueError, IndexError):
        return not_before, frozenset()
