"""Batches out to the network: `kiln.batches` to gossipsub, a receipt of each to `kiln.publications` (docs/DESIGN.md).

The topic of batches is the outbox: the LIVE batches of the bridge's network are taken from it, others are left alone,
and its place is committed only up to the first batch whose receipt the broker has not acknowledged. So after a crash a
batch may be published again, which its CID makes harmless, and none is passed over.

A batch that no peer is there for is tried again every `retry_every`; after `publish_timeout` its receipt says so. The
others go on meanwhile; those of one topic keep their order. While `can_publish` holds publishing back, nothing is tried
and no time runs out.

A first start (no committed place) begins at the beginning of the topic, but what closed more than `max_age` before it
gets a receipt with the error `too old` instead: peers have moved on. That moment is kept with the committed place, so
later starts draw the same line, and a batch that waited while the bridge was down is still published.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from kafka import KafkaConsumer, TopicPartition
from kafka.errors import KafkaError
from kafka.structs import OffsetAndMetadata

from bridge.capture.spool import KafkaFrames
from bridge.frames_producer import FramesProducerError
from schemas.cid import CidError
from schemas.pubsub import write_batch_update
from schemas.records import (
    UNREADABLE,
    BatchRecord,
    PublicationRecord,
    QuarantineRecord,
    decode_batch,
    encode,
)
from schemas.topics import Separator, TopicError, topic_name

TRANSPORT: Final = "gossipsub"
TOO_OLD: Final = "too old"
NO_PEER: Final = "no peer on the topic"
MALFORMED: Final = "batch_malformed"

_MAX_OPEN: Final = 1_000  # batches read and not yet committed: what waits for peers must not fill the memory


class PublishError(RuntimeError):
    """What an injected `publish` raises when it could not try: the batch waits as if there were no peer."""


@dataclass(frozen=True)
class Options:
    """Times in µs."""

    network: str
    publish_timeout: int = 60_000_000
    """how long a batch waits for a peer"""
    retry_every: int = 1_000_000
    max_age: int = 60_000_000
    """on a first start: batches that closed longer ago are not published"""
    batch_typ: int = 3


class Place(NamedTuple):
    """A record of the topic of batches."""

    partition: int
    offset: int


class Output(NamedTuple):
    """What is to be written because of one batch; `done` with its place once the broker has it."""

    place: Place
    topic: str
    """`publications` or `quarantine`"""
    key: bytes
    value: bytes


class Publication:
    """One batch on its way to its topic. Pure: time comes from the caller, in µs."""

    def __init__(self, place: Place, batch: BatchRecord, batch_typ: int) -> None:
        """TopicError, CidError: no message can be made of it."""
        separator = Separator(batch.separator.key, batch.separator.value)
        self.place = place
        self.cid = batch.cid
        self.topic = topic_name(batch.network, separator)
        self.data = write_batch_update(separator, batch.cid, batch_typ)
        self._waited = 0
        self._tried_at: int | None = None

    def tried(self, peers: int, now: int, timeout: int, why: str = NO_PEER) -> PublicationRecord | None:
        """After a try that reached so many peers: its receipt, or None: it waits on."""
        if peers:
            return PublicationRecord(self.cid, TRANSPORT, now, topic=self.topic, peers=peers)
        if self._tried_at is not None:
            self._waited += max(0, now - self._tried_at)
        self._tried_at = now
        if self._waited < timeout:
            return None
        error = f"{why} for {self._waited / 1e6:.0f} s"
        return PublicationRecord(self.cid, TRANSPORT, now, topic=self.topic, peers=0, error=error)

    def held(self) -> None:
        """Time until the next try does not count: publishing was held back."""
        self._tried_at = None

    def too_old(self, now: int) -> PublicationRecord:
        """The receipt of a batch that is not published at all."""
        return PublicationRecord(self.cid, TRANSPORT, now, topic=self.topic, error=TOO_OLD)


class Outbox:
    """What to do with the records of the topic of batches, and up to where they are dealt with. Pure.

    Take records in, step again and again, write what comes out, say `done` of what the broker has.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._not_before: dict[int, int] = {}
        self._next: dict[int, int] = {}
        self._open: dict[int, deque[int]] = {}  # offsets not yet done, by partition, in order
        self._done: set[Place] = set()
        self._waiting: dict[str, deque[Publication]] = {}  # by topic
        self._due: dict[str, int] = {}
        self._held = False
        self.published = 0
        """batches that reached a peer"""
        self.failed = 0
        """receipts with an error"""
        self.quarantined = 0

    def start(self, partition: int, offset: int, not_before: int) -> None:
        """Records of this partition come from here on; those that closed before `not_before` (µs) are too old."""
        self._next[partition] = offset
        self._not_before[partition] = not_before
        self._open[partition] = deque()

    @property
    def open(self) -> int:
        """How many records are taken and not done."""
        return sum(map(len, self._open.values()))

    @property
    def waiting(self) -> Mapping[str, int]:
        """How many batches wait for a peer or for their turn, by topic."""
        return {topic: len(line) for topic, line in self._waiting.items()}

    def take(self, place: Place, value: bytes | None, now: int) -> Output | None:
        """The next record of a partition. What is to be written at once, if anything."""
        self._next[place.partition] = place.offset + 1
        try:
            batch = decode_batch(value or b"")
            if batch.origin != "LIVE" or batch.network != self._options.network:
                return None
            publication = Publication(place, batch, self._options.batch_typ)
        except (*UNREADABLE, TopicError, CidError) as error:
            self._open[place.partition].append(place.offset)
            return self._quarantine(place, value or b"", error, now)
        self._open[place.partition].append(place.offset)
        if batch.closed_at < self._not_before[place.partition]:
            return self._receipt(publication, publication.too_old(now))
        self._waiting.setdefault(publication.topic, deque()).append(publication)
        return None

    def step(self, held: bool, publish: Callable[[str, bytes], int], now: int) -> list[Output]:
        """Try what is due. `publish`: to how many peers it went; PublishError: it could not try."""
        if held:
            if not self._held:
                for line in self._waiting.values():
                    for publication in line:
                        publication.held()
                self._due.clear()
            self._held = True
            return []
        self._held = False
        outputs: list[Output] = []
        for topic in list(self._waiting):
            if self._due.get(topic, now) <= now:
                outputs += self._try(topic, publish, now)
        return outputs

    def done(self, place: Place) -> None:
        """The broker has what was to be written because of this record."""
        self._done.add(place)
        line = self._open[place.partition]
        while line and (head := Place(place.partition, line[0])) in self._done:
            self._done.remove(head)
            line.popleft()

    def places(self) -> dict[int, int]:
        """The offset to go on from after a crash, by partition."""
        return {
            partition: self._open[partition][0] if self._open[partition] else at for partition, at in self._next.items()
        }

    def not_before(self, partition: int) -> int:
        """As given to `start`."""
        return self._not_before[partition]

    def _try(self, topic: str, publish: Callable[[str, bytes], int], now: int) -> Iterable[Output]:
        line = self._waiting[topic]
        outputs: list[Output] = []
        blocked: str | None = None  # once one has found no peer, the next ones need not ask
        for publication in list(line):
            peers, why = 0, NO_PEER
            if blocked is None:
                try:
                    peers = publish(topic, publication.data)
                except PublishError as error:
                    why = str(error)
                if not peers:
                    blocked = why
            receipt = publication.tried(peers, now, self._options.publish_timeout, blocked or why)
            if receipt is not None:
                line.remove(publication)
                outputs.append(self._receipt(publication, receipt))
        if line:
            self._due[topic] = now + self._options.retry_every
        else:
            del self._waiting[topic]
            self._due.pop(topic, None)
        return outputs

    def _receipt(self, publication: Publication, receipt: PublicationRecord) -> Output:
        if receipt.error is None:
            self.published += 1
        else:
            self.failed += 1
        return Output(publication.place, "publications", receipt.cid.encode(), encode(receipt))

    def _quarantine(self, place: Place, value: bytes, error: Exception, now: int) -> Output:
        self.quarantined += 1
        fault = QuarantineRecord(
            stage="publisher",
            reason=MALFORMED,
            detail=f"record {place.partition}/{place.offset} of batches: {error}",
            data=value,
            observed_at=now,
        )
        return Output(place, "quarantine", f"batches/{place.partition}/{place.offset}".encode(), encode(fault))


