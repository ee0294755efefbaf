"""Threads that work on Kafka in sessions until they are stopped.

The fetcher is such a thread, and works in the bridge that leads. `KafkaWorker` is for those that share the work.
"""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from traceback import walk_stack
from typing import Final, NamedTuple, Protocol

from kafka.errors import KafkaError, KafkaTimeoutError, NoError

from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition
from kiln.bridge.kafka.producers import FramesProducerError, StoppableKafkaProducer
from kiln.bridge.kafka.topic_notes import NotedTopic, TopicNotes
from kiln.conf.process.kafka_clients import open_client
from kiln.conf.process.kafka_errors import describe_kafka_error
from kiln.conf.process.kafka_records import KafkaRecord, RecordReader
from kiln.conf.process.kafka_topics import (
    CHECK_EVERY,
    TopicIdentity,
    describe_replaced_topic,
    describe_topics,
    find_replaced_topics,
)
from kiln.schemas.times import clamp_micros

RENEW_EVERY: Final = 3_600_000_000
"""µs between two commits of an unchanged offset: brokers forget an offset that is not committed for a week, by default
(`offsets.retention.minutes`)."""

_MAX_RECORDS: Final = 10_000  # per poll
END_TIMEOUT: Final = 5.0
"""s for the broker to report an end offset"""

SESSION: Final = 10.0
"""Seconds without a heartbeat after which the broker removes a bridge from a group. Brokers allow at least 6 s, by
default (`group.min.session.timeout.ms`)."""

STALL_AFTER: Final = 60.0
"""s without progress after which a thread is reported as stalled. No healthy step takes so long."""

REVIVE_AFTER: Final = 10.0
"""s from the last step of a crashed thread until it is restarted."""

CHECK_ENDS_AFTER: Final = 20.0
"""s without a record after which a thread asks the broker for the end offsets."""

_LOST_LEAD_PAUSE: Final = (
    1.0  # s after a lapsed lead, so that records in flight reach the broker before a session reads the log
)
_STANDBY_INTERVAL: Final = 0.1  # s between two checks whether this bridge leads


