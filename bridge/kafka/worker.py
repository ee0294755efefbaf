"""A thread that works as a member of a Kafka consumer group.

Kafka assigns each partition to one bridge of the group (assignor `cooperative-sticky`), and to another bridge when the
first sends no heartbeat for 10 s (SESSION). A bridge is a static member (KIP-345): if it restarts within this time, it
keeps its partitions. The broker refuses offsets of a member that it has removed from the group.

The metadata of a committed offset begins with the id of the topic (KIP-516). If the topic is deleted and created again,
its id changes, and the offset is not used. The group's consumer commits offsets, but reads no records. A `RecordReader`
reads them, because it can skip records that cannot be decoded, and can read partitions of other members.
"""

from __future__ import annotations

import logging
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing, suppress
from typing import Final, NamedTuple

from confluent_kafka import Consumer, KafkaException, Message, TopicCollection
from confluent_kafka import KafkaError as LibrdkafkaError
from confluent_kafka import TopicPartition as Assignment
from confluent_kafka.admin import AdminClient
from kafka.errors import KafkaTimeoutError

from kafka import TopicPartition
from kiln.bridge.kafka.producers import FramesProducerError, close_producer, open_producer
from kiln.bridge.kafka.session_thread import SESSION, KafkaConfig, SessionThread, TwinError
from kiln.conf.process.kafka_records import KafkaRecord, RecordReader, to_kafka_error
from kiln.conf.process.kafka_topics import CHECK_EVERY, TopicIdentity
from kiln.conf.process.librdkafka import LIBRDKAFKA_LOG, READ_OPTIONS, librdkafka_options

_LOG: Final = logging.getLogger(__name__)
_COMMIT_EVERY: Final = 1.0  # seconds between two commits of changed offsets, because the broker may sync each commit
_HEARTBEAT: Final = 1.0  # seconds
_ANSWER_TIMEOUT: Final = 10.0  # seconds for the broker to answer a request
_DRAIN_TIMEOUT: Final = 2.0  # seconds for the broker to acknowledge what is written when the thread stops
_END_TIMEOUT: Final = 5.0  # seconds for the broker to report an end offset
_NO_RECORD_FOR: Final = 20.0  # seconds without a record after which the end offsets are requested
_REJOINING: Final = frozenset(
    (LibrdkafkaError.REBALANCE_IN_PROGRESS, LibrdkafkaError.ILLEGAL_GENERATION, LibrdkafkaError.UNKNOWN_MEMBER_ID)
)
"""Errors of a commit during a rebalance. The records whose offsets are not committed are handled again, by the bridge
that gets the partition."""
_FATAL: Final = frozenset(
    (
        LibrdkafkaError._ALL_BROKERS_DOWN,
        LibrdkafkaError.TOPIC_AUTHORIZATION_FAILED,
        LibrdkafkaError.GROUP_AUTHORIZATION_FAILED,
        LibrdkafkaError.UNKNOWN_TOPIC_OR_PART,
    )
)
"""Errors that end a session. librdkafka recovers from all other errors by itself."""
_NO_ID: Final = "A" * 22  # the topic id from a broker that is older than Kafka 2.8
_TOPIC_ID: Final = re.compile(r"([\w+/-]{22}) ")


class Progress(NamedTuple):
    """An offset to commit for a partition, and its metadata."""

    offset: int
    metadata: str


