"""Membership of a bridge in the Kafka consumer group of the bridges of its network.

Kafka's group protocol detects the live bridges, and informs each bridge of the others' interests. The protocol works
across machines, and needs no shared clock and no rights beyond those of the bridge's other groups. The bridge is a
static member (KIP-345) under its peer id, so that a bridge that restarts within `SESSION` is the same member. The group
assigns no partitions. Its client is kafka-python, because librdkafka supports no custom assignor.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, Protocol

import msgspec
from kafka.coordinator.assignors.abstract import AbstractPartitionAssignor
from kafka.coordinator.base import MemberState
from kafka.errors import CommitFailedError, FencedInstanceIdError, KafkaTimeoutError, RebalanceInProgressError
from kafka.protocol.consumer.metadata import ConsumerProtocolAssignment, ConsumerProtocolSubscription
from kafka.structs import OffsetAndMetadata
from msgspec import structs

from kafka import KafkaConsumer, TopicPartition
from kiln.bridge.cluster.group import (
    PROTOCOL,
    GroupView,
    LiveBridge,
    Member,
    build_round,
    group_name,
    interests_digest,
)
from kiln.bridge.kafka.session_thread import SESSION, KafkaConfig, SessionThread, TwinError
from kiln.conf.process.bridge_status import SharingStatus
from kiln.conf.process.kafka_clients import open_client

_HEARTBEAT: Final = 2.0  # seconds between two heartbeats, and between two commits
_POLL_TIMEOUT: Final = 0.25  # seconds between two polls of the broker
_COMMIT_TIMEOUT: Final = 5.0  # seconds for the broker to answer a commit
_REJOIN_WITHIN: Final = 20.0  # seconds for a live bridge to rejoin in a rebalance
_REJOIN_AFTER: Final = 4.0  # seconds in a rebalance until the bridge rejoins; other members join at a heartbeat
_ANSWER_WITHIN: Final = SESSION + _REJOIN_WITHIN + SESSION  # seconds for a rebalance, in which a bridge may be missing


class _Group(AbstractPartitionAssignor):  # type: ignore[misc]  # kafka-python has no types
    """An assignor of kafka-python that assigns no partition, and exchanges the data of `kiln.bridge.cluster.group`.

    kafka-python calls the methods in a thread of its own.
    """

    name = PROTOCOL

    def __init__(self, member: Member, topic: str) -> None:
        self.member = member
        self._topic = topic
        self.joined: tuple[GroupView, int] | None = None
        """the newest view, and the number of its round"""

    def metadata(self, topics: Sequence[str]) -> ConsumerProtocolSubscription:
        # without `topics`, which change only to force a rejoin: the broker begins a round when this data changes
        return ConsumerProtocolSubscription(version=0, topics=[self._topic], user_data=msgspec.json.encode(self.member))

    def assign(self, cluster: object, members: Sequence[_Joined]) -> dict[str, ConsumerProtocolAssignment]:
        view = build_round([msgspec.json.decode(member.metadata.user_data, type=Member) for member in members])
        data = msgspec.json.encode(view)
        return {
            member.member_id: ConsumerProtocolAssignment(version=0, assigned_partitions=[], user_data=data)
            for member in members
        }

    def on_assignment(self, assignment: ConsumerProtocolAssignment, generation: int) -> None:
        self.joined = (msgspec.json.decode(assignment.user_data, type=GroupView), generation)


class _Subscription(Protocol):
    user_data: bytes


class _Joined(Protocol):
    member_id: str
    metadata: _Subscription


class Membership(SessionThread):
    """A thread that joins the group of the bridges and tracks the live ones, from `start()` to `stop()`.

    `bridges` and `authors` may be used in any thread.
    """

    def __init__(self, kafka: KafkaConfig, network: str, member: Member) -> None:
        """Create the thread without starting it."""
        super().__init__("membership", "the other bridges are unknown", kafka)
        self._group = group_name(kafka.prefix, network)
        self._partition = TopicPartition(f"{kafka.prefix}wanted", 0)
        self._assignor = _Group(member, self._partition.topic)
        self._wanted = member  # what to send to the other bridges
        self._round: GroupView | None = None
        self._number = 0
        self._authors = frozenset(member.authors)
        self._subscribes_more = False

    # -------- state

    @property
    def bridges(self) -> tuple[LiveBridge, ...]:
        """The live bridges, including this one. Empty before the broker has sent the first view."""
        return () if self._round is None else self._round.bridges

    @property
    def authors(self) -> frozenset[str]:
        """Peer ids that sign the messages of all bridges that have been alive since this one started."""
        return self._authors

    def update(self, interests: Sequence[str], *, leads: bool) -> None:
        """Set the current interests, and whether this bridge fetches for all. Kafka informs the others of a change."""
        self._wanted = structs.replace(self._wanted, interests=interests_digest(interests), leads=leads)

    def status(self) -> SharingStatus:
        """Return the status of the group."""
        view = self._round
        return SharingStatus(
            leads=self._wanted.leads,
            leader="" if view is None else view.leader,
            bridges=tuple(bridge.peer for bridge in self.bridges),
            round=self._number,
        )

    # -------- the thread

    def _run_session(self) -> None:
        consumer = open_client(
            KafkaConsumer,
            **self._client_options,
            bootstrap_timeout_ms=5_000,
            group_id=self._group,
            group_instance_id=self._wanted.peer,
            session_timeout_ms=int(SESSION * 1_000),
            heartbeat_interval_ms=int(_HEARTBEAT * 1_000),
            max_poll_interval_ms=int(_REJOIN_WITHIN * 1_000),
            partition_assignment_strategy=[self._assignor],
            enable_auto_commit=False,
        )
        try:
            self._subscribe(consumer)
            self._follow_rounds(consumer)
        except FencedInstanceIdError as error:
            raise TwinError(self._wanted.peer) from error
        finally:
            consumer.close(timeout_ms=2_000)

    def _subscribe(self, consumer: KafkaConsumer) -> None:
        """Join the group, or rejoin it by changing the subscription."""
        self._assignor.member = self._wanted
        self._subscribes_more = not self._subscribes_more
        more = [f"{self._prefix}batches"] if self._subscribes_more else []
        consumer.subscribe([self._partition.topic, *more])

    def _follow_rounds(self, consumer: KafkaConsumer) -> None:
        joined: tuple[GroupView, int] | None = None
        self._assignor.joined = None
        confirmed = commit_at = rejoin_at = time.monotonic()
        while not self._stop.is_set():
            self._mark_progress()
            # kafka-python 3.0.12 drops the result of a rejoin that ends between two polls, and does not rejoin then
            if joined is None or consumer.group_metadata().state is MemberState.STABLE:
                rejoin_at = time.monotonic() + _REJOIN_AFTER
            elif time.monotonic() >= rejoin_at:
                self._subscribe(consumer)
                rejoin_at = time.monotonic() + _REJOIN_AFTER
            if joined is None or _is_active(consumer):
                consumer.poll(timeout_ms=int(_POLL_TIMEOUT * 1_000))
            else:
                self._stop.wait(_POLL_TIMEOUT)
            if self._assignor.joined != joined and (joined := self._assignor.joined) is not None:
                commit_at = time.monotonic()
                self._authors |= frozenset(joined[0].authors)
                self._round, self._number = joined
                self._state = f"{len(joined[0].bridges)} bridges"
            now = time.monotonic()
            if joined is not None and now >= commit_at and self._commit(consumer):
                confirmed, commit_at = now, now + _HEARTBEAT
                self._error = None
                if self._is_outdated(joined[0]):
                    self._subscribe(consumer)
            elif now - confirmed > _ANSWER_WITHIN:
                # kafka-python reports nothing when another member uses the instance id of this one
                raise KafkaTimeoutError(
                    f"no response from group {self._group} for {_ANSWER_WITHIN:g} s. The broker is unavailable, or "
                    f"another bridge uses the key of this one ({self._wanted.peer}). Check the broker, and give each "
                    "bridge its own state folder."
                )

    def _commit(self, consumer: KafkaConsumer) -> bool:
        """Commit an offset, which no bridge reads, and return whether the broker still accepts this member."""
        try:
            consumer.commit({self._partition: OffsetAndMetadata(0)}, timeout_ms=int(_COMMIT_TIMEOUT * 1_000))
        except (RebalanceInProgressError, CommitFailedError):
            return False
        return True

    def _is_outdated(self, view: GroupView) -> bool:
        """Return whether the group has outdated data about this bridge, such as data from before a restart."""
        wanted = self._wanted
        known = next((bridge for bridge in view.bridges if bridge.peer == wanted.peer), None)
        return (
            known is None
            or (known.interests, known.leads) != (wanted.interests, wanted.leads)
            or not set(wanted.authors) <= set(view.authors)
        )


def _is_active(consumer: KafkaConsumer) -> bool:
    """Return false if the result of a rejoin was dropped. Polls would then not wait, but use a whole core."""
    is_stable = consumer.group_metadata().state is MemberState.STABLE
    return is_stable or bool(consumer._coordinator.need_rejoin())  # no public method reports this
