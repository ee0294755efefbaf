"""Kiln's Kafka topics, and the limits that every reader and writer observes (docs/design, contracts, Kafka topics).

A new topic begins with an entry in `TOPICS`.
"""

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
"""maximum number of epoch writers to one partition of `kiln.updates`: the query `updates`, and for each network the
bridge's fetcher, with one epoch for each partition of `kiln.wanted` (decision 7)"""

MAX_TOPIC: Final = 4096
"""maximum length of a gossipsub topic name in bytes, because names repeat in records and rows. A Ceramic topic has
about 100"""

Partitions = Literal["frames", "updates", "other"]


@dataclass(frozen=True)
class KafkaTopic:
    """A Kafka topic. Its full name is the prefix of the settings (`kiln.`) and `name`."""

    name: str
    key: str
    """description of a record's key"""
    value: str
    """description of a record"""
    partitions: Partitions = "other"
    """the `…` in `kafka.…_partitions`, the setting with the number of partitions"""
    compacted: bool = False
    """true if the broker keeps the newest record of each key for ever; else it keeps records for `kafka.retention`"""
    for_life: bool = False
    """true if the number of partitions never changes, because windows belong to partitions (decision 1)"""


TOPICS: Final[dict[str, KafkaTopic]] = {
    topic.name: topic
    for topic in (
        KafkaTopic("frames", "the connection", "a Frame: the exact bytes of one RPC or datagram", partitions="frames"),
        KafkaTopic(
            "updates",
            "NETWORK/KEY/VALUE of the separator, or the stream; none: a tick",
            "an update with its separator",
            partitions="updates",
            for_life=True,
        ),
        KafkaTopic("batches", "NETWORK/KEY/VALUE of the separator", "a CIP-123 batch with its block"),
        KafkaTopic("publications", "the CID", "the receipt of a publication"),
        KafkaTopic("streams", "the stream", "the separator that a verified genesis names", compacted=True),
        KafkaTopic("quarantine", "the position of the faulty record", "bytes that could not be used, and why"),
        KafkaTopic("wanted", "the CID", "a block to fetch, and the records that wait for it"),
        KafkaTopic("blocks", "the CID", "the bytes of a block, or the reason why it could not be fetched"),
    )
}

Offsets = Mapping[str, Mapping[int, int]]
"""offsets by full topic name and partition; end offsets are exclusive"""


def count_unread(read: Offsets, ends: Offsets, oldest: Offsets | None = None) -> int:
    """Count the unread records over all topics and partitions of `ends`. Records that the broker has removed do not
    count.

    Args:
        read: Offsets up to which records were read.
        ends: Offsets after the last records.
        oldest: First offsets that the broker still has; 0 for a partition that is missing.
    """
    return sum(
        max(0, end - max(read.get(topic, {}).get(partition, 0), (oldest or {}).get(topic, {}).get(partition, 0)))
        for topic, partitions in ends.items()
        for partition, end in partitions.items()
    )
