"""Topics on a broker that are deleted and created again, and the way out of that."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from unittest import mock

from kafka import KafkaAdminClient
from kiln.conf.settings.reading import load_settings
from kiln.deploy.ops.recover import Recovery
from kiln.deploy.stack.kafka_broker import ensure_topics
from kiln.pipelines.recovery import Damage
from kiln.schemas.kafka.topics import TOPICS
from kit.awaiting import wait_until
from kit.broker_access import client, security, variables


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
    """The partitions of all topics, by full name."""
    with KafkaAdminClient(**client(address)) as admin:
        return {each["name"]: len(each["partitions"]) for each in admin.describe_topics() if not each["error_code"]}


def add_partitions(address: str, topic: str, total: int) -> None:
    """Give a topic more partitions. `topic`: its full name."""
    with KafkaAdminClient(**client(address)) as admin:
        admin.create_partitions({topic: total})


def recover(address: str, prefix: str, state: Path) -> list[Damage]:
    """Do what `kiln recover --yes` does in a state folder, for topics on the broker at `address`; what was found."""
    told = {
        **variables(address),
        "KILN_KAFKA__PREFIX": prefix,
        "KILN_STATE": str(state),
        "KILN_KAFKA__UPDATES_PARTITIONS": str(_partitions(address)[f"{prefix}updates"]),
    }
    with mock.patch.dict(os.environ, told), Recovery(load_settings(), print) as recovery:
        found = recovery.find()
        assert recovery.repair(found, 0) == []
    return found
