"""Fetch blocks from IPFS: `kiln.wanted` to `kiln.updates`, `kiln.streams`, `kiln.blocks` (docs/design/bridge.md).

An update of unknown separator waits in `kiln.wanted` for the genesis of its stream. All updates that wait for one
genesis share one fetch, and are then released to `kiln.updates` in their order. Once the broker has them, the answer
is written to `kiln.streams`, so that no reader of the answer can send a later update past them. The block of another
node's batch goes to `kiln.blocks` if its separator is of interest when the fetcher reads the record. When there is
room, the fetcher also fetches geneses of streams whose separator is only claimed (decision 20).

A missing block is retried with growing pauses, for `give_up_after` of the time that IPFS is available. Then its records
go to quarantine, and the block is not tried again for `retry_after`. While IPFS is unavailable everything waits.

Exactly once: a released update carries the epoch (`genesis/NETWORK/PARTITION`, generation). Before the fetcher writes
the first of some updates, it commits which updates these are and their generation, together with the offset in
`kiln.wanted`. Each commit raises the generation by one. After a crash the fetcher releases the same updates under the
same generation before anything else, so that a reader of the log drops what came already in the same epoch
(docs/design, decision 7; kiln.bridge.fetcher.offsets).

What is committed is also written to a file before the first update, for the case that Kafka loses the offset. With
neither, and with streams that an earlier run fetched, the fetcher stops and explains how to set the offset.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple

from kafka.structs import OffsetAndMetadata

from kafka import KafkaConsumer, TopicPartition
from kiln.bridge.fetcher.attempts import FAULT, Answer, BlockRequest, FetchFailure, fetch_block
from kiln.bridge.fetcher.fetch_queue import KnownAnswers, UnansweredGeneses
from kiln.bridge.fetcher.offsets import DoneOffsets
from kiln.bridge.fetcher.pending import CLAIM_REPLAY, FetchingOptions, FetchOutput, PendingFetches
from kiln.bridge.fetcher.position_file import FilePosition, PositionFile
from kiln.bridge.fetcher.wanted import KafkaPosition
from kiln.bridge.ipfs import BlockStore
from kiln.bridge.kafka.producers import FramesProducerError, StoppableKafkaProducer
from kiln.bridge.kafka.thread import RENEW_EVERY, KafkaConfig, Leadership, LeaderThread, PositionLostError, now_us
from kiln.bridge.kafka.topic_notes import TopicNotes
from kiln.conf.process.bridge_status import FetcherStatus
from kiln.conf.process.kafka_records import RecordReader
from kiln.schemas.kafka.records import UNREADABLE, decode_stream
from kiln.schemas.wire.topics import Interest, parse_interest

_LOG: Final = logging.getLogger(__name__)
_MAX_RECORDS_PER_POLL: Final = 500  # per round
_WRITE_TIMEOUT: Final = 60.0  # s for the broker to acknowledge a stage of a round


class _FetchProgress(NamedTuple):
    waiting: int
    in_flight: int
    claimed: int
    counts: Counter[str]
    unanswered: UnansweredGeneses = UnansweredGeneses()


class Fetcher(LeaderThread):
    """A thread that runs `PendingFetches` between Kafka and IPFS, from `start()` to `stop()`.

    An error in reading one block is logged and quarantined, and stops nothing else.
    """

    def __init__(
        self,
        kafka: KafkaConfig,
        options: FetchingOptions,
        blocks: BlockStore,
        interests: Callable[[], Iterable[str]],
        clock_us: Callable[[], int] = now_us,
        group: str | None = None,
        position_file: Path | None = None,
        leadership: Leadership | None = None,
        notes: TopicNotes | None = None,
    ) -> None:
        """Create the thread without starting it.

        Args:
            interests: returns the current interests as texts (`kiln.schemas.wire.topics.parse_interest`); called in
                this thread.
            group: consumer group of the offsets; by default one of the network.
            position_file: file with a copy of the offsets.
        """
        group = group or f"{kafka.prefix}fetcher.{options.network}"
        super().__init__("fetcher", "nothing is fetched", kafka, group, leadership, notes)
        self._options = options
        self._file = None if position_file is None else PositionFile(position_file)
        self._file_positions: dict[int, FilePosition] = {}  # in the file now
        self._topic_id = ""
        self._blocks = blocks
        self._interests = interests
        self._clock_us = clock_us
        self._pool = self._new_pool()
        self._known: KnownAnswers | None = None
        self._progress = _FetchProgress(0, 0, 0, Counter())

    @property
    def waiting(self) -> int:
        """Records that wait."""
        return self._progress.waiting

    @property
    def under_way(self) -> int:
        """Blocks being fetched."""
        return self._progress.in_flight

    @property
    def claimed(self) -> int:
        """Geneses to compare with claims."""
        return self._progress.claimed

    @property
    def counts(self) -> Mapping[str, int]:
        """Records since the start by outcome, named as in kiln.schemas.metrics."""
        return self._progress.counts

    def status(self) -> FetcherStatus:
        """Return the status of the fetcher."""
        streams, updates = self._progress.unanswered
        return FetcherStatus(
            self.state,
            self.waiting,
            self.under_way,
            dict(self.counts),
            self.places_lost,
            self.claimed,
            streams,
            updates,
        )

    def _on_standby(self) -> None:
        """Drop offsets and streams, because the leader commits newer offsets and finds more streams."""
        super()._on_standby()
        self._known = None
        if self._file is not None:
            self._file.remove()

    def _release_resources(self) -> None:
        # fetches in flight end when the block store is closed
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = self._new_pool()  # for a restart of the thread; it costs nothing before its first fetch

    def _new_pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._options.max_concurrent, "fetch")

    def _read_streams(self) -> KnownAnswers:
        """Read all streams that are in `kiln.streams` now."""
        known = KnownAnswers()
        with closing(self._open_consumer(None)) as consumer, closing(self._open_reader()) as reader:
            parts = self._list_partitions(f"{self._prefix}streams")
            ends = consumer.end_offsets(parts)
            reader.assign(consumer.beginning_offsets(parts))
            for record in self._read_until(reader, ends, lambda: f"reading the known streams: {len(known.streams)}"):
                self._add_known_stream(known, record.value)
        return known

    def _add_known_stream(self, known: KnownAnswers, value: bytes | None) -> None:
        try:
            record = decode_stream(value or b"")
        except UNREADABLE:
            return  # `sink` quarantines it; an unknown stream is fetched
        if record.network == self._options.network and record.source == "genesis":
            known.add_stream(record.stream, record.separator)

    def _start_partitions(
        self, consumer: KafkaConsumer, reader: RecordReader, pending: PendingFetches
    ) -> dict[TopicPartition, DoneOffsets]:
        """Move the reader to the committed offsets, and return the finished offsets by partition.

        Raises:
            PositionLostError: an offset is lost.
        """
        topic = f"{self._prefix}wanted"
        parts = self._list_partitions(topic)
        is_replaced = topic in self._watch_topics(topic)
        done: dict[TopicPartition, DoneOffsets] = {}
        positions: dict[TopicPartition, int] = {}
        starts, ends = consumer.beginning_offsets(parts), consumer.end_offsets(parts)
        file_positions = self._read_file(topic)
        self._file_positions = dict(file_positions or {})
        for part in parts:
            committed = None if is_replaced else self._read_committed(consumer, part, file_positions)
            offset, metadata = (starts[part], "") if committed is None else committed
            # the clock is greater than any generation that commits have counted up to
            offsets = DoneOffsets(offset, metadata, self._clock_us())
            if offsets.read > ends[part]:  # the state has no note of the topic's id
                _LOG.error(
                    "%s-%d ends at offset %d, below the position %d of group %s: reading it from its beginning",
                    *(topic, part.partition, ends[part], offsets.read, self._group),
                )
                offset = starts[part]
                offsets = DoneOffsets(offset, "", self._clock_us())
            pending.start(part.partition, offsets)
            self._record_lost_range(pending, part, offsets, starts[part])
            positions[part] = max(offset - CLAIM_REPLAY, starts[part])
            done[part] = offsets
        reader.assign(positions)
        if self._is_leader:
            self._commit(consumer, done, {}, commit_all=True)
            self._save_topics()
        return done

    def _read_committed(
        self, consumer: KafkaConsumer, part: TopicPartition, file_positions: Mapping[int, FilePosition] | None
    ) -> tuple[int, str] | None:
        """Return offset and metadata from Kafka or the file, or `None` on the first start with this partition."""
        committed = consumer.committed(part, metadata=True, timeout_ms=10_000)
        if committed is not None:
            return committed.offset, committed.metadata or ""
        if file_positions is not None:
            if part.partition not in file_positions:
                return None  # the partition was added later
            position = file_positions[part.partition]
            _LOG.error(
                "Kafka has lost the committed offset of group %s for %s-%d: using offset %d from %s",
                *(self._group, part.topic, part.partition, position.offset, self._file),
            )
            self._places_lost += 1
            return position.offset, position.metadata
        if self._known is not None and self._known.streams:  # a fetcher has run, since only fetchers write streams
            raise PositionLostError(
                f"Kafka has lost the committed offset of group {self._group} for {part.topic}-{part.partition}, and no "
                "file has it. Set it with kafka-consumer-groups.sh --reset-offsets: --to-latest skips the waiting "
                "records, --to-earliest releases all of them again."
            )
        return None

    def _read_file(self, topic: str) -> Mapping[int, FilePosition] | None:
        if self._file is None:
            return None
        self._topic_id = self._watched[topic].id
        try:
            return self._file.read(self._topic_id)
        except OSError as error:
            raise PositionLostError(
                f"cannot read {self._file} ({error.strerror}). Check the file's permissions and the disk."
            ) from error

    def _record_lost_range(
        self, pending: PendingFetches, part: TopicPartition, offsets: DoneOffsets, before: int
    ) -> None:
        first = offsets.resume_offset
        lost = pending.record_lost_range(part.partition, before, self._clock_us())
        if lost:
            _LOG.error(
                "Kafka deleted %d records of %s-%d before group %s had processed them: offsets %d to %d",
                *(lost, part.topic, part.partition, self._group, first, before - 1),
            )

    def _commit(
        self,
        consumer: KafkaConsumer,
        done: Mapping[TopicPartition, DoneOffsets],
        releasing: Mapping[int, set[int]],
        *,
        commit_all: bool = False,
    ) -> None:
        """Commit the changed offsets, or with `commit_all` every offset, so that Kafka does not forget any."""
        changed = {part for part, offsets in done.items() if offsets.changed or part.partition in releasing}
        changed_offsets = {
            part: OffsetAndMetadata(offsets.resume_offset, offsets.metadata(releasing.get(part.partition, ())))
            for part, offsets in done.items()
            if not offsets.is_repeating and (commit_all or part in changed)
        }
        if changed_offsets:
            consumer.commit(changed_offsets, timeout_ms=10_000)
            if self._file is not None:
                self._file_positions |= {
                    part.partition: FilePosition(each.offset, each.metadata) for part, each in changed_offsets.items()
                }
                try:
                    self._file.write(self._topic_id, self._file_positions)
                except OSError as error:
                    raise PositionLostError(
                        f"cannot write {self._file} ({error.strerror}). Check the folder's permissions and the disk."
                    ) from error
        for part in changed_offsets:
            done[part].mark_committed()

    def _run_as_leader(self, consumer: KafkaConsumer, reader: RecordReader, producer: StoppableKafkaProducer) -> None:
        if self._known is None:
            known = self._read_streams()
            if self._must_stop:  # not all are read
                return
            self._known = known
        before = self._progress.counts
        pending = PendingFetches(self._options, self._known)
        done = self._start_partitions(consumer, reader, pending)
        renew_at = self._clock_us() + RENEW_EVERY
        answers: deque[tuple[BlockRequest, Future[Answer]]] = deque()  # filled by the threads that fetch
        while not self._must_stop:
            self._check_topics()
            self._poll_records(consumer, reader, pending, done)
            now = self._clock_us()
            while answers:
                request, future = answers.popleft()
                pending.add_answer(request, _get_answer(request, future), now)
            for request in pending.start_fetches(now):
                future = self._pool.submit(
                    fetch_block, self._blocks, request, self._options.timeout / 1e6, self._options.implied_separator
                )
                future.add_done_callback(partial(_add_answer, answers, request))
            writes = pending.stage_writes(now)
            if not self._is_leader:
                return
            self._commit(consumer, done, writes.releasing, commit_all=now >= renew_at)
            renew_at = now + RENEW_EVERY if now >= renew_at else renew_at
            for stage in writes.stages:
                if not self._write(producer, stage):
                    return
            pending.confirm_writes()
            self._progress = _FetchProgress(
                pending.waiting_count,
                pending.in_flight,
                pending.claimed_count,
                before + pending.counts,
                pending.unanswered,
            )
            self._state = _describe_state(pending)
            self._error = (
                None if pending.ipfs_error is None else f"nothing is fetched, IPFS is unavailable: {pending.ipfs_error}"
            )

    def _poll_records(
        self,
        consumer: KafkaConsumer,
        reader: RecordReader,
        pending: PendingFetches,
        done: Mapping[TopicPartition, DoneOffsets],
    ) -> None:
        rooms = {part: pending.room(part.partition, _MAX_RECORDS_PER_POLL) for part in done}
        full = {part for part, room in rooms.items() if not room}
        reader.pause(full)
        reader.resume(rooms.keys() - full)
        max_records = min((room for room in rooms.values() if room), default=1)
        interests: list[Interest] | None = None
        for part, records in self._poll(reader, 20 if pending.is_busy else 200, max_records).items():
            if interests is None:
                interests = [parse_interest(text) for text in self._interests()]
            now = self._clock_us()
            for record in records:
                if record.offset > done[part].next_offset:
                    first = consumer.beginning_offsets([part])[part]
                    self._record_lost_range(pending, part, done[part], min(first, record.offset))
                announcer = pending.add_record(
                    KafkaPosition(part.partition, record.offset), record.value, interests, now
                )
                if announcer:
                    self._blocks.add_announcer(announcer)

    def _write(self, producer: StoppableKafkaProducer, outputs: Sequence[FetchOutput]) -> bool:
        """Write a stage and wait for its acknowledgements.

        Returns:
            False if the session must stop before the broker has all records.

        Raises:
            FramesProducerError: the broker refused a record.
        """
        remaining = len(outputs)
        results: SimpleQueue[BaseException | None] = SimpleQueue()  # filled by kafka-python's thread
        for output in outputs:
            if not self._is_leader:
                return False
            future = producer.send(f"{self._prefix}{output.topic}", value=output.value, key=output.key)
            future.add_callback(lambda _: results.put(None))
            future.add_errback(results.put)
        deadline = time.monotonic() + _WRITE_TIMEOUT
        while remaining:
            if self._stop.is_set():
                deadline = min(deadline, time.monotonic() + 2.0)
            try:
                error = results.get(timeout=min(0.5, max(0.0, deadline - time.monotonic())))
            except Empty:
                if not self._is_leader:
                    return False
                if time.monotonic() < deadline:
                    continue
                if self._stop.is_set():
                    return False
                raise FramesProducerError(f"no acknowledgement within {_WRITE_TIMEOUT:g} s") from None
            if error is not None:
                raise FramesProducerError(f"the broker refused a record: {error!r}") from error
            remaining -= 1
        return True


def _add_answer(
    answers: deque[tuple[BlockRequest, Future[Answer]]], request: BlockRequest, future: Future[Answer]
) -> None:
    answers.append((request, future))


def _get_answer(request: BlockRequest, future: Future[Answer]) -> Answer:
    error = future.exception()
    if error is None:
        return future.result()
    # the bytes come from a peer, so an error in reading them must not end all fetching
    _LOG.error("cannot read the block of %s %s", request.kind, request.cid, exc_info=error)
    return FetchFailure(FAULT, repr(error)[:500], final=True)


def _describe_state(pending: PendingFetches) -> str:
    waiting = f" (waiting: {pending.waiting_count})" if pending.waiting_count else ""
    if pending.ipfs_error is not None:
        return f"IPFS is unavailable: {pending.ipfs_error}{waiting}"
    return f"fetching {pending.in_flight}{waiting}" if pending.is_busy else "waiting for records"
