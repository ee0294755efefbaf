"""Live bridges of a network: the members of the Kafka group that bridges join."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kiln.bridge.cluster.group import GroupView, group_name, read_member, read_round
from kiln.conf.settings.model import Kafka

_PATIENCE = 3_000  # ms


@dataclass(frozen=True)
class BridgeMember:
    """A live bridge.

    Attributes:
        address: Address of its machine, as the broker sees it.
        leads: True if it fetches for all bridges.
        duties: 1 if its settings allow it to fetch.
    """

    peer: str
    host: str
    address: str
    leads: bool
    duties: int


def list_live_bridges(kafka: Kafka, network: str) -> tuple[BridgeMember, ...]:
    """List the bridges of a network, ordered by peer id.

    The broker must be reachable.

    Returns:
        The bridges; none if the broker does not describe the group.
    """
    from kafka.admin import KafkaAdminClient
    from kafka.errors import KafkaError

    from kiln.conf.process.kafka_clients import open_client

    group = group_name(kafka.prefix, network)
    try:
        with open_client(KafkaAdminClient, **kafka.client_options(), bootstrap_timeout_ms=_PATIENCE) as admin:
            described = admin.describe_groups([group])[group]
    except (KafkaError, OSError):
        return ()
    return tuple(sorted(_read_members(described["members"]), key=lambda member: member.peer))


def _read_members(descriptions: Sequence[Mapping[str, object]]) -> Iterator[BridgeMember]:
    for description in descriptions:
        metadata = _read_user_data(description["member_metadata"])
        assignment = _read_user_data(description["member_assignment"])
        try:
            member = read_member(metadata)
            view = read_round(assignment) if assignment else GroupView("", (), ())
        except msgspec.DecodeError:
            continue  # a member that is no bridge, or one of another version
        address = str(description["client_host"]).lstrip("/")
        yield BridgeMember(member.peer, member.host, address, view.leader == member.peer, int(member.fetches))


def _read_user_data(protocol: object) -> bytes:
    """Read the user data of kafka-python's subscription or assignment; empty if the group has none."""
    data = protocol.get("user_data") if isinstance(protocol, Mapping) else None
    return data.encode() if isinstance(data, str) else b""
