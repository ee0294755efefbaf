"""Publish batches from `kiln.batches` to gossipsub, with a receipt of each in `kiln.publications` (docs/design).

The topic of batches is the outbox. The publisher takes the LIVE batches of the bridge's network. It commits its offset
only up to the first batch whose receipt the broker has not acknowledged. After a crash it reads the receipts beyond
that offset: a batch whose receipt was lost may be published again, which its CID makes harmless, but none is skipped.

The block of a batch is in IPFS, and pinned, before its CID is published, because other nodes fetch what is announced to
them. While IPFS is unavailable nothing is published, no timeout runs, and the batches wait in their order.

The transition of CIP-120 decides on which topics a batch is published (`transition.py`). Each topic gets a receipt.

A batch without a peer waits apart from the others (`deliveries.py`), and after `publish_timeout` gets a receipt with
that error. If the transport can tell which topics have peers, only batches with a peer are stored and handed over.
Otherwise a batch is retried every `retry_every`, and handed over at least once before it is given up, since the
transport may keep it for a peer that comes later. Batches of one topic and separator keep their order. While
`can_publish` holds publishing back, nothing is tried and no timeout runs.

A first start (no committed offset) begins at the beginning of the topic. A batch that closed more than `max_age` before
that start gets a receipt with the error `too old`, because peers have moved on. That time is committed with the offset,
so that later starts use the same limit, and publish batches that waited while the bridge was down.

A start without an offset but with receipts is no first start: Kafka has lost the offset. The publisher then begins at
the beginning of the topic and skips the batches that have a receipt. No batch is too old then, because the first start
gave a receipt to each that was. The offset up to which receipts count is committed as well.

A query that stops in the middle of a micro-batch writes the batches of the micro-batch again. The publisher remembers
the last `RECENT_BATCHES` batches, reads them again at a start, and skips a batch with the same CID, separator and
closing time.

Records that Kafka deleted before the publisher read them are counted, logged, and reported by a quarantine record.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kafka.structs import OffsetAndMetadata

from kafka import KafkaConsumer, TopicPartition
from kiln.bridge.ipfs import BlockStoreUnavailableError
from kiln.bridge.kafka.producers import FramesProducerError, StoppableKafkaProducer
from kiln.bridge.kafka.thread import RENEW_EVERY, KafkaConfig, Leadership, LeaderThread, now_us
from kiln.bridge.kafka.topic_notes import TopicNotes
from kiln.bridge.publisher.deliveries import OutboxPosition, Subscribers
from kiln.bridge.publisher.outbox import (
    MAX_BLOCK_BYTES,
    MAX_OPEN,
    RECENT_BATCHES,
    BlockKeeper,
    Outbox,
    OutboxRecord,
    PublishError,
    PublishingOptions,
)
from kiln.bridge.publisher.pace import AuthorPacer
from kiln.bridge.publisher.pins import PinsError
from kiln.bridge.publisher.transition import BY_SEPARATOR, TopicScheme
from kiln.conf.process.bridge_status import PublisherStatus
from kiln.conf.process.kafka_records import RecordReader
from kiln.schemas.kafka.records import UNREADABLE, decode_publication
from kiln.schemas.wire.topics import format_topic

_LOG: Final = logging.getLogger(__name__)
_POLL_EVERY: Final = 100_000  # µs between two polls for new batches, while no record comes and nothing is due
_UNPIN_EVERY: Final = 10_000_000  # µs between two checks for expired pins
_COMMIT_EVERY: Final = 1_000_000
"""µs between two commits of changed offsets, because the broker may sync each commit. After a crash, the receipts
beyond the offset show what was published."""


class _PublishCounts(NamedTuple):
    published: int = 0
    failed: int = 0
    quarantined: int = 0
    lost: int = 0


@dataclass
class _Session:
    """State of one session with Kafka."""

    consumer: KafkaConsumer
    reader: RecordReader
    producer: StoppableKafkaProducer
    outbox: Outbox
    committed: dict[int, int]
    """committed offsets"""
    outputs: list[OutboxRecord]
    """records that are not sent yet"""
    renew_at: int
    commit_at: int = 0
    unpin_at: int = 0
    unacknowledged: int = 0
    """sent records that the broker has not acknowledged"""
    acknowledgements: deque[tuple[OutboxPosition, BaseException | None]] = field(default_factory=deque)
    """filled by kafka-python's thread"""


