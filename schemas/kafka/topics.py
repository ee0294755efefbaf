"""Kiln's Kafka topics, and the limits for all readers and writers (docs/design/contracts.md, Kafka topics)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

MAX_RECORD: Final = 8 * 1024 * 1024
"""maximum size of a record in bytes, for every topic and producer"""

MAX_PARTITIONS: Final = 256
"""maximum number of partitions of `frames` and of `updates`"""

MAX_OTHER_PARTITIONS: Final = 64
"""maximum number of partitions of a topic other than `frames` and `updates`"""

MAX_NETWORKS: Final = 4
"""maximum number of networks whose bridges write to one `kiln.updates`"""

MAX_EPOCH_WRITERS: Final = (1 + MAX_OTHER_PARTITIONS) * MAX_NETWORKS
"""maximum number of writers of one partition of `kiln.updates` that `kiln.schemas.kafka.epoch_guard` tracks. For each
network these are the query `updates`, and the bridge's fetcher once per partition of `kiln.wanted`"""

MAX_TOPIC: Final = 4096
"""maximum number of characters in a gossipsub topic name, because many records and rows repeat it. A Ceramic topic has
about 100"""

Partitions = Literal["frames", "updates", "other"]


@dataclass(frozen=True)
class KafkaTopic:
    """A Kafka topic. Its full name is `name` after the prefix in the settings, by default `kiln.`."""

    name: str
    partitions: Partitions = "other"
    """start of the name of the setting for the number of partitions: `kafka.frames_partitions`, …"""
    compacted: bool = False
    """true if Kafka compacts the topic and keeps the newest record of each key; otherwise `kafka.retention` applies"""
    for_life: bool = False
    """true if the number of partitions must never change, because windows belong to partitions (decision 1)"""


TOPICS: Final[dict[str, KafkaTopic]] = {
    topic.name: topic
    for topic in (
        KafkaTopic("frames", partitions="frames"),
        KafkaTopic("updates", partitions="updates", for_life=True),
        KafkaTopic("batches"),
        KafkaTopic("publications"),
        KafkaTopic("streams", compacted=True),
        KafkaTopic("quarantine"),
        KafkaTopic("wanted"),
        KafkaTopic("blocks"),
    )
}
"""Topics by name. docs/design/contracts.md describes their keys and values."""

Offsets = Mapping[str, Mapping[int, int]]
"""offsets by full topic name and partition; an end offset is that of the next record"""


def count_unread(read: Offsets, ends: Offsets, oldest: Offsets | None = None) -> int:
    """Count the unread records over all topics and partitions of `ends`, except those that Kafka has deleted.

    Args:
        read: Offset of the next record to read, in each partition; 0 if it is missing.
        ends: End offset of each partition.
        oldest: Offset of the oldest record that Kafka still has, in each partition; 0 if it is missing.
    """
    return sum(
        max(0, end - max(read.get(topic, {}).get(partition, 0), (oldest or {}).get(topic, {}).get(partition, 0)))
        for topic, partitions in ends.items()
        for partition, end in partitions.items()
    )