class KafkaWorker(SessionThread):
    """A thread that handles the records of the partitions that Kafka assigns to it, from `start()` to `stop()`.

    A subclass handles the records, and commits for each partition the offset below which all records are finished.
    After a crash, the records from this offset on are handled again, by this bridge or another one.
    """

    def __init__(
        self,
        name: str,
        consequence: str,
        kafka: KafkaConfig,
        group: str,
        topic: str,
        outputs: Iterable[str],
        instance: str | None,
        *,
        reads_all: bool = False,
    ) -> None:
        """Create the thread without starting it.

        Args:
            topic: topic to read, without the prefix of `kafka`.
            outputs: topics that `_send` writes, without the prefix.
            instance: id of the static member; `None` for a member that leaves the group when the thread ends.
            reads_all: true if the member that has partition 0 reads all partitions, and the others read none.
        """
        super().__init__(name, consequence, kafka)
        self._group = group
        self._topic = f"{self._prefix}{topic}"
        self._outputs = tuple(f"{self._prefix}{name}" for name in outputs)
        self._instance = instance
        self._reads_all = reads_all
        self._first_id = ""  # id of the topic in the first session
        self._assigned: set[int] = set()  # partitions that the group has assigned to this member
        self._committed: dict[int, Progress] = {}  # for each partition that this member reads
        self._broker_error: LibrdkafkaError | None = None
        self._refusal: str | None = None  # text about the first record of `_send` that the broker refused

    @abstractmethod
    def _begin(self, partition: int, committed: Progress | None, first: int, end: int) -> int:
        """Begin with a newly assigned partition, and return the offset from which to read it.

        Args:
            committed: the committed offset; `None` if there is none.
            first: the first offset that the broker still has.
            end: the offset after the last record.
        """

    @abstractmethod
    def _end(self, partition: int) -> None:
        """Forget the unfinished records of a partition that this bridge no longer reads."""

    @abstractmethod
    def _record_lost_range(self, partition: int, before: int) -> int:
        """Record that the broker has deleted all records below the offset `before`.

        Returns:
            The number of deleted records that were not finished.
        """

    @abstractmethod
    def _handle(self, partition: int, record: KafkaRecord) -> None:
        """Begin to handle a record that was read."""

    @abstractmethod
    def _work(self) -> None:
        """Do the work that is due between two polls."""

    @abstractmethod
    def _wait(self) -> float:
        """Return the maximum seconds that the next poll may wait for records."""

    @abstractmethod
    def _room(self, partition: int) -> int:
        """Return the number of records that may be read from a partition now."""

    @abstractmethod
    def _commit_done(self) -> None:
        """Commit the offsets of finished records; called every second, before a rebalance, and at the end."""

    # -------- a session

    def _run_session(self) -> None:
        self._broker_error, self._refusal, self._assigned, self._committed = None, None, set(), {}
        options = librdkafka_options(self._client_options)
        try:
            with ExitStack() as opened:
                self._producer = open_producer(self._client_options, self._outputs)
                opened.callback(close_producer, self._producer, 2)
                admin = AdminClient({**options}, logger=LIBRDKAFKA_LOG)
                self._identity = self._read_identity(admin)
                self._first_id = self._first_id or self._identity.id
                self._reader = opened.enter_context(closing(self._open_reader()))
                self._consumer = self._open_consumer(options)
                opened.callback(lambda: self._forget(self._committed))
                opened.callback(self._consumer.close)
                self._consumer.subscribe(
                    [self._topic], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
                )
                self._run_group(admin)
        except KafkaException as error:
            cause: LibrdkafkaError = error.args[0]
            if cause.code() == LibrdkafkaError.FENCED_INSTANCE_ID:
                raise TwinError(self._instance or "") from error
            raise to_kafka_error(cause) from error

    def _run_group(self, admin: AdminClient) -> None:
        stalls = StallCheck()
        commit_at, check_at = 0.0, time.monotonic() + CHECK_EVERY
        while not self._stop.is_set():
            self._mark_progress()
            self._serve_group()
            stalls.check(self._reader, has_records=self._read())
            self._work()
            self._await_written(0)
            now = time.monotonic()
            if now >= commit_at:
                self._commit_done()
                commit_at = now + _COMMIT_EVERY
            if now >= check_at:
                self._check_topic(admin)
                check_at = now + CHECK_EVERY
        self._work()
        self._await_written(_DRAIN_TIMEOUT)
        self._commit_done()

    def _open_reader(self) -> RecordReader:
        return RecordReader(self._client_options, self._group)

    def _open_consumer(self, options: Mapping[str, str | int | bool]) -> Consumer:
        static = {} if self._instance is None else {"group.instance.id": self._instance}
        return Consumer(
            {
                **options,
                **READ_OPTIONS,
                **static,
                "group.id": self._group,
                "partition.assignment.strategy": "cooperative-sticky",
                "session.timeout.ms": int(SESSION * 1_000),
                "heartbeat.interval.ms": int(_HEARTBEAT * 1_000),
                "error_cb": self._on_error,
            },
            logger=LIBRDKAFKA_LOG,
        )

    def _read_identity(self, admin: AdminClient) -> TopicIdentity:
        described = admin.describe_topics(TopicCollection([self._topic]), request_timeout=_ANSWER_TIMEOUT)
        try:
            topic = described[self._topic].result()
        except KafkaException as error:
            if error.args[0].code() == LibrdkafkaError.UNKNOWN_TOPIC_OR_PART:
                raise FramesProducerError(
                    f"topic {self._topic} does not exist. Restart the bridge, which creates it."
                ) from error
            raise
        topic_id = str(topic.topic_id)
        return TopicIdentity("" if topic_id == _NO_ID else topic_id, len(topic.partitions))

    def _check_topic(self, admin: AdminClient) -> None:
        """End the session if the topic was created again, or if partitions were added.

        Kafka's clients would read the new topic from the old offset, without an error.
        """
        try:
            identity = self._read_identity(admin)
        except KafkaException:
            return  # if the error persists, the consumer reports it
        if identity != self._identity:
            raise FramesProducerError(
                f"topic {self._topic} was created again or has more partitions, so the bridge restarts its consumer"
            )

    def _serve_group(self) -> None:
        message = self._consumer.poll(0)  # serves the group, and reads no record
        if message is not None and (error := message.error()) is not None:
            self._on_error(error)
        if self._broker_error is not None:
            raise KafkaException(self._broker_error)
        self._begin_assigned()

    # -------- the group; librdkafka calls these in this thread, while it polls or closes

    def _on_error(self, error: LibrdkafkaError) -> None:
        if error.code() in _FATAL or error.fatal():
            self._broker_error = error

    def _on_assign(self, consumer: Consumer, parts: list[Assignment]) -> None:
        consumer.incremental_assign([])  # the reader reads
        self._assigned |= {part.partition for part in parts}

    def _on_revoke(self, consumer: Consumer, parts: list[Assignment]) -> None:
        with suppress(KafkaException):  # without a commit, the records are handled again
            self._commit_done()
        self._on_lost(consumer, parts)

    def _on_lost(self, consumer: Consumer, parts: list[Assignment]) -> None:
        consumer.incremental_unassign([])
        self._assigned -= {part.partition for part in parts}
        if gone := self._committed.keys() - self._list_own():
            self._forget(gone)
            self._assign_reader({})

    def _list_own(self) -> set[int]:
        """Return the partitions that this member must read, given those that Kafka has assigned to it."""
        if self._reads_all:
            return set(range(self._identity.partitions)) if 0 in self._assigned else set()
        return self._assigned

    # -------- partitions

    def _begin_assigned(self) -> None:
        added = [Assignment(self._topic, number) for number in self._list_own() - self._committed.keys()]
        if not added:
            return
        offsets: dict[int, int] = {}
        for part in self._consumer.committed(added, _ANSWER_TIMEOUT):
            if part.error is not None:
                raise KafkaException(part.error)
            first, end = self._read_bounds(part)
            committed = self._read_committed(part, first, end)
            self._committed[part.partition] = committed or Progress(first, "")
            offsets[part.partition] = self._begin(part.partition, committed, first, end)
        self._assign_reader(offsets)

    def _read_bounds(self, part: Assignment) -> tuple[int, int]:
        """Read the oldest offset of a partition and the offset after its newest record from the broker."""
        first, end = self._consumer.get_watermark_offsets(part, _ANSWER_TIMEOUT, cached=False)
        if end < 0:  # unknown while the broker restarts; it must not look like a topic that was created again
            raise KafkaException(LibrdkafkaError(LibrdkafkaError.LEADER_NOT_AVAILABLE))
        return first, end

    def _read_committed(self, part: Assignment, first: int, end: int) -> Progress | None:
        if part.offset < 0:  # Kafka drops the offsets of a group together with the topic
            return None if self._identity.id == self._first_id else Progress(first, "")
        metadata = part.metadata or ""
        noted = _TOPIC_ID.match(metadata)
        if part.offset > end or (noted is not None and self._identity.id not in ("", noted[1])):
            return Progress(first, "")  # the offset belongs to a deleted topic of this name
        return Progress(part.offset, metadata[noted.end() :] if noted else metadata)

    def _forget(self, partitions: Iterable[int]) -> None:
        for partition in list(partitions):
            del self._committed[partition]
            self._end(partition)

    # -------- records

    def _assign_reader(self, added: Mapping[int, int]) -> None:
        """Let the reader read this member's partitions. `added` maps new partitions to their first offsets to read."""
        parts = {TopicPartition(self._topic, partition): partition for partition in self._committed}
        self._reader.assign({p: added[n] if n in added else self._reader.position(p) for p, n in parts.items()})

    def _read(self) -> bool:
        """Poll for records, and handle them. Return true if there were any."""
        rooms = {part: self._room(part.partition) for part in self._reader.partitions}
        self._reader.pause(part for part, room in rooms.items() if not room)
        self._reader.resume(part for part, room in rooms.items() if room)
        positions = self._reader.active_positions
        most = min((room for room in rooms.values() if room), default=1)
        arrived = self._reader.poll(self._wait(), most)
        for part, records in arrived.items():
            for record in records:
                if record.offset > positions[part]:
                    # offsets without records, such as the markers of transactions, are not lost
                    first, _ = self._read_bounds(Assignment(part.topic, part.partition))
                    self._skip_lost(part.partition, min(first, record.offset))
                positions[part] = record.offset + 1
                self._handle(part.partition, record)
        return bool(arrived)

    def _report(self, state: str, ipfs_error: str | None = None) -> None:
        self._error = ipfs_error and f"{self._consequence}, because IPFS is unavailable: {ipfs_error}"
        self._state = state

    def _skip_lost(self, partition: int, before: int) -> None:
        if lost := self._record_lost_range(partition, before):
            _LOG.error(
                "Kafka deleted %d records of %s-%d below offset %d before group %s had handled them. "
                "Raise the retention of the topic.",
                *(lost, self._topic, partition, before, self._group),
            )

    def _send(self, topic: str, key: bytes, value: bytes, written: Callable[[], None] = lambda: None) -> None:
        """Queue a record to be sent.

        Args:
            topic: topic without the prefix.
            written: called in `_await_written` once the broker has the record.
        """

        def record_outcome(error: LibrdkafkaError | None, message: Message) -> None:
            if error is None:
                written()
            else:
                self._refusal = self._refusal or f"the broker refused a record of {message.topic()}: {error.str()}"

        self._producer.produce(f"{self._prefix}{topic}", value, key, on_delivery=record_outcome)

    def _await_written(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the broker to acknowledge all sent records. Return true if it has.

        Raises:
            FramesProducerError: the broker refused a record.
        """
        missing = self._producer.flush(timeout)
        if self._refusal is not None:
            raise FramesProducerError(self._refusal)
        return not missing

    def _commit(self, progress: Mapping[int, Progress]) -> bool:
        """Commit offsets. Return false if the broker refused them because of a rebalance."""
        offsets = [
            Assignment(self._topic, partition, offset, f"{self._identity.id} {metadata}".lstrip())
            for partition, (offset, metadata) in progress.items()
        ]
        try:
            parts = self._consumer.commit(offsets=offsets, asynchronous=False) if offsets else []
            errors = [part.error for part in parts if part.error is not None]
        except KafkaException as error:
            errors = [error.args[0]]
        if any(error.code() not in _REJOINING for error in errors):
            raise KafkaException(errors[0])
        if errors:
            return False
        self._committed |= progress
        return True


class StallCheck:
    """Detects that a reader gets no records although the broker has some.

    Such a broker, for example one that has lost a disk, reports no error.
    """

    def __init__(self) -> None:
        self._last_record_at = time.monotonic()
        self._behind: dict[TopicPartition, int] = {}  # positions below the end at the last check

    def check(self, reader: RecordReader, *, has_records: bool) -> None:
        """Check the reader after a poll. If no record arrives for long, compare its positions with the end offsets.

        Args:
            has_records: true if the poll returned records.

        Raises:
            KafkaError: a partition has records after the reader's position, and none arrives.
        """
        now, positions = time.monotonic(), reader.active_positions
        if has_records:
            self._last_record_at, self._behind = now, {}
        elif now > self._last_record_at + _NO_RECORD_FOR:
            for part, position in positions.items():
                if self._behind.get(part) == position:
                    raise KafkaTimeoutError(
                        f"the broker sends no record of {part.topic}-{part.partition} from offset {position} on, "
                        "although it has some. Check the broker's log and disk."
                    )
            self._behind = {
                part: position for part, position in positions.items() if position < reader.read_end(part, _END_TIMEOUT)
            }
            self._last_record_at = now
