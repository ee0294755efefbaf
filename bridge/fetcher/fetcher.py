"""Blocks out of IPFS: `kiln.wanted` to `kiln.updates`, `kiln.streams`, `kiln.blocks` (docs/design/bridge.md, Fetching).

An update of unknown separator waits in `kiln.wanted` for the genesis of its stream. All updates that wait for one
genesis share one fetch. With the answer these updates go on to `kiln.updates`, in their order. Once the broker has the
updates, the answer goes to `kiln.streams`, so that no reader of the answer can send a later update past them. The block
of somebody else's batch goes to `kiln.blocks`, if its separator is of interest when the fetcher reads the record. The
fetcher also asks for geneses of streams whose separator is only claimed, when there is room (decision 20).

The fetcher tries a missing block again, with pauses that grow, for `give_up` of the time that IPFS was there. Then the
records go to quarantine, and the fetcher does not ask for the block again for `forget`. While IPFS is away everything
waits.

Exactly once: a released update carries the epoch (`genesis/NETWORK/PARTITION`, generation). Before the fetcher writes
the first of some updates, it commits which updates these are and their generation, with the place in `kiln.wanted`.
Each commit raises the generation by one. After a crash the fetcher releases the same updates under the same generation
before anything else. So a reader of the log drops what came already in the same epoch (docs/design, decision 7;
kiln.bridge.fetcher.offsets).

What the fetcher commits also goes into a file, before the fetcher writes the first update. The file counts where Kafka
has lost the place. With neither, and with streams that an earlier run fetched, the fetcher does not guess: it stops,
and says how to set the place.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

from kafka.structs import OffsetAndMetadata

from kafka import KafkaConsumer, TopicPartition
from kiln.bridge.fetcher.attempts import FAULT, Answer, BlockRequest, FetchFailure, fetch
from kiln.bridge.fetcher.offsets import DoneOffsets
from kiln.bridge.fetcher.pending import CLAIMS_AGAIN, FetchingOptions, FetchOutput, KnownAnswers, PendingFetches
from kiln.bridge.fetcher.position_file import FilePosition, PositionFile
from kiln.bridge.ipfs import BlockStore
from kiln.bridge.kafka.position import KafkaPosition
from kiln.bridge.kafka.producers import FramesProducerError, StoppableKafkaProducer
from kiln.bridge.kafka.thread import RENEW_EVERY, Leadership, LeaderThread, PositionLostError
from kiln.bridge.kafka.topic_notes import TopicNotes
from kiln.conf.process.bridge_status import FetcherStatus
from kiln.schemas.kafka.records import UNREADABLE, decode_stream
from kiln.schemas.wire.topics import Interest, parse_interest

_LOG: Final = logging.getLogger(__name__)
_AT_ONCE: Final = 500  # records taken in one round
_PATIENCE: Final = 60.0  # s for the broker to take a stage of a round


def _now_us() -> int:
    return time.time_ns() // 1_000


class Fetcher(LeaderThread):
    """Runs PendingFetches between Kafka and IPFS, in a thread of its own, from `start()` to `stop()`.

    Of a network and prefix one fetcher works at a time: the fetcher assigns itself the partitions. While Kafka is away,
    the fetcher tries again from its committed place. An error in reading one block is logged and quarantined, and stops
    nothing.
    """

    def __init__(
        self,
        bootstrap_servers: str | Sequence[str],
        client_options: Mapping[str, object],
        prefix: str,
        options: FetchingOptions,
        blocks: BlockStore,
        interests: Callable[[], Iterable[str]],
        clock_us: Callable[[], int] = _now_us,
        group: str | None = None,
        place_file: Path | None = None,
        leadership: Leadership | None = None,
        notes: TopicNotes | None = None,
    ) -> None:
        """`client_options`: how to talk to the brokers (security_protocol, sasl_…, ssl_…). `prefix`: of topics.

        `interests`: the interests now, as texts (`kiln.schemas.wire.topics.parse_interest`); called in this thread.
        `group`: the consumer group that keeps the place; by default one of the network. `place_file`: keeps the place,
        too.
        `leadership`: which of several bridges fetches. `notes`: which topics the place is of.
        """
        super().__init__(
            "fetcher",
            "nothing is fetched",
            bootstrap_servers,
            client_options,
            prefix,
            group or f"{prefix}fetcher.{options.network}",
            leadership,
            notes,
        )
        self._options = options
        self._file = None if place_file is None else PositionFile(place_file)
        self._filed: dict[int, FilePosition] = {}  # in the file now
        self._topic_id = ""
        self._blocks = blocks
        self._interests = interests
        self._clock_us = clock_us
        self._pool = self._new_pool()
        self._known: KnownAnswers | None = None
        self._view = (0, 0, 0, Counter[str]())
        self._places_lost = 0

    @property
    def waiting(self) -> int:
        """Records that wait."""
        return self._view[0]

    @property
    def under_way(self) -> int:
        """Blocks being fetched."""
        return self._view[1]

    @property
    def claimed(self) -> int:
        """Geneses that are to be held against claims."""
        return self._view[2]

    @property
    def counts(self) -> Mapping[str, int]:
        """What became of records since the start, by the names in kiln.schemas.metrics."""
        return self._view[3]

    @property
    def places_lost(self) -> int:
        """How often Kafka had lost the place in a partition, since the start."""
        return self._places_lost

    def status(self) -> FetcherStatus:
        """How it goes."""
        return FetcherStatus(
            self.state, self.waiting, self.under_way, dict(self.counts), self.places_lost, self.claimed
        )

    def _stood_by(self) -> None:
        """The leader commits places and learns of streams that this fetcher has not seen."""
        super()._stood_by()
        self._known = None
        if self._file is not None:
            self._file.remove()

    def _ended(self) -> None:
        # fetches under way end when the blocks are closed
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = self._new_pool()  # for a thread that starts again; it costs nothing before its first fetch

    def _new_pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._options.at_most, "fetch")

    def _read_streams(self) -> KnownAnswers:
        """All streams that are in `kiln.streams` now."""
        known = KnownAnswers()
        consumer = self._consumer(None)
        try:
            parts = self._partitions(f"{self._prefix}streams")
            consumer.assign(parts)
            consumer.seek_to_beginning(*parts)
            ends = consumer.end_offsets(parts)
            while not self._halts and any(consumer.position(part) < ends[part] for part in parts):
                self._state = f"reading which streams are known: {len(known.streams)}"
                for records in self._poll(consumer, 200).values():
                    for record in records:
                        self._remember(known, record.value)
        finally:
            consumer.close()
        return known

    def _remember(self, known: KnownAnswers, value: bytes | None) -> None:
        try:
            record = decode_stream(value or b"")
        except UNREADABLE:
            return  # `sink` quarantines it; a stream that is not known is asked for
        if record.network == self._options.network and record.source == "genesis":
            known.add_stream(record.stream, record.separator)

    def _begin(self, consumer: KafkaConsumer, pending: PendingFetches) -> dict[TopicPartition, DoneOffsets]:
        """Moves the consumer to the places that are kept. The offsets that are done, by partition. PlaceLostError."""
        topic = f"{self._prefix}wanted"
        parts = self._partitions(topic)
        anew = topic in self._begin_topics(topic)
        consumer.assign(parts)
        done: dict[TopicPartition, DoneOffsets] = {}
        starts, ends = consumer.beginning_offsets(parts), consumer.end_offsets(parts)
        filed = self._read_file(topic)
        self._filed = dict(filed or {})
        for part in parts:
            kept = None if anew else self._kept(consumer, part, filed)
            offset, metadata = (starts[part], "") if kept is None else kept
            # a clock is greater than what any number of commits has counted up to
            offsets = DoneOffsets(offset, metadata, self._clock_us())
            if offsets.read > ends[part]:  # a state that has noted no topic
                _LOG.error(
                    "%s, partition %d, ends at %d, and %s had read up to %d: it is read from its beginning",
                    *(topic, part.partition, ends[part], self._group, offsets.read),
                )
                offset = starts[part]
                offsets = DoneOffsets(offset, "", self._clock_us())
            pending.start(part.partition, offsets)
            self._gone(pending, part, offsets, starts[part])
            consumer.seek(part, max(offset - CLAIMS_AGAIN, starts[part]))
            done[part] = offsets
        if self._leads:
            self._commit(consumer, done, {}, everything=True)
            self._note_topics()
        return done

    def _kept(
        self, consumer: KafkaConsumer, part: TopicPartition, filed: Mapping[int, FilePosition] | None
    ) -> tuple[int, str] | None:
        """Offset and metadata, from Kafka, or from the file. None: the first start on this partition."""
        kept = consumer.committed(part, metadata=True, timeout_ms=10_000)
        if kept is not None:
            return kept.offset, kept.metadata or ""
        if filed is not None:
            if part.partition not in filed:
                return None  # the partition was added since
            place = filed[part.partition]
            _LOG.error("Kafka has lost the place of %s in %s: taken from %s", self._group, part, self._file)
            self._places_lost += 1
            return place.offset, place.metadata
        if self._known is not None and self._known.streams:  # a fetcher has run: each stream there came through one
            raise PositionLostError(
                f"the place of {self._group} in {part.topic}, partition {part.partition}, is lost, and no file has it. "
                "Set the place with kafka-consumer-groups.sh --reset-offsets: --to-latest leaves what waits, "
                "--to-earliest releases all of it again"
            )
        return None

    def _read_file(self, topic: str) -> Mapping[int, FilePosition] | None:
        if self._file is None:
            return None
        self._topic_id = self._watched[topic].id
        try:
            return self._file.read(self._topic_id)
        except OSError as error:
            raise PositionLostError(f"{self._file} cannot be read: {error.strerror}") from error

    def _gone(self, pending: PendingFetches, part: TopicPartition, offsets: DoneOffsets, before: int) -> None:
        first = offsets.place
        lost = pending.gone(part.partition, before, self._clock_us())
        if lost:
            _LOG.error(
                "Kafka let %d records of %s go before %s was done with them: partition %d, offsets %d to %d",
                *(lost, part.topic, self._group, part.partition, first, before - 1),
            )

    def _commit(
        self,
        consumer: KafkaConsumer,
        done: Mapping[TopicPartition, DoneOffsets],
        going: Mapping[int, set[int]],
        *,
        everything: bool = False,
    ) -> None:
        """Commits the places that have changed. `everything`: the others too, so that Kafka does not forget them."""
        changed = {part for part, offsets in done.items() if offsets.changed or part.partition in going}
        places = {
            part: OffsetAndMetadata(offsets.place, offsets.metadata(going.get(part.partition, ())))
            for part, offsets in done.items()
            if not offsets.repeating and (everything or part in changed)
        }
        if places:
            consumer.commit(places, timeout_ms=10_000)
            if self._file is not None:
                self._filed |= {
                    part.partition: FilePosition(kept.offset, kept.metadata) for part, kept in places.items()
                }
                try:
                    self._file.write(self._topic_id, self._filed)
                except OSError as error:
                    raise PositionLostError(f"{self._file} cannot be written: {error.strerror}") from error
        for part in places:
            done[part].committed()

    def _work(self, consumer: KafkaConsumer, producer: StoppableKafkaProducer) -> None:
        if self._known is None:
            known = self._read_streams()
            if self._halts:  # not all are read
                return
            self._known = known
        before = self._view[3]
        pending = PendingFetches(self._options, self._known)
        done = self._begin(consumer, pending)
        renew_at = self._clock_us() + RENEW_EVERY
        answers: deque[tuple[BlockRequest, Future[Answer]]] = deque()  # filled by the threads that fetch
        while not self._halts:
            self._check_topics()
            self._take(consumer, pending, done)
            now = self._clock_us()
            while answers:
                request, future = answers.popleft()
                pending.answer(request, _answer_of(request, future), now)
            for request in pending.next(now):
                future = self._pool.submit(
                    fetch, self._blocks, request, self._options.timeout / 1e6, self._options.implied_separator
                )
                future.add_done_callback(partial(_came, answers, request))
            writes = pending.next_writes(now)
            if not self._leads:
                return
            self._commit(consumer, done, writes.going, everything=now >= renew_at)
            renew_at = now + RENEW_EVERY if now >= renew_at else renew_at
            for stage in writes.stages:
                if not self._write(producer, stage):
                    return
            pending.written()
            self._view = (pending.waiting, pending.under_way, pending.claimed, before + pending.counts)
            self._state = _in_words(pending)
            self._error = None if pending.away is None else f"nothing is fetched, IPFS is away: {pending.away}"

    def _take(
        self, consumer: KafkaConsumer, pending: PendingFetches, done: Mapping[TopicPartition, DoneOffsets]
    ) -> None:
        rooms = {part: pending.room(part.partition, _AT_ONCE) for part in done}
        full = [part for part, room in rooms.items() if not room]
        consumer.pause(*full)
        consumer.resume(*(rooms.keys() - full))
        at_most = min((room for room in rooms.values() if room), default=1)
        interests: list[Interest] | None = None
        for part, records in self._poll(consumer, 20 if pending.busy else 200, at_most).items():
            if interests is None:
                interests = [parse_interest(text) for text in self._interests()]
            now = self._clock_us()
            for record in records:
                if record.offset > done[part].next:
                    first = consumer.beginning_offsets([part])[part]
                    self._gone(pending, part, done[part], min(first, record.offset))
                announcer = pending.take(KafkaPosition(part.partition, record.offset), record.value, interests, now)
                if announcer:
                    self._blocks.announced(announcer)

    def _write(self, producer: StoppableKafkaProducer, outputs: Sequence[FetchOutput]) -> bool:
        """Whether the broker has all of them; False when the session halts. FramesProducerError: a refusal."""
        left = len(outputs)
        told: SimpleQueue[BaseException | None] = SimpleQueue()  # filled by kafka-python's thread
        for output in outputs:
            if not self._leads:
                return False
            future = producer.send(f"{self._prefix}{output.topic}", value=output.value, key=output.key)
            future.add_callback(lambda _: told.put(None))
            future.add_errback(told.put)
        deadline = time.monotonic() + _PATIENCE
        while left:
            if self._stop.is_set():
                deadline = min(deadline, time.monotonic() + 2.0)
            try:
                error = told.get(timeout=min(0.5, max(0.0, deadline - time.monotonic())))
            except Empty:
                if not self._leads:
                    return False
                if time.monotonic() < deadline:
                    continue
                if self._stop.is_set():
                    return False
                raise FramesProducerError(f"no answer within {_PATIENCE:g} s") from None
            if error is not None:
                raise FramesProducerError(f"a record was refused: {error!r}") from error
            left -= 1
        return True


def _came(answers: deque[tuple[BlockRequest, Future[Answer]]], request: BlockRequest, future: Future[Answer]) -> None:
    answers.append((request, future))


def _answer_of(request: BlockRequest, future: Future[Answer]) -> Answer:
    error = future.exception()
    if error is None:
        return future.result()
    # a peer chooses the bytes: what they can make go wrong must not end all fetching
    _LOG.error("fetching the %s %s", request.kind, request.cid, exc_info=error)
    return FetchFailure(FAULT, repr(error)[:500], final=True)


def _in_words(pending: PendingFetches) -> str:
    waiting = f" (waiting: {pending.waiting})" if pending.waiting else ""
    if pending.away is not None:
        return f"IPFS is away: {pending.away}{waiting}"
    return f"fetching {pending.under_way}{waiting}" if pending.busy else "waiting for what is wanted"
