"""Topics on a broker that are deleted and created again."""

from __future__ import annotations

from datetime import timedelta

from kafka import KafkaAdminClient
from kiln.deploy.stack.kafka_broker import ensure_topics
from kiln.schemas.kafka.topics import TOPICS
from kit.awaiting import wait_until
from kit.broker_access import client, security


def create_again(address: str, prefix: str, *names: str) -> None:
    """Delete topics and create them under the same names, each with one partition."""
    full = [f"{prefix}{name}" for name in names]
    with KafkaAdminClient(**client(address)) as admin:
        admin.delete_topics(full)
        wait_until(lambda: not set(full) & set(admin.list_topics()), "the topics are gone")
    parts, make = _partitions(address), dict.fromkeys(TOPICS, timedelta(days=1))
    there = {name: parts[f"{prefix}{name}"] for name in TOPICS if f"{prefix}{name}" in parts}
    ensure_topics(address, prefix, there, make, client_options=security(address))


def _partitions(address: str) -> dict[str, int]:
    """Return the number of partitions of each topic, by full name."""
    with KafkaAdminClient(**client(address)) as admin:
        return {each["name"]: len(each["partitions"]) for each in admin.describe_topics() if not each["error_code"]}


def add_partitions(address: str, topic: str, total: int) -> None:
    """Increase the number of partitions of a topic to `total`. `topic` is the full name."""
    with KafkaAdminClient(**client(address)) as admin:
        admin.create_partitions({topic: total})