def now_us() -> int:
    """Return the Unix time in µs, within the range of records: the clock of the machine may be wrong."""
    return clamp_micros(time.time_ns() // 1_000)


class BlockedError(RuntimeError):
    """A condition that stops the thread until a user does what the message says."""


class PositionLostError(BlockedError):
    """A lost offset, so that it is unknown which records are done. The message says what to do."""


class TopicReplacedError(BlockedError):
    """A topic that is not the one to which the offsets belong. The message says what to do."""


class KafkaConfig(NamedTuple):
    """The brokers, options of their clients (security_protocol, sasl_…, ssl_…), and the prefix of topics and groups."""

    servers: str | Sequence[str]
    client_options: Mapping[str, object]
    prefix: str


class KafkaThread(ABC):
    """A thread that runs from `start()` to `stop()`.

    When Kafka fails, `error` reports it, and a new session begins from the committed offset.
    """

    def __init__(self, name: str, consequence: str, kafka: KafkaConfig, group: str) -> None:
        """Create the thread without starting it.

        Args:
            consequence: the consequence if the thread cannot work, such as "nothing is published".
            group: consumer group of the offsets.
        """
        self._name = name
        self._consequence = consequence
        self._servers, self._client_options, self._prefix = kafka
        self._group = group
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._state = "not started"
        self._error: str | None = None
        self._progress_at = self._last_record_at = time.monotonic()
        self._stalled_positions: dict[TopicPartition, int] = {}  # positions below the end at the last check

    def start(self) -> None:
        self._mark_progress()
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        thread.start()
        self._thread = thread

    def revive(self) -> None:
        """Restart the thread if it has crashed.

        It does nothing before `start`, after `stop`, or within REVIVE_AFTER of the last step.
        """
        if self._thread is None or self._thread.is_alive() or self._stop.is_set():
            return
        if time.monotonic() - self._progress_at > REVIVE_AFTER:
            with suppress(RuntimeError):  # no thread can be started now
                self.start()

    def stop(self, timeout: float = 5.0) -> None:
        """End the thread after its current step. Never call it in a thread that this thread waits for."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout)

    @property
    def state(self) -> str:
        """A description of what the thread does or waits for."""
        return self._state

    @property
    def error(self) -> str | None:
        """The reason why the thread cannot work now, if any."""
        alive = self._thread is not None and self._thread.is_alive()
        if self._error is None and alive and time.monotonic() - self._progress_at > STALL_AFTER:
            return f"{self._consequence}: the {self._name} has stalled in {self._describe_stack()}. Restart the bridge."
        return self._error

    def _mark_progress(self) -> None:
        """Record progress at each step, because a call that never returns from kafka-python reports nothing."""
        self._progress_at = time.monotonic()

    def _describe_stack(self) -> str:
        """Describe the stack from the innermost call of this program."""
        ident = None if self._thread is None else self._thread.ident
        frame = sys._current_frames().get(ident or 0)
        calls = []
        for each, line in () if frame is None else walk_stack(frame):
            calls.append(f"{each.f_code.co_name} ({Path(each.f_code.co_filename).name}:{line})")
            if str(each.f_globals.get("__name__")).startswith("kiln."):
                break
        return " > ".join(reversed(calls))

    @abstractmethod
    def _run_session(self) -> None:
        """Run one session, until stopped or Kafka fails."""

    @abstractmethod
    def _release_resources(self) -> None:
        """Release the resources of the thread when it ends."""

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._mark_progress()
                try:
                    self._run_session()
                except BlockedError as error:
                    self._error = self._state = f"{self._consequence}: {error}"
                    self._stop.wait(10.0)
                # kafka-python asserts that it knows every option, raises ValueError for wrong values, and passes an
                # OSError through, such as too many open files
                except (KafkaError, FramesProducerError, OSError, ValueError, AssertionError) as error:
                    self._error = self._state = f"{self._consequence}, Kafka fails: {self._describe_error(error)}"
                    self._stop.wait(1.0)
        finally:
            self._release_resources()
            self._state = "stopped"
            if not self._stop.is_set():
                self._error = f"{self._consequence}: the {self._name} has crashed, and will be restarted"

    def _poll(
        self, reader: RecordReader, timeout_ms: int, max_records: int = _MAX_RECORDS
    ) -> Mapping[TopicPartition, list[KafkaRecord]]:
        """Poll like `RecordReader.poll`.

        A broker that does not send what it has, such as after the loss of a disk, gives no error. Only the end offsets
        show that records are missing.

        Raises:
            KafkaError: the broker has records, and none arrives; or it refuses.
        """
        self._mark_progress()
        records = reader.poll(timeout_ms / 1_000, max_records)
        self._check_ends(
            has_records=bool(records),
            positions=reader.active_positions,
            read_end=lambda part: reader.read_end(part, END_TIMEOUT),
        )
        return records

    def _check_ends(
        self,
        *,
        has_records: bool,
        positions: Mapping[TopicPartition, int],
        read_end: Callable[[TopicPartition], int],
    ) -> None:
        """Ask the broker for the end offsets now and then while no record arrives; call this at each poll.

        Args:
            positions: offset of the next record, by partition that is read.

        Raises:
            KafkaError: the broker has records, and none arrives.
        """
        now = time.monotonic()
        self._stalled_positions = (
            {}
            if has_records
            else {part: offset for part, offset in self._stalled_positions.items() if part in positions}
        )
        if has_records:
            self._last_record_at = now
        elif now > self._last_record_at + CHECK_ENDS_AFTER:
            for part, position in positions.items():
                if self._stalled_positions.get(part) == position:
                    raise KafkaTimeoutError(
                        f"no record of {part.topic}-{part.partition} arrives from offset {position} on"
                    )
            self._stalled_positions = {
                part: position for part, position in positions.items() if position < read_end(part)
            }
            self._last_record_at = now

    def _list_partitions(self, topic: str) -> list[TopicPartition]:
        """Return the partitions of a topic in order.

        Raises:
            FramesProducerError: the topic does not exist.
            KafkaError: no broker answers.
        """
        admin = open_client(KafkaAdminClient, bootstrap_servers=self._servers, **self._client_options)
        try:  # a consumer of kafka-python would wait endlessly for an unknown topic
            [description] = admin.describe_topics([topic])
        finally:
            admin.close()
        if description["error_code"] != NoError.errno:
            raise FramesProducerError(f"topic {topic} does not exist")
        numbers = sorted(each["partition_index"] for each in description["partitions"])
        return [TopicPartition(topic, number) for number in numbers]

    def _describe_error(self, error: Exception) -> str:
        if isinstance(error, KafkaError):
            return describe_kafka_error(error, {**self._client_options, "bootstrap_servers": self._servers})
        return str(error) if isinstance(error, FramesProducerError) else repr(error)

    def _open_consumer(self, group: str | None) -> KafkaConsumer:
        """Open a client for offsets. It never polls: `_open_reader` gives records."""
        return open_client(
            KafkaConsumer,
            bootstrap_servers=self._servers,
            **self._client_options,
            bootstrap_timeout_ms=5_000,
            group_id=group,
            enable_auto_commit=False,
            isolation_level="read_committed",
        )

    def _open_reader(self) -> RecordReader:
        self._last_record_at, self._stalled_positions = time.monotonic(), {}
        return RecordReader({**self._client_options, "bootstrap_servers": self._servers}, self._group)


class Leadership(Protocol):
    """The choice of the bridge that fetches, of several bridges."""

    def is_leader(self) -> bool:
        """Return whether this bridge leads at this moment."""
        ...

    def another_bridge_leads(self) -> bool:
        """Return whether another bridge is known to lead."""
        ...

    def describe(self) -> str:
        """Describe why this bridge does not lead."""
        ...


class SoleLeadership:
    """The leadership of the only bridge."""

    def is_leader(self) -> bool:
        return True

    def another_bridge_leads(self) -> bool:
        return False

    def describe(self) -> str:
        return ""


class LeaderThread(KafkaThread):
    """A thread that works in the bridge that leads, and is on standby in the others.

    Each session begins from the committed offset. One such thread works at a time for a network and prefix, because it
    assigns itself the partitions. While Kafka is unavailable, it retries from the committed offset.
    """

    def __init__(
        self,
        name: str,
        consequence: str,
        kafka: KafkaConfig,
        group: str,
        leadership: Leadership | None = None,
        notes: TopicNotes | None = None,
    ) -> None:
        """Create the thread like `KafkaThread`.

        Args:
            leadership: decides which of several bridges works; by default `SoleLeadership`.
            notes: the topics to which the offsets belong.
        """
        super().__init__(name, consequence, kafka, group)
        self._leadership = leadership or SoleLeadership()
        self._lost_lead = False  # in this session
        self._places_lost = 0
        self._notes = notes
        self._watched: dict[str, TopicIdentity] = {}  # topics whose offsets this session commits
        self._check_at = 0.0
        self._admin: KafkaAdminClient | None = None

    @property
    def places_lost(self) -> int:
        """Number of partitions whose offset Kafka had lost, since the start."""
        return self._places_lost

    @property
    def _is_leader(self) -> bool:
        """Return whether this bridge has led since the start of the session. The thread checks it before each action of
        the leader."""
        self._lost_lead = self._lost_lead or not self._leadership.is_leader()
        return not self._lost_lead

    @property
    def _must_stop(self) -> bool:
        """Return whether the session must end."""
        return self._stop.is_set() or not self._is_leader

    def _read_until(
        self, reader: RecordReader, ends: Mapping[TopicPartition, int], describe: Callable[[], str]
    ) -> Iterator[KafkaRecord]:
        """Yield records of the assigned partitions until `ends`, or earlier if the session must stop.

        Args:
            describe: returns the state of this thread.
        """
        while not self._must_stop and any(reader.position(part) < end for part, end in ends.items()):
            self._state = describe()
            for records in self._poll(reader, 200).values():
                yield from records

    @abstractmethod
    def _run_as_leader(self, consumer: KafkaConsumer, reader: RecordReader, producer: StoppableKafkaProducer) -> None:
        """Run one session, until it must stop or Kafka fails.

        Args:
            consumer: client for the offsets of the group.
            reader: reader of records, which has no partitions yet.
            producer: producer of all outputs.
        """

    def _on_standby(self) -> None:
        """Drop what may be outdated while another bridge leads. Called repeatedly."""
        if self._notes is not None:
            self._notes.remove()

    def _watch_topics(self, *topics: str) -> set[str]:
        """Compare topics with the noted ones, and watch them for as long as the session lasts.

        Returns:
            The topics to read from their beginning, whatever offsets the group has committed.

        Raises:
            TopicReplacedError: A topic was deleted and created again.
            KafkaError: No broker answers.
        """
        self._watched = describe_topics(self._topic_admin(), topics)
        self._check_at = time.monotonic() + CHECK_EVERY
        noted = {} if self._notes is None else self._notes.read()
        self._check_replaced({topic: each.id for topic, each in noted.items() if topic in topics}, self._watched)
        return {topic for topic in topics if topic in noted and noted[topic].from_beginning}

    def _save_topics(self) -> None:
        """Save the watched topics, once the committed offsets belong to them.

        Raises:
            OSError: the notes cannot be read or written.
        """
        if self._notes is not None:
            current = {topic: NotedTopic(each.id) for topic, each in self._watched.items() if each.id}
            if current != self._notes.read():
                self._notes.write(current)

    def _check_replaced(self, noted: Mapping[str, str], now: Mapping[str, TopicIdentity]) -> None:
        for topic in find_replaced_topics(noted, now):
            raise TopicReplacedError(
                f"{describe_replaced_topic(topic, noted[topic], now[topic].id)}. Stop Kiln and run kiln recover: the "
                "bridge then reads the topic from its beginning, and skips the records that are done"
            )

    def _check_topics(self) -> None:
        """Compare the watched topics with the broker's; call this often.

        A client silently reads on in a re-created topic, at the old offset or from the beginning.

        Raises:
            TopicReplacedError: A topic was deleted and created again.
            FramesProducerError: A topic has more partitions, which the next session reads.
        """
        if time.monotonic() < self._check_at or not self._watched:
            return
        self._check_at = time.monotonic() + CHECK_EVERY
        try:
            current = describe_topics(self._topic_admin(), self._watched)
        except (KafkaError, OSError):  # if it persists, the consumer reports it
            self._close_admin()
            return
        self._check_replaced({topic: each.id for topic, each in self._watched.items()}, current)
        for topic, each in current.items():
            if each.partitions != self._watched[topic].partitions:
                raise FramesProducerError(
                    f"the number of partitions of {topic} changed from {self._watched[topic].partitions} to "
                    f"{each.partitions}"
                )

    def _topic_admin(self) -> KafkaAdminClient:
        if self._admin is None:
            self._admin = open_client(
                KafkaAdminClient,
                bootstrap_servers=self._servers,
                **self._client_options,
                bootstrap_timeout_ms=5_000,
                request_timeout_ms=5_000,
            )
        return self._admin

    def _close_admin(self) -> None:
        if self._admin is not None:
            self._admin.close()
            self._admin = None

    def _run_session(self) -> None:
        if not self._leadership.is_leader():
            self._error, self._state = None, f"on standby: {self._leadership.describe()}"
            if self._leadership.another_bridge_leads():
                self._on_standby()
            self._stop.wait(_STANDBY_INTERVAL)
            return
        self._lost_lead = False
        with ExitStack() as opened:
            opened.callback(self._close_admin)
            opened.callback(self._watched.clear)
            consumer = opened.enter_context(closing(self._open_consumer(self._group)))
            reader = opened.enter_context(closing(self._open_reader()))
            producer = StoppableKafkaProducer(self._servers, self._client_options)
            opened.callback(producer.close, 2)
            self._run_as_leader(consumer, reader, producer)
        if self._lost_lead:
            self._stop.wait(_LOST_LEAD_PAUSE)