class Publisher(LeaderThread):
    """A thread that runs an `Outbox` between Kafka and the network, from `start()` to `stop()`."""

    def __init__(
        self,
        kafka: KafkaConfig,
        options: PublishingOptions,
        publish: Callable[[str, bytes], int],
        can_publish: Callable[[], str | None],
        keeper: BlockKeeper,
        topics: Callable[[], TopicScheme] = lambda: BY_SEPARATOR,
        clock_us: Callable[[], int] = now_us,
        group: str | None = None,
        pace: AuthorPacer | None = None,
        leadership: Leadership | None = None,
        notes: TopicNotes | None = None,
        subscribers: Subscribers | None = None,
    ) -> None:
        """Create the thread without starting it.

        Args:
            publish: hands a message for a topic to the node and returns the number of peers; called in this thread, as
                is `keeper`.
            can_publish: returns `None`, or the reason why publishing is held back now.
            topics: returns the topics on which batches are published now.
            group: consumer group of the offset; by default one of the network.
            pace: the gap between two messages of one author.
            subscribers: finds the peers of topics, so that nothing is handed to the node for a topic that has none;
                called in this thread.
        """
        group = group or f"{kafka.prefix}publisher.{options.network}"
        super().__init__("publisher", "nothing is published", kafka, group, leadership, notes)
        self._options = options
        self._publish = publish
        self._can_publish = can_publish
        self._keeper = keeper
        self._topics = topics
        self._clock_us = clock_us
        self._pace = pace
        self._subscribers = subscribers
        self._counts = _PublishCounts()

    @property
    def published(self) -> int:
        """Publications that reached a peer, since the start."""
        return self._counts.published

    @property
    def failed(self) -> int:
        """Receipts with an error (no peer in time, too old, refused by IPFS), since the start."""
        return self._counts.failed

    @property
    def quarantined(self) -> int:
        """Records that could not be read as a batch, since the start."""
        return self._counts.quarantined

    @property
    def lost(self) -> int:
        """Records that Kafka deleted before they were read, since the start."""
        return self._counts.lost

    def status(self) -> PublisherStatus:
        """Return the status of the publisher."""
        return PublisherStatus(self.state, self.published, self.failed, self.lost, self.places_lost)

    def _release_resources(self) -> None:
        self._keeper.close()

    def _run_as_leader(self, consumer: KafkaConsumer, reader: RecordReader, producer: StoppableKafkaProducer) -> None:
        outbox = Outbox(self._options, self._subscribers)
        counts_before = self._counts
        committed, outputs = self._start_outbox(consumer, reader, outbox)
        session = _Session(consumer, reader, producer, outbox, committed, outputs, self._clock_us() + RENEW_EVERY)
        grace = 2.0
        while not self._stop.is_set() or (session.unacknowledged and grace > 0):
            if not self._is_leader:
                return  # the bridge that leads now continues from the committed offset and the receipts
            now = self._clock_us()
            if self._stop.is_set():  # wait only for the receipts of what is published already
                grace -= 0.05
                time.sleep(0.05)
            else:
                self._publish_batches(session, now)
            self._send_outputs(session)
            while session.acknowledgements:
                position, error = session.acknowledgements.popleft()
                session.unacknowledged -= 1
                if error is not None:
                    raise FramesProducerError(f"the broker refused a receipt: {error!r}") from error
                outbox.acknowledge(position)
            has_changed = outbox.resume_offsets() != session.committed and now >= session.commit_at
            if (has_changed or now >= session.renew_at) and self._is_leader:
                session.committed = self._commit(consumer, reader.partitions, outbox)
                session.commit_at, session.renew_at = now + _COMMIT_EVERY, now + RENEW_EVERY
            self._counts = _PublishCounts(
                counts_before.published + outbox.published,
                counts_before.failed + outbox.failed,
                counts_before.quarantined + outbox.quarantined,
                counts_before.lost + outbox.lost,
            )
            self._error = (
                None if outbox.ipfs_error is None else f"nothing is published, IPFS is unavailable: {outbox.ipfs_error}"
            )
        if outbox.resume_offsets() != session.committed and self._is_leader:
            self._commit(consumer, reader.partitions, outbox)

    def _publish_batches(self, session: _Session, now: int) -> None:
        """Read batches and publish those that are due."""
        outbox = session.outbox
        held_back = self._can_publish()
        self._read_batches(session, now)
        if not self._must_stop:  # else receipts may not have been read to their end
            session.outputs += outbox.step(
                held_back is not None,
                self._keeper,
                self._publish_message,
                self._clock_us(),
                self._topics(),
                self._pace,
            )
        if now >= session.unpin_at:
            # a pin that lasts too long does no harm, and `store_and_pin` reports an unreachable node
            with suppress(BlockStoreUnavailableError, PinsError):
                self._keeper.unpin_expired(now)
            session.unpin_at = now + _UNPIN_EVERY
        self._state = _describe_state(held_back, outbox)

    def _read_batches(self, session: _Session, now: int) -> None:
        """Poll for batches, as many as the outbox has room for, until the next attempt is due."""
        consumer, reader, outbox = session.consumer, session.reader, session.outbox
        room = MAX_OPEN - outbox.open_count if outbox.block_bytes < MAX_BLOCK_BYTES else 0
        if room > 0:
            reader.resume(reader.partitions)
        else:
            reader.pause(reader.partitions)
        self._check_topics()
        # whole ms, rounded up so that the next attempt is due after the wait
        wait = -(-outbox.time_to_next_attempt(now, _POLL_EVERY) // 1_000)
        for part, records in self._poll(reader, wait, max(1, room)).items():
            for record in records:
                if record.offset > outbox.next_offset(part.partition):
                    first = consumer.beginning_offsets([part])[part]
                    session.outputs += self._record_lost_range(outbox, part, min(first, record.offset), now)
                output = outbox.add_record(OutboxPosition(part.partition, record.offset), record.value, now)
                session.outputs += [] if output is None else [output]

    def _send_outputs(self, session: _Session) -> None:
        """Send the outputs to Kafka, while this bridge leads."""

        def send(output: OutboxRecord) -> None:
            future = session.producer.send(f"{self._prefix}{output.topic}", value=output.value, key=output.key)
            future.add_callback(lambda _: session.acknowledgements.append((output.position, None)))
            future.add_errback(lambda error: session.acknowledgements.append((output.position, error)))

        for output in session.outputs:
            if not self._is_leader:
                return
            send(output)
            session.unacknowledged += 1
        session.outputs = []

    def _publish_message(self, topic: str, data: bytes) -> int:
        if not self._is_leader:
            raise PublishError(self._leadership.describe())
        peers = self._publish(topic, data)
        if peers and self._pace is not None:
            self._pace.record_message(self._clock_us())
        return peers

    def _commit(self, consumer: KafkaConsumer, parts: Iterable[TopicPartition], outbox: Outbox) -> dict[int, int]:
        """Commit the offsets to resume from, and return them."""
        offsets = outbox.resume_offsets()
        to_commit = {
            part: OffsetAndMetadata(offsets[part.partition], outbox.metadata(part.partition))
            for part in parts
            if part.partition in offsets
        }
        consumer.commit(to_commit, timeout_ms=10_000)
        return offsets

    def _start_outbox(
        self, consumer: KafkaConsumer, reader: RecordReader, outbox: Outbox
    ) -> tuple[dict[int, int], list[OutboxRecord]]:
        """Move the reader to the committed offsets.

        A first start sets and commits the limit of `max_age`. Where Kafka has lost an offset, receipts show what is
        done.

        Returns:
            The committed offsets, and the records to write at once.
        """
        topic = f"{self._prefix}batches"
        parts = self._list_partitions(topic)
        is_replaced = topic in self._watch_topics(topic)
        starts = consumer.beginning_offsets(parts)
        ends = consumer.end_offsets(parts)
        committed = {
            part: saved
            for part in parts
            if not is_replaced
            and (saved := consumer.committed(part, metadata=True, timeout_ms=10_000)) is not None
            and saved.offset <= ends[part]  # else the topic was re-created
        }
        now = self._clock_us()
        outputs: list[OutboxRecord] = []
        receipted: dict[str, dict[str, int]] | None = None
        times: list[int] = []
        positions: dict[TopicPartition, int] = {}
        for part in parts:
            if (saved := committed.get(part)) is not None:
                # an offset without the limit was set by hand: publish from there
                offset, (not_before, until) = saved.offset, _read_metadata(saved.metadata or "")
                if saved.metadata and starts[part] <= offset < ends[part]:
                    # after a crash there may be receipts of batches beyond the offset
                    times.append(self._read_log_time(part, offset))
            else:
                receipted = self._read_receipts(0) if receipted is None else receipted
                if self._must_stop:  # not all receipts are read
                    return {}, []
                offset = starts[part]
                not_before, until = (0, ends[part]) if receipted else (now - self._options.max_age, 0)
                if receipted:
                    self._places_lost += 1
                    _LOG.error(
                        "Kafka has lost the committed offset of group %s for %s-%d: batches with a receipt are skipped",
                        *(self._group, topic, part.partition),
                    )
            if offset < until and receipted is None:
                receipted = self._read_receipts(0)
            outbox.start(part.partition, offset, not_before, until, ends[part])
            outputs += self._record_lost_range(outbox, part, starts[part], now)
            positions[part] = max(offset - RECENT_BATCHES, starts[part])
        reader.assign(positions)
        if receipted is None and times:
            receipted = self._read_receipts(min(times))
        outbox.set_receipted_topics(receipted or {})
        if self._is_leader:
            self._commit(consumer, reader.partitions, outbox)
            self._save_topics()
        return outbox.resume_offsets(), outputs

    def _record_lost_range(self, outbox: Outbox, part: TopicPartition, before: int, now: int) -> list[OutboxRecord]:
        first = outbox.next_offset(part.partition)
        output = outbox.record_lost_range(part.partition, before, now)
        if output is None:
            return []
        _LOG.error(
            "Kafka deleted %d records of %s-%d before group %s had read them: offsets %d to %d",
            *(before - first, part.topic, part.partition, self._group, first, before - 1),
        )
        return [output]

    def _read_log_time(self, part: TopicPartition, offset: int) -> int:
        """Return the LogAppendTime of a record in ms, or 0 if there is none, as where a transaction was aborted."""
        with closing(self._open_reader()) as reader:
            reader.assign({part: offset})
            for record in self._read_until(reader, {part: offset + 1}, lambda: "reading the time of the offset"):
                return record.timestamp
        return 0

    def _read_receipts(self, since: int) -> dict[str, dict[str, int]]:
        """Return the times in µs, by CID and topic of this network, of the newest receipts of this transport.

        Args:
            since: LogAppendTime, in ms, of the first receipt that counts.
        """
        topics_by_cid: dict[str, dict[str, int]] = {}
        own = format_topic(self._options.network, None)
        with closing(self._open_consumer(None)) as consumer, closing(self._open_reader()) as reader:
            parts = self._list_partitions(f"{self._prefix}publications")
            ends = consumer.end_offsets(parts)
            starts = consumer.offsets_for_times(dict.fromkeys(parts, since))
            reader.assign({part: ends[part] if first is None else first.offset for part, first in starts.items()})
            for record in self._read_until(
                reader, ends, lambda: f"reading the receipts of batches: {len(topics_by_cid)}"
            ):
                with suppress(*UNREADABLE):  # `sink` quarantines it
                    receipt = decode_publication(record.value or b"")
                    on = receipt.topic or ""
                    if receipt.transport == self._options.transport and f"{on}/".startswith(f"{own}/"):
                        times = topics_by_cid.setdefault(receipt.batch_cid, {})
                        times[on] = max(times.get(on, 0), receipt.published_at)
        return topics_by_cid


def _read_metadata(text: str) -> tuple[int, int]:
    """Read `not_before` and `until` from what `Outbox.metadata` wrote."""
    numbers = [int(word) if word.lstrip("-").isdigit() else 0 for word in text.split()]
    return (*numbers, 0, 0)[0], (*numbers, 0, 0)[1]


def _describe_state(held_back: str | None, outbox: Outbox) -> str:
    count = outbox.waiting_count
    if held_back is not None:
        return f"held back: {held_back}" + (f" (batches waiting: {count})" if count else "")
    if outbox.ipfs_error is not None:
        return f"IPFS is unavailable: {outbox.ipfs_error} (batches waiting: {count})"
    if not count:
        return "waiting for batches"
    flows = outbox.flows_without_peer
    if not flows:
        return f"publishing (batches waiting: {count})"
    topic, _ = next(iter(flows))
    others = f" and {len(flows) - 1} other topics" if len(flows) > 1 else ""
    return f"waiting for a peer on {topic}{others} (batches waiting: {count})"
