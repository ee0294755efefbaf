"""A thread that works out of Kafka: session after session, until it is stopped. Publisher and fetcher are threads of
this kind, and work in the bridge that leads."""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from traceback import walk_stack
from typing import Final, Protocol

from kafka.consumer.fetcher import ConsumerRecord
from kafka.errors import KafkaError, KafkaTimeoutError, NoError

from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition
from kiln.bridge.kafka.producers import FramesProducerError, StoppableKafkaProducer
from kiln.bridge.kafka.topic_notes import NotedTopic, TopicNotes
from kiln.conf.process.kafka_clients import open_client
from kiln.conf.process.kafka_errors import in_words
from kiln.conf.process.kafka_topics import (
    CHECK_EVERY,
    TopicIdentity,
    describe_replaced,
    describe_topics,
    replaced_topics,
)

RENEW_EVERY: Final = 3_600_000_000
"""µs between two commits of a place that does not change: brokers forget a place that nobody commits for a week, by
default (`offsets.retention.minutes`)."""

STANDS_STILL: Final = 60.0
"""s without a step after which a thread is said to stand still. No step takes so long while all goes well."""

REVIVE_AFTER: Final = 10.0
"""s from the last step of a thread that a fault has ended until it starts again."""

GIVES_NOTHING: Final = 20.0
"""s without a record after which a thread asks the broker whether there are any."""

_SETTLE: Final = 1.0  # s after a lapsed lead: what was on its way to the broker is there before a session reads the log
_STAND_BY: Final = 0.1  # s between two looks whether this bridge leads


class BlockedError(RuntimeError):
    """The thread cannot work before somebody does what the text says."""


class PositionLostError(BlockedError):
    """Nobody knows any more which records are done. The text says what to do."""


class TopicReplacedError(BlockedError):
    """A topic is not the one in which the offsets are kept. The text says what to do."""


