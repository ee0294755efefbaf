"""Detection and repair of damage in a state folder, while no query runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Final, Self

import pyarrow as pa
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
from kiln.pipelines.decode.decoder import compute_column_identities, is_lasting
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.delta.rows import read_rows
from kiln.pipelines.recovery import (
    Damage,
    DamageError,
    adopt_topics,
    advance_query,
    examine,
    replace_dedup_store,
    rewind_query,
    set_files_aside,
)
from kiln.pipelines.runtime.checkpoint import Checkpoint
from kiln.pipelines.runtime.progress_marker import ProgressMarker
from kiln.pipelines.runtime.topics import KafkaTopics, TopicState
from kiln.schemas.kafka import topics as log
from kiln.schemas.queries import QUERIES
from kiln.schemas.wire.identity import VERDICT_NAMES, Verdict


def read_message_identities(lake: Lake, horizon: int) -> Iterator[tuple[bytes, ...]]:
    """Read the digests by which `archive` recognises the messages in its table. `horizon` is that of unsigned messages,
    in µs."""
    columns = ["network", "message_id", "verdict", "observed_at"]
    for batch in read_rows(lake.open("messages"), columns):
        times = batch.column("observed_at").cast(pa.int64()).to_pylist()
        texts = (batch.column(name).to_pylist() for name in columns[:3])
        for network, message_id, verdict, observed_at in zip(*texts, times, strict=True):
            is_signed = verdict == _SIGNED
            identities = compute_column_identities(network, message_id, is_signed, observed_at, "", horizon)
            yield identities[:1] if is_lasting(message_id, is_signed) else identities


_SIGNED: Final = VERDICT_NAMES[Verdict.VALID]


class Recovery:
    """A context manager that locks the queries and the table maintenance of a state folder.

    Raises:
        StateInUseError: One of them runs.
    """

    def __init__(self, settings: Settings, say: Say) -> None:
        """Create the context manager; `say` is called with progress messages."""
        self._settings = settings
        self._location = build_damage_location(settings)
        self._say = say
        self._locks = ExitStack()
        self._broker_status: BrokerStatus | None = None
        self._notes: dict[str, TopicNotes] = {}
        """topic notes of the bridge's consumers whose topics were replaced, by `Damage.query`"""

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
        """Find the damage, at most one `Damage` per query.

        If there are checkpoints, reads their topics and the progress of `updates` from Kafka, and starts an embedded
        broker for that.
        """
        progress = None
        topics: dict[str, dict[str, TopicState]] = {}
        queries = [name for name in QUERIES if Checkpoint(self._settings.checkpoints_root / name).exists]
        bridge_damages: list[Damage] = []
        if queries or list_topic_notes(self._settings.bridge_dir):
            kafka = KafkaTopics(self._settings.broker.client_options)
            try:
                self._read_broker_status()
                topics = read_topics(self._settings, kafka, queries)
                bridge_damages = self._find_bridge_damages(kafka)
                progress = read_progress_report(self._settings) if has_progress_marker(self._settings) else None
            except (PrerequisiteError, KafkaError) as error:
                self._say(f"cannot compare the checkpoints with Kafka: {error}")
            finally:
                kafka.close()
        return [*examine(self._location, QUERIES, progress, topics), *bridge_damages]

    def _find_bridge_damages(self, kafka: KafkaTopics) -> list[Damage]:
        """Find the bridge's consumers whose topics were replaced."""
        damages: list[Damage] = []
        for notes in list_topic_notes(self._settings.bridge_dir):
            noted = {topic: note.id for topic, note in notes.read().items()}
            identities = kafka.read_identities(noted) if noted else {}
            replaced = find_replaced_topics(noted, identities)
            if not replaced:
                continue
            name = f"bridge, {notes.group}"
            self._notes[name] = notes
            problem = "; ".join(
                describe_replaced_topic(topic, noted[topic], identities[topic].id) for topic in replaced
            )
            remedy = (
                f"It reads {', '.join(replaced)} from the beginning, and skips records with a receipt and known ones"
            )
            adopted = {topic: TopicState(identities[topic].id, {}, {}) for topic in replaced}
            damages.append(Damage(name, problem, remedy, adopted_topics=adopted))
        return damages

    def _adopt_bridge_topics(self, damage: Damage) -> None:
        notes = self._notes[damage.query]
        with lock_state(self._settings.state, "bridge"):
            notes.write(
                notes.read() | {topic: NotedTopic(adopted.id, True) for topic, adopted in damage.adopted_topics.items()}
            )

    def repair(self, damages: Sequence[Damage], now: int) -> list[Damage]:
        """Repair damages.

        Reads the offsets of Kafka if a query must be rewound or advanced, and starts an embedded broker for that.

        Args:
            damages: Damages that `find` returned.
            now: Current time, µs.

        Returns:
            The damages that remain, each with the obstacle to its repair as the remedy.

        Raises:
            BrokerError: The embedded broker does not start.
        """
        left: list[Damage] = []
        oldest: log.Offsets | None = None
        for damage in damages:
            try:
                if damage.is_self_repairing:
                    set_files_aside(self._location, damage)
                elif damage.advance_from is not None:
                    advance_query(self._location, damage, self._find_state_start(damage.advance_from.ends, now), now)
                elif damage.rebuilds_dedup_state:
                    self._rebuild_dedup_state(damage.query, now)
                elif damage.query in self._notes:
                    self._adopt_bridge_topics(damage)
                elif damage.adopted_topics:
                    adopt_topics(self._location, damage)
                elif damage.rewind_to is None:
                    left.append(damage)
                else:
                    oldest = self._read_oldest_offsets() if oldest is None else oldest
                    rewind_query(self._location, damage, oldest)
            except DamageError as error:
                left.append(replace(damage, remedy=str(error), rewind_to=None, advance_from=None, adopted_topics={}))
        return left

    def _rebuild_dedup_state(self, query: str, now: int) -> None:
        dedupe, durable = self._settings.dedupe, self._settings.durability == "power"
        identities = read_message_identities(self._location.lake, micros(dedupe.unsigned_ttl))
        replace_dedup_store(self._location, query, identities, now, durable=durable)

    def _read_oldest_offsets(self) -> log.Offsets:
        status = self._read_broker_status()
        if not status.reachable:
            raise DamageError(f"cannot read the offsets of the broker at {status.servers}: {status.problem}")
        return {topic.name: topic.begin for topic in status.topics}

    def _find_state_start(self, ends: log.Offsets, now: int) -> log.Offsets:
        """Find the offsets, before `ends`, of the first records that `updates` still needs for deduplication."""
        kafka = self._settings.broker
        self._read_broker_status()
        try:
            with ProgressMarker(kafka.client_options(), kafka.topic("updates")) as marker:
                return marker.find_offsets_since(ends, (now - micros(self._settings.dedupe.signed_ttl)) // 1_000)
        except KafkaError as error:
            raise DamageError(f"cannot find the start offsets at the broker {kafka.servers}: {error}") from error

    def _read_broker_status(self) -> BrokerStatus:
        """Read the status of the broker once, after starting an embedded one."""
        if self._broker_status is None:
            self._locks.enter_context(start_broker(self._settings, self._say, check_topics=False))
            self._broker_status = read_broker_status(self._settings.kafka)
        return self._broker_status