def _now_us() -> int:
    return time.time_ns() // 1_000


class Publisher:
    """Runs an Outbox between Kafka and the network, in a thread of its own, from `start()` to `stop()`.

    While Kafka is away it tries again from its committed place.
    """

    def __init__(
        self,
        bootstrap_servers: str | Sequence[str],
        client_options: Mapping[str, object],
        prefix: str,
        options: Options,
        publish: Callable[[str, bytes], int],
        can_publish: Callable[[], str | None],
        clock_us: Callable[[], int] = _now_us,
        group: str | None = None,
    ) -> None:
        """`client_options`: how to talk to the brokers (security_protocol, sasl_…, ssl_…). `prefix`: of topics.

        `publish(topic, data)`: hands a message to the node and returns to how many peers it goes; called in this
        thread. `can_publish`: None, or in words why publishing is held back now. `group`: who keeps the place; by
        default one of the network.
        """
        self._servers = bootstrap_servers
        self._client_options = dict(client_options)
        self._prefix = prefix
        self._options = options
        self._publish = publish
        self._can_publish = can_publish
        self._clock_us = clock_us
        self._group = group or f"{prefix}publisher.{options.network}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._state = "not started"
        self._error: str | None = None
        self._counted = (0, 0, 0)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Ends after what it does now. Not to be called in the thread that `publish` waits for."""
        self._stop.set()
        self._thread.join(timeout)

    @property
    def state(self) -> str:
        """What it does or waits for, in words."""
        return self._state

    @property
    def error(self) -> str | None:
        """Why it cannot work now; None: it can."""
        return self._error

    @property
    def published(self) -> int:
        """Batches that reached a peer, since the start."""
        return self._counted[0]

    @property
    def failed(self) -> int:
        """Receipts with an error (no peer in time, too old), since the start."""
        return self._counted[1]

    @property
    def quarantined(self) -> int:
        """Records that were no batch, since the start."""
        return self._counted[2]

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    self._session()
                except (KafkaError, FramesProducerError, ValueError, AssertionError) as error:
                    self._error = f"nothing is published, Kafka fails: {error!r}"
                    self._state = self._error
                    self._stop.wait(1.0)
        finally:
            self._state = "stopped"
            if not self._stop.is_set():  # what `publish` or `can_publish` raised ends the thread
                self._error = "nothing is published: the publisher has ended by a fault"

    def _session(self) -> None:
        """From the committed places on, until stopped or Kafka fails."""
        consumer = KafkaConsumer(
            bootstrap_servers=self._servers,
            **self._client_options,
            bootstrap_timeout_ms=5_000,
            group_id=self._group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            max_partition_fetch_bytes=16 << 20,
        )
        try:
            producer = KafkaFrames(self._servers, self._client_options)
            try:
                self._work(consumer, producer)
            finally:
                producer.close(2)
        finally:
            consumer.close()

    def _work(self, consumer: KafkaConsumer, producer: KafkaFrames) -> None:
        topic = f"{self._prefix}batches"
        outbox = Outbox(self._options)
        before = self._counted
        committed = self._begin(consumer, topic, outbox)
        answers: deque[tuple[Place, BaseException | None]] = deque()  # filled by kafka-python's thread
        under_way = 0
        patience = 2.0
        while not self._stop.is_set() or (under_way and patience > 0):
            now = self._clock_us()
            outputs: list[Output] = []
            if self._stop.is_set():  # only the receipts of what is published already are waited for
                patience -= 0.05
                time.sleep(0.05)
            else:
                held = self._can_publish()
                room = _MAX_OPEN - outbox.open
                (consumer.resume if room > 0 else consumer.pause)(*consumer.assignment())
                for part, records in consumer.poll(timeout_ms=100, max_records=max(1, room)).items():
                    for record in records:
                        output = outbox.take(Place(part.partition, record.offset), record.value, now)
                        outputs += [] if output is None else [output]
                outputs += outbox.step(held is not None, self._publish, self._clock_us())
                self._state = _in_words(held, outbox)
            for output in outputs:
                future = producer.send(f"{self._prefix}{output.topic}", value=output.value, key=output.key)
                future.add_callback(partial(_took, answers, output.place))
                future.add_errback(partial(_refused, answers, output.place))
                under_way += 1
            while answers:
                place, error = answers.popleft()
                under_way -= 1
                if error is not None:
                    raise FramesProducerError(f"a receipt was refused: {error!r}") from error
                outbox.done(place)
            places = outbox.places()
            if places != committed:
                consumer.commit(
                    {
                        TopicPartition(topic, partition): OffsetAndMetadata(offset, str(outbox.not_before(partition)))
                        for partition, offset in places.items()
                    },
                    timeout_ms=10_000,
                )
                committed = places
            self._counted = (
                before[0] + outbox.published,
                before[1] + outbox.failed,
                before[2] + outbox.quarantined,
            )
            self._error = None

    def _begin(self, consumer: KafkaConsumer, topic: str, outbox: Outbox) -> dict[int, int]:
        """Where to go on; on a first start the line of `max_age` is drawn and kept. What is committed."""
        partitions = consumer.partitions_for_topic(topic)
        if not partitions:
            raise FramesProducerError(f"there is no topic {topic}")
        parts = [TopicPartition(topic, partition) for partition in sorted(partitions)]
        consumer.assign(parts)
        places: dict[int, int] = {}
        for part in parts:
            kept = consumer.committed(part, metadata=True, timeout_ms=10_000)
            if kept is not None:
                # a place without the line was set by hand: publish from there
                text = kept.metadata or ""
                not_before = int(text) if text.lstrip("-").isdigit() else 0
                offset = kept.offset
                consumer.seek(part, offset)
            else:
                not_before = self._clock_us() - self._options.max_age
                consumer.seek_to_beginning(part)
                offset = consumer.position(part, timeout_ms=10_000)
                consumer.commit({part: OffsetAndMetadata(offset, str(not_before))}, timeout_ms=10_000)
            places[part.partition] = offset
            outbox.start(part.partition, places[part.partition], not_before)
        return places


def _took(answers: deque[tuple[Place, BaseException | None]], place: Place, _: object) -> None:
    answers.append((place, None))


def _refused(answers: deque[tuple[Place, BaseException | None]], place: Place, error: BaseException) -> None:
    answers.append((place, error))


def _in_words(held: str | None, outbox: Outbox) -> str:
    waiting = outbox.waiting
    count = sum(waiting.values())
    if held is not None:
        return f"held back: {held}" + (f" (batches waiting: {count})" if count else "")
    if not waiting:
        return "waiting for batches"
    topic = next(iter(waiting))
    others = f" and {len(waiting) - 1} other topics" if len(waiting) > 1 else ""
    return f"waiting for a peer on {topic}{others} (batches waiting: {count})"
