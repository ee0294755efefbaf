"""Publish batches from `kiln.batches` to the network, with a receipt for each in `kiln.publications` (docs/design).

Batches are published at least once. A peer can apply a batch twice without harm, because a batch is a set of tips.
Kafka assigns each partition to one bridge (`KafkaWorker`). The bridge commits the offset of its oldest batch whose
receipts the broker has not acknowledged. The metadata of the offset shows which later batches have all receipts
acknowledged. After a crash, all other batches from that offset on are published again.

The block of a batch is stored and pinned in IPFS before its CID is published, because other nodes fetch the block as
soon as they know the CID. While IPFS is unavailable, nothing is published, no timeout runs, and the batches keep their
order.

The transition of CIP-120 decides on which topics a batch is published (`transition.py`). Each topic gets a receipt.

A batch without a peer waits apart from the others (`deliveries.py`). After `publish_timeout` it gets a receipt with the
reason. If the transport knows which topics have peers, only batches with a peer are stored and sent. Otherwise a batch
is retried every `retry_every`, and sent at least once before it is given up, since the transport may keep it for a peer
that comes later. Batches of one topic and separator keep their order. While `can_publish` returns a reason to wait,
nothing is published and no timeout runs.

At the first start, the group has no committed offset, and the publisher begins at the beginning of the topic. A batch
that closed more than `max_age` before that start gets a receipt with the error `too old`, because its tips may be
outdated. The limit is committed with the offset. Later starts use the same limit, so that batches are published even
if they waited while the bridge was down.

Records that Kafka deleted before the publisher read them are counted, logged, and reported by a quarantine record.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from kiln.bridge.ipfs import BlockStore, BlockStoreUnavailableError
from kiln.bridge.kafka.session_thread import KafkaConfig, now_us
from kiln.bridge.kafka.worker import KafkaWorker, Progress
from kiln.bridge.publisher.batches import (
    MAX_BLOCK_BYTES,
    MAX_OPEN,
    PendingBatches,
    PublishingOptions,
    read_metadata,
)
from kiln.bridge.publisher.deliveries import Subscribers
from kiln.bridge.publisher.pace import AuthorPacer
from kiln.bridge.publisher.transition import BY_SEPARATOR, TopicScheme
from kiln.conf.process.bridge_status import PublisherStatus
from kiln.conf.process.kafka_records import KafkaRecord

_LOG: Final = logging.getLogger(__name__)
_POLL_EVERY: Final = 100_000  # time in µs between two polls, while no record comes and nothing is due
_REMOVE_EVERY: Final = 10_000_000  # time in µs between two removals of old blocks


class Publisher(KafkaWorker):
    """A thread that reads batches from Kafka, publishes them and writes receipts, from `start()` to `stop()`."""

    def __init__(
        self,
        kafka: KafkaConfig,
        options: PublishingOptions,
        publish: Callable[[str, bytes], int],
        can_publish: Callable[[], str | None],
        blocks: BlockStore,
        topics: Callable[[], TopicScheme] = lambda: BY_SEPARATOR,
        clock_us: Callable[[], int] = now_us,
        group: str | None = None,
        pace: AuthorPacer | None = None,
        instance: str | None = None,
        subscribers: Subscribers | None = None,
    ) -> None:
        """Create the thread without starting it.

        Args:
            publish: sends a message on a topic, reports it to `pace`, and returns the number of peers that it was sent
                to; called in this thread.
            can_publish: returns the reason why nothing may be published now, or `None`.
            blocks: the store of the blocks.
            topics: returns the topics on which batches are published now.
            group: consumer group of the offsets; by default that of gossipsub publishers of the network.
            pace: rate limiter of the messages; by default without a limit.
            instance: id of the static member in the consumer group (`KafkaWorker`).
            subscribers: finds the peers of topics, so that no message is sent on a topic without a peer; called in this
                thread.
        """
        group = group or f"{kafka.prefix}publisher.{options.network}"
        outputs = "publications", "quarantine"
        super().__init__("publisher", "nothing is published", kafka, group, "batches", outputs, instance)
        self._options = options
        self._publish = publish
        self._can_publish = can_publish
        self._blocks = blocks
        self._topics = topics
        self._clock_us = clock_us
        self._pace = pace or AuthorPacer(0, 1)
        self._pending = PendingBatches(options, subscribers)
        self._is_removing = False
        self._removed_at = 0

    def status(self) -> PublisherStatus:
        """Return the status of the publisher."""
        pending = self._pending
        return PublisherStatus(self.state, pending.published, pending.failed, pending.lost)

    def _begin(self, partition: int, committed: Progress | None, first: int, end: int) -> int:
        if committed is None:
            self._pending.start(partition, first, self._clock_us() - self._options.max_age)
            return first
        # an offset without the limit was set by hand, or belongs to a new topic: publish from that offset on
        not_before, settled = read_metadata(committed.offset, committed.metadata)
        self._pending.start(partition, committed.offset, not_before, settled)
        self._skip_lost(partition, first)
        return max(committed.offset, first)

    def _end(self, partition: int) -> None:
        self._pending.end(partition)

    def _handle(self, partition: int, record: KafkaRecord) -> None:
        self._pending.add_record(partition, record.offset, record.value, self._clock_us())

    def _record_lost_range(self, partition: int, before: int) -> int:
        return self._pending.record_lost_range(partition, before, self._clock_us())

    def _wait(self) -> float:
        # whole ms, rounded up so that the next attempt is due after the wait
        return -(-self._pending.time_to_next_attempt(self._clock_us(), _POLL_EVERY) // 1_000) / 1_000

    def _room(self, partition: int) -> int:
        return max(0, MAX_OPEN - self._pending.open_count) if self._pending.block_bytes < MAX_BLOCK_BYTES else 0

    def _work(self) -> None:
        if not self._stop.is_set():
            self._publish_due()
        for output in self._pending.take_outputs():
            self._send(output.topic, output.key, output.value, partial(self._pending.acknowledge, output.record))

    def _publish_due(self) -> None:
        now, held_back = self._clock_us(), self._can_publish()
        self._pending.step(held_back is not None, self._blocks, self._publish, now, self._topics(), self._pace)
        if self._is_removing or abs(now - self._removed_at) >= _REMOVE_EVERY:  # the clock may be set back
            self._is_removing, self._removed_at = False, now
            # a block that stays too long does no harm, and `put` reports an unreachable node
            with suppress(BlockStoreUnavailableError):
                self._is_removing = self._blocks.remove_older(now - self._options.pin_duration)
        standby = f"on standby: Kafka has assigned no partition of {self._topic} to this bridge"
        state = _describe_state(held_back, self._pending) if self._committed else standby
        self._report(state, self._pending.ipfs_error)

    def _commit_done(self) -> None:
        progress = {
            partition: Progress(offset, self._pending.metadata(partition))
            for partition, offset in self._pending.resume_offsets().items()
        }
        self._commit({number: place for number, place in progress.items() if self._committed[number] != place})


def _describe_state(held_back: str | None, pending: PendingBatches) -> str:
    count = pending.waiting_count
    if held_back is not None:
        return f"held back: {held_back}" + (f" (batches waiting: {count})" if count else "")
    if pending.ipfs_error is not None:
        return f"IPFS is unavailable: {pending.ipfs_error} (batches waiting: {count})"
    if not count:
        return "waiting for batches"
    flows = pending.queue.parked_flows
    if not flows:
        return f"publishing (batches waiting: {count})"
    topic, _ = next(iter(flows))
    others = f" and {len(flows) - 1} other topics" if len(flows) > 1 else ""
    return f"waiting for a peer on {topic}{others} (batches waiting: {count})"
