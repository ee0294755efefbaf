"""Fetch blocks from IPFS: `kiln.wanted` to `kiln.updates`, `kiln.streams`, `kiln.blocks` (docs/design/bridge.md).

An update of unknown separator waits in `kiln.wanted` for the genesis of its stream. All updates that wait for one
genesis share one fetch. They are then released, that is, written to `kiln.updates` in their order. After that, the
separator is written to `kiln.streams`. The query `updates` reads it there, and then writes updates of the stream to
`kiln.updates` itself. If the separator were written earlier, these could overtake the waiting updates.

The block of another node's batch goes to `kiln.blocks` if the interests of the bridge cover the separator of the batch.
With spare capacity, the fetcher also fetches geneses only to check claimed separators (decision 20).

A missing block is retried with growing pauses, for `give_up_after` of the time that IPFS is available, or a minute for
a batch of an unproven author (`AnnouncerPlaces`). Then its records go to quarantine, and the block is not tried again
for `retry_after`. While IPFS is unavailable everything waits.

One bridge of the network does this work: the bridge to which Kafka assigns the first partition of `kiln.wanted`. It
reads all partitions, because records of different partitions may need the same genesis (`KafkaWorker`).

Exactly once: each released update carries an epoch, which is `genesis/NETWORK/PARTITION` and a generation. Before the
fetcher writes a group of updates, it commits the generation and the list of these updates, together with its offset in
`kiln.wanted`. Each commit raises the generation by one. After a crash, the fetcher of this or another bridge releases
the same updates under the same generation before it does anything else. So a reader of `kiln.updates` recognises and
drops the repeated ones (docs/design, decision 7; kiln.bridge.fetcher.offsets).

A bridge that was cut off or suspended never writes after its successor. The broker accepts a commit only from a member
of the group, and removes no member within SESSION of a commit. Each write ends before that time is over.

If `kiln.streams` has records, an earlier run has fetched. If the group then has no committed offset, the fetcher stops,
and its error explains how to set the offset.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from msgspec import structs

from kiln.bridge.fetcher.attempts import FAULT, Answer, BlockRequest, FetchFailure, fetch_block
from kiln.bridge.fetcher.fetch_queue import KnownAnswers
from kiln.bridge.fetcher.offsets import DoneOffsets
from kiln.bridge.fetcher.pending import REPLAY, FetchingOptions, FetchOutput, PendingFetches, StagedWrites
from kiln.bridge.fetcher.wanted import KafkaPosition
from kiln.bridge.ipfs import BlockStore
from kiln.bridge.kafka.producers import FramesProducerError
from kiln.bridge.kafka.session_thread import SESSION, BlockedError, KafkaConfig, now_us
from kiln.bridge.kafka.worker import KafkaWorker, Progress, StallCheck
from kiln.conf.process.bridge_status import FetcherStatus
from kiln.conf.process.kafka_records import KafkaRecord, RecordReader
from kiln.schemas.kafka.records import UNREADABLE, decode_stream
from kiln.schemas.wire.topics import Interest, parse_interest

_LOG: Final = logging.getLogger(__name__)
_MAX_RECORDS_PER_POLL: Final = 500
_RENEW_AFTER: Final = 4.0  # seconds from a commit to the next one while the fetcher writes
_RENEW_WITHIN: Final = SESSION - _RENEW_AFTER - 2.0  # seconds for that commit, with a margin of 2 s
_STOP_TIMEOUT: Final = 2.0  # seconds for the broker to acknowledge a stage when the thread stops


class PositionLostError(BlockedError):
    """Kafka has lost the committed offset, so it is unknown which records are done. The message gives the remedy."""


class _StreamsReader:
    """Reader of the records that are in `kiln.streams` when the reader is created. Each `read` returns some of them."""

    def __init__(self, reader: RecordReader, topic: str) -> None:
        self._reader = reader
        parts = reader.list_partitions(topic)
        if not parts:
            raise FramesProducerError(f"topic {topic} does not exist. Restart Kiln, which creates missing topics")
        self._ends = {part: reader.read_end(part) for part in parts}
        reader.assign(dict.fromkeys(parts, 0))
        self._stalls = StallCheck()

    @property
    def is_done(self) -> bool:
        return all(self._reader.position(part) >= end for part, end in self._ends.items())

    def read(self) -> list[KafkaRecord]:
        records = [record for arrived in self._reader.poll(0.2).values() for record in arrived]
        self._stalls.check(self._reader, has_records=bool(records))
        return records

    def close(self) -> None:
        self._reader.close()


class Fetcher(KafkaWorker):
    """A thread that reads `kiln.wanted`, fetches blocks from IPFS and writes the results, from `start()` to `stop()`.

    If decoding a block raises an unexpected error, the error is logged, the records that wait for the block go to
    quarantine, and the thread continues.
    """

    def __init__(
        self,
        kafka: KafkaConfig,
        options: FetchingOptions,
        blocks: BlockStore,
        interests: Callable[[], Iterable[str]],
        clock_us: Callable[[], int] = now_us,
        instance: str | None = None,
    ) -> None:
        """Create the thread without starting it.

        Args:
            interests: returns the current interests as texts (`kiln.schemas.wire.topics.parse_interest`); called in
                this thread.
            instance: id of the static member in the consumer group (`KafkaWorker`).
        """
        group = f"{kafka.prefix}fetcher.{options.network}"
        outputs = "updates", "quarantine", "streams", "blocks"
        super().__init__("fetcher", "nothing is fetched", kafka, group, "wanted", outputs, instance, reads_all=True)
        self._options = options
        self._blocks = blocks
        self._interests = interests
        self._clock_us = clock_us
        self._pool = ThreadPoolExecutor(options.max_concurrent, "fetch")
        self._streams: _StreamsReader | None = None
        self._forget_work()
        self._renew_at = 0.0  # time by `_boot_clock`
        self._places_lost = 0
        self._counts_before: Counter[str] = Counter()  # from before the current partitions were assigned
        self._status = FetcherStatus("", counts=Counter())  # status as of the last step

    def _forget_work(self) -> None:
        self._without_offset: set[int] = set()  # partitions without a committed offset
        self._known = KnownAnswers()
        self._pending = PendingFetches(self._options, self._known)
        self._staged: StagedWrites | None = None  # not written yet
        self._fetches: dict[Future[Answer], BlockRequest] = {}
        self._followed: list[Interest] | None = None  # the interests, as of this poll

    @property
    def leads(self) -> bool:
        """True if this bridge fetches for all bridges of the network, because Kafka has assigned the work to it."""
        return bool(self._pending.offsets)

    def status(self) -> FetcherStatus:
        """Return the status of the fetcher."""
        return structs.replace(self._status, state=self.state, places_lost=self._places_lost)

    def _release_resources(self) -> None:
        # fetches in flight end when the block store is closed
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -------- partitions

    def _begin(self, partition: int, committed: Progress | None, first: int, end: int) -> int:
        if self._streams is None:
            self._streams = _StreamsReader(self._open_reader(), f"{self._prefix}streams")
        if committed is None:
            self._without_offset.add(partition)
        place = committed or Progress(first, "")
        # each commit raises the generation by one, so the clock in µs is greater than any earlier generation
        offsets = DoneOffsets(place.offset, place.metadata, self._clock_us())
        if offsets.read > end:  # Kafka has an older backup of the topic
            _LOG.error(
                "%s-%d ends at offset %d, but group %s has read up to offset %d: the topic has lost records, as after "
                "a restore from a backup. Reading the partition from its beginning",
                *(self._topic, partition, end, self._group, offsets.read),
            )
            offsets = DoneOffsets(first, "", self._clock_us())
        self._pending.start(partition, offsets)
        self._skip_lost(partition, first)
        return max(offsets.resume_offset - REPLAY, first)

    def _end(self, partition: int) -> None:
        self._counts_before = self._counts_before + self._pending.counts
        if self._streams is not None:
            self._streams.close()
            self._streams = None
        self._forget_work()

    def _record_lost_range(self, partition: int, before: int) -> int:
        return self._pending.record_lost_range(partition, before, self._clock_us())

    def _has_read_streams(self) -> bool:
        """Read some records of `kiln.streams`, and return true if all are read.

        Raises:
            PositionLostError: there are streams, so a fetcher has run, but the group has no offset.
        """
        if self._streams is None:
            return True
        for record in self._streams.read():
            self._add_known_stream(record.value)
        self._state = f"reading the known streams: {len(self._known.streams)} so far"
        if not self._streams.is_done:
            return False
        if self._without_offset and self._known.streams:
            self._places_lost = max(self._places_lost, len(self._without_offset))
            raise PositionLostError(
                f"Kafka has lost the committed offset of group {self._group} for {self._topic}-"
                f"{min(self._without_offset)}. Set an offset with kafka-consumer-groups.sh --reset-offsets: "
                "--to-latest skips the records that still wait. --to-earliest reads all records of the topic; choose "
                "it if the topic was deleted and created again."
            )
        self._streams.close()
        self._streams = None
        self._commit_offsets(dict.fromkeys(self._without_offset, ()))  # so that a loss of the offset is noticed later
        self._without_offset.clear()
        return True

    def _add_known_stream(self, value: bytes | None) -> None:
        try:
            record = decode_stream(value or b"")
        except UNREADABLE:
            return  # the query `sink` quarantines it; if the stream is wanted, its genesis is fetched
        if record.network == self._options.network and record.source == "genesis":
            self._known.streams[record.stream] = record.separator

    # -------- records

    def _wait(self) -> float:
        if self._streams is not None:
            return 0.0
        return 0.02 if self._pending.is_busy or self._staged is not None else 0.2

    def _room(self, partition: int) -> int:
        if self._streams is not None or self._staged is not None:
            return 0
        return self._pending.room(partition, _MAX_RECORDS_PER_POLL)

    def _handle(self, partition: int, record: KafkaRecord) -> None:
        if self._followed is None:
            self._followed = [parse_interest(text) for text in self._interests()]
        position = KafkaPosition(partition, record.offset)
        self._pending.add_record(position, record.value, self._followed, self._clock_us())

    def _work(self) -> None:
        self._followed = None
        if not self._pending.offsets:
            self._report(f"on standby: Kafka has assigned no partition of {self._topic} to this bridge")
        elif not self._stop.is_set() and self._has_read_streams():
            if self._staged is None:
                self._staged = self._stage_writes()
            stages, releasing = self._staged
            if not any(stages) or (self._begin_writes(releasing) and all(map(self._write, stages))):
                self._pending.confirm_writes()
                self._staged = None
            self._report(_describe_state(self._pending), self._pending.queue.ipfs_error)
        streams, updates = self._pending.queue.count_unanswered()
        self._status = FetcherStatus(
            "",
            waiting=self._pending.waiting_count,
            fetching=self._pending.queue.in_flight,
            counts=self._counts_before + self._pending.counts,
            claimed=len(self._pending.claims),
            unanswered_streams=streams,
            unanswered_updates=updates,
        )

    def _stage_writes(self) -> StagedWrites:
        now = self._clock_us()
        for future in [future for future in self._fetches if future.done()]:
            request = self._fetches.pop(future)
            self._pending.add_answer(request, _get_answer(request, future), now)
        for request in self._pending.start_fetches(now):
            future = self._pool.submit(
                fetch_block,
                self._blocks,
                request,
                self._options.timeout / 1e6,
                self._options.implied_separator,
                self._pending.queue.list_announcers(request),
            )
            self._fetches[future] = request
        return self._pending.stage_writes(now)

    # -------- commits and writes

    def _commit_done(self) -> None:
        if self._staged is None:
            changed = (
                n for n, offsets in self._pending.offsets.items() if offsets.changed and not offsets.is_repeating
            )
            self._commit_offsets(dict.fromkeys(changed, ()))

    def _commit_offsets(self, releasing: Mapping[int, Collection[int]]) -> bool:
        """Commit the offsets of partitions, and the offsets of the records to release next.

        Returns:
            False if the broker rejects the commit, because the group is changing.
        """
        progress = {
            number: Progress(
                self._pending.offsets[number].resume_offset, self._pending.offsets[number].metadata(records)
            )
            for number, records in releasing.items()
        }
        if not self._commit(progress):
            return False
        for number in progress:
            self._pending.offsets[number].mark_committed()
        return True

    def _begin_writes(self, releasing: Mapping[int, Collection[int]]) -> bool:
        """Commit the offsets of the records to release next; return false if the broker rejects the commit."""
        began = _boot_clock()
        # records that an earlier run has perhaps released keep their generation
        again = {
            number: self._committed[number] for number, offsets in self._pending.offsets.items() if offsets.is_repeating
        }
        fresh = {number: releasing.get(number, ()) for number in self._pending.offsets.keys() - again.keys()}
        if not self._commit(again) or not self._commit_offsets(fresh):
            return False
        self._renew_at = began + _RENEW_AFTER
        return True

    def _renew(self) -> None:
        """Repeat the last commit in time, so that the broker does not remove this bridge from the group.

        Raises:
            FramesProducerError: the broker may have removed this bridge from the group.
        """
        if (now := _boot_clock()) < self._renew_at:
            return
        if now >= self._renew_at + _RENEW_WITHIN or not self._commit(self._committed):
            raise FramesProducerError(
                f"the broker did not accept a commit of group {self._group} in time, so another bridge may be fetching "
                "now"
            )
        self._renew_at = now + _RENEW_AFTER

    def _write(self, outputs: Sequence[FetchOutput]) -> bool:
        """Write a stage and wait for its acknowledgements.

        Returns:
            False if the thread must stop before the broker has all records.

        Raises:
            FramesProducerError: the broker refused a record, or may have removed this bridge from the group.
        """
        for output in outputs:
            self._renew()
            self._send(*output)
        stopped_at = 0.0
        while not self._await_written(0.5):
            self._renew()
            if self._stop.is_set():
                stopped_at = stopped_at or time.monotonic()
                if time.monotonic() > stopped_at + _STOP_TIMEOUT:
                    return False
        return True


def _boot_clock() -> float:
    """Return the seconds since boot; unlike `time.monotonic` they include the time that the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _get_answer(request: BlockRequest, future: Future[Answer]) -> Answer:
    error = future.exception()
    if error is None:
        return future.result()
    # the bytes come from a peer, so an error in reading them must not end all fetching
    _LOG.error(
        "cannot decode the block of the %s %s. The records that wait for it go to quarantine, with reason %s. Report "
        "this bug in Kiln",
        *(request.kind, request.cid, FAULT),
        exc_info=error,
    )
    return FetchFailure(FAULT, repr(error)[:500], final=True)


def _describe_state(pending: PendingFetches) -> str:
    waiting = f" (records waiting: {pending.waiting_count})" if pending.waiting_count else ""
    if pending.queue.ipfs_error is not None:
        return f"IPFS is unavailable: {pending.queue.ipfs_error}{waiting}"
    return f"fetching blocks: {pending.queue.in_flight}{waiting}" if pending.is_busy else "waiting for records"
