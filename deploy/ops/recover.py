"""Finds what is damaged in a state folder, and puts it right while no query runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Self

from kafka.errors import KafkaError

from kiln.bridge.kafka.topic_notes import NotedTopic, TopicNotes, list_topic_notes
from kiln.conf.process.errors import PrerequisiteError
from kiln.conf.process.kafka_topics import describe_replaced_topic, find_replaced_topics
from kiln.conf.process.locks import lock_state
from kiln.conf.settings.durations import micros
from kiln.conf.settings.model import Settings
from kiln.deploy.ops.maintenance import LOCK as MAINTAIN
from kiln.deploy.ops.status import BrokerStatus, read_broker_status
from kiln.deploy.stack.kafka_broker import Say, start_broker
from kiln.pipelines.app.supervisor import build_damage_location, has_progress_marker, read_progress_report, read_topics
from kiln.pipelines.recovery import (
    Damage,
    DamageError,
    adopt_topics,
    advance_query,
    examine,
    rewind_query,
    set_files_aside,
)
from kiln.pipelines.runtime.checkpoint import Checkpoint
from kiln.pipelines.runtime.progress_marker import ProgressMarker
from kiln.pipelines.runtime.topics import KafkaTopics, TopicState
from kiln.schemas.kafka import topics as log
from kiln.schemas.queries import QUERIES


class Recovery:
    """A context manager that keeps every query of the state folder from running, and the care of its tables.
    StateInUseError: one runs."""

    def __init__(self, settings: Settings, say: Say) -> None:
        """`say` hears what is waited for."""
        self._settings = settings
        self._place = build_damage_location(settings)
        self._say = say
        self._locks = ExitStack()
        self._asked: BrokerStatus | None = None
        self._notes: dict[str, TopicNotes] = {}
        """of the parts of the bridge that are to read another topic, by their names in `Damage.query`"""

    def __enter__(self) -> Self:
        with ExitStack() as locks:
            for name in (*QUERIES, MAINTAIN):
                locks.enter_context(lock_state(self._settings.state, name))
            self._locks = locks.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._locks.close()

    def find(self) -> list[Damage]:
        """What is wrong, at most one `Damage` a query. Asks Kafka how far `updates` got, and for the topics that the
        checkpoints have read, where there is a checkpoint; the embedded broker is started for that."""
        told = None
        topics: dict[str, dict[str, TopicState]] = {}
        begun = [name for name in QUERIES if Checkpoint(self._settings.checkpoints_root / name).exists]
        of_bridge: list[Damage] = []
        if begun or list_topic_notes(self._settings.bridge_dir):
            kafka = KafkaTopics(self._settings.broker.client_options)
            try:
                self._broker()
                topics = read_topics(self._settings, kafka, begun)
                of_bridge = self._find_of_bridge(kafka)
                told = read_progress_report(self._settings) if has_progress_marker(self._settings) else None
            except (PrerequisiteError, KafkaError) as error:
                self._say(f"{error}: whether the checkpoints go with what Kafka has is not known")
            finally:
                kafka.close()
        return [*examine(self._place, QUERIES, told, topics), *of_bridge]

    def _find_of_bridge(self, kafka: KafkaTopics) -> list[Damage]:
        """What the parts of the bridge have read of topics that are others now."""
        found: list[Damage] = []
        for notes in list_topic_notes(self._settings.bridge_dir):
            noted = {topic: each.id for topic, each in notes.read().items()}
            there = kafka.read_identities(noted) if noted else {}
            replaced = find_replaced_topics(noted, there)
            if not replaced:
                continue
            name = f"bridge, {notes.group}"
            self._notes[name] = notes
            words = "; ".join(describe_replaced_topic(topic, noted[topic], there[topic].id) for topic in replaced)
            remedy = (
                f"It reads {', '.join(replaced)} from the beginning, and passes over what has a receipt or is known"
            )
            anew = {topic: TopicState(there[topic].id, {}, {}) for topic in replaced}
            found.append(Damage(name, words, remedy, adopted_topics=anew))
        return found

    def _read_anew_by_bridge(self, damage: Damage) -> None:
        notes = self._notes[damage.query]
        with lock_state(self._settings.state, "bridge"):
            notes.write(
                notes.read() | {topic: NotedTopic(each.id, True) for topic, each in damage.adopted_topics.items()}
            )

    def put_right(self, found: Sequence[Damage], now: int) -> list[Damage]:
        """Does what each says; returns those that are left, each with what is in the way as its remedy. Asks Kafka what
        Kafka holds where a query is to go back or on; the embedded broker is started for that. `now`: µs.
        BrokerError."""
        left: list[Damage] = []
        oldest: log.Offsets | None = None
        for damage in found:
            try:
                if damage.is_self_repairing:
                    set_files_aside(self._place, damage)
                elif damage.advance_from is not None:
                    advance_query(self._place, damage, self._remembered(damage.advance_from.ends, now), now)
                elif damage.query in self._notes:
                    self._read_anew_by_bridge(damage)
                elif damage.adopted_topics:
                    adopt_topics(self._place, damage)
                elif damage.rewind_to is None:
                    left.append(damage)
                else:
                    oldest = self._oldest() if oldest is None else oldest
                    rewind_query(self._place, damage, oldest)
            except DamageError as error:
                left.append(replace(damage, remedy=str(error), rewind_to=None, advance_from=None, adopted_topics={}))
        return left

    def _oldest(self) -> log.Offsets:
        status = self._broker()
        if not status.reachable:
            raise DamageError(f"the broker at {status.servers} does not say what it holds: {status.problem}")
        return {topic.name: topic.begin for topic in status.topics}

    def _remembered(self, ends: log.Offsets, now: int) -> log.Offsets:
        """From where on `updates` would remember what it read before `ends`."""
        kafka = self._settings.broker
        self._broker()
        try:
            with ProgressMarker(kafka.client_options(), kafka.topic("updates")) as marker:
                return marker.find_offsets_since(ends, (now - micros(self._settings.dedupe.signed_ttl)) // 1_000)
        except KafkaError as error:
            raise DamageError(f"the broker at {kafka.servers} does not say where to begin: {error}") from error

    def _broker(self) -> BrokerStatus:
        """What the broker says, which runs from the first time on that this is asked."""
        if self._asked is None:
            self._locks.enter_context(start_broker(self._settings, self._say, die_with_parent=True))
            self._asked = read_broker_status(self._settings.kafka)
        return self._asked
