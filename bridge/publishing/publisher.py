"""Batches out to the network: `kiln.batches` to gossipsub, a receipt of each to `kiln.publications` (docs/design).

The topic of batches is the outbox. The publisher takes the LIVE batches of the bridge's network and leaves the others.
It commits its place only up to the first batch whose receipt the broker has not acknowledged. So after a crash the
publisher may publish a batch again, which the CID makes harmless, and passes no batch over.

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
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from kafka import KafkaConsumer, TopicPartition
from kafka.structs import OffsetAndMetadata

from bridge.ipfs import BlocksAwayError
from bridge.kafka.place import Place
from bridge.kafka.producers import FramesProducerError, StoppableKafkaProducer
from bridge.kafka.thread import KafkaThread, partitions_of
from bridge.publishing.outbox import MAX_BLOCK_BYTES, MAX_OPEN, Keeper, Outbox, Output, PublishingOptions
from bridge.publishing.pins import PinsError
from bridge.publishing.transition import BY_SEPARATOR, Topics
from bridge.status import PublisherStatus

_UNPIN_EVERY: Final = 10_000_000  # µs between two looks at pins that have run out


def _now_us() -> int:
    return time.time_ns() // 1_000


class Publisher(KafkaThread):
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
        keeper: Keeper,
        topics: Callable[[], Topics] = lambda: BY_SEPARATOR,
        clock_us: Callable[[], int] = _now_us,
        group: str | None = None,
    ) -> None:
        """`client_options`: how to talk to the brokers (security_protocol, sasl_…, ssl_…). `prefix`: of topics.

        `publish(topic, data)`: hands a message to the node and returns to how many peers it goes; called in this
        thread, as is `keeper`. `can_publish`: None, or in words why publishing is held back now. `topics`: those on
        which batches go out now. `group`: the consumer group that keeps the place; by default one of the network.
        """
        super().__init__(
            "publisher",
            "nothing is published",
            bootstrap_servers,
            client_options,
            prefix,
            group or f"{prefix}publisher.{options.network}",
        )
        self._options = options
        self._publish = publish
        self._can_publish = can_publish
        self._keeper = keeper
        self._topics = topics
        self._clock_us = clock_us
        self._counted = (0, 0, 0)

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

    def status(self) -> PublisherStatus:
        """How it goes."""
        return PublisherStatus(self.state, self.published, self.failed)

    def _ended(self) -> None:
        self._keeper.close()

    def _work(self, consumer: KafkaConsumer, producer: StoppableKafkaProducer) -> None:
        topic = f"{self._prefix}batches"
        outbox = Outbox(self._options)
        before = self._counted
        committed = self._begin(consumer, topic, outbox)
        answers: deque[tuple[Place, BaseException | None]] = deque()  # filled by kafka-python's thread
        under_way = 0
        patience = 2.0
        unpin_at = 0
        while not self._stop.is_set() or (under_way and patience > 0):
            now = self._clock_us()
            outputs: list[Output] = []
            if self._stop.is_set():  # only the receipts of what is published already are waited for
                patience -= 0.05
                time.sleep(0.05)
            else:
                held_back = self._can_publish()
                room = MAX_OPEN - outbox.open if outbox.block_bytes < MAX_BLOCK_BYTES else 0
                wait = 0 if outbox.unkept and outbox.away is None else 100  # ms
                (consumer.resume if room > 0 else consumer.pause)(*consumer.assignment())
                for part, records in consumer.poll(timeout_ms=wait, max_records=max(1, room)).items():
                    for record in records:
                        output = outbox.take(Place(part.partition, record.offset), record.value, now)
                        outputs += [] if output is None else [output]
                outputs += outbox.step(
                    held_back is not None, self._keeper, self._publish, self._clock_us(), self._topics()
                )
                if now >= unpin_at:
                    self._unpin_expired(now)
                    unpin_at = now + _UNPIN_EVERY
                self._state = _in_words(held_back, outbox)
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
            self._error = None if outbox.away is None else f"nothing is published, IPFS is away: {outbox.away}"

    def _unpin_expired(self, now: int) -> None:
        # a pin that lasts too long does no harm, and `keep` reports a node that is away
        with suppress(BlocksAwayError, PinsError):
            self._keeper.unpin_expired(now)

    def _begin(self, consumer: KafkaConsumer, topic: str, outbox: Outbox) -> dict[int, int]:
        """Moves the consumer to the committed places, which it returns. A first start draws and keeps the line of
        `max_age`."""
        parts = partitions_of(consumer, topic)
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