class KafkaThread(ABC):
    """Runs from `start()` to `stop()`. When Kafka fails, `error` says so, and a new session begins from the committed
    place."""

    def __init__(
        self,
        name: str,
        failing: str,
        bootstrap_servers: str | Sequence[str],
        client_options: Mapping[str, object],
        prefix: str,
        group: str,
    ) -> None:
        """`failing`: what it means that the thread cannot work, such as "nothing is published". `prefix`: of topics.
        `group`: the consumer group that keeps the place."""
        self._name = name
        self._failing = failing
        self._servers = bootstrap_servers
        self._client_options = dict(client_options)
        self._prefix = prefix
        self._group = group
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._state = "not started"
        self._error: str | None = None
        self._moved_at = self._given_at = time.monotonic()
        self._behind: dict[TopicPartition, int] = {}  # offsets that the broker had records at when nothing had come

    def start(self) -> None:
        self._moved()
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        thread.start()
        self._thread = thread

    def revive(self) -> None:
        """Start the thread again if a fault has ended it.

        Does nothing before `start`, after `stop`, or within REVIVE_AFTER of the last step.
        """
        if self._thread is None or self._thread.is_alive() or self._stop.is_set():
            return
        if time.monotonic() - self._moved_at > REVIVE_AFTER:
            with suppress(RuntimeError):  # no thread can be started now
                self.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Ends the thread after its present step. Never to be called in a thread that this thread waits for."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout)

    @property
    def state(self) -> str:
        """What the thread does or waits for, in words."""
        return self._state

    @property
    def error(self) -> str | None:
        """Why the thread cannot work now; None: it can."""
        alive = self._thread is not None and self._thread.is_alive()
        if self._error is None and alive and time.monotonic() - self._moved_at > STANDS_STILL:
            return f"{self._failing}: the {self._name} stands still in {self._where()}. A bridge started anew goes on"
        return self._error

    def _moved(self) -> None:
        """To be called at each step: who waits for kafka-python without an end tells nothing of it."""
        self._moved_at = time.monotonic()

    def _where(self) -> str:
        """The calls from the innermost one of this program on."""
        ident = None if self._thread is None else self._thread.ident
        frame = sys._current_frames().get(ident or 0)
        calls = []
        for each, line in () if frame is None else walk_stack(frame):
            calls.append(f"{each.f_code.co_name} ({Path(each.f_code.co_filename).name}:{line})")
            if str(each.f_globals.get("__name__")).startswith("kiln."):
                break
        return " > ".join(reversed(calls))

    @abstractmethod
    def _session(self) -> None:
        """One session, until stopped or Kafka fails."""

    @abstractmethod
    def _ended(self) -> None:
        """Gives back what the thread held."""

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._moved()
                try:
                    self._session()
                except BlockedError as error:
                    self._error = self._state = f"{self._failing}: {error}"
                    self._stop.wait(10.0)
                # kafka-python asserts that it knows every option, and refuses values by a ValueError. An OSError, such
                # as too many open files, comes through it as it is
                except (KafkaError, FramesProducerError, OSError, ValueError, AssertionError) as error:
                    self._error = self._state = f"{self._failing}, Kafka fails: {self._why(error)}"
                    self._stop.wait(1.0)
        finally:
            self._ended()
            self._state = "stopped"
            if not self._stop.is_set():
                self._error = f"{self._failing}: the {self._name} has ended by a fault, and starts again"

    def _poll(
        self, consumer: KafkaConsumer, timeout_ms: int, max_records: int | None = None
    ) -> Mapping[TopicPartition, list[ConsumerRecord]]:
        """As KafkaConsumer.poll. KafkaTimeoutError: the broker has records, and none has come for long.

        kafka-python can lose what keeps its view of the cluster new, and tells nobody: a consumer made anew reads.
        """
        self._moved()
        given: Mapping[TopicPartition, list[ConsumerRecord]] = consumer.poll(timeout_ms, max_records)
        now, paused = time.monotonic(), consumer.paused()
        self._behind = {} if given else {part: at for part, at in self._behind.items() if part not in paused}
        if given:
            self._given_at = now
        elif now > self._given_at + GIVES_NOTHING:
            places = {part: consumer.position(part) for part in consumer.assignment() - paused}
            for part, place in places.items():
                if self._behind.get(part) == place:
                    raise KafkaTimeoutError(f"nothing comes of {part.topic}-{part.partition} from offset {place} on")
            ends = consumer.end_offsets(list(places)) if places else {}
            self._behind = {part: place for part, place in places.items() if place < ends[part]}
            self._given_at = now
        return given

    def _partitions(self, topic: str) -> list[TopicPartition]:
        """In order. FramesProducerError: there is no such topic. KafkaError."""
        admin = open_client(KafkaAdminClient, bootstrap_servers=self._servers, **self._client_options)
        try:  # a consumer of kafka-python would wait for what it does not know without an end
            [told] = admin.describe_topics([topic])
        finally:
            admin.close()
        if told["error_code"] != NoError.errno:
            raise FramesProducerError(f"there is no topic {topic}")
        numbers = sorted(each["partition_index"] for each in told["partitions"])
        return [TopicPartition(topic, number) for number in numbers]

    def _why(self, error: Exception) -> str:
        if isinstance(error, KafkaError):
            return in_words(error, {**self._client_options, "bootstrap_servers": self._servers})
        return str(error) if isinstance(error, FramesProducerError) else repr(error)

    def _consumer(self, group: str | None) -> KafkaConsumer:
        self._given_at, self._behind = time.monotonic(), {}
        return open_client(
            KafkaConsumer,
            bootstrap_servers=self._servers,
            **self._client_options,
            bootstrap_timeout_ms=5_000,
            group_id=group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            max_partition_fetch_bytes=16 << 20,
        )


class Leadership(Protocol):
    """Which of several bridges does what one alone must do."""

    def leads(self) -> bool:
        """Whether this bridge leads at this moment."""
        ...

    def another_leads(self) -> bool:
        """Whether another bridge is known to lead."""
        ...

    def in_words(self) -> str:
        """Why this bridge does not lead."""
        ...


class SoleLeadership:
    """The leadership of a bridge that has no others beside it."""

    def leads(self) -> bool:
        return True

    def another_leads(self) -> bool:
        return False

    def in_words(self) -> str:
        return ""


