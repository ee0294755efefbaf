"""Identities of Kafka topics: a topic that was deleted and created again has the same name and another id (KIP-516).

An offset of the deleted topic means nothing in the new one. So every consumer that stores offsets also stores the id of
the topic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from kafka import KafkaAdminClient

CHECK_EVERY: Final = 5.0
"""Seconds between two checks of the topics that a consumer is reading."""


class TopicIdentity(NamedTuple):
    """The id of a topic and its number of partitions. The id is empty if the broker is older than Kafka 2.8."""

    id: str
    partitions: int


def describe_topics(admin: KafkaAdminClient, topics: Iterable[str]) -> dict[str, TopicIdentity]:
    """Request the identities of topics from a broker.

    Returns:
        The identities by topic name, with the prefix. Topics that do not exist are left out.

    Raises:
        KafkaError: The broker does not answer.
    """
    return {
        topic["name"]: TopicIdentity(str(topic["topic_id"] or ""), len(topic["partitions"]))
        for topic in admin.describe_topics(sorted(set(topics)))
        if not topic["error_code"]
    }


def find_replaced_topics(noted: Mapping[str, str], found: Mapping[str, TopicIdentity]) -> list[str]:
    """Find the topics that were deleted and created again.

    Args:
        noted: The stored id of each topic, by its name.
        found: The identities that the broker reports.

    Returns:
        The topics whose id is not the stored one, in the order of `noted`. Topics that do not exist, or whose id the
        broker does not report, are left out.
    """
    return [topic for topic, known in noted.items() if known and topic in found and found[topic].id not in ("", known)]


def describe_replaced_topic(topic: str, noted: str, found: str) -> str:
    """Explain to a user that the id of a topic is not the stored one."""
    return (
        f"{topic} is not the topic that was read before: its id in Kafka is {found}, but the id stored with the "
        f"offsets is {noted}. The topic was deleted and created again, or kafka.bootstrap names another cluster"
    )
