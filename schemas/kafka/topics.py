"""The log: Kiln's Kafka topics, what each holds, and the limits that every reader and writer keeps (docs/design,
contracts, Kafka topics).

`TOPICS` is the one list of them. A new topic begins here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

MAX_RECORD: Final = 8 * 1024 * 1024
"""Bytes of one record. Every topic takes, and every producer sends, a record up to this size."""

MAX_OTHER_PARTITIONS: Final = 64
"""The most partitions of a topic that is neither `frames` nor `updates`."""

MAX_NETWORKS: Final = 4
"""Networks whose bridges may write one `kiln.updates`."""

MAX_EPOCH_WRITERS: Final = (1 + MAX_OTHER_PARTITIONS) * MAX_NETWORKS
"""Who may write epochs into one partition of `kiln.updates`: the query `updates`, and for each network the bridge's
fetcher, which has an epoch of its own for each partition of `kiln.wanted` (decision 7)."""

MAX_TOPIC: Final = 4096
"""Bytes of the name of a gossipsub topic. Names stand in records and rows many times over; a Ceramic topic has about a
hundred characters."""

Partitions = Literal["frames", "updates", "other"]


@dataclass(frozen=True)
class KafkaTopic:
    """A topic of the log. The prefix of the settings (`kiln.`) stands before `name`."""

    name: str
    key: str
    """what the key of a record is, in words"""
    value: str
    """what a record says, in words"""
    partitions: Partitions = "other"
    """the setting `kafka.…_partitions` that counts its partitions"""
    compacted: bool = False
    """True: the broker keeps the newest record of each key for ever. False: it keeps records for `kafka.retention`."""
    for_life: bool = False
    """True: the number of partitions never changes, as a window lives in a partition (decision 1)."""


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
        KafkaTopic("history", "NETWORK/KEY/VALUE of the separator", "a batch of a backfill run, to be published"),
        KafkaTopic("publications", "the CID", "the receipt of a publication"),
        KafkaTopic("streams", "the stream", "the separator that a verified genesis names", compacted=True),
        KafkaTopic("quarantine", "the place of what is at fault", "bytes that could not be used, and why"),
        KafkaTopic("wanted", "the CID", "a block to fetch, and what waits for it"),
        KafkaTopic("blocks", "the CID", "the bytes of a block, or why it could not be had"),
    )
}

Offsets = Mapping[str, Mapping[int, int]]
"""By full topic name and partition: the offset after the last record that is meant."""


def count_unread(read: Offsets, ends: Offsets, oldest: Offsets | None = None) -> int:
    """Records before `ends` that are not `read` yet, over all topics and partitions of `ends`.

    `oldest`: the first offset that the broker still holds, 0 where the mapping has none. What the broker removed before
    somebody read it does not count.
    """
    return sum(
        max(0, end - max(read.get(topic, {}).get(partition, 0), (oldest or {}).get(topic, {}).get(partition, 0)))
        for topic, partitions in ends.items()
        for partition, end in partitions.items()
    )