class LeaderThread(KafkaThread):
    """Works in the bridge that leads, and stands by in the others. Each session begins from the committed place."""

    def __init__(
        self,
        name: str,
        failing: str,
        bootstrap_servers: str | Sequence[str],
        client_options: Mapping[str, object],
        prefix: str,
        group: str,
        leadership: Leadership | None = None,
        notes: TopicNotes | None = None,
    ) -> None:
        """As `KafkaThread`. `leadership`: None is Alone. `notes`: keeps which topics the offsets are of."""
        super().__init__(name, failing, bootstrap_servers, client_options, prefix, group)
        self._leadership = leadership or SoleLeadership()
        self._lapsed = False  # the lead, in this session
        self._notes = notes
        self._watched: dict[str, TopicIdentity] = {}  # in which this session keeps offsets
        self._check_at = 0.0
        self._admin: KafkaAdminClient | None = None

    @property
    def _leads(self) -> bool:
        """Whether this bridge has led for all of the session. Asked before each thing that only the leader may do."""
        self._lapsed = self._lapsed or not self._leadership.leads()
        return not self._lapsed

    @property
    def _halts(self) -> bool:
        """Whether the session is to end."""
        return self._stop.is_set() or not self._leads

    @abstractmethod
    def _work(self, consumer: KafkaConsumer, producer: StoppableKafkaProducer) -> None:
        """One session, until it halts or Kafka fails. The consumer has no partitions yet."""

    def _stood_by(self) -> None:
        """Another bridge leads: what this one knew is no longer the newest. Called again and again."""
        if self._notes is not None:
            self._notes.remove()

    def _begin_topics(self, *topics: str) -> set[str]:
        """Compare topics with the noted ones, and watch them for as long as the session lasts.

        Returns:
            Those that are read from their beginning, whatever offsets Kafka has of the group.

        Raises:
            TopicReplacedError: A topic was deleted and created again.
            KafkaError: No broker answers.
        """
        self._watched = describe_topics(self._topic_admin(), topics)
        self._check_at = time.monotonic() + CHECK_EVERY
        noted = {} if self._notes is None else self._notes.read()
        self._refuse_replaced({topic: each.id for topic, each in noted.items() if topic in topics}, self._watched)
        return {topic for topic in topics if topic in noted and noted[topic].anew}

    def _note_topics(self) -> None:
        """To be called once the offsets that Kafka has are of the topics that `_begin_topics` saw. OSError."""
        if self._notes is not None:
            fresh = {topic: NotedTopic(each.id) for topic, each in self._watched.items() if each.id}
            if fresh != self._notes.read():
                self._notes.write(fresh)

    def _refuse_replaced(self, noted: Mapping[str, str], found: Mapping[str, TopicIdentity]) -> None:
        for topic in replaced_topics(noted, found):
            raise TopicReplacedError(
                f"{describe_replaced(topic, noted[topic], found[topic].id)}. Stop Kiln and type kiln recover: then the "
                "topic is read from its beginning, and what is done already is not done again"
            )

    def _check_topics(self) -> None:
        """To be called often. kafka-python reads on in a topic that was created again, at the old offset or at the
        beginning, and says nothing.

        Raises:
            TopicReplacedError: A topic is another one.
            FramesProducerError: A topic has more partitions, which the next session reads.
        """
        if time.monotonic() < self._check_at or not self._watched:
            return
        self._check_at = time.monotonic() + CHECK_EVERY
        try:
            found = describe_topics(self._topic_admin(), self._watched)
        except (KafkaError, OSError):  # the consumer reports it where it lasts
            self._close_admin()
            return
        self._refuse_replaced({topic: each.id for topic, each in self._watched.items()}, found)
        for topic, each in found.items():
            if each.partitions != self._watched[topic].partitions:
                raise FramesProducerError(
                    f"{topic} has {each.partitions} partitions now, and had {self._watched[topic].partitions}"
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

    def _session(self) -> None:
        if not self._leadership.leads():
            self._error, self._state = None, f"stands by: {self._leadership.in_words()}"
            if self._leadership.another_leads():
                self._stood_by()
            self._stop.wait(_STAND_BY)
            return
        self._lapsed = False
        consumer = self._consumer(self._group)
        try:
            producer = StoppableKafkaProducer(self._servers, self._client_options)
            try:
                self._work(consumer, producer)
            finally:
                producer.close(2)
        finally:
            consumer.close()
            self._watched = {}
            self._close_admin()
        if self._lapsed:
            self._stop.wait(_SETTLE)
