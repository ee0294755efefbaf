"""Membership of a bridge in the consumer group of the bridges of its network, from start to stop.

Kafka's group protocol detects the live bridges. It works across machines, and needs no shared clock and no rights
beyond those of the bridge's other groups. The bridge is a static member (KIP-345) under its peer id, so that a bridge
that restarts within `SESSION` is the same member, and no other takes over.

*Leading.* The leader acts while its lease lasts. The lease begins when the bridge sent the heartbeat that the
broker answered last, and ends `MARGIN` before the broker could give the bridge up. The clock of the lease goes on while
the machine sleeps. A bridge that is suspended between a check of the lease and its next action may still do that one
action.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol, cast

import msgspec
from kafka.coordinator.assignors.abstract import AbstractPartitionAssignor
from kafka.errors import FencedInstanceIdError, KafkaTimeoutError
from kafka.protocol.consumer.metadata import ConsumerProtocolAssignment, ConsumerProtocolSubscription
from msgspec import structs

from kafka import KafkaConsumer
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
from kiln.bridge.kafka.thread import BlockedError, KafkaConfig, KafkaThread
from kiln.conf.process.bridge_status import SharingStatus
from kiln.conf.process.kafka_clients import open_client

SESSION: Final = 10.0
"""Seconds without a heartbeat after which the broker removes a bridge from the group. Brokers allow at least 6 s, by
default (`group.min.session.timeout.ms`)."""
MARGIN: Final = 2.0
_HEARTBEAT: Final = 2.0  # s
_POLL_TIMEOUT: Final = 0.25  # s between two polls of the broker
_REJOIN_WITHIN: Final = 20.0  # s for a live bridge to rejoin in a rebalance


class _Group(AbstractPartitionAssignor):  # type: ignore[misc]  # kafka-python has no types
    """An assignor of kafka-python that assigns no partition, but exchanges the data of `kiln.bridge.cluster.group`.

    It is called in kafka-python's thread.
    """

    name = PROTOCOL

    def __init__(self, member: Member) -> None:
        self.member = member
        self.joined: tuple[GroupView, int] | None = None
        """The newest round and its number."""

    def metadata(self, topics: Sequence[str]) -> ConsumerProtocolSubscription:
        return ConsumerProtocolSubscription(
            version=0, topics=sorted(topics), user_data=msgspec.json.encode(self.member)
        )

    def assign(self, cluster: object, members: Sequence[_Joined]) -> dict[str, ConsumerProtocolAssignment]:
        view = msgspec.json.encode(build_round([read_member(each.metadata.user_data) for each in members]))
        return {
            each.member_id: ConsumerProtocolAssignment(version=0, assigned_partitions=[], user_data=view)
            for each in members
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
            "no bridge is known to lead, so nothing is published or fetched",
            kafka,
            group_name(kafka.prefix, network),
        )
        self._assignor = _Group(member)
        self._clock = clock
        self._interests = member.interests
        self._round: GroupView | None = None
        self._number = 0
        self._lease = (0.0, 0.0)  # from, until, by the clock
        self._authors = frozenset(member.authors)

    # -------- state

    def is_leader(self) -> bool:
        """Return whether this bridge leads at this moment."""
        begins, ends = self._lease
        return begins <= self._clock() < ends

    @property
    def bridges(self) -> tuple[LiveBridge, ...]:
        """The live bridges, this one included; none before the first round."""
        return () if self._round is None else self._round.bridges

    @property
    def authors(self) -> frozenset[str]:
        """Peer ids of the messages of this bridge, and of each that led since this one started."""
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
            return "waiting for its lease to begin"
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
        self._lease = (0.0, 0.0)

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
            consumer.subscribe([f"{self._prefix}batches"])  # any topic of Kiln's, since no partition is assigned
            self._renew_lease(consumer, cast(_HasCoordinator, consumer)._coordinator)
        except FencedInstanceIdError as error:
            raise TwinError(self._me) from error
        finally:
            consumer.close(timeout_ms=2_000)

    def _renew_lease(self, consumer: KafkaConsumer, coordinator: _Coordinator) -> None:
        heartbeat = coordinator.heartbeat
        polled = before = answered = self._clock()
        sent, sent_at = heartbeat.last_send, before  # a heartbeat, and a time before it was sent
        begins = self._lease[0]
        joined: tuple[GroupView, int] | None = None
        self._assignor.joined = None
        while not self._stop.is_set():
            self._mark_progress()
            before, polled = polled, self._clock()
            self._rejoin_if_changed(coordinator)
            consumer.poll(timeout_ms=int(_POLL_TIMEOUT * 1_000))
            if self._assignor.joined != joined and (joined := self._assignor.joined) is not None:
                begins = self._begin_round(*joined, begins, self._clock())
                answered = before
            if heartbeat.last_send != sent:
                sent, sent_at = heartbeat.last_send, before
            if heartbeat.last_receive >= sent:
                answered = max(answered, sent_at)
            timeout = SESSION + (_REJOIN_WITHIN + SESSION if coordinator.rebalance_in_progress() else 0.0)
            if self._clock() - answered > timeout:
                # kafka-python reports nothing when another member uses the instance id of this one
                raise KafkaTimeoutError(
                    f"no response from group {self._group} for {timeout:g} s: the broker is unavailable, or another "
                    f"bridge uses the key of this one ({self._me})"
                )
            is_leader = joined is not None and joined[0].leader == self._me
            self._lease = (begins, answered + SESSION - MARGIN if is_leader else 0.0)
            self._error = None

    def _begin_round(self, view: GroupView, number: int, begins: float, now: float) -> float:
        """Begin a new round.

        Args:
            begins: start of the lease in the previous round.

        Returns:
            Start of the lease, if this bridge leads.
        """
        me = self._assignor.member
        is_leader = view.leader == me.peer
        self._assignor.member = structs.replace(me, led=(me.led or number) if is_leader else 0)
        self._authors |= frozenset(view.authors)
        self._round, self._number = view, number
        self._state = "leads" if is_leader else f"{view.leader} leads"
        # the former leader may not know yet, so its lease has to expire first
        return begins if is_leader and me.led else now + SESSION if view.after else 0.0

    def _rejoin_if_changed(self, coordinator: _Coordinator) -> None:
        """Rejoin if the group has outdated data of this bridge: after a restart, the group still has the data from
        before."""
        if self._assignor.member.interests != self._interests:
            self._assignor.member = structs.replace(self._assignor.member, interests=self._interests)
        view, me = self._round, self._assignor.member
        if view is None or self._assignor.joined is None or coordinator.need_rejoin():
            return
        known = {bridge.peer: bridge.interests for bridge in view.bridges}
        if known.get(me.peer) != me.interests or (view.leader == me.peer and view.authors != me.authors):
            coordinator.request_rejoin()


class TwinError(BlockedError):
    """Two bridges with one key."""

    def __init__(self, peer: str) -> None:
        super().__init__(f"another bridge uses the key of this one ({peer}). Give each bridge its own state folder.")


class _Heartbeat(Protocol):
    """Times by `time.monotonic`, s."""

    last_send: float
    last_receive: float


class _Coordinator(Protocol):
    # no public method of kafka-python returns the time of the last heartbeat response, or requests a rejoin
    heartbeat: _Heartbeat

    def need_rejoin(self) -> bool: ...
    def rebalance_in_progress(self) -> bool: ...
    def request_rejoin(self) -> None: ...


class _HasCoordinator(Protocol):
    _coordinator: _Coordinator
