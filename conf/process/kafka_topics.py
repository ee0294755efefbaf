"""Identities of Kafka topics: a topic that was deleted and created again has the same name and another id (KIP-516).

An offset of the deleted topic means nothing in the new one. So every consumer that stores offsets stores the topic's id
next to them.
Every room may import this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from kafka import KafkaAdminClient

CHECK_EVERY: Final = 5.0
"""Seconds between two checks of the topics that a consumer is reading."""


class TopicIdentity(NamedTuple):
    """The id of a topic, empty if the broker is older than Kafka 2.8, and its number of partitions."""

    id: str
    partitions: int


def describe_topics(admin: KafkaAdminClient, topics: Iterable[str]) -> dict[str, TopicIdentity]:
    """Request the identities of topics from a broker.

    Returns:
        The identities by full topic name, without the topics that do not exist.

    Raises:
        KafkaError: The broker does not answer.
    """
    return {
        topic["name"]: TopicIdentity(str(topic["topic_id"] or ""), len(topic["partitions"]))
        for topic in admin.describe_topics(sorted(set(topics)))
        if not topic["error_code"]
    }


def find_replaced_topics(noted: Mapping[str, str], found: Mapping[str, TopicIdentity]) -> list[str]:
    """Compare noted ids with the identities that the broker reports.

    Returns:
        The topics whose ids differ, in the order of `noted`. Topics that do not exist, and topics whose id
        the broker does not report, are not among them.
    """
    return [topic for topic, known in noted.items() if known and topic in found and found[topic].id not in ("", known)]


def describe_replaced_topic(topic: str, noted: str, found: str) -> str:
    """Explain that a topic has another id than the one noted."""
    return (
        f"{topic} is not the topic that was read before: its id in Kafka is {found}, and the id noted with the offsets "
        f"is {noted}. The topic was deleted and created again, or kafka.bootstrap names another cluster"
    )
