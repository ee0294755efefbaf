"""Kafka's topics as a checkpoint needs them: what the broker has, and the ids noted in the checkpoint's folder.

Spark's own files name a topic by its name alone. After the topic was deleted and created again, Spark reads on at the
old offsets as soon as the new topic is long enough, and skips the records before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec

from kiln.conf.process.kafka_topics import TopicIdentity, describe_replaced, describe_topics
from kiln.conf.process.location import Location
from kiln.schemas.kafka import topics as log

if TYPE_CHECKING:
    from kafka.admin import OffsetSpec

    from kafka import KafkaAdminClient

NOTE: Final = "topics.json"
"""A file of Kiln's in a checkpoint: topic ids by full topic name."""

_PATIENCE_MS: Final = 5_000


class TopicState(NamedTuple):
    """A topic now: its id, and by partition the offset of its oldest record and the offset after its newest."""

    id: str
    begin: Mapping[int, int]
    end: Mapping[int, int]


class Topics(Protocol):
    """The topics of a broker: `KafkaTopics`, or others in tests."""

    def states(self, topics: Iterable[str]) -> Mapping[str, TopicState]: ...
    def identities(self, topics: Iterable[str]) -> Mapping[str, TopicIdentity]: ...
    def close(self) -> None: ...


class KafkaTopics:
    """The topics of a Kafka broker, by full name; those that do not exist are left out. For one thread."""

    def __init__(self, client_options: Callable[[], Mapping[str, object]]) -> None:
        """Connects when first asked. `client_options`: gives kafka-python's then."""
        self._options = client_options
        self._client: KafkaAdminClient | None = None

    def states(self, topics: Iterable[str]) -> dict[str, TopicState]:
        """Read ids and offsets. KafkaError: no broker answers."""
        from kafka.admin import OffsetSpec  # slow, and `kiln status` may need no Kafka

        found = self.identities(topics)
        begin, end = self._offsets(found, OffsetSpec.EARLIEST), self._offsets(found, OffsetSpec.LATEST)
        return {topic: TopicState(each.id, begin[topic], end[topic]) for topic, each in found.items()}

    def _offsets(self, topics: Mapping[str, TopicIdentity], spec: OffsetSpec) -> dict[str, dict[int, int]]:
        from kafka import TopicPartition

        parts = [TopicPartition(topic, part) for topic, each in topics.items() for part in range(each.partitions)]
        found = self._admin.list_partition_offsets(dict.fromkeys(parts, spec)) if parts else {}
        offsets: dict[str, dict[int, int]] = {topic: {} for topic in topics}
        for part in parts:
            offsets[part.topic][part.partition] = found[part].offset
        return offsets

    def identities(self, topics: Iterable[str]) -> dict[str, TopicIdentity]:
        """Read ids and numbers of partitions. KafkaError: no broker answers."""
        return describe_topics(self._admin, topics)

    @property
    def _admin(self) -> KafkaAdminClient:
        from kafka import KafkaAdminClient
        from kiln.conf.process.kafka_clients import open_client

        if self._client is None:
            self._client = open_client(
                KafkaAdminClient,
                **self._options(),
                bootstrap_timeout_ms=_PATIENCE_MS,
                request_timeout_ms=_PATIENCE_MS,
                reconnect_backoff_max_ms=1_000,
            )
        return self._client

    def close(self) -> None:
        """Close the connection; the next question opens another one."""
        if self._client is not None:
            self._client.close()
            self._client = None


def read_noted(checkpoint: Location) -> dict[str, str]:
    """Read the topic ids that a checkpoint notes, by full topic name; none if it is of a Kiln that noted none."""
    path = checkpoint / NOTE
    return msgspec.json.decode(path.read(), type=dict[str, str]) if path.exists() else {}


def note_topics(checkpoint: Location, ids: Mapping[str, str]) -> None:
    """Note topic ids in a checkpoint, next to those of other topics that it notes."""
    noted = read_noted(checkpoint)
    fresh = noted | {topic: each for topic, each in ids.items() if each}
    if fresh != noted:
        (checkpoint / NOTE).write([msgspec.json.encode(fresh)])


class Misfit(NamedTuple):
    """A topic to which the offsets of a checkpoint do not belong, and where in it the query can go on."""

    words: str
    begin: Mapping[int, int]


def find_misfits(noted: Mapping[str, str], read: log.Offsets, found: Mapping[str, TopicState]) -> dict[str, Misfit]:
    """Compare a checkpoint with the topics of the broker.

    Args:
        noted: The topic ids that the checkpoint notes.
        read: The offsets up to which the query has read, or has begun to.
        found: The topics that the query reads.

    Returns:
        The misfits by full topic name. In another topic the query goes on at the beginning. In a topic that has lost
        its newest records, as a broker's disk may, it goes on where the topic ends.
    """
    misfits: dict[str, Misfit] = {}
    for topic, state in found.items():
        known = noted.get(topic, "")
        offsets = read.get(topic, {})
        beyond = next(((part, at) for part, at in offsets.items() if at > state.end.get(part, 0)), None)
        if known and state.id and known != state.id:
            misfits[topic] = Misfit(describe_replaced(topic, known, state.id), state.begin)
        elif beyond is not None:
            part, at = beyond
            words = (
                f"{topic}-{part} ends at the offset {state.end.get(part, 0):,}, and was read up to {at:,}: the topic "
                "was deleted and created again, or has lost records"
            )
            kept = {part: min(offsets.get(part, 0), end) for part, end in state.end.items()}
            misfits[topic] = Misfit(words, kept if known and state.id else state.begin)
    return misfits
