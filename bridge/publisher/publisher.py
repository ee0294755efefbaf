"""Batches out to the network: `kiln.batches` to gossipsub, a receipt of each to `kiln.publications` (docs/design).

The topic of batches is the outbox. The publisher takes the LIVE batches of the bridge's network and leaves the others.
It commits its place only up to the first batch whose receipt the broker has not acknowledged. After a crash the
publisher reads the receipts beyond its place: a batch whose receipt did not come to the broker may go out again, which
the CID makes harmless, and no batch is passed over.

The block of a batch is in IPFS, and pinned, before the publisher publishes the CID: other nodes act on what is
announced to them and fetch the block. While IPFS is away the publisher publishes nothing, no time runs out, and the
batches wait in their order.

The transition of CIP-120 says on which topics a batch goes out (`transition.py`). Each topic gets a receipt.

The publisher tries a batch that finds no peer again every `retry_every`. After `publish_timeout` the receipt says that
there was no peer. Other topics go on meanwhile; batches of one topic keep their order. The publisher hands over each
batch at least once before it gives the batch up: a transport may keep the batch for a peer that comes later. While
`can_publish` holds publishing back, the publisher tries nothing and no time runs out.

A first start (no committed place) begins at the beginning of the topic. A batch that closed more than `max_age` before
that start gets a receipt with the error `too old` instead: peers have moved on. The publisher keeps that moment with
the committed place. So later starts draw the same line, and publish a batch that waited while the bridge was down.

A start that finds no place but receipts is no first start: Kafka has lost the place. Then the publisher begins at the
beginning of the topic, too, and passes over the batches that have a receipt. No batch is too old then: the first start
gave its receipt to each batch that was. The publisher commits, beside its place, up to which offset receipts count.

A query that is stopped in the middle of a micro-batch writes the batches of the micro-batch again. The publisher
remembers the last `REMEMBERED` batches, reads them again at a start, and passes over a batch with the same CID,
separator, and moment of closing.

Records that Kafka let go before the publisher read them are counted, logged, and told by a record of quarantine.

`kiln.history` is the outbox of backfill runs, from its beginning on. No batch there is too old. A batch there that went
out before, of live or of a run, does not go out again, not even where a crash took its receipt (`ledger.py`). The
publisher takes a few of them at a time, so that live's batches need not wait.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from kafka.structs import OffsetAndMetadata

from kafka import KafkaConsumer, TopicPartition
from kiln.bridge.ipfs import BlockStoreUnavailableError
from kiln.bridge.kafka.position import KafkaPosition
from kiln.bridge.kafka.producers import FramesProducerError, StoppableKafkaProducer
from kiln.bridge.kafka.thread import RENEW_EVERY, Leadership, LeaderThread
from kiln.bridge.kafka.topic_notes import TopicNotes
from kiln.bridge.publisher.ledger import PublishLedger
from kiln.bridge.publisher.outbox import (
    MAX_BLOCK_BYTES,
    MAX_OPEN,
    REMEMBERED,
    RUNS_AT_ONCE,
    BlockKeeper,
    Outbox,
    OutboxRecord,
    PublishError,
    PublishingOptions,
    number_of,
)
from kiln.bridge.publisher.pace import AuthorPacer
from kiln.bridge.publisher.pins import PinsError
from kiln.bridge.publisher.transition import BY_SEPARATOR, TopicScheme
from kiln.conf.process.bridge_status import PublisherStatus
from kiln.schemas.kafka.records import UNREADABLE, decode_publication
from kiln.schemas.wire.topics import topic_name

_LOG: Final = logging.getLogger(__name__)
_LOOK_EVERY: Final = 100_000  # µs between two looks for new batches, where no record comes and nothing is due
_UNPIN_EVERY: Final = 10_000_000  # µs between two looks at pins that have run out
_COMMIT_EVERY: Final = 1_000_000
"""µs between two commits of places that change: the broker may sync each commit. After a crash, the receipts beyond the
place say what went out."""


def _now_us() -> int:
    return time.time_ns() // 1_000


class Publisher(LeaderThread):
    """Runs an Outbox between Kafka and the network, in a thread of its own, from `start()` to `stop()`.

    While Kafka is away it tries again from its committed place.
    """

    def __init__(
        self,
        bootstrap_servers: str | Sequence[str],
        client_options: Mapping[str, object],
        prefix: str,
        options: PublishingOptions,
        publish: Callable[[str, bytes], int],
        can_publish: Callable[[], str | None],
        keeper: BlockKeeper,
        topics: Callable[[], TopicScheme] = lambda: BY_SEPARATOR,
        clock_us: Callable[[], int] = _now_us,
        group: str | None = None,
        pace: AuthorPacer | None = None,
        ledger: PublishLedger | None = None,
        leadership: Leadership | None = None,
        notes: TopicNotes | None = None,
    ) -> None:
        """`client_options`: how to talk to the brokers (security_protocol, sasl_…, ssl_…). `prefix`: of topics.

        `publish(topic, data)`: hands a message to the node and returns to how many peers it goes; called in this
        thread, as is `keeper`. `can_publish`: None, or in words why publishing is held back now. `topics`: those on
        which batches go out now. `group`: the consumer group that keeps the place; by default one of the network.
        `pace`: the gap between two messages of one author. `ledger`: which batches of runs were handed to the node,
        by this transport; by default one that ends with the process. `leadership`: which of several bridges
        publishes. `notes`: which topics the place is of.
        """
        super().__init__(
            "publisher",
            "nothing is published",
            bootstrap_servers,
            client_options,
            prefix,
            group or f"{prefix}publisher.{options.network}",
            leadership,
            notes,
        )
        self._options = options
        self._publish = publish
        self._can_publish = can_publish
        self._keeper = keeper
        self._topics = topics
        self._clock_us = clock_us
        self._pace = pace
        self._ledger = PublishLedger() if ledger is None else ledger
        self._counted = (0, 0, 0, 0)
        self._places_lost = 0

    @property
    def published(self) -> int:
        """Publications that reached a peer, since the start."""
        return self._counted[0]

    @property
    def failed(self) -> int:
        """Receipts with an error (no peer in time, too old, refused by IPFS), since the start."""
        return self._counted[1]

    @property
    def quarantined(self) -> int:
        """Records that were no batch, since the start."""
        return self._counted[2]

    @property
    def lost(self) -> int:
        """Records that Kafka let go before they were read, since the start."""
        return self._counted[3]

    @property
    def places_lost(self) -> int:
        """How often Kafka had lost the place in a partition, since the start."""
        return self._places_lost

    def status(self) -> PublisherStatus:
        """How it goes."""
        return PublisherStatus(self.state, self.published, self.failed, self.lost, self.places_lost)

    def _ended(self) -> None:
        self._keeper.close()
        self._ledger.close()

    def _work(self, consumer: KafkaConsumer, producer: StoppableKafkaProducer) -> None:
        outbox = Outbox(self._options, self._ledger, lambda: self._went_out(producer))
        before = self._counted
        committed, outputs = self._begin(consumer, outbox)
        of_runs = [part for part in consumer.assignment() if self._is_of_runs(part)]
        of_live = [part for part in consumer.assignment() if not self._is_of_runs(part)]
        commit_at, renew_at = 0, self._clock_us() + RENEW_EVERY
        answers: deque[tuple[KafkaPosition, BaseException | None]] = deque()  # filled by kafka-python's thread
        under_way = 0
        patience = 2.0
        unpin_at = 0
        while not self._stop.is_set() or (under_way and patience > 0):
            if not self._leads:
                return  # whoever leads now goes on from the committed place, and from the receipts
            now = self._clock_us()
            if self._stop.is_set():  # only the receipts of what is published already are waited for
                patience -= 0.05
                time.sleep(0.05)
            else:
                held_back = self._can_publish()
                room = MAX_OPEN - outbox.open if outbox.block_bytes < MAX_BLOCK_BYTES else 0
                # ms; whole ones, so that what is due is due then
                wait = 0 if outbox.unkept and outbox.away is None else -(-outbox.wait(now, _LOOK_EVERY) // 1_000)
                (consumer.resume if room > 0 else consumer.pause)(*of_live)
                full = room <= 0 or outbox.open_of_runs >= RUNS_AT_ONCE
                (consumer.pause if full else consumer.resume)(*of_runs)
                self._check_topics()
                for part, records in self._poll(consumer, wait, max(1, room)).items():
                    number = self._number(part)
                    for record in records:
                        if number < 0 and outbox.open_of_runs >= RUNS_AT_ONCE:
                            consumer.seek(part, record.offset)
                            break
                        if record.offset > outbox.expects(number):
                            first = consumer.beginning_offsets([part])[part]
                            outputs += self._gone(outbox, part, min(first, record.offset), now)
                        output = outbox.take(KafkaPosition(number, record.offset), record.value, now)
                        outputs += [] if output is None else [output]
                if not self._halts:  # else receipts may not have been read to their end
                    outputs += outbox.step(
                        held_back is not None, self._keeper, self._speak, self._clock_us(), self._topics(), self._pace
                    )
                if now >= unpin_at:
                    self._unpin_expired(now)
                    unpin_at = now + _UNPIN_EVERY
                self._state = _in_words(held_back, outbox)
            for output in outputs:
                if not self._leads:
                    return
                future = producer.send(f"{self._prefix}{output.topic}", value=output.value, key=output.key)
                future.add_callback(partial(_took, answers, output.place))
                future.add_errback(partial(_refused, answers, output.place))
                under_way += 1
            outputs = []
            while answers:
                place, error = answers.popleft()
                under_way -= 1
                if error is not None:
                    raise FramesProducerError(f"a receipt was refused: {error!r}") from error
                outbox.done(place)
            places = outbox.places()
            if ((places != committed and now >= commit_at) or now >= renew_at) and self._leads:
                self._commit(consumer, outbox)
                committed = places
                commit_at, renew_at = now + _COMMIT_EVERY, now + RENEW_EVERY
            self._counted = (
                before[0] + outbox.published,
                before[1] + outbox.failed,
                before[2] + outbox.quarantined,
                before[3] + outbox.lost,
            )
            self._error = None if outbox.away is None else f"nothing is published, IPFS is away: {outbox.away}"
        if outbox.places() != committed and self._leads:
            self._commit(consumer, outbox)

    def _speak(self, topic: str, data: bytes) -> int:
        if not self._leads:
            raise PublishError(self._leadership.in_words())
        peers = self._publish(topic, data)
        if peers and self._pace is not None:
            self._pace.spoke(topic, self._clock_us())
        return peers

    def _unpin_expired(self, now: int) -> None:
        # a pin that lasts too long does no harm, and `keep` reports a node that is away
        with suppress(BlockStoreUnavailableError, PinsError):
            self._keeper.unpin_expired(now)

    def _is_of_runs(self, part: TopicPartition) -> bool:
        return bool(part.topic == f"{self._prefix}history")

    def _number(self, part: TopicPartition) -> int:
        return number_of(part.partition, self._is_of_runs(part))

    def _commit(self, consumer: KafkaConsumer, outbox: Outbox) -> None:
        places = outbox.places()
        kept = {
            part: OffsetAndMetadata(places[number], outbox.metadata(number))
            for part in consumer.assignment()
            if (number := self._number(part)) in places
        }
        consumer.commit(kept, timeout_ms=10_000)

    def _went_out(self, producer: StoppableKafkaProducer) -> Mapping[str, set[str]]:
        """As `_receipts`, of all that went out up to now and has a receipt."""
        producer.flush(timeout=30)
        return self._receipts(0, only_out=True)

    def _begin(self, consumer: KafkaConsumer, outbox: Outbox) -> tuple[dict[int, int], list[OutboxRecord]]:
        """Moves the consumer to the committed places, which it returns, with what to write at once.

        A first start draws and keeps the line of `max_age`. Where Kafka has lost a place, receipts say what is done.
        """
        topic, history = f"{self._prefix}batches", f"{self._prefix}history"
        parts = self._partitions(topic)
        of_runs = self._partitions(history)
        anew = self._begin_topics(topic, history)
        consumer.assign([*parts, *of_runs])
        starts, ends = consumer.beginning_offsets([*parts, *of_runs]), consumer.end_offsets(parts)
        now = self._clock_us()
        outputs: list[OutboxRecord] = []
        receipted: dict[str, set[str]] | None = None
        since: int | None = None
        for part in parts:
            kept = None if topic in anew else consumer.committed(part, metadata=True, timeout_ms=10_000)
            if kept is not None and kept.offset <= ends[part]:
                # a place without the line was set by hand: publish from there
                offset, (not_before, until) = kept.offset, _read_metadata(kept.metadata or "")
                if kept.metadata and starts[part] <= offset < ends[part]:
                    # after a crash there may be receipts of batches beyond the place
                    stamp = self._stamp(part, offset)
                    since = stamp if since is None else min(since, stamp)
            else:  # beyond the end: the topic was made anew
                receipted = self._receipts(0) if receipted is None else receipted
                if self._halts:  # not all receipts are read
                    return {}, []
                offset = starts[part]
                not_before, until = (0, ends[part]) if receipted else (now - self._options.max_age, 0)
                if receipted:
                    self._places_lost += 1
                    _LOG.error(
                        "Kafka has lost the place of %s in %s, partition %d: batches with a receipt are passed over",
                        *(self._group, topic, part.partition),
                    )
            if offset < until and receipted is None:
                receipted = self._receipts(0)
            outbox.start(part.partition, offset, not_before, until, ends[part])
            outputs += self._gone(outbox, part, starts[part], now)
            consumer.seek(part, max(offset - REMEMBERED, starts[part]))
        for part in of_runs:
            kept = None if history in anew else consumer.committed(part, metadata=True, timeout_ms=10_000)
            # the ledger and the receipts know what is done, so a place that is lost loses nothing
            offset = starts[part] if kept is None or kept.offset > consumer.end_offsets([part])[part] else kept.offset
            outbox.start(self._number(part), offset, 0)
            outputs += self._gone(outbox, part, starts[part], now)
            consumer.seek(part, max(offset, starts[part]))
        if receipted is None and since is not None:
            receipted = self._receipts(since)
        outbox.receipted(receipted or {})
        if self._leads:
            self._commit(consumer, outbox)
            self._note_topics()
        return outbox.places(), outputs

    def _gone(self, outbox: Outbox, part: TopicPartition, before: int, now: int) -> list[OutboxRecord]:
        first = outbox.expects(self._number(part))
        output = outbox.gone(self._number(part), before, now)
        if output is None:
            return []
        _LOG.error(
            "Kafka let %d records of %s go before %s read them: partition %d, offsets %d to %d",
            *(before - first, part.topic, self._group, part.partition, first, before - 1),
        )
        return [output]

    def _stamp(self, part: TopicPartition, offset: int) -> int:
        """The broker's stamp of a record, ms; 0: the record does not come."""
        consumer = self._consumer(None)
        try:
            consumer.assign([part])
            consumer.seek(part, offset)
            records = consumer.poll(timeout_ms=5_000, max_records=1).get(part, [])
            return int(records[0].timestamp) if records else 0
        finally:
            consumer.close()

    def _receipts(self, since: int, only_out: bool = False) -> dict[str, set[str]]:
        """The topics of this network, by CID, of all receipts of this transport that the broker stamped with `since`
        (ms) or later, up to now. `only_out`: without those that tell an error."""
        found: dict[str, set[str]] = {}
        own = topic_name(self._options.network, None)
        consumer = self._consumer(None)
        try:
            parts = self._partitions(f"{self._prefix}publications")
            consumer.assign(parts)
            ends = consumer.end_offsets(parts)
            for part, first in consumer.offsets_for_times(dict.fromkeys(parts, since)).items():
                consumer.seek(part, ends[part] if first is None else first.offset)
            while not self._halts and any(consumer.position(part) < ends[part] for part in parts):
                self._state = f"reading which batches have a receipt: {len(found)}"
                for records in self._poll(consumer, 200).values():
                    for record in records:
                        with suppress(*UNREADABLE):  # `sink` quarantines it
                            receipt = decode_publication(record.value or b"")
                            on = receipt.topic or ""
                            if only_out and receipt.error is not None:
                                continue
                            if receipt.transport == self._options.transport and f"{on}/".startswith(f"{own}/"):
                                found.setdefault(receipt.cid, set()).add(on)
        finally:
            consumer.close()
        return found


def _read_metadata(text: str) -> tuple[int, int]:
    """`not_before` and `until`, as `Outbox.metadata` writes them."""
    numbers = [int(word) if word.lstrip("-").isdigit() else 0 for word in text.split()]
    return (*numbers, 0, 0)[0], (*numbers, 0, 0)[1]


def _took(answers: deque[tuple[KafkaPosition, BaseException | None]], place: KafkaPosition, _: object) -> None:
    answers.append((place, None))


def _refused(
    answers: deque[tuple[KafkaPosition, BaseException | None]], place: KafkaPosition, error: BaseException
) -> None:
    answers.append((place, error))


def _in_words(held_back: str | None, outbox: Outbox) -> str:
    waiting = outbox.waiting
    count = sum(waiting.values()) + outbox.unkept
    if held_back is not None:
        return f"held back: {held_back}" + (f" (batches waiting: {count})" if count else "")
    if outbox.away is not None:
        return f"IPFS is away: {outbox.away} (batches waiting: {count})"
    if not waiting:
        return "waiting for batches"
    topic = next(iter(waiting))
    others = f" and {len(waiting) - 1} other topics" if len(waiting) > 1 else ""
    return f"waiting for a peer on {topic}{others} (batches waiting: {count})"
