"""Publish batches from `kiln.batches` to gossipsub, with a receipt of each in `kiln.publications` (docs/design).

The topic of batches is the outbox. The publisher takes the LIVE batches of the bridge's network. It commits its offset
only up to the first batch whose receipt the broker has not acknowledged. After a crash it reads the receipts beyond
that offset: a batch whose receipt was lost may be published again, which its CID makes harmless, but none is skipped.

The block of a batch is in IPFS, and pinned, before its CID is published, because other nodes fetch what is announced to
them. While IPFS is unavailable nothing is published, no timeout runs, and the batches wait in their order.

The transition of CIP-120 decides on which topics a batch is published (`transition.py`). Each topic gets a receipt.

A batch that reaches no peer is retried every `retry_every`, and after `publish_timeout` gets a receipt with that error.
Other topics continue meanwhile; batches of one topic keep their order. Each batch is handed over at least once before
it is given up, since a transport may keep it for a peer that comes later. While `can_publish` holds publishing back,
nothing is tried and no timeout runs.

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

`kiln.history` is the outbox of backfill runs, read from its beginning. No batch there is too old. One that was
published before, live or by a run, is not published again, even if a crash lost its receipt (`ledger.py`). Only a few
of them are open at a time, so that live batches need not wait.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial
from typing import Final, NamedTuple

from kafka.structs import OffsetAndMetadata

from kafka import KafkaConsumer, TopicPartition
from kiln.bridge.ipfs import BlockStoreUnavailableError
from kiln.bridge.kafka.position import KafkaPosition
from kiln.bridge.kafka.producers import FramesProducerError, StoppableKafkaProducer
from kiln.bridge.kafka.thread import RENEW_EVERY, KafkaConfig, Leadership, LeaderThread, now_us
from kiln.bridge.kafka.topic_notes import TopicNotes
from kiln.bridge.publisher.ledger import PublishLedger
from kiln.bridge.publisher.outbox import (
    MAX_BLOCK_BYTES,
    MAX_OPEN,
    MAX_OPEN_HISTORY,
    RECENT_BATCHES,
    BlockKeeper,
    Outbox,
    OutboxRecord,
    PublishError,
    PublishingOptions,
    outbox_partition,
)
from kiln.bridge.publisher.pace import AuthorPacer
from kiln.bridge.publisher.pins import PinsError
from kiln.bridge.publisher.transition import BY_SEPARATOR, TopicScheme
from kiln.conf.process.bridge_status import PublisherStatus
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
        ledger: PublishLedger | None = None,
        leadership: Leadership | None = None,
        notes: TopicNotes | None = None,
    ) -> None:
        """Create the thread without starting it.

        Args:
            publish: hands a message for a topic to the node and returns the number of peers; called in this thread, as
                is `keeper`.
            can_publish: returns `None`, or the reason why publishing is held back now.
            topics: returns the topics on which batches are published now.
            group: consumer group of the offset; by default one of the network.
            pace: the gap between two messages of one author.
            ledger: batches of runs that were handed to the node by this transport; by default one in memory.
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
        self._ledger = PublishLedger() if ledger is None else ledger
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
        self._ledger.close()

    def _run_as_leader(self, consumer: KafkaConsumer, producer: StoppableKafkaProducer) -> None:
        outbox = Outbox(self._options, self._ledger, lambda: self._read_published_topics(producer))
        counts_before = self._counts
        committed, outputs = self._start_outbox(consumer, outbox)
        history_parts = [part for part in consumer.assignment() if self._is_history(part)]
        live_parts = [part for part in consumer.assignment() if not self._is_history(part)]
        commit_at, renew_at = 0, self._clock_us() + RENEW_EVERY
        acknowledgements: deque[tuple[KafkaPosition, BaseException | None]] = deque()  # filled by kafka-python's thread
        unacknowledged = 0
        grace = 2.0
        unpin_at = 0
        while not self._stop.is_set() or (unacknowledged and grace > 0):
            if not self._is_leader:
                return  # the bridge that leads now continues from the committed offset and the receipts
            now = self._clock_us()
            if self._stop.is_set():  # wait only for the receipts of what is published already
                grace -= 0.05
                time.sleep(0.05)
            else:
                held_back = self._can_publish()
                room = MAX_OPEN - outbox.open_count if outbox.block_bytes < MAX_BLOCK_BYTES else 0
                # whole ms, rounded up so that the next attempt is due after the wait
                wait = (
                    0
                    if outbox.unpinned_count and outbox.ipfs_error is None
                    else -(-outbox.time_to_next_attempt(now, _POLL_EVERY) // 1_000)
                )
                (consumer.resume if room > 0 else consumer.pause)(*live_parts)
                full = room <= 0 or outbox.open_history_count >= MAX_OPEN_HISTORY
                (consumer.pause if full else consumer.resume)(*history_parts)
                self._check_topics()
                for part, records in self._poll(consumer, wait, max(1, room)).items():
                    number = self._outbox_partition(part)
                    for record in records:
                        if number < 0 and outbox.open_history_count >= MAX_OPEN_HISTORY:
                            consumer.seek(part, record.offset)
                            break
                        if record.offset > outbox.next_offset(number):
                            first = consumer.beginning_offsets([part])[part]
                            outputs += self._record_lost_range(outbox, part, min(first, record.offset), now)
                        output = outbox.add_record(KafkaPosition(number, record.offset), record.value, now)
                        outputs += [] if output is None else [output]
                if not self._must_stop:  # else receipts may not have been read to their end
                    outputs += outbox.step(
                        held_back is not None,
                        self._keeper,
                        self._publish_message,
                        self._clock_us(),
                        self._topics(),
                        self._pace,
                    )
                if now >= unpin_at:
                    self._unpin_expired(now)
                    unpin_at = now + _UNPIN_EVERY
                self._state = _describe_state(held_back, outbox)
            for output in outputs:
                if not self._is_leader:
                    return
                future = producer.send(f"{self._prefix}{output.topic}", value=output.value, key=output.key)
                future.add_callback(partial(_add_success, acknowledgements, output.position))
                future.add_errback(partial(_add_failure, acknowledgements, output.position))
                unacknowledged += 1
            outputs = []
            while acknowledgements:
                position, error = acknowledgements.popleft()
                unacknowledged -= 1
                if error is not None:
                    raise FramesProducerError(f"the broker refused a receipt: {error!r}") from error
                outbox.acknowledge(position)
            offsets = outbox.resume_offsets()
            if ((offsets != committed and now >= commit_at) or now >= renew_at) and self._is_leader:
                self._commit(consumer, outbox)
                committed = offsets
                commit_at, renew_at = now + _COMMIT_EVERY, now + RENEW_EVERY
            self._counts = _PublishCounts(
                counts_before.published + outbox.published,
                counts_before.failed + outbox.failed,
                counts_before.quarantined + outbox.quarantined,
                counts_before.lost + outbox.lost,
            )
            self._error = (
                None if outbox.ipfs_error is None else f"nothing is published, IPFS is unavailable: {outbox.ipfs_error}"
            )
        if outbox.resume_offsets() != committed and self._is_leader:
            self._commit(consumer, outbox)

    def _publish_message(self, topic: str, data: bytes) -> int:
        if not self._is_leader:
            raise PublishError(self._leadership.describe())
        peers = self._publish(topic, data)
        if peers and self._pace is not None:
            self._pace.record_message(topic, self._clock_us())
        return peers

    def _unpin_expired(self, now: int) -> None:
        # a pin that lasts too long does no harm, and `store_and_pin` reports a node that is away
        with suppress(BlockStoreUnavailableError, PinsError):
            self._keeper.unpin_expired(now)

    def _is_history(self, part: TopicPartition) -> bool:
        return bool(part.topic == f"{self._prefix}history")

    def _outbox_partition(self, part: TopicPartition) -> int:
        return outbox_partition(part.partition, self._is_history(part))

    def _commit(self, consumer: KafkaConsumer, outbox: Outbox) -> None:
        offsets = outbox.resume_offsets()
        to_commit = {
            part: OffsetAndMetadata(offsets[number], outbox.metadata(number))
            for part in consumer.assignment()
            if (number := self._outbox_partition(part)) in offsets
        }
        consumer.commit(to_commit, timeout_ms=10_000)

    def _read_published_topics(self, producer: StoppableKafkaProducer) -> Mapping[str, set[str]]:
        """Return the topics, by CID, of everything published up to now that has a receipt."""
        producer.flush(timeout=30)
        return self._read_receipts(0, only_published=True)

    def _start_outbox(self, consumer: KafkaConsumer, outbox: Outbox) -> tuple[dict[int, int], list[OutboxRecord]]:
        """Move the consumer to the committed offsets.

        A first start sets and commits the limit of `max_age`. Where Kafka has lost an offset, receipts show what is
        done.

        Returns:
            The committed offsets, and the records to write at once.
        """
        topic, history = f"{self._prefix}batches", f"{self._prefix}history"
        parts = self._list_partitions(topic)
        history_parts = self._list_partitions(history)
        replaced_topics = self._watch_topics(topic, history)
        consumer.assign([*parts, *history_parts])
        starts, ends = consumer.beginning_offsets([*parts, *history_parts]), consumer.end_offsets(parts)
        now = self._clock_us()
        outputs: list[OutboxRecord] = []
        receipted: dict[str, set[str]] | None = None
        since: int | None = None
        for part in parts:
            saved = None if topic in replaced_topics else consumer.committed(part, metadata=True, timeout_ms=10_000)
            if saved is not None and saved.offset <= ends[part]:
                # an offset without the limit was set by hand: publish from there
                offset, (not_before, until) = saved.offset, _read_metadata(saved.metadata or "")
                if saved.metadata and starts[part] <= offset < ends[part]:
                    # after a crash there may be receipts of batches beyond the offset
                    stamp = self._read_log_time(part, offset)
                    since = stamp if since is None else min(since, stamp)
            else:  # an offset beyond the end: the topic was re-created
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
            consumer.seek(part, max(offset - RECENT_BATCHES, starts[part]))
        for part in history_parts:
            saved = None if history in replaced_topics else consumer.committed(part, metadata=True, timeout_ms=10_000)
            # the ledger and the receipts show what is done, so a lost offset loses nothing
            if saved is None or saved.offset > consumer.end_offsets([part])[part]:
                offset = starts[part]
            else:
                offset = saved.offset
            outbox.start(self._outbox_partition(part), offset, 0)
            outputs += self._record_lost_range(outbox, part, starts[part], now)
            consumer.seek(part, max(offset, starts[part]))
        if receipted is None and since is not None:
            receipted = self._read_receipts(since)
        outbox.set_receipted_topics(receipted or {})
        if self._is_leader:
            self._commit(consumer, outbox)
            self._save_topics()
        return outbox.resume_offsets(), outputs

    def _record_lost_range(self, outbox: Outbox, part: TopicPartition, before: int, now: int) -> list[OutboxRecord]:
        first = outbox.next_offset(self._outbox_partition(part))
        output = outbox.record_lost_range(self._outbox_partition(part), before, now)
        if output is None:
            return []
        _LOG.error(
            "Kafka deleted %d records of %s-%d before group %s had read them: offsets %d to %d",
            *(before - first, part.topic, part.partition, self._group, first, before - 1),
        )
        return [output]

    def _read_log_time(self, part: TopicPartition, offset: int) -> int:
        """Return the LogAppendTime of a record in ms, or 0 if the record does not come."""
        with closing(self._open_consumer(None)) as consumer:
            consumer.assign([part])
            consumer.seek(part, offset)
            records = consumer.poll(timeout_ms=5_000, max_records=1).get(part, [])
            return int(records[0].timestamp) if records else 0

    def _read_receipts(self, since: int, only_published: bool = False) -> dict[str, set[str]]:
        """Return the topics of this network, by CID, of all receipts of this transport from `since` to now.

        Args:
            since: LogAppendTime in ms.
            only_published: leave out receipts with an error.
        """
        topics_by_cid: dict[str, set[str]] = {}
        own = format_topic(self._options.network, None)
        with closing(self._open_consumer(None)) as consumer:
            parts = self._list_partitions(f"{self._prefix}publications")
            consumer.assign(parts)
            ends = consumer.end_offsets(parts)
            for part, first in consumer.offsets_for_times(dict.fromkeys(parts, since)).items():
                consumer.seek(part, ends[part] if first is None else first.offset)
            for record in self._read_until(
                consumer, ends, lambda: f"reading the receipts of batches: {len(topics_by_cid)}"
            ):
                with suppress(*UNREADABLE):  # `sink` quarantines it
                    receipt = decode_publication(record.value or b"")
                    on = receipt.topic or ""
                    if only_published and receipt.error is not None:
                        continue
                    if receipt.transport == self._options.transport and f"{on}/".startswith(f"{own}/"):
                        topics_by_cid.setdefault(receipt.batch_cid, set()).add(on)
        return topics_by_cid


def _read_metadata(text: str) -> tuple[int, int]:
    """Read `not_before` and `until` from what `Outbox.metadata` wrote."""
    numbers = [int(word) if word.lstrip("-").isdigit() else 0 for word in text.split()]
    return (*numbers, 0, 0)[0], (*numbers, 0, 0)[1]


def _add_success(
    acknowledgements: deque[tuple[KafkaPosition, BaseException | None]], position: KafkaPosition, _: object
) -> None:
    acknowledgements.append((position, None))


def _add_failure(
    acknowledgements: deque[tuple[KafkaPosition, BaseException | None]], position: KafkaPosition, error: BaseException
) -> None:
    acknowledgements.append((position, error))


def _describe_state(held_back: str | None, outbox: Outbox) -> str:
    waiting = outbox.waiting_by_topic
    count = sum(waiting.values()) + outbox.unpinned_count
    if held_back is not None:
        return f"held back: {held_back}" + (f" (batches waiting: {count})" if count else "")
    if outbox.ipfs_error is not None:
        return f"IPFS is unavailable: {outbox.ipfs_error} (batches waiting: {count})"
    if not waiting:
        return "waiting for batches"
    topic = next(iter(waiting))
    others = f" and {len(waiting) - 1} other topics" if len(waiting) > 1 else ""
    return f"waiting for a peer on {topic}{others} (batches waiting: {count})"
