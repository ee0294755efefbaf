"""Membership of a bridge in the consumer group of the bridges of its network, from start to stop.

Kafka's group protocol detects the live bridges. It works across machines, and needs no shared clock and no rights
beyond those of the bridge's other groups. The bridge is a static member (KIP-345) under its peer id, so that a bridge
that restarts within `SESSION` is the same member, and no other takes over.

*Leading.* Kafka assigns one partition, 0 of `kiln.wanted`, to the leader. The broker accepts a commit only from a
member of the current round, so each commit shows that it has not given this one up. The leader acts while its lease
lasts: it begins when the bridge sent the newest commit that the broker accepted, and ends `MARGIN` before the broker
could give the bridge up, or when a new round begins. The clock of the lease goes on while the machine sleeps. A bridge
that is suspended between a check of the lease and its next action may still do that one action.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol

import msgspec
from kafka.consumer.subscription_state import ConsumerRebalanceListener
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
    read_member,
    read_round,
)
from kiln.bridge.kafka.thread import SESSION, BlockedError, KafkaConfig, KafkaThread
from kiln.conf.process.bridge_status import SharingStatus
from kiln.conf.process.kafka_clients import open_client

MARGIN: Final = 2.0  # s
_HEARTBEAT: Final = 2.0  # s, of the member, and between two commits
_POLL_TIMEOUT: Final = 0.25  # s between two polls of the broker
_COMMIT_TIMEOUT: Final = 5.0  # s for the broker to answer a commit
_REJOIN_WITHIN: Final = 20.0  # s for a live bridge to rejoin in a rebalance
_REJOIN_AFTER: Final = 4.0  # s outside of a round, of which other bridges need one heartbeat, until it rejoins again
_ANSWER_WITHIN: Final = SESSION + _REJOIN_WITHIN + SESSION  # s for a round, in which a bridge may be missing


class _Group(AbstractPartitionAssignor):  # type: ignore[misc]  # kafka-python has no types
    """An assignor of kafka-python that assigns one partition to the leader, and exchanges the data of
    `kiln.bridge.cluster.group`.

    It is called in kafka-python's thread.
    """

    name = PROTOCOL

    def __init__(self, member: Member, partition: TopicPartition) -> None:
        self.member = member
        self._partition = partition
        self.joined: tuple[GroupView, int] | None = None
        """The newest round and its number."""

    def metadata(self, topics: Sequence[str]) -> ConsumerProtocolSubscription:
        # the broker begins a round when a member's data changes, and its subscription changes only for a rejoin
        return ConsumerProtocolSubscription(
            version=0, topics=[self._partition.topic], user_data=msgspec.json.encode(self.member)
        )

    def assign(self, cluster: object, members: Sequence[_Joined]) -> dict[str, ConsumerProtocolAssignment]:
        joined = {each.member_id: read_member(each.metadata.user_data) for each in members}
        view = build_round(joined.values())
        leads = [(self._partition.topic, [self._partition.partition])]
        return {
            member_id: ConsumerProtocolAssignment(
                version=0,
                assigned_partitions=leads if member.peer == view.leader else [],
                user_data=msgspec.json.encode(view),
            )
            for member_id, member in joined.items()
        }

    def on_assignment(self, assignment: ConsumerProtocolAssignment, generation: int) -> None:
        self.joined = (read_round(assignment.user_data), generation)


class _Subscription(Protocol):
    user_data: bytes


class _Joined(Protocol):
    member_id: str
    metadata: _Subscription


def _boot_clock() -> float:
    """Return the seconds since boot; unlike `time.monotonic` they include the time that the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Membership(KafkaThread):
    """A thread that joins the group, renews the lease, and tracks the leader and the live bridges.

    `is_leader`, `bridges` and `authors` may be used in any thread.
    """

    def __init__(
        self, kafka: KafkaConfig, network: str, member: Member, clock: Callable[[], float] = _boot_clock
    ) -> None:
        """Create the thread without starting it.

        Args:
            clock: returns seconds, as `CLOCK_BOOTTIME`.
        """
        super().__init__(
            "membership",
            "no bridge is known to lead, so nothing is fetched",
            kafka,
            group_name(kafka.prefix, network),
        )
        self._partition = TopicPartition(f"{kafka.prefix}wanted", 0)
        self._assignor = _Group(member, self._partition)
        self._clock = clock
        self._interests = member.interests
        self._round: GroupView | None = None
        self._number = 0
        self._lease_until = 0.0  # by the clock
        self._authors = frozenset(member.authors)
        self._subscribes_more = False

    # -------- state

    def is_leader(self) -> bool:
        """Return whether this bridge leads at this moment."""
        return self._clock() < self._lease_until

    @property
    def bridges(self) -> tuple[LiveBridge, ...]:
        """The live bridges, this one included; none before the first round."""
        return () if self._round is None else self._round.bridges

    @property
    def authors(self) -> frozenset[str]:
        """Peer ids of the messages of all bridges that were alive since this one started."""
        return self._authors

    def set_interests(self, interests: Sequence[str]) -> None:
        """Set the current interests; the others learn of a change in the next round."""
        self._interests = interests_digest(interests)

    def another_bridge_leads(self) -> bool:
        """Return whether another bridge is known to lead."""
        return self._round is not None and self._round.leader != self._me

    def describe(self) -> str:
        """Describe why this bridge does not lead."""
        if self._round is None:
            return self.error or "waiting for Kafka to assign the leader"
        if self._round.leader == self._me:
            return "waiting for Kafka to renew its lease"
        return f"another bridge leads: {self._round.leader}"

    def status(self) -> SharingStatus:
        """Return the status of the group."""
        view = self._round
        return SharingStatus(
            leads=self.is_leader(),
            leader="" if view is None else view.leader,
            bridges=tuple(bridge.peer for bridge in self.bridges),
            round=self._number,
        )

    # -------- the thread

    @property
    def _me(self) -> str:
        return self._assignor.member.peer

    def _release_resources(self) -> None:
        self.end_lease()

    def end_lease(self) -> None:
        """End the lease, because a new round begins."""
        self._lease_until = 0.0

    def _run_session(self) -> None:
        consumer = open_client(
            KafkaConsumer,
            bootstrap_servers=self._servers,
            **self._client_options,
            bootstrap_timeout_ms=5_000,
            group_id=self._group,
            group_instance_id=self._me,
            session_timeout_ms=int(SESSION * 1_000),
            heartbeat_interval_ms=int(_HEARTBEAT * 1_000),
            max_poll_interval_ms=int(_REJOIN_WITHIN * 1_000),
            partition_assignment_strategy=[self._assignor],
            enable_auto_commit=False,
        )
        try:
            self._subscribe(consumer)
            self._renew_lease(consumer)
        except FencedInstanceIdError as error:
            raise TwinError(self._me) from error
        finally:
            consumer.close(timeout_ms=2_000)

    def _subscribe(self, consumer: KafkaConsumer) -> None:
        """Join the group, or rejoin it: a consumer rejoins when its subscription changes."""
        self._subscribes_more = not self._subscribes_more
        more = [f"{self._prefix}batches"] if self._subscribes_more else []
        consumer.subscribe([self._partition.topic, *more], listener=_LeaseListener(consumer, self))

    def _renew_lease(self, consumer: KafkaConsumer) -> None:
        joined: tuple[GroupView, int] | None = None
        self._assignor.joined = None
        renewed = self._clock()
        renew_at = rejoin_at = renewed
        while not self._stop.is_set():
            self._mark_progress()
            # kafka-python 3.0.12 drops the result of a rejoin that ends between two polls, and does not rejoin then
            if joined is None or consumer.group_metadata().state is MemberState.STABLE:
                rejoin_at = self._clock() + _REJOIN_AFTER
            elif self._clock() >= rejoin_at:
                self._subscribe(consumer)
                rejoin_at = self._clock() + _REJOIN_AFTER
            consumer.poll(timeout_ms=int(_POLL_TIMEOUT * 1_000))
            if self._assignor.joined != joined and (joined := self._assignor.joined) is not None:
                renew_at = self._clock()
                self._begin_round(*joined)
            now = self._clock()
            if joined is not None and now >= renew_at and self._commit(consumer):
                renewed, renew_at = now, now + _HEARTBEAT
                self._lease_until = now + SESSION - MARGIN if consumer.assignment() else 0.0
                self._error = None
                if self._is_outdated(joined[0]):
                    self._subscribe(consumer)
            elif now - renewed > _ANSWER_WITHIN:
                # kafka-python reports nothing when another member uses the instance id of this one
                raise KafkaTimeoutError(
                    f"no response from group {self._group} for {_ANSWER_WITHIN:g} s: the broker is unavailable, or "
                    f"another bridge uses the key of this one ({self._me})"
                )

    def _commit(self, consumer: KafkaConsumer) -> bool:
        """Commit an offset that nothing reads, and return whether this bridge is a member of the current round."""
        try:
            consumer.commit({self._partition: OffsetAndMetadata(0)}, timeout_ms=int(_COMMIT_TIMEOUT * 1_000))
        except (RebalanceInProgressError, CommitFailedError):
            return False
        return True

    def _begin_round(self, view: GroupView, number: int) -> None:
        me = self._assignor.member
        is_leader = view.leader == me.peer
        self._assignor.member = structs.replace(me, led=(me.led or number) if is_leader else 0)
        self._authors |= frozenset(view.authors)
        self._round, self._number = view, number
        self._state = "leads" if is_leader else f"{view.leader} leads"

    def _is_outdated(self, view: GroupView) -> bool:
        """Return whether the group has outdated data of this bridge: after a restart, it still has the data from
        before."""
        if self._assignor.member.interests != self._interests:
            self._assignor.member = structs.replace(self._assignor.member, interests=self._interests)
        me = self._assignor.member
        known = {bridge.peer: bridge.interests for bridge in view.bridges}
        return known.get(me.peer) != me.interests or not set(me.authors) <= set(view.authors)


class _LeaseListener(ConsumerRebalanceListener):  # type: ignore[misc]  # kafka-python has no types
    """Ends the lease before this bridge joins a new round, and reads nothing of the partition that it is assigned."""

    def __init__(self, consumer: KafkaConsumer, membership: Membership) -> None:
        self._consumer = consumer
        self._membership = membership

    def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        self._membership.end_lease()

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        self._consumer.pause(*assigned)


class TwinError(BlockedError):
    """Two bridges with one key."""

    def __init__(self, peer: str) -> None:
        super().__init__(f"another bridge uses the key of this one ({peer}). Give each bridge its own state folder.")
