"""The bridges of a network that live, asked of Kafka: the members of the group that bridges join."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kiln.bridge.cluster.group import GroupView, group_name, read_member, read_round
from kiln.conf.settings.model import Kafka


@dataclass(frozen=True)
class BridgeMember:
    """A bridge that lives. `address`: of its machine, as the broker sees it; `leads`: publishes and fetches for all."""

    peer: str
    host: str
    address: str
    leads: bool
    duties: int


def list_live_bridges(kafka: Kafka, network: str, patience: float = 3.0) -> tuple[BridgeMember, ...]:
    """The bridges of a network, by peer id; none where the broker does not say. The broker must answer: look first."""
    from kafka.admin import KafkaAdminClient
    from kafka.errors import KafkaError

    from kiln.conf.process.kafka_clients import open_client

    group = group_name(kafka.prefix, network)
    try:
        with open_client(
            KafkaAdminClient, **kafka.client_options(), bootstrap_timeout_ms=int(patience * 1_000)
        ) as admin:
            described = admin.describe_groups([group])[group]
    except (KafkaError, OSError):
        return ()
    return tuple(sorted(_read_members(described["members"]), key=lambda each: each.peer))


def _read_members(told: Sequence[Mapping[str, object]]) -> Iterator[BridgeMember]:
    for each in told:
        member, joined = _read_user_data(each["member_metadata"]), _read_user_data(each["member_assignment"])
        try:
            said = read_member(member)
            round_ = read_round(joined) if joined else GroupView("", (), ())
        except msgspec.DecodeError:
            continue  # a member that is no bridge, or one of another version
        address = str(each["client_host"]).lstrip("/")
        yield BridgeMember(said.peer, said.host, address, round_.leader == said.peer, said.duties)


def _read_user_data(told: object) -> bytes:
    """Of a subscription or an assignment, as kafka-python tells it; empty while the group has none."""
    data = told.get("user_data") if isinstance(told, Mapping) else None
    return data.encode() if isinstance(data, str) else b""
